package jobrun

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/job"
)

const (
	bringPause = 2 * time.Second // between two requests to a source
	// returnTimeout bounds the release of the hosts.
	returnTimeout = 30 * time.Second
	// unlistedTimeout bounds it if the source has never answered: a request that it received may
	// have been cut off.
	unlistedTimeout = 3 * time.Second
)

// bringer requests, from a source that can provide hosts, as many slots as the job can use.
type bringer struct {
	scaler discovery.Scaler
	log    logrus.FieldLogger
	cancel context.CancelFunc
	asking sync.WaitGroup
	woken  wake.Flag

	brought bool // a request has succeeded; owned by the goroutine until it has ended
	cannot  bool // the source has said that it brings no hosts; owned in the same way

	mu     sync.Mutex
	size   job.Size
	listed bool // the source has listed hosts; a failure before that ends the job with its own error
}

// bringHosts runs a bringer if the source can provide hosts.
func bringHosts(ctx context.Context, r *run) (stop func(), err error) {
	size, _ := hostsource.Size(r.settings, r.Fixed) // it was valid when the job began
	b := bring(ctx, r.cfg.Source, size, r.log)
	if b == nil {
		return nil, nil
	}
	r.events = append(r.events, b.hear)
	r.replayed = append(r.replayed, b.hear)
	return func() {
		select {
		case <-r.again: // an earlier request was for the workers
		default:
		}
		b.end(r.again, r.over())
	}, nil
}

// bring starts a bringer, which sends requests to the source until end is called. It returns nil if
// the source cannot provide hosts or the world is fixed. The caller passes the job's events to
// hear, which report changes of the job's bounds.
func bring(ctx context.Context, source discovery.Discoverer, size job.Size, log logrus.FieldLogger) *bringer {
	scaler, can := source.(discovery.Scaler)
	if !can || !size.Elastic {
		return nil
	}
	b := &bringer{scaler: scaler, log: log, size: size, woken: wake.New()}
	ctx, b.cancel = context.WithCancel(context.WithoutCancel(ctx)) // workers still run when ctx ends
	b.asking.Go(func() { b.run(ctx) })
	return b
}

// hear takes an event of the job: new bounds, or the first list of hosts.
func (b *bringer) hear(e job.Event) {
	b.mu.Lock()
	if e.Name != job.Scaled && (e.Name != job.HostsFound || b.listed) {
		b.mu.Unlock()
		return
	}
	b.listed = b.listed || e.Name == job.HostsFound
	for _, f := range e.Fields {
		n, _ := strconv.Atoi(fmt.Sprint(f.Value)) // replayed values have another type; no bound: nil
		switch f.Key {
		case "min_np":
			b.size.Min = n
		case "max_np":
			b.size.Max = n
		}
	}
	b.mu.Unlock()
	b.woken.Set()
}

// bounds returns the minimum and the maximum number of slots to request. Without a bound on the
// size, the maximum is the number of slots at the start.
func (b *bringer) bounds() (least, most int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	least, most = b.size.Min, b.size.Max
	if most == 0 {
		most = max(b.size.NP, least)
	}
	if least == 0 {
		least = b.size.NP
	}
	return min(least, most), most + b.size.Spares
}

// run requests slots periodically, and when the bounds change, until ctx ends.
func (b *bringer) run(ctx context.Context) {
	told := false // a failure has been logged
	for {
		least, most := b.bounds()
		err := b.scaler.Scale(ctx, least, most)
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, discovery.ErrNoScale):
			b.cannot = true
			return
		case err == nil:
			b.brought, told = true, false
		case !told && b.lists():
			b.log.Warnf("asking for hosts: %v; the job continues with its present hosts", err)
			told = true
		}
		select {
		case <-ctx.Done():
			return
		case <-b.woken:
		case <-time.After(bringPause):
		}
	}
}

// lists reports whether the source has listed hosts.
func (b *bringer) lists() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.listed
}

// end stops the requests and, if the job is over, returns the hosts to the source. It blocks until
// that is done, or a value arrives on again.
func (b *bringer) end(again <-chan struct{}, over bool) {
	b.cancel()
	b.asking.Wait()
	if !over || b.cannot && !b.brought {
		return
	}
	answers, limit := b.brought || b.lists(), unlistedTimeout
	if answers {
		limit = returnTimeout
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	var hurrying sync.WaitGroup
	hurrying.Go(func() {
		select {
		case <-again:
			cancel()
		case <-ctx.Done():
		}
	})
	err := b.scaler.Scale(ctx, 0, 0)
	cancel()
	hurrying.Wait()
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("the source has not answered within %v, and may keep them", limit)
	}
	if err != nil && !errors.Is(err, discovery.ErrNoScale) && answers {
		b.log.Errorf("giving the hosts back: %v", err)
	}
}
