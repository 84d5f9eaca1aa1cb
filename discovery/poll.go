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

// Poll turns a Discoverer into a stream of host lists. A Poll is used for one Run.
type Poll struct {
	// Source is asked repeatedly. If it is a Watcher it is watched instead, unless its Watch
	// returns ErrNoWatch.
	Source Discoverer
	// Interval is the pause after each question, and after a failure of a Watcher. 0: 1 s.
	Interval time.Duration
	// RemovalAfter is the number of consecutive lists without a host after which the host counts as
	// gone. An empty list counts for all hosts together; at least two empty lists in a row are
	// needed. A list of a Watcher counts once when it is pushed, and again for each Interval in
	// which the source pushes nothing else. Each source of a Merged is counted separately. 0: 1.
	RemovalAfter int
	// Known are the hosts that an earlier Run has reported. They are current until the first list,
	// which is compared with them. A failure of the first query is then handled like any later
	// failure. Nil: there was no earlier Run.
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
		k.settle, k.stands = nil, nil // each of the merged sources has its own
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

// discover asks the source once.
func (p *Poll) discover(ctx context.Context, k *keeper) error {
	hosts, err := p.Source.Discover(ctx)
	if err != nil || ctx.Err() != nil {
		return err
	}
	return k.take(hosts)
}

// watch receives lists until the source stops watching or sends an invalid list. A list that must
// be repeated before it counts is counted again for each interval in which the source pushes
// nothing else.
func watch(ctx context.Context, k *keeper, interval time.Duration, listen func(context.Context, func([]plan.Host)) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var (
		mu    sync.Mutex // a source may push from several goroutines
		ended bool
		heard bool
		lists int // number of lists pushed
	)
	var take func(hosts []plan.Host) // the caller holds mu
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
		k.confirmed = time.Now() // until now it would have reported a change
	}
	if ctx.Err() != nil { // a list was refused, or Run is ending
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
	confirmed time.Time // when the source last confirmed the list, or Run was called
	failures  retry.Row // failures since then
	settle    *settle   // nil: every list counts as it is
	kept      int       // hosts that still count although the list lacks them
}

// take checks a list and passes it on if it differs from the last.
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

// settled returns the hosts that count, given a list, and logs when further hosts are missing from
// it.
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
		return fmt.Errorf("discovery: the list is not valid: %w", err)
	}
	return nil
}

// failed logs a failure, if it is due, and returns the age of the last list, which stays.
func (k *keeper) failed(err error) time.Duration {
	age := time.Since(k.confirmed)
	if !k.failures.Failed(time.Now(), err) {
		return age
	}
	k.log.WithError(err).WithField("age", age.Round(time.Millisecond)).WithField("failures", k.failures.Failures()).
		Warn("discovery: failed; the last list of hosts stays")
	return age
}

// emptyAfter is the number of consecutive empty lists that removes all hosts: a source with a brief
// problem often prints nothing and exits with 0.
const emptyAfter = 2

// settle decides which hosts count: a host is removed only after it was missing from a number of
// consecutive lists. It reads no clock. It is not safe for concurrent use.
type settle struct {
	after   int            // number of lists from which a host must be missing
	stands  []plan.Host    // hosts that count, as of the last list
	missing map[string]int // by host, the number of consecutive lists that lacked it
}

// take takes the list said into account. It returns the hosts that count then, and how many of them
// the list lacks. These are last, with the slots that they had.
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
