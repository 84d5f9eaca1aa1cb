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
	"github.com/hvdrun/hvdrun/job"
)

const (
	bringPause = 2 * time.Second // until a source is asked for hosts again
	// returnTimeout bounds giving the hosts back.
	returnTimeout = 30 * time.Second
)

// bringer asks a source of hosts that can bring some for as many as the job has use for.
type bringer struct {
	scaler discovery.Scaler
	log    logrus.FieldLogger
	cancel context.CancelFunc
	asking sync.WaitGroup
	woken  chan struct{}

	brought bool // the source has been asked with success; of the goroutine, until it has ended

	mu     sync.Mutex
	size   job.Size
	listed bool // the source has listed hosts: what fails before that ends the job, and its error says so
}

// bringHook has a source that can bring hosts bring as many as the job has use for.
type bringHook struct{ bringer *bringer }

func (h *bringHook) start(ctx context.Context, r *run) error {
	size, _ := hostsource.Size(r.settings, r.Fixed) // it was right when the job began
	if h.bringer = bring(ctx, r.cfg.Source, size, r.log); h.bringer != nil {
		r.events = append(r.events, h.bringer.hear)
		r.replayed = append(r.replayed, h.bringer.hear)
	}
	return nil
}

func (h *bringHook) stop(r *run) { h.bringer.end(r.over()) }

// bring asks the source until end is called; nil: it cannot bring hosts, or the job cannot grow.
// The caller has hear called with the job's events, which tell when its bounds change.
func bring(ctx context.Context, source discovery.Discoverer, size job.Size, log logrus.FieldLogger) *bringer {
	scaler, can := source.(discovery.Scaler)
	if !can || !size.Elastic {
		return nil
	}
	b := &bringer{scaler: scaler, log: log, size: size, woken: make(chan struct{}, 1)}
	ctx, b.cancel = context.WithCancel(context.WithoutCancel(ctx)) // workers are still there when it ends
	b.asking.Go(func() { b.run(ctx) })
	return b
}

// hear takes new bounds of the job, and that there is a list of hosts.
func (b *bringer) hear(e job.Event) {
	b.mu.Lock()
	if e.Name != job.Scaled && (e.Name != job.HostsFound || b.listed) {
		b.mu.Unlock()
		return
	}
	b.listed = b.listed || e.Name == job.HostsFound
	for _, f := range e.Fields {
		n, _ := strconv.Atoi(fmt.Sprint(f.Value)) // of another kind where it was replayed; no bound: nil
		switch f.Key {
		case "min_np":
			b.size.Min = n
		case "max_np":
			b.size.Max = n
		}
	}
	b.mu.Unlock()
	select {
	case b.woken <- struct{}{}:
	default:
	}
}

// bounds are the slots to ask for. Without a bound, those of the start are enough.
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

// run asks again and again.
func (b *bringer) run(ctx context.Context) {
	told := false // that it fails
	for {
		least, most := b.bounds()
		err := b.scaler.Scale(ctx, least, most)
		switch {
		case ctx.Err() != nil || errors.Is(err, discovery.ErrNoScale):
			return
		case err == nil:
			b.brought, told = true, false
		case !told && b.lists():
			b.log.Warnf("asking for hosts: %v; the job goes on with its present hosts", err)
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

// lists returns whether the source has listed hosts.
func (b *bringer) lists() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.listed
}

// end stops asking, and gives the hosts back where the job is over. It blocks until that is done.
func (b *bringer) end(over bool) {
	if b == nil {
		return
	}
	b.cancel()
	b.asking.Wait()
	if !over {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), returnTimeout)
	defer cancel()
	if err := b.scaler.Scale(ctx, 0, 0); err != nil && !errors.Is(err, discovery.ErrNoScale) && (b.brought || b.lists()) {
		b.log.Errorf("giving the hosts back: %v", err)
	}
}
