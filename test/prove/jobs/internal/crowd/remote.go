package crowd

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/driver/launch"
	"github.com/hvdrun/hvdrun/plan"
)

// order is a message from the driver's process to a workers' process, a JSON object per line.
type order struct {
	Start string   `json:",omitempty"` // an incarnation
	Env   []string `json:",omitempty"` // its environment
	Stop  []string `json:",omitempty"` // incarnations to stop
	Kill  []string `json:",omitempty"` // incarnations to kill
	// Whole is the generation of a world that all members have received; Over is one that all have
	// to leave, because some have died or because of an update.
	Whole uint64 `json:",omitempty"`
	Over  uint64 `json:",omitempty"`
	Dead  bool   `json:",omitempty"`
}

// news is a message from a workers' process.
type news struct {
	Forked, Ended string // an incarnation
	Signal        syscall.Signal
	// World is the generation of a world of Size members, of which Members of the process have
	// received it, the last At nanoseconds since 1970, and Committed have reported a commit; or all
	// of them have received an update, Heard.
	World                    uint64
	Size, Members, Committed int
	Heard                    uint64
	At                       int64
}

// remote is a launcher whose workers run in other processes.
type remote struct {
	processes []*process

	// told receives what is true of all processes together: all members have received World, or
	// have committed in it, or have received the update Heard.
	told chan news

	mu      sync.Mutex
	workers map[string]remoteWorker // that run, by incarnation
	pid     int                     // last process id given to a worker; it is fictitious
	muster  muster
}

// process is one that runs workers.
type process struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	out     io.ReadCloser
	sending sync.Mutex
	enc     *json.Encoder
	workers int // that run; the remote's lock guards it
}

// muster is what the processes have told of the newest world.
type muster struct {
	world     uint64
	whole     bool   // all members have received it
	committed bool   // and reported a commit
	of        []news // the last of each process; the zero news: none
	heard     []news // the same of those with Heard
}

type remoteWorker struct {
	slot plan.SlotID
	in   *process
	news chan news
}

// startRemote starts so many processes.
func startRemote(ctx context.Context, processes int) (*remote, error) {
	r := &remote{told: make(chan news, 64), workers: make(map[string]remoteWorker)}
	for range processes {
		cmd, err := self(ctx, processes)
		if err != nil {
			return nil, err
		}
		p := &process{cmd: cmd}
		if p.in, err = cmd.StdinPipe(); err != nil {
			return nil, err
		}
		if p.out, err = cmd.StdoutPipe(); err != nil {
			return nil, err
		}
		p.enc = json.NewEncoder(p.in)
		if err := cmd.Start(); err != nil {
			return nil, err
		}
		r.processes = append(r.processes, p)
	}
	return r, nil
}

// close tells the processes to end.
func (r *remote) close() (err error) {
	for _, p := range r.processes {
		err = errors.Join(err, p.in.Close())
	}
	return err
}

// processor returns the CPU time of the processes, which have ended.
func (r *remote) processor() (sum time.Duration) {
	for _, p := range r.processes {
		sum += p.cmd.ProcessState.UserTime() + p.cmd.ProcessState.SystemTime()
	}
	return sum
}

