package page

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/internal/dashboard"
	"github.com/hvdrun/hvdrun/internal/replay"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/job"
)

// longestReplay is the longest time in which a job is replayed if no speed is given.
const longestReplay = time.Minute

// ReplayCommand returns the command hvdrun replay.
func ReplayCommand(p *cli.Program) *cobra.Command {
	var listen string
	var speed float64
	cmd := &cobra.Command{
		Use:   "replay EVENTS [--speed N]",
		Short: "Show a past job on the page, from its events file",
		Long: `replay plays a past job on the page in the browser: hosts and workers, generations, throughput and events, from the
beginning to the end. EVENTS is its events file (--events-file); if it has several jobs, the last is shown. It prints a
URL; Ctrl-C ends the page. Only this machine can reach the page unless --listen names another address.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !(speed >= 0) { // or not a number
				return fmt.Errorf("--speed: %g is not 0 or more", speed)
			}
			r, err := readRecording(args[0])
			if err != nil {
				return err
			}
			cfg := dashboard.Config{Listen: listen, Tokens: dashboard.NewTokens(), Job: dashboard.Job{Source: newReplayed(r, speed, time.Now())}}
			server, err := openPage(cfg)
			if err != nil {
				return cli.Failed(err)
			}
			fmt.Fprintf(p.Stdout, "%s of %s at %s\n", filepath.Base(args[0]), r.Begun().Local().Format(time.DateTime), dashboard.WithToken(server.URL(), cfg.Tokens.Read))
			if server.Fingerprint() != "" {
				fmt.Fprintf(p.Stdout, "the browser does not know the certificate; its SHA-256 is %s\n", server.Fingerprint())
			}
			return cli.Failed(cmp.Or(server.Serve(cmd.Context()), context.Cause(cmd.Context())))
		},
	}
	cmd.Flags().StringVar(&listen, "listen", "", "address and port (default: port 8470 of loopback, or another if that is in use)")
	cmd.Flags().Float64Var(&speed, "speed", 0, "`N` times as fast as the job (default: the speed at which it takes a minute, at least 1)")
	return cmd
}

func readRecording(path string) (*replay.Recording, error) {
	f, err := safefile.Read(path)
	if err != nil {
		return nil, cli.Failed(err)
	}
	defer f.Close()
	r, err := replay.Read(f)
	if err != nil {
		return nil, cli.Failed(fmt.Errorf("%s: %w", path, err))
	}
	return r, nil
}

// replayed gives a page access to a past job.
type replayed struct {
	r     *replay.Recording
	speed float64
	from  time.Time // when the replay began

	mu     sync.Mutex
	player *replay.Player
	last   time.Time // the latest time of the job that was requested
}

// newReplayed returns a job whose replay begins now. If speed is 0, the replay takes at most
// longestReplay.
func newReplayed(r *replay.Recording, speed float64, now time.Time) *replayed {
	if speed == 0 {
		speed = max(1, r.Ended().Sub(r.Begun()).Seconds()/longestReplay.Seconds())
	}
	return &replayed{r: r, speed: speed, from: now, player: r.NewPlayer(), last: r.Begun()}
}

// Status returns the job's status at the present time of the replay.
func (s *replayed) Status(context.Context) (job.Status, error) { return s.at(time.Now()), nil }

func (s *replayed) at(now time.Time) job.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	at, played := s.r.Ended(), now.Sub(s.from).Seconds()*s.speed
	if played < at.Sub(s.r.Begun()).Seconds() {
		at = s.r.Begun().Add(time.Duration(played * float64(time.Second)))
	}
	if at.After(s.last) {
		s.last = at
	}
	return s.player.Status(s.last)
}

// Command refuses all commands.
func (s *replayed) Command(context.Context, job.Command) (string, error) {
	return "", &job.RefusedError{Reason: "a past job takes no commands"}
}
