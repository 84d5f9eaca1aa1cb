package torchrun

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/torchrun/dynamic"
	"github.com/hvdrun/hvdrun/torchrun/replica"
)

const (
	// endedFile is the name of the file in the copy that has the exit status of a job that has
	// ended.
	endedFile = "ended"
	// seedPatience is how long a node waits for the gossip address of the first node before it
	// starts without it.
	seedPatience = 2 * time.Second
)

// Elastic is one node of a job whose programs use package elastic. The node with rank 0 of the
// rendezvous runs the driver. When that node is gone, the next one continues the job from its copy
// of the journal, which all nodes have. The workers are not restarted for this.
type Elastic struct {
	// Rendezvous is where the nodes meet, and Peers connects them to each other.
	Rendezvous *Dynamic
	Peers      *Peers
	// Serve offers the slots of this node to the job's driver until ctx ends, and then makes its
	// workers leave. It calls joined with its gossip address, and seeds for the addresses of the
	// others.
	Serve func(ctx context.Context, seeds func() []string, joined func(addr string)) error
	// Drive runs the job's driver until the job has ended. It stops the job when stop is closed.
	// When ctx ends, it kills the driver but not the workers. It returns ErrDriverDied if another
	// driver can continue.
	Drive func(ctx context.Context, stop <-chan struct{}, at Seat) (status int, err error)
	// Log must not be nil.
	Log logrus.FieldLogger
}

// Seat is what a driver needs.
type Seat struct {
	// Nodes is the number of nodes of the round, and Gossip the address of this node's agent.
	Nodes  int
	Gossip string
	// Found is the copy that the previous driver has left. If its Term is 0, there was no previous
	// driver.
	Found replica.Copy
	// Journal takes the records of this driver.
	Journal *replica.Leader
}

// ErrDriverDied means that the driver has died and the job can continue.
var ErrDriverDied = errors.New("torchrun: the job's driver has died")

// outcome is how the lead of this node has ended: with the job, or with err.
type outcome struct {
	status int
	err    error
}

// elasticRun is a running Elastic. Only one goroutine uses it.
type elasticRun struct {
	Elastic
	node   replica.Node
	side   context.Context // context of everything that runs in the background
	wg     sync.WaitGroup
	rounds chan Round
	failed chan error // errors of the rendezvous, the agent or the driver
	joined chan string
	ended  chan int // the job has ended with this status
	drove  chan outcome

	round  Round
	ceded  int                      // number of the last round in which another node took over the lead
	gossip string                   // gossip address of this node's agent; empty: it has not joined
	lead   *lead                    // nil: this node does not lead
	known  atomic.Pointer[[]string] // gossip addresses of the agents of other nodes; nil: none are known yet
}

// lead is the state of a node that leads.
type lead struct {
	kill context.CancelFunc
	stop chan struct{}
	wg   sync.WaitGroup

	mu      sync.Mutex
	members []string
	journal *replica.Leader // nil: not available yet
	leading chan struct{}   // closed when journal is set
}

// Run runs the node until the job has ended, ctx ends, or the node can no longer take part. It
// returns the job's exit status. When ctx ends, the node's workers move elsewhere, and the job
// continues without the node; if no other node is left, the job is stopped. No goroutine of Run is
// left when it returns.
func (e Elastic) Run(ctx context.Context) (status int, err error) {
	side, cancel := context.WithCancel(context.WithoutCancel(ctx))
	r := &elasticRun{
		Elastic: e, side: side, rounds: make(chan Round), failed: make(chan error, 3), joined: make(chan string, 1),
		ended: make(chan int, 2), drove: make(chan outcome, 1), ceded: -1,
	}
	r.node.Name = e.Peers.Member()
	e.Peers.answer(journalCopy.of(0), r.node.Serve)
	r.wg.Go(r.meet)
	r.wg.Go(r.awaitEnd)
	status, err = r.run(ctx)
	cancel()
	r.wg.Wait()
	if r.lead != nil {
		r.unseat()
	}
	bounded, release := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer release()
	if err == nil && ctx.Err() == nil {
		if cerr := e.Rendezvous.closeWith(bounded, status); cerr != nil {
			e.Log.Debugf("torchrun: closing the rendezvous: %v", cerr)
		}
	}
	if lerr := e.Rendezvous.Leave(bounded); lerr != nil {
		e.Log.Debugf("torchrun: leaving the rendezvous: %v", lerr)
	}
	e.Peers.refuse(journalCopy.of(0)).Wait()
	return status, err
}