// listen forwards the messages of the processes until their end.
func (r *remote) listen() error {
	errs := make([]error, len(r.processes))
	var wg sync.WaitGroup
	for i := range r.processes {
		wg.Go(func() { errs[i] = r.listenTo(i) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// listenTo returns once the process has ended.
func (r *remote) listenTo(i int) (err error) {
	p := r.processes[i]
	defer func() { err = errors.Join(err, p.cmd.Wait()) }()
	dec := json.NewDecoder(bufio.NewReader(p.out))
	for {
		var n news
		if err := dec.Decode(&n); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		id := n.Forked + n.Ended
		if id == "" {
			if err := r.hear(i, n); err != nil && !errors.Is(err, os.ErrClosed) { // those that are told to end need no orders
				return err
			}
			continue
		}
		r.mu.Lock()
		w := r.workers[id]
		r.mu.Unlock()
		w.news <- n
	}
}

// hear takes what a process has told of a world, and tells all what all of them have told.
func (r *remote) hear(i int, n news) error {
	r.mu.Lock()
	all, o := r.muster.take(i, len(r.processes), n)
	r.mu.Unlock()
	if all == (news{}) {
		return nil
	}
	r.told <- all
	if o.Whole+o.Over == 0 {
		return nil
	}
	return r.sendAll(o)
}

// take returns what all of so many processes have told, with the order that follows from it; the
// zero news if some have not.
func (m *muster) take(i, processes int, n news) (all news, o order) {
	if n.World > m.world {
		*m = muster{world: n.World, of: make([]news, processes), heard: make([]news, processes)}
	}
	switch {
	case n.World < m.world:
		return news{}, o
	case n.Heard > 0:
		return m.takeHeard(i, n)
	}
	m.of[i] = n
	for _, of := range m.of {
		all.Members += of.Members
		all.Committed += of.Committed
		all.At = max(all.At, of.At)
	}
	all.World, all.Size = n.World, n.Size
	switch {
	case !m.whole && all.Members == n.Size:
		m.whole = true
		return all, order{Whole: n.World}
	case !m.committed && all.Committed == n.Size:
		m.committed = true
		return all, o
	}
	return news{}, o
}

func (m *muster) takeHeard(i int, n news) (all news, o order) {
	m.heard[i], all.Heard = n, n.Heard
	for k, h := range m.heard {
		if h.Heard == 0 && m.of[k].Members > 0 {
			return news{}, o
		}
		if h.Heard > 0 {
			all.Heard, all.At = min(all.Heard, h.Heard), max(all.At, h.At)
		}
	}
	return all, order{Over: n.World}
}

func (p *process) send(o order) error {
	p.sending.Lock()
	defer p.sending.Unlock()
	return p.enc.Encode(o)
}

func (r *remote) sendAll(o order) error {
	for _, p := range r.processes {
		if err := p.send(o); err != nil {
			return err
		}
	}
	return nil
}

// kill ends workers as if killed; the others notice it at once, as peers in training do.
func (r *remote) kill(ids []string) error {
	orders := make(map[*process][]string)
	r.mu.Lock()
	for _, id := range ids {
		in := r.workers[id].in
		orders[in] = append(orders[in], id)
	}
	world := r.muster.world
	r.mu.Unlock()
	for _, p := range r.processes {
		if err := p.send(order{Kill: orders[p], Over: world, Dead: true}); err != nil {
			return err
		}
	}
	return nil
}

// running returns the slots of the workers, by incarnation.
func (r *remote) running() map[string]plan.SlotID {
	r.mu.Lock()
	defer r.mu.Unlock()
	slots := make(map[string]plan.SlotID, len(r.workers))
	for id, w := range r.workers {
		slots[id] = w.slot
	}
	return slots
}

// The workers reach the driver as workers of agents do.
func (r *remote) ListenAddr() string                   { return "127.0.0.1:0" }
func (r *remote) Listening(int)                        {}
func (r *remote) HostAddr(host string) (string, error) { return host, nil }

// enter adds a worker to the process that has fewest; leave removes it.
func (r *remote) enter(s launch.Spec) (w remoteWorker, pid int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	in := r.processes[0]
	for _, p := range r.processes {
		if p.workers < in.workers {
			in = p
		}
	}
	in.workers++
	w = remoteWorker{s.Slot, in, make(chan news, 2)} // forked and ended
	r.workers[s.Incarnation] = w
	r.pid++
	return w, r.pid
}

func (r *remote) leave(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.workers[id].in.workers--
	delete(r.workers, id)
}

func (r *remote) Run(ctx context.Context, s launch.Spec, started func(int)) error {
	w, pid := r.enter(s)
	defer r.leave(s.Incarnation)
	if err := w.in.send(order{Start: s.Incarnation, Env: s.Env}); err != nil {
		return &launch.StartError{Command: "worker", Err: err}
	}
	stop := ctx.Done()
	for {
		select {
		case <-stop:
			stop = nil
			if err := w.in.send(order{Stop: []string{s.Incarnation}}); err != nil {
				return fmt.Errorf("the workers' process: %w", err)
			}
		case n := <-w.news:
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
