package transfer

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
)

const (
	leastKept = 2        // steps whose averages are kept, regardless of their size
	mostKept  = 64       // largest number of steps whose averages are kept, however small
	smallKept = 32 << 20 // bytes up to which averages of more than leastKept steps are kept

	soon = 10 * time.Second // longest wait for a commit that is about to be made

	soonSteps = 16          // number of steps within which another follower is likely to come
	pulse     = time.Second // longest pause between two frames from a source
	share     = 2           // pause after a chunk of a commit, as a multiple of its duration, so that it costs the members little
	rest      = 20 * time.Millisecond
)

// Depth returns the number of steps whose averages a source keeps, and which a follower can receive
// before it has the commit. size is the number of bytes of the averages of a step.
func Depth(size int) int { return min(max(leastKept, smallKept/max(size, 1)), mostKept) }

// FeedSource provides the commits for a Feed. Its functions may be called by any goroutine.
type FeedSource struct {
	// Size is the number of bytes of the averages of a step.
	Size int
	// Reserve allocates the memory that commits need while one is held. It may take long.
	Reserve func()
	// Trim frees that memory.
	Trim func()
	// Hold holds the newest commit. It returns nil before the first commit, and ErrSoon if only the
	// commit of one of the next steps can be held.
	Hold func() (*Commit, error)
	// Sample returns the checksums of some chunks of the newest commit. Keep calls it.
	Sample func(commit uint64) []Sum
}

// Feed is what a worker that trains provides for its followers. Its methods are safe for concurrent
// use.
type Feed struct {
	id     uint64
	source FeedSource

	mu        sync.Mutex
	followers int
	holding   bool
	ended     bool
	next      uint64 // the step after the last one passed to Keep
	kept      []*kept
	free      []*kept
	more      chan struct{} // closed at the next change
	end       chan struct{} // closed by End
}

// kept holds the averages of a step.
type kept struct {
	number, commit uint64
	sums           []Sum // checksums of chunks of that commit
	carried        [][]byte
	averages       []byte
}

// NewFeed returns a feed with the given source. It starts nothing.
func NewFeed(s FeedSource) *Feed {
	return &Feed{id: rand.Uint64() | 1, source: s, more: make(chan struct{}), end: make(chan struct{})}
}

// ID returns the ID of the feed, which is unique in the job and never 0.
func (f *Feed) ID() uint64 { return f.id }

// Followed reports whether the feed has followers.
func (f *Feed) Followed() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.followers > 0
}

// Keep keeps a copy of a step's averages, and of the values of the parts that are in no blob, for
// followers. The step is about to be applied to the state of the given commit, which is the newest.
// Without followers, Keep neither calls carried nor copies anything.
func (f *Feed) Keep(number, commit uint64, carried func() ([][]byte, error), averages []byte) error {
	f.mu.Lock()
	if number < f.next { // it was applied before, with the same averages, and was undone
		f.mu.Unlock()
		return nil
	}
	f.next = number + 1
	var k *kept
	if f.followers > 0 {
		k = f.take()
	}
	if k == nil {
		f.changed()
		f.mu.Unlock()
		return nil
	}
	f.mu.Unlock()
	values, err := carried()
	k.number, k.commit, k.carried, k.sums = number, commit, values, f.source.Sample(commit)
	copy(k.averages, averages)
	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil && f.followers > 0 {
		f.kept = append(f.kept, k)
	}
	f.changed()
	return err
}

// take returns memory for a step: free memory or, without free memory, that of the oldest step. The
// caller holds mu.
func (f *Feed) take() *kept {
	if last := len(f.free) - 1; last >= 0 {
		k := f.free[last]
		f.free = f.free[:last]
		return k
	}
	if len(f.kept) == 0 {
		return nil
	}
	k := f.kept[0]
	copy(f.kept, f.kept[1:])
	f.kept = f.kept[:len(f.kept)-1]
	return k
}

