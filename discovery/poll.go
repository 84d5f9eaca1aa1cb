package discovery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/plan"
)

const defaultInterval = time.Second

// Poll turns a Discoverer into a stream of host lists. It is used for one Run.
type Poll struct {
	// Source is asked again and again. If it is a Watcher it is watched instead, unless its Watch
	// returns ErrNoWatch.
	Source Discoverer
	// Interval is the pause after each question, and after a failure of a Watcher. 0: 1 s.
	Interval time.Duration
	// RemovalAfter is the number of consecutive lists without a host after which the host counts as
	// gone. An empty list counts for all hosts together; it takes at least two of them. A list of a
	// Watcher counts once when it is pushed, and once more for each Interval in which the source
	// pushes nothing else; each source of a Merged has its own count. 0: 1.
	RemovalAfter int
	// Known are the hosts that an earlier Run has reported. The first list is compared with them,
	// and they stand until then, so no failure is one before the first list. Nil: there was no
	// earlier Run.
	Known []plan.Host
	// Failed is called with each failure after the first list, and with the time since the source
	// last confirmed its list, or since Run was called. It is called from one goroutine at a time
	// and must not block for long. Nil: it is not called.
	Failed func(err error, age time.Duration)
	// Stands is called whenever the source gives or confirms a list, before the list is passed on;
	// for a Merged, whenever one of its sources does so and none of the others has failed since its
	// own last list. It is called from one goroutine at a time and must not block. Nil: it is not
	// called.
	Stands func()
	// Log takes failures and recoveries. Of consecutive failures it takes those that differ from
	// the previous one, and otherwise the first, second, fourth, eighth and so on. Nil:
	// logrus.StandardLogger().
	Log logrus.FieldLogger
}

// FirstError is returned by Poll's Run if the source fails before its first list.
type FirstError struct{ Err error }

// Error names the source's error.
func (e *FirstError) Error() string {
	return fmt.Sprintf("discovery: no hosts were ever found: %v", e.Err)
}

// Unwrap returns the source's error.
func (e *FirstError) Unwrap() error { return e.Err }

var (
	errNoSource   = errors.New("discovery: there is no source to ask")
	errWatchEnded = errors.New("discovery: the source has stopped watching")
)

// Run asks the source until ctx ends, and then returns ctx's cause. It calls found with the first
// list, which may be empty, and with every list that differs from the last one, even if only the
// order differs. found owns the list. It is called by one goroutine at a time and not after Run has
// returned; the next question waits for it.
//
// Without Known, a failure before the first list is returned at once, as a *FirstError. Any other
// failure is logged and passed to Failed, the last list stays, and the source is asked again after
// Interval. A list that plan.CheckHosts refuses is a failure. Run waits for the source, so it ends
// only as promptly as the source does.
func (p *Poll) Run(ctx context.Context, found func([]plan.Host)) error {
	interval := p.Interval
	if interval <= 0 {
		interval = defaultInterval
	}
	k := &keeper{found: found, stands: p.Stands, log: p.log(), confirmed: time.Now(),
		settle: &settle{after: p.RemovalAfter, stands: slices.Clone(p.Known)}}
	ask := p.discover
	switch source := p.Source.(type) {
	case *Merged:
		k.settle, k.stands = nil, nil // each of the sources has its own
		ask = func(ctx context.Context, k *keeper) error {
			return watch(ctx, k, interval, func(ctx context.Context, found func([]plan.Host)) error {
				return source.watch(ctx, p, found)
			})
		}
	case Watcher:
		ask = func(ctx context.Context, k *keeper) error { return watch(ctx, k, interval, source.Watch) }
	}
	for {
		err := errNoSource
		if p.Source != nil {
			err = ask(ctx, k)
		}
		if errors.Is(err, ErrNoWatch) && ctx.Err() == nil {
			ask, err = p.discover, p.discover(ctx, k)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			if !k.known && p.Known == nil {
				return &FirstError{err}
			}
			age := k.failed(err)
			if p.Failed != nil {
				p.Failed(err, age)
			}
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(interval):
		}
	}
}

func (p *Poll) log() logrus.FieldLogger {
	if p.Log == nil {
		return logrus.StandardLogger()
	}
	return p.Log
}

// discover asks once.
func (p *Poll) discover(ctx context.Context, k *keeper) error {
	hosts, err := p.Source.Discover(ctx)
	if err != nil || ctx.Err() != nil {
		return err
	}
	return k.take(hosts)
}

