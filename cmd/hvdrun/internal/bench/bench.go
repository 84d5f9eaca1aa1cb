// Package bench implements hvdrun bench, which measures collectives of hvdrun and other libraries.
package bench

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/bench"
	"github.com/hvdrun/hvdrun/plan"
)

// benchRank is the subcommand that hvdrun starts itself with, once for each rank. Its argument is a
// bench.Spec in JSON.
const benchRank = "__bench-rank"

// algorithmVariable is the environment variable that sets the algorithm of the workers.
const algorithmVariable = plan.EnvAlgorithm

const defaultSizes = "4,1KiB,64KiB,1MiB,16MiB,64MiB"

// benchUsages describes the settings whose meaning in a measurement differs from that in a job.
var benchUsages = map[string]string{
	"np":    "ranks (default: the slots of the hosts, else 2)",
	"hosts": "hosts and their slots; names of this machine alone, 127.0.0.1:2,127.0.0.2:2, are ranks as on several hosts",
}

// benchShares are the settings of a job that a measurement also has, besides the settings of hosts.
var benchShares = []string{"network-interfaces", "listen", "encrypt-data", "connections", "start-timeout", "agent-timeout"}

// benchIgnores are settings of the polling of sources; a measurement calls a source once.
var benchIgnores = []string{"discovery-interval", "discovery-removal-after"}

// benchFlags are the values of the flags, as text.
type benchFlags struct {
	op, sizes, seconds, rounds, against, algorithm, bucket, tsv string
	alloc, async, into, memory                                  bool
}

// Commands returns hvdrun bench, and the hidden command that runs a rank of the measurement.
func Commands(p *cli.Program) []*cobra.Command {
	return []*cobra.Command{benchCommand(p), rankCommand(p)}
}

