package dashboard

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/internal/wake"
)

const (
	// maxViewers bounds the concurrent streams.
	maxViewers = 64
	// backlog is the number of messages that may wait for a viewer. A slower viewer is dropped: its
	// browser connects again.
	backlog = 16
	// idle is the number of intervals between two looks while there are no viewers.
	idle = 5
)

// hub looks at the job at intervals, and sends the changes to the viewers.
type hub struct {
	feed     *Feed
	interval time.Duration
	due      wake.Flag     // for a look
	looked   chan struct{} // closed after the first look

	mu      sync.Mutex
	seq     int
	now     time.Time
	rate    float64
	shown   *shown
	events  []Event
	viewers map[chan message]bool
	over    bool // no more viewers are accepted: the server ends
}

// message is a message of a stream. All viewers share its text.
type message struct {
	name string // full or patch
	text []byte
}

func newHub(j Job, interval time.Duration) *hub {
	return &hub{
		feed: NewFeed(j), interval: interval, due: wake.New(), looked: make(chan struct{}),
		viewers: map[chan message]bool{},
	}
}

// run looks at the job until ctx ends, then looks once more and ends all streams.
func (h *hub) run(ctx context.Context) {
	defer h.feed.Close()
	defer h.end()
	h.look(ctx)
	close(h.looked)
	tick := time.NewTicker(h.interval)
	defer tick.Stop()
	for n := 1; ; n++ {
		select {
		case <-tick.C:
			if !h.watched() && n%idle != 0 {
				continue
			}
		case <-h.due:
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), h.interval)
			h.look(last)
			cancel()
			return
		}
		h.look(ctx)
	}
}

func (h *hub) watched() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.viewers) > 0
}

// look looks at the job once, and sends the changes.
func (h *hub) look(ctx context.Context) {
	v := h.feed.Look(ctx, time.Now())
	s, err := show(v)
	if err != nil {
		return // cannot happen: values of a status can be encoded
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	before := h.shown
	h.shown, h.events, h.now, h.rate = s, v.Events, v.Status.Time, v.Rate
	if before == nil {
		return
	}
	h.seq++
	m := message{"patch", s.patch(before, h.now, h.seq, h.rate, h.events)}
	for c := range h.viewers {
		select {
		case c <- m:
		default:
			h.drop(c)
		}
	}
}

// drop ends a stream; the caller holds mu.
func (h *hub) drop(c chan message) {
	if h.viewers[c] {
		delete(h.viewers, c)
		close(c)
	}
}

// end ends all streams.
func (h *hub) end() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.over = true
	for c := range h.viewers {
		h.drop(c)
	}
}

// full returns a message with the whole view.
func (h *hub) full() message {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.fullLocked()
}

func (h *hub) fullLocked() message {
	return message{"full", h.shown.full(h.now, h.seq, h.rate, h.events)}
}

// subscribe returns the whole view, and a stream of what follows. The caller must call leave. The
// channel is closed when the stream ends.
func (h *hub) subscribe() (first message, c chan message, leave func(), err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.over:
		return message{}, nil, nil, errors.New("dashboard: the server ends")
	case len(h.viewers) >= maxViewers:
		return message{}, nil, nil, fmt.Errorf("dashboard: %d viewers have the page open, and no more are admitted: close another", maxViewers)
	}
	c = make(chan message, backlog)
	h.viewers[c] = true
	leave = func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.drop(c)
	}
	return h.fullLocked(), c, leave, nil
}