// changed notifies waiting visitors. The caller holds mu.
func (f *Feed) changed() {
	close(f.more)
	f.more = make(chan struct{})
}

// End ends all calls of Serve that serve a follower, and new followers are refused.
func (f *Feed) End() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.ended {
		close(f.end)
	}
	f.ended = true
	f.changed()
}

// ErrSoon is returned by FeedSource.Hold if a commit that can be held follows soon.
var ErrSoon = errors.New("transfer: a commit that can be held follows soon")

var (
	errEnded = errors.New("transfer: the feed has ended")
	errLate  = errors.New("transfer: the next commit takes long")
)

// enter adds a follower. The averages of step from and of all later steps are kept for it.
func (f *Feed) enter() (from uint64, err error) {
	f.mu.Lock()
	if f.ended || f.holding {
		defer f.mu.Unlock()
		if f.ended {
			return 0, errEnded
		}
		return 0, ErrBusy
	}
	f.holding = true
	f.followers++ // from now on the departure of others does not end the feed's work
	first := f.followers == 1
	f.mu.Unlock()
	if first {
		f.prepare()
	}
	f.source.Reserve()
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.next, nil
}

// prepare allocates the memory for averages, before steps need it.
func (f *Feed) prepare() {
	var all []*kept
	for range Depth(f.source.Size) {
		k := &kept{averages: make([]byte, f.source.Size)}
		clear(k.averages)
		all = append(all, k)
	}
	f.mu.Lock()
	f.free = all
	f.mu.Unlock()
}

// leave removes a follower, which enter has added.
func (f *Feed) leave() {
	f.mu.Lock()
	f.followers--
	last := f.followers == 0
	if last {
		f.kept, f.free = nil, nil
	}
	f.mu.Unlock()
	if !last {
		return
	}
	timer := time.NewTimer(pulse) // a world may be starting, which has priority, and other followers may come
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-f.end:
	}
	if !f.Followed() {
		f.source.Trim()
	}
}

// serve serves one follower.
func (f *Feed) serve(to *link) error {
	v := &visitor{link: to, feed: f, spare: soonSteps}
	from, err := f.enter()
	if err != nil {
		busy := uint32(0)
		if errors.Is(err, ErrBusy) {
			busy = 1
		}
		return errors.Join(err, v.write(frameNone, busy, nil))
	}
	defer f.leave()
	if err := v.hold(from); err != nil {
		v.release()
		return errors.Join(err, v.write(frameNone, 0, nil))
	}
	defer v.release()
	if err := v.head(); err != nil {
		return err
	}
	return v.send()
}

// visitor is one follower, at its source.
type visitor struct {
	*link
	feed   *Feed
	commit *Commit // the held commit; nil: it has been sent
	holds  bool    // f.holding is set because of this visitor
	chunks []place
	sent   int    // number of chunks sent
	first  uint64 // number of the first step
	cursor uint64 // the next step to send
	spare  int    // steps after the commit until memory for other followers is freed
}

// hold holds a commit from which on all averages are kept: one that includes all steps before from.
func (v *visitor) hold(from uint64) error {
	f := v.feed
	v.holds = true
	limit := time.Now().Add(soon)
	for {
		f.mu.Lock()
		more, ended := f.more, f.ended
		f.mu.Unlock()
		if ended {
			return errEnded
		}
		c, err := f.source.Hold()
		switch {
		case errors.Is(err, ErrSoon):
		case err != nil:
			return err
		case c == nil:
			return errNone
		case c.Steps >= from:
			v.commit, v.first, v.cursor = c, c.Steps, c.Steps
			return nil
		default:
			c.Release()
		}
		if time.Now().After(limit) {
			return errLate
		}
		if err := v.await(more, pulse); err != nil {
			return err
		}
	}
}

// release releases the commit, and lets another follower take one.
func (v *visitor) release() {
	if v.commit != nil {
		v.commit.Release()
		v.commit = nil
	}
	if v.holds {
		v.holds = false
		v.feed.mu.Lock()
		v.feed.holding = false
		v.feed.mu.Unlock()
	}
}