// meet takes part in the rounds until side ends.
func (r *elasticRun) meet() {
	for {
		round, err := r.Rendezvous.Next(r.side, false)
		switch {
		case err == nil:
		case r.side.Err() != nil:
			return
		case errors.Is(err, ErrClosed), errors.Is(err, dynamic.ErrDismissed):
			r.closed()
			return
		default:
			r.failed <- err
			return
		}
		select {
		case r.rounds <- round:
		case <-r.side.Done():
			return
		}
		select {
		case <-r.Rendezvous.Changed():
		case <-r.side.Done():
			return
		}
	}
}

// closed reports the outcome of a job that another node has closed. A node that never had a place
// in the job has no copy that shows the outcome.
func (r *elasticRun) closed() {
	ctx, cancel := context.WithTimeout(r.side, leaveTimeout)
	status, err := r.Rendezvous.ended(ctx)
	cancel()
	if err == nil {
		r.ended <- status
	} else if _, missing := r.node.Await(ctx, endedFile); missing != nil { // otherwise awaitEnd reports the status
		r.failed <- fmt.Errorf("torchrun: the job has ended, and its exit status is not known: %w", err)
	}
}

// awaitEnd waits until the copy shows that the job has ended, and reports the status.
func (r *elasticRun) awaitEnd() {
	text, err := r.node.Await(r.side, endedFile)
	if err != nil {
		return
	}
	status, err := strconv.Atoi(string(text))
	if err != nil {
		status = 1
	}
	r.ended <- status
}

// run is the node's loop.
func (r *elasticRun) run(ctx context.Context) (int, error) {
	serving, drain := context.WithCancelCause(r.side)
	defer drain(nil)
	var served chan struct{} // closed when the agent has ended; nil: it has not begun
	end := func(why error) {
		drain(why)
		if served != nil {
			<-served
		}
	}
	for {
		select {
		case round := <-r.rounds:
			r.round = round
			if served == nil {
				served = make(chan struct{})
				r.wg.Go(func() {
					defer close(served)
					r.serve(serving, round)
				})
			}
			r.enter(round)
		case r.gossip = <-r.joined:
			r.enter(r.round)
		case out := <-r.drove:
			r.unseat()
			switch {
			case out.err == nil:
				end(errEnded)
				return out.status, nil
			case errors.Is(out.err, replica.ErrLost):
				r.Log.Warn("torchrun: another node runs the job's driver now")
				r.ceded = r.round.Number
			case errors.Is(out.err, ErrDriverDied):
				r.Log.Warn("torchrun: the job's driver has died; another one takes over")
				r.enter(r.round)
			default:
				end(out.err)
				return 1, out.err
			}
		case status := <-r.ended:
			end(errEnded)
			return status, nil
		case err := <-r.failed:
			end(err)
			return 1, err
		case <-ctx.Done():
			return r.depart(context.Cause(ctx), drain, served)
		}
	}
}

// depart makes the job's driver, which may run on this or another node, move this node's workers
// elsewhere. If this node leads and no other node is left, it stops the job.
func (r *elasticRun) depart(why error, drain func(error), served <-chan struct{}) (int, error) {
	over, cancel := context.WithCancel(r.side)
	defer cancel()
	alone := make(chan struct{})
	if r.lead != nil {
		l := r.lead
		l.wg.Go(func() {
			if l.awaitAlone(over) == nil {
				close(alone)
			}
		})
	}
	if r.lead == nil || r.round.World > 1 {
		drain(why)
	}
	if served == nil {
		return 1, why
	}
	select {
	case <-served:
		return 1, why
	case <-alone:
	}
	status, stopped := r.stopJob()
	drain(why)
	<-served
	if !stopped {
		return 1, why
	}
	return status, nil
}

// stopJob makes the driver stop the job, and returns the job's exit status.
func (r *elasticRun) stopJob() (status int, stopped bool) {
	close(r.lead.stop)
	out := <-r.drove
	return out.status, out.err == nil
}

// errEnded is the reason why an agent ends together with the job.
var errEnded = errors.New("the job has ended")

