package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/bench"
	"github.com/hvdrun/hvdrun/plan"
)

// benchRank is the subcommand that hvdrun starts itself with, once for each rank. Its argument is a
// bench.Spec in JSON.
const benchRank = "__bench-rank"

// algorithmVariable tells workers which algorithm to use.
const algorithmVariable = plan.EnvAlgorithm

const defaultSizes = "4,1KiB,64KiB,1MiB,16MiB,64MiB"

// benchShares are the settings of a job that a measurement has too, with what they mean there.
var benchShares = []struct{ name, usage string }{
	{"np", "ranks (default: the slots of -H, else 2)"},
	{"hosts", "names of this machine and their slots, 127.0.0.1:2,127.0.0.2:2: ranks as on several hosts"},
	{"encrypt-data", ""}, {"connections", ""},
	{"log-level", ""}, {"log-format", ""}, {"verbose", ""}, {configFile, ""},
}

// benchFlags is what was asked for, as text.
type benchFlags struct {
	op, sizes, seconds, rounds, against, algorithm, tsv, plot string
	alloc, memory                                             bool
}

func (p *program) benchCommand() *cobra.Command {
	var b benchFlags
	cmd := &cobra.Command{
		Use:   "bench [flags]",
		Short: "Measure the collectives on this machine, alone or beside other libraries'",
		Long: `bench starts ranks on this machine, lets them run a collective operation on float32 tensors of several sizes, and prints how
long it took: the least, the median and the 99th percentile of the samples. A sample is one operation, and its time the
longest over the ranks; operations follow each other without a pause. As many are taken as fit into --seconds, at least
10 and at most 20,000. Results are checked first.

With --against other libraries are measured too, by programs that are compiled on the spot, in turns with hvdrun's ranks.
With --memory the ranks also copy memory, one alone and all at once, which tells the bandwidth that an all-reduce can reach
with tensors beyond the size of the caches. Nothing else should run on the machine.`,
		Example: `  hvdrun bench -np 4
  hvdrun bench -np 2 --sizes 4,64KiB,64MiB --against openmpi,gloo --tsv bench.tsv --plot bench.svg`,
		Args:                  cobra.NoArgs,
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := load(cmd.Flags(), p.env)
			if err != nil {
				return err
			}
			m, err := b.measurement(cmd.Context(), &s)
			if err != nil {
				return err
			}
			return p.runBench(cmd.Context(), &s, m)
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	addFlag(fs, settingNamed("np")).Usage = benchShares[0].usage
	fs.StringVar(&b.op, "op", string(bench.AllReduce), "operation: allreduce, broadcast, allgather, reducescatter, alltoall or barrier")
	fs.StringVar(&b.sizes, "sizes", defaultSizes, "bytes of the whole tensor")
	fs.StringVar(&b.seconds, "seconds", "1", "duration to aim at for the samples of one size")
	fs.StringVar(&b.rounds, "rounds", "3", "times that everything is measured")
	fs.StringVar(&b.algorithm, "algorithm", "", "algorithm to use whatever the size ("+algorithmVariable+")")
	fs.StringVar(&b.against, "against", "", "others to measure: openmpi, openmpi-tcp, gloo, joined by commas")
	fs.BoolVar(&b.alloc, "alloc", false, "tensors in memory that the ranks of a host share, as collective.Alloc gives")
	fs.BoolVar(&b.memory, "memory", false, "measure the memory's bandwidth too")
	fs.StringVar(&b.tsv, "tsv", "", "file for all rows of all rounds, separated by tabs")
	fs.StringVar(&b.plot, "plot", "", "file for a plot, whose name ends in .svg")
	for _, share := range benchShares[1:] {
		f := addFlag(fs, settingNamed(share.name))
		if share.usage != "" {
			f.Usage = share.usage
		}
	}
	return cmd
}

// measurement is what the flags ask for.
type measurement struct {
	spec      bench.Spec
	ranks     int
	hosts     []plan.Host
	rounds    int
	peers     []bench.Peer
	algorithm string
	tsv, plot string
}

// measurement reads the flags. Its errors name them.
func (b *benchFlags) measurement(ctx context.Context, s *settings) (m measurement, err error) {
	m.algorithm, m.tsv, m.plot = b.algorithm, b.tsv, b.plot
	m.spec.Alloc, m.spec.Memory = b.alloc, b.memory
	if m.spec.Op, err = bench.ParseOp(b.op); err != nil {
		return m, fmt.Errorf("--op: %w", err)
	}
	if m.spec.Sizes, err = bench.ParseSizes(b.sizes); err != nil {
		return m, fmt.Errorf("--sizes: %w", err)
	}
	if m.spec.Op == bench.Barrier {
		m.spec.Sizes = []int{0}
	}
	if m.spec.Time, err = parseDuration(b.seconds); err != nil {
		return m, fmt.Errorf("--seconds: %w", err)
	}
	if m.rounds, err = parseCount(b.rounds, 1); err != nil {
		return m, fmt.Errorf("--rounds: %w", err)
	}
	if _, err = collective.ParseAlgorithm(b.algorithm); err != nil {
		return m, fmt.Errorf("--algorithm: %w", err)
	}
	if b.against != "" {
		if m.peers, err = bench.ParsePeers(b.against); err != nil {
			return m, fmt.Errorf("--against: %w", err)
		}
	}
	if b.plot != "" && !strings.HasSuffix(b.plot, ".svg") {
		return m, fmt.Errorf("--plot: the name %q does not end in .svg", b.plot)
	}
	if !s.given("np") && !s.given("hosts") {
		s.np, s.origins["np"] = 2, "the default of -np"
	}
	if m.hosts, err = s.fixedHosts(); err != nil {
		return m, err
	}
	size, err := s.size(m.hosts)
	if err != nil {
		return m, err
	}
	m.ranks = size.NP
	if !allLocal(ctx, m.hosts) {
		return m, fmt.Errorf("%s: a host is not this machine, and others are not measured", s.origin("hosts"))
	}
	return m, m.checkMemory()
}

// checkMemory refuses tensors for which the machine has no room: each rank has its own, a library
// keeps up to one of that size besides, and results of some operations are another.
func (m *measurement) checkMemory() error {
	info, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return nil // a machine that does not tell
	}
	_, after, _ := strings.Cut(string(info), "MemAvailable:")
	var kib int
	if _, err := fmt.Sscan(after, &kib); err != nil {
		return nil
	}
	largest := m.spec.Sizes[len(m.spec.Sizes)-1]
	if need := 3 * largest * m.ranks; need > kib<<10 {
		return fmt.Errorf("--sizes: %s on %d ranks may need %s of memory, and %s are free", bench.SizeText(largest), m.ranks,
			bench.SizeText(need), bench.SizeText(kib<<10>>20<<20))
	}
	return nil
}

func (p *program) benchRankCommand() *cobra.Command {
	return &cobra.Command{
		Use:                benchRank,
		Hidden:             true,
		DisableFlagParsing: true,
		Args:               cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var spec bench.Spec
			if err := json.Unmarshal([]byte(args[0]), &spec); err != nil {
				return err
			}
			if err := bench.Rank(cmd.Context(), spec, p.stdout); err != nil {
				if cause := context.Cause(cmd.Context()); cause != nil {
					err = cause
				}
				return runError{err}
			}
			return nil
		},
	}
}