// watch listens until the source can watch no longer, or says what cannot be. A list that is to be
// seen again before it counts is taken as said again by a source that says nothing else for the
// interval.
func watch(ctx context.Context, k *keeper, interval time.Duration, listen func(context.Context, func([]plan.Host)) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var (
		mu    sync.Mutex // a source may call from goroutines of its own
		ended bool
		heard bool
		lists int // that were pushed
	)
	var take func(hosts []plan.Host) // the lock is held
	take = func(hosts []plan.Host) {
		if ended || ctx.Err() != nil {
			return
		}
		if err := k.take(hosts); err != nil {
			cancel(err)
			return
		}
		heard = true
		lists++
		if at := lists; k.kept > 0 {
			time.AfterFunc(interval, func() {
				mu.Lock()
				defer mu.Unlock()
				if at == lists {
					take(hosts)
				}
			})
		}
	}
	err := listen(ctx, func(hosts []plan.Host) {
		mu.Lock()
		defer mu.Unlock()
		take(hosts)
	})
	mu.Lock()
	defer mu.Unlock()
	ended = true
	if heard {
		k.confirmed = time.Now() // it would have told of a change until now
	}
	if ctx.Err() != nil { // a list was refused, or all is over
		return context.Cause(ctx)
	}
	if err == nil {
		err = errWatchEnded
	}
	return err
}

// keeper holds the last good list.
type keeper struct {
	found     func([]plan.Host)
	stands    func() // may be nil
	log       logrus.FieldLogger
	known     bool
	last      []plan.Host
	confirmed time.Time // when the source last stood by the list, or Run was called
	failures  retry.Row // since then
	settle    *settle   // nil: every list counts as it is
	kept      int       // hosts that still count, though the list lacks them
}

// take checks a list and hands it on where it is news.
func (k *keeper) take(hosts []plan.Host) error {
	if err := checkList(hosts); err != nil {
		return err
	}
	if failures := k.failures.Ended(); failures > 0 {
		k.log.WithField("failures", failures).Info("discovery: the source answers again")
	}
	k.confirmed = time.Now()
	if k.stands != nil {
		k.stands()
	}
	hosts = k.settled(hosts)
	if k.known && slices.Equal(k.last, hosts) {
		return nil
	}
	k.known, k.last = true, hosts
	if first, second := plan.SameButCase(hosts); first != "" {
		k.log.Warnf("discovery: the hosts %s and %s differ in case only: if they are one machine, it gets the workers of both", first, second)
	}
	k.found(slices.Clone(hosts))
	return nil
}

// settled returns what counts of a list, and logs where hosts begin to be missing.
func (k *keeper) settled(hosts []plan.Host) []plan.Host {
	if k.settle == nil {
		return hosts
	}
	before := k.kept
	hosts, k.kept = k.settle.take(hosts)
	if k.kept > before {
		k.log.WithField("missing", k.kept).WithField("hosts", len(hosts)).
			Info("discovery: hosts are missing from the list; they count as gone if the next lists lack them too")
	}
	return hosts
}

func checkList(hosts []plan.Host) error {
	if err := plan.CheckHosts(hosts); err != nil {
		return fmt.Errorf("discovery: a list that cannot be: %w", err)
	}
	return nil
}

// failed logs a failure, if it is due, and returns the age of the list that stays.
func (k *keeper) failed(err error) time.Duration {
	age := time.Since(k.confirmed)
	if !k.failures.Failed(time.Now(), err) {
		return age
	}
	k.log.WithError(err).WithField("age", age.Round(time.Millisecond)).WithField("failures", k.failures.Failures()).
		Warn("discovery: failed; the last list of hosts stays")
	return age
}

// emptyAfter is how many empty lists in a row it takes to remove all hosts: a source that has a
// moment of trouble often prints nothing, and ends well.
const emptyAfter = 2

// settle decides which hosts a list stands for: one that the list lacks goes only when it was
// missing from so many lists in a row. It reads no clock and is for one goroutine.
type settle struct {
	after   int            // lists from which a host must be missing
	stands  []plan.Host    // what counts, as of the last list
	missing map[string]int // from how many lists in a row a host of these was
}

// take returns what counts when the source has said that list, and how many hosts of it the list
// lacks. Those stand at its end, with the slots that they had.
func (s *settle) take(said []plan.Host) (stands []plan.Host, kept int) {
	need := max(1, s.after)
	if len(said) == 0 {
		need = max(need, emptyAfter)
	}
	listed := make(map[string]bool, len(said))
	for _, h := range said {
		listed[h.Name] = true
	}
	missing := map[string]int{}
	stands = slices.Clone(said)
	for _, h := range s.stands {
		if listed[h.Name] {
			continue
		}
		if n := s.missing[h.Name] + 1; n < need {
			missing[h.Name] = n
			stands = append(stands, h)
			kept++
		}
	}
	s.stands, s.missing = stands, missing
	return stands, kept
}