// serve runs this node's agent.
func (r *elasticRun) serve(ctx context.Context, round Round) {
	if round.Rank != 0 {
		bounded, cancel := context.WithTimeout(ctx, seedPatience)
		if addr, err := round.Store.Get(bounded, gossipOf(0)); err == nil {
			r.known.Store(&[]string{string(addr)})
		}
		cancel()
	}
	seeds := func() (addrs []string) {
		if known := r.known.Load(); known != nil {
			addrs = slices.Clone(*known)
		}
		return addrs
	}
	err := r.Serve(ctx, seeds, func(addr string) { r.joined <- addr })
	if err == nil && ctx.Err() == nil {
		err = errors.New("torchrun: the agent of this node has ended")
	}
	if err != nil && ctx.Err() == nil {
		r.failed <- err
	}
}

func gossipOf(rank int) string { return "gossip/" + strconv.Itoa(rank) }

// enter acts on this node's place in a round, once its agent has joined.
func (r *elasticRun) enter(round Round) {
	if r.gossip == "" {
		return
	}
	own := r.gossip
	r.wg.Go(func() { r.exchange(round, own) })
	if r.lead != nil {
		r.lead.setMembers(round.Agents)
		return
	}
	if round.Rank != 0 || round.Number == r.ceded {
		return
	}
	ctx, kill := context.WithCancel(r.side)
	l := &lead{kill: kill, stop: make(chan struct{}), leading: make(chan struct{}), members: round.Agents}
	r.lead = l
	l.wg.Go(func() {
		status, err := r.drive(ctx, l, round, own)
		r.drove <- outcome{status, err}
	})
}

// exchange publishes the gossip address of this node's agent to the other nodes of a round, and
// fetches theirs. It ends when the round's store does.
func (r *elasticRun) exchange(round Round, own string) {
	ctx, cancel := context.WithTimeout(r.side, rankTimeout)
	defer cancel()
	err := round.Store.Set(ctx, gossipOf(round.Rank), []byte(own))
	if err == nil && round.Rank == 0 { // the others connect to it to notice its end: see Dynamic.attend
		err = round.Store.Set(ctx, "store", []byte(r.Peers.Addr()))
	}
	if err != nil {
		r.Log.Debugf("torchrun: announcing the address of this node: %v", err)
		return
	}
	var all []string
	for rank := range round.World {
		if rank == round.Rank {
			continue
		}
		addr, err := round.Store.Get(ctx, gossipOf(rank))
		if err != nil {
			return
		}
		all = append(all, string(addr))
	}
	r.known.Store(&all)
}

// drive runs the job's driver on this node until the job has ended or another node leads.
func (r *elasticRun) drive(ctx context.Context, l *lead, round Round, own string) (status int, err error) {
	journal, found, err := r.Peers.lead(ctx, &r.node, journalCopy, round.Agents)
	if err != nil {
		return 0, err
	}
	defer journal.Close()
	l.begin(journal)
	if text, over := found.Files[endedFile]; over {
		if status, err = strconv.Atoi(string(text)); err != nil {
			return 0, fmt.Errorf("torchrun: the job's copy says that it has ended with %q", text)
		}
		return status, journal.Sync()
	}
	ctx, kill := context.WithCancel(ctx)
	defer kill()
	l.wg.Go(func() {
		select {
		case <-journal.Lost():
			kill()
		case <-ctx.Done():
		}
	})
	r.Log.Info("torchrun: this node runs the job's driver")
	status, err = r.Drive(ctx, l.stop, Seat{Nodes: round.World, Gossip: own, Found: found, Journal: journal})
	select {
	case <-journal.Lost():
		return 0, replica.ErrLost
	default:
	}
	if err != nil {
		return 0, err
	}
	journal.Put(endedFile, []byte(strconv.Itoa(status)))
	return status, journal.Sync()
}

// awaitAlone blocks until no other node is left.
func (l *lead) awaitAlone(ctx context.Context) error {
	select {
	case <-l.leading:
		return l.journal.AwaitAlone(ctx)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// begin starts to write the journal to the members of the last round.
func (l *lead) begin(journal *replica.Leader) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.journal = journal
	journal.SetMembers(l.members)
	close(l.leading)
}

func (l *lead) setMembers(members []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.members = members
	if l.journal != nil {
		l.journal.SetMembers(members)
	}
}

// unseat kills the driver of this node, if it still runs.
func (r *elasticRun) unseat() {
	r.lead.kill()
	r.lead.wg.Wait()
	r.lead = nil
}