func benchCommand(p *cli.Program) *cobra.Command {
	var b benchFlags
	cmd := &cobra.Command{
		Use:   "bench [flags]",
		Short: "Measure the collectives, alone or beside other libraries'",
		Long: `bench starts ranks on this machine, or on other hosts as a job would, lets them run a collective operation on float32
tensors of several sizes, and prints its time: the minimum, the median and the 99th percentile of the samples. A sample is
one operation, and its time that of the slowest rank; operations follow each other without a pause. bench takes as many
samples as fit into --seconds, at least 10 and at most 20,000. Results are checked first.

For ranks on several hosts it also prints the bytes on sockets for each operation, and their share of the time of one plain
stream between two of the hosts.

--against measures other libraries too, in turns with hvdrun's ranks, by programs that bench compiles: openmpi, mpich, torch
(torch.distributed with gloo) and gloo with their defaults, openmpi-tcp, and, with settings that are faster for some sizes
and numbers of ranks, openmpi-nocma, openmpi-acoll, openmpi-xhc, openmpi-ucx, openmpi-linear, openmpi-rabenseifner,
mpich-posix and mpich-ucc. bench prints their versions and settings. Between hosts Open MPI needs ssh to all of them, with
hvdrun's settings for ssh. The libraries must be installed on all hosts. MPICH is measured on one machine only.

With --memory the ranks also copy memory, one alone and all at once, which shows the bandwidth that an all-reduce of large
tensors can reach. The operation gradients is a backward pass of 32 layers, which a device computes in the time of one
all-reduce, and whose layers elastic/gradient averages as soon as they are ready. Run nothing else on the machines.`,
		Example: `  hvdrun bench -np 4
  hvdrun bench -np 2 --sizes 4,64KiB,64MiB --against openmpi,gloo \
      --tsv bench.tsv
  hvdrun bench -H node1:8,node2:8 --sizes 1MiB,64MiB --against openmpi`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := settings.Load(cmd.Flags(), p.Env)
			if err != nil {
				return err
			}
			m, err := b.measurement(&s)
			if err != nil {
				return err
			}
			return runBench(cmd.Context(), p, &s, m)
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	b.addFlags(fs)
	return cmd
}

// addFlags defines all flags.
func (b *benchFlags) addFlags(fs *pflag.FlagSet) {
	share := func(name string) {
		f := settings.AddFlag(fs, settings.SettingNamed(name))
		if usage, ok := benchUsages[name]; ok {
			f.Usage = usage
		}
	}
	share("np")
	fs.StringVar(&b.op, "op", string(bench.AllReduce),
		"operation: allreduce, allreduce-async, broadcast, allgather, reducescatter, alltoall, sendrecv, barrier or gradients")
	fs.StringVar(&b.sizes, "sizes", defaultSizes, "bytes of the whole tensor")
	fs.StringVar(&b.seconds, "seconds", "1", "duration to aim at for the samples of one size")
	fs.StringVar(&b.rounds, "rounds", "3", "times that everything is measured")
	fs.StringVar(&b.algorithm, "algorithm", "", "algorithm to use whatever the size ("+algorithmVariable+")")
	fs.StringVar(&b.bucket, "bucket", "", "bytes of gradients that are reduced together (default: those of elastic/gradient, 4MiB)")
	fs.StringVar(&b.against, "against", "", "others to measure, joined by commas: openmpi, mpich, torch, gloo, and openmpi-tcp and so on with other settings (above)")
	fs.BoolVar(&b.alloc, "alloc", false, "tensors in memory that the ranks of a host share, as collective.Alloc gives")
	fs.BoolVar(&b.into, "into", false, "allgather, reducescatter and alltoall put results into tensors that are there (AllGatherInto, …)")
	fs.BoolVar(&b.async, "async", false, "allreduce, broadcast, allgather and reducescatter run in the background and are waited for (BroadcastAsync, …)")
	fs.BoolVar(&b.memory, "memory", false, "measure the memory's bandwidth too")
	fs.StringVar(&b.tsv, "tsv", "", "file for all rows of all rounds, separated by tabs")
	for _, st := range settings.Table {
		if st.Source && st.Name != "np" && !slices.Contains(benchIgnores, st.Name) || slices.Contains(benchShares, st.Name) {
			share(st.Name)
		}
	}
}

// measurement is the measurement that the flags describe.
type measurement struct {
	spec      bench.Spec
	np        int         // 0: all slots
	hosts     []plan.Host // nil: the sources list the hosts
	rounds    int
	peers     []bench.Peer
	algorithm string
	tsv       string
}

// measurement parses the flags. Its errors name the flag.
func (b *benchFlags) measurement(s *settings.Settings) (m measurement, err error) {
	m.algorithm, m.tsv = b.algorithm, b.tsv
	m.spec.Alloc, m.spec.Into, m.spec.Async, m.spec.Memory = b.alloc, b.into, b.async, b.memory
	if m.spec.Op, err = bench.ParseOp(b.op); err != nil {
		return m, fmt.Errorf("--op: %w", err)
	}
	if m.spec.Sizes, err = bench.ParseSizes(b.sizes); err != nil {
		return m, fmt.Errorf("--sizes: %w", err)
	}
	if m.spec.Op == bench.Barrier {
		m.spec.Sizes = []int{0}
	}
	if m.spec.Async && !m.spec.Op.HasAsync() {
		return m, fmt.Errorf("--async: --op %s has no such form", m.spec.Op)
	}
	if m.spec.Async && m.spec.Op.HasInto() {
		m.spec.Into = true // the asynchronous operations exist only in this form
	}
	if m.spec.Into && !m.spec.Op.HasInto() {
		return m, fmt.Errorf("--into: --op %s has no such form", m.spec.Op)
	}
	if m.spec.Time, err = settings.ParseDuration(b.seconds); err != nil {
		return m, fmt.Errorf("--seconds: %w", err)
	}
	if m.rounds, err = settings.ParseCount(b.rounds, 1); err != nil {
		return m, fmt.Errorf("--rounds: %w", err)
	}
	if _, err = collective.ParseAlgorithm(b.algorithm); err != nil {
		return m, fmt.Errorf("--algorithm: %w", err)
	}
	if b.bucket != "" {
		sizes, err := bench.ParseSizes(b.bucket)
		switch {
		case err != nil:
			return m, fmt.Errorf("--bucket: %w", err)
		case len(sizes) != 1:
			return m, fmt.Errorf("--bucket: %q is several sizes", b.bucket)
		case m.spec.Op != bench.Gradients:
			return m, fmt.Errorf("--bucket: only --op %s has buckets", bench.Gradients)
		}
		m.spec.Bucket = sizes[0]
	}
	if b.against != "" {
		if m.peers, err = bench.ParsePeers(b.against); err != nil {
			return m, fmt.Errorf("--against: %w", err)
		}
	}
	return m, m.place(s)
}

// place sets the hosts and the number of ranks from the settings.
func (m *measurement) place(s *settings.Settings) (err error) {
	if m.hosts, err = hostsource.Fixed(s); err != nil {
		return err
	}
	if m.hosts == nil {
		m.np = s.Np
		return nil
	}
	if !s.Given("np") && !s.Given("hosts") && !s.Given("hostfile") {
		s.Np, s.Origins["np"] = 2, "the default of -np"
		m.hosts = []plan.Host{{Name: "localhost", Slots: s.Np}}
	}
	size, err := hostsource.Size(s, m.hosts)
	m.np = size.NP
	return err
}

// checkParts returns an error for tensors that cannot be split into equal parts for the ranks, as
// an operation with --into needs.
func (m *measurement) checkParts(ranks int) error {
	for _, size := range m.spec.Sizes {
		if m.spec.Into && m.spec.Op != bench.ReduceScatter && size%(4*ranks) != 0 {
			return fmt.Errorf("--sizes: %s cannot be divided into equal parts of whole elements for %d ranks, as --into and --async need", bench.SizeText(size), ranks)
		}
	}
	return nil
}

// checkMemory returns an error for tensors that do not fit into the machine's memory: each rank has
// its own tensor, a library keeps up to one more of that size, and some operations have a result of
// that size too.
func (m *measurement) checkMemory(ranks int) error {
	info, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return nil // the size of the memory is unknown
	}
	_, after, _ := strings.Cut(string(info), "MemAvailable:")
	var kib int
	if _, err := fmt.Sscan(after, &kib); err != nil {
		return nil
	}
	largest := m.spec.Sizes[len(m.spec.Sizes)-1]
	if need := 3 * largest * ranks; need > kib<<10 {
		return fmt.Errorf("--sizes: %s on %d ranks may need %s of memory, and %s are free", bench.SizeText(largest), ranks,
			bench.SizeText(need), bench.SizeText(kib<<10>>20<<20))
	}
	return nil
}

func rankCommand(p *cli.Program) *cobra.Command {
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
			err := bench.Rank(cmd.Context(), spec, p.Stdout)
			if err != nil {
				err = cmp.Or(context.Cause(cmd.Context()), err)
			}
			return cli.Failed(err)
		},
	}
}
