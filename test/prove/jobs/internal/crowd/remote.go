package crowd

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os/exec"
	"slices"
	"sync"
	"syscall"

	"github.com/hvdrun/hvdrun/driver/launch"
	"github.com/hvdrun/hvdrun/plan"
)

// order is a message from the driver's process to the workers' process, a JSON object per line.
type order struct {
	Start string   `json:",omitempty"` // an incarnation
	Env   []string `json:",omitempty"` // its environment
	Stop  []string `json:",omitempty"` // incarnations to stop
	Kill  []string `json:",omitempty"` // incarnations to kill
}

// news is a message from the workers' process.
type news struct {
	Forked, Ended string // an incarnation
	Signal        syscall.Signal
	// World is the generation of a world that all its members have received; Heard is the number of
	// an update that all have received. At is the time in nanoseconds since 1970.
	World uint64
	Size  int
	Heard uint64
	At    int64
}

// remote is a launcher whose workers run in another process.
type remote struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out io.ReadCloser

	// told receives messages that are not about a single worker.
	told chan news

	// Orders are queued until the workers' process has connected.
	sending sync.Mutex
	enc     *json.Encoder

	mu      sync.Mutex
	workers map[string]remoteWorker // that run, by incarnation
	pid     int                     // last process id given to a worker; it is fictitious
}

type remoteWorker struct {
	slot plan.SlotID
	news chan news
}

func startRemote(ctx context.Context) (*remote, error) {
	cmd, err := self(ctx)
	if err != nil {
		return nil, err
	}
	r := &remote{cmd: cmd, told: make(chan news, 64), workers: make(map[string]remoteWorker)}
	if r.in, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if r.out, err = cmd.StdoutPipe(); err != nil {
		return nil, err
	}
	r.enc = json.NewEncoder(r.in)
	return r, cmd.Start()
}

// listen forwards the messages of the workers' process until its end.
func (r *remote) listen() error {
	dec := json.NewDecoder(bufio.NewReader(r.out))
	for {
		var n news
		if err := dec.Decode(&n); err == io.EOF {
			return r.cmd.Wait()
		} else if err != nil {
			return err
		}
		id := n.Forked + n.Ended
		if id == "" {
			r.told <- n
			continue
		}
		r.mu.Lock()
		w := r.workers[id]
		r.mu.Unlock()
		w.news <- n
	}
}

func (r *remote) send(o order) error {
	r.sending.Lock()
	defer r.sending.Unlock()
	return r.enc.Encode(o)
}

// everyTenth returns the incarnations of every tenth worker, by slot.
func (r *remote) everyTenth() (ids []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := slices.SortedFunc(maps.Keys(r.workers), func(a, b string) int {
		s, t := r.workers[a].slot, r.workers[b].slot
		return cmp.Or(cmp.Compare(s.Host, t.Host), cmp.Compare(s.Index, t.Index))
	})
	for i := 0; i < len(all); i += 10 {
		ids = append(ids, all[i])
	}
	return ids
}

// The workers reach the driver as workers of agents do.
func (r *remote) ListenAddr() string                   { return "127.0.0.1:0" }
func (r *remote) Listening(int)                        {}
func (r *remote) HostAddr(host string) (string, error) { return host, nil }

func (r *remote) Run(ctx context.Context, s launch.Spec, started func(int)) error {
	heard := make(chan news, 2) // forked and ended
	r.mu.Lock()
	r.workers[s.Incarnation] = remoteWorker{s.Slot, heard}
	r.pid++
	pid := r.pid
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.workers, s.Incarnation)
	}()
	if err := r.send(order{Start: s.Incarnation, Env: s.Env}); err != nil {
		return &launch.StartError{Command: "worker", Err: err}
	}
	stop := ctx.Done()
	for {
		select {
		case <-stop:
			stop = nil
			if err := r.send(order{Stop: []string{s.Incarnation}}); err != nil {
				return fmt.Errorf("the workers' process: %w", err)
			}
		case n := <-heard:
			switch {
			case n.Forked != "":
				started(pid)
			case n.Signal != 0:
				return &launch.ExitError{Code: 128 + int(n.Signal), Signal: n.Signal}
			default:
				return nil
			}
		}
	}
}