// await waits until the feed changes. If it does not within the given time, await sends the
// follower a sign of life.
func (v *visitor) await(more <-chan struct{}, while time.Duration) error {
	timer := time.NewTimer(while)
	defer timer.Stop()
	select {
	case <-more:
		return nil
	case <-timer.C:
		return v.write(frameBeat, 0, AppendWord(nil, v.latest()))
	}
}

func (v *visitor) latest() uint64 {
	v.feed.mu.Lock()
	defer v.feed.mu.Unlock()
	return v.feed.next
}

func (v *visitor) head() error {
	v.chunks = v.commit.places()
	h := Head{Manifest: v.commit.manifest(), Feed: v.feed.id, Steps: v.commit.Steps, Latest: v.latest(),
		Carried: v.commit.Carried, size: v.feed.source.Size}
	return v.write(frameHead, 0, h.append(nil))
}

// send sends steps as they become available, and between them the chunks of the commit.
func (v *visitor) send() error {
	depth := uint64(Depth(v.feed.source.Size))
	for {
		f := v.feed
		f.mu.Lock()
		more, ended, step, lost := f.more, f.ended, f.find(v.cursor), f.lost(v.cursor)
		var head []byte
		if step != nil {
			head = (&Step{Number: step.number, Commit: step.commit, Carried: step.carried, Sums: step.sums, latest: f.next}).append(nil)
		}
		f.mu.Unlock()
		var err error
		switch {
		case ended:
			return errEnded
		case lost:
			return v.write(frameLost, 0, nil)
		case step != nil && (v.commit == nil || v.cursor-v.first < depth):
			err = v.step(head)
		case v.commit != nil && v.sent < len(v.chunks):
			err = v.chunk(more)
		case v.commit != nil:
			v.release()
		default:
			err = v.await(more, pulse)
		}
		if err != nil {
			return err
		}
	}
}

// find returns a step; nil if it is not kept. The caller holds mu.
func (f *Feed) find(number uint64) *kept {
	for _, k := range f.kept {
		if k.number == number {
			return k
		}
	}
	return nil
}

// lost reports whether a step is no longer kept although a later one is. The caller holds mu.
func (f *Feed) lost(number uint64) bool {
	last := len(f.kept) - 1
	return last >= 0 && f.kept[last].number > number && f.find(number) == nil
}

// chunk sends a chunk, and then pauses to leave the processors to training.
func (v *visitor) chunk(more <-chan struct{}) error {
	began := time.Now()
	if err := v.writeChunk(v.commit, v.sent, v.chunks[v.sent]); err != nil {
		return err
	}
	v.sent++
	timer := time.NewTimer(min(share*time.Since(began), rest))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-more: // send averages at once
	}
	return nil
}

// step sends a step. If the step is overwritten while it is sent, the follower learns that it is
// lost.
func (v *visitor) step(head []byte) error {
	if err := v.write(frameStep, 0, head); err != nil {
		return err
	}
	size := v.feed.source.Size
	for at := 0; at < size; {
		piece := v.buffer(min(snapshot.ChunkSize, size-at))
		v.feed.mu.Lock()
		k := v.feed.find(v.cursor)
		if k != nil {
			copy(piece, k.averages[at:])
		}
		v.feed.mu.Unlock()
		if k == nil {
			return errors.Join(fmt.Errorf("transfer: step %d is overwritten while it is sent", v.cursor), v.write(frameLost, 0, nil))
		}
		if err := v.write(framePiece, 0, piece); err != nil {
			return err
		}
		at += len(piece)
	}
	v.cursor++
	if v.commit != nil { // only steps after the commit count
		return nil
	}
	if v.spare--; v.spare != 0 {
		return nil
	}
	v.feed.mu.Lock()
	idle := !v.feed.holding
	v.feed.mu.Unlock()
	if idle {
		v.feed.source.Trim()
	}
	return nil
}
