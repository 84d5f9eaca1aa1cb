package torchrun

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobrun"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/torchrun/replica"
)

// torchrunDriver is the subcommand that runs the driver of a job of several nodes, on one of the
// nodes.
const torchrunDriver = "torchrun-driver"

// seatFD is the descriptor of the driver's connection to the node's agent.
const seatFD = 3

// driverStart is the first message of the agent to the driver: its command line, and what the
// previous driver left.
type driverStart struct {
	Args  []string     `json:"args"`
	Found replica.Copy `json:"found"`
}

// driverSays is a message of the driver: a change of the job's copy, or, with Sync, the request to
// answer true when the nodes have stored all earlier changes.
type driverSays struct {
	Change *replica.Change `json:"change,omitempty"`
	Sync   bool            `json:"sync,omitempty"`
}

// seat is the claim of a driver whose agent is the leader of the nodes. It ends with the
// connection.
type seat struct {
	conn    net.Conn
	lost    chan struct{}
	wg      sync.WaitGroup
	syncing sync.Mutex // held by Sync, so that one request is in flight
	synced  chan bool  // of capacity 1: the answer to it

	mu  sync.Mutex
	out *json.Encoder
}

var _ jobrun.Claim = (*seat)(nil)

func newSeat(conn net.Conn, in *json.Decoder) *seat {
	s := &seat{conn: conn, lost: make(chan struct{}), out: json.NewEncoder(conn), synced: make(chan bool, 1)}
	s.wg.Go(func() {
		defer close(s.lost)
		var synced bool
		for in.Decode(&synced) == nil {
			s.synced <- synced
		}
	})
	return s
}

// say sends a message. It ignores errors: the reader of the connection notices that the agent is
// gone.
func (s *seat) say(what driverSays) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.out.Encode(what)
}

// Append, Replace, SetBehind, Put, Sync, State, Lost and Release implement jobrun.Claim.
func (s *seat) Append(payload []byte) {
	s.say(driverSays{Change: &replica.Change{Records: [][]byte{payload}}})
}

func (s *seat) Replace(records [][]byte) {
	s.say(driverSays{Change: &replica.Change{Replace: true, Records: records}})
}

func (s *seat) SetBehind() { s.say(driverSays{Change: &replica.Change{Behind: true}}) }

func (s *seat) Put(name string, value []byte) {
	s.say(driverSays{Change: &replica.Change{File: name, Value: value}})
}

func (s *seat) State() string { return "" }

func (s *seat) Lost() <-chan struct{} { return s.lost }

func (s *seat) Sync() error {
	s.syncing.Lock()
	defer s.syncing.Unlock()
	s.say(driverSays{Sync: true})
	select {
	case <-s.synced:
		return nil
	case <-s.lost:
		return replica.ErrLost
	}
}

func (s *seat) Release(bool) error {
	err := s.conn.Close()
	s.wg.Wait()
	return err
}

func driverCommand(p *cli.Program) *cobra.Command {
	return &cobra.Command{
		Use:    torchrunDriver,
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE:   func(cmd *cobra.Command, _ []string) error { return runTorchDriver(cmd.Context(), p) },
	}
}

// runTorchDriver starts the job, or takes it over.
func runTorchDriver(ctx context.Context, p *cli.Program) error {
	for _, w := range []io.Writer{p.Stdout, p.Stderr} {
		if s, is := w.(*cli.Stream); is { // the agent reads them; a failure means that it is dead and must not stop the job
			s.WhenClosed(func(error) { os.Exit(1) })
		}
	}
	file := os.NewFile(seatFD, "the agent")
	conn, err := net.FileConn(file)
	_ = file.Close() // it was duplicated
	if err != nil {
		return fmt.Errorf("%s is started by hvdrun torchrun --elastic alone: %w", torchrunDriver, err)
	}
	in := json.NewDecoder(conn)
	var start driverStart
	if err := in.Decode(&start); err != nil {
		return cli.Failed(errors.Join(fmt.Errorf("the agent of this node does not name a job to drive: %w", err), conn.Close()))
	}
	s, command, err := settings.OfArgs(start.Args, p.Env, "")
	if err != nil {
		return errors.Join(err, conn.Close())
	}
	log := settings.Logger(p, &s)
	c := jobrun.Holds(p, newSeat(conn, in), "the agent of this node has ended: another node goes on with the job", log)
	again := *p
	again.Args = start.Args
	if len(start.Found.Records) == 0 {
		err = jobrun.Run(ctx, &again, &s, command, c)
	} else {
		err = goOn(ctx, &again, start, c, log)
	}
	return err
}

// goOn takes over a job whose driver on another node is gone.
func goOn(ctx context.Context, p *cli.Program, start driverStart, c *jobrun.Claimed, log *logrus.Logger) error {
	if start.Found.Behind {
		c.Release(false)
		return cli.Failed(errors.New("the job cannot be resumed: no node has its last records"))
	}
	// The flags are those of the job, except for the address of this node's agent.
	d, err := jobrun.PlaceCopy(p, c, "", jobdir.Copy{Records: start.Found.Records, Files: start.Found.Files, Args: start.Args})
	if err != nil {
		c.Release(false)
		return cli.Failed(fmt.Errorf("the job cannot be resumed: %w", err))
	}
	log.Infof("the driver of this node takes over job %s", d.About.RunID)
	return jobrun.ResumeClaimed(ctx, p, d, c)
}
