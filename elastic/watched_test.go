package elastic

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/internal/dirtypages"
	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// needWatch skips the test if the kernel does not support watching.
func needWatch(t *testing.T) {
	t.Helper()
	w, err := dirtypages.Open()
	if err != nil {
		t.Skip(err)
	}
	w.Close()
}

// watchAll makes the package watch tensors of any size for the duration of the test.
func watchAll(t *testing.T) {
	least, much := leastWatched, muchCompared
	leastWatched, muchCompared = 1, 1
	t.Cleanup(func() { leastWatched, muchCompared = least, much })
}

// flaky is a Deferred part without a value that fails on request.
type flaky struct{ fails bool }

func (f *flaky) Save() error                                        { return nil }
func (f *flaky) Restore() error                                     { return nil }
func (f *flaky) Sync(context.Context, *collective.Group, int) error { return nil }
func (f *flaky) Image() ([]byte, error)                             { return []byte{1}, nil }
func (f *flaky) SetImage([]byte) error                              { return nil }
func (f *flaky) Pending() func() ([]byte, error) {
	var err error
	if f.fails {
		err = errors.New("no room")
	}
	return func() ([]byte, error) { return []byte{1}, err }
}

// shadowed is a rank with Watched parts and copies of their expected values.
type shadowed struct {
	state       *State
	pieces      [][]byte // of all parts, in order
	live, saved [][]byte
	flaky       flaky
}

// newShadowed makes parts in one allocation, most of which share pages at their edges.
func newShadowed(w *Worker, gap int, watched bool) *shadowed {
	all := make([]byte, 2*snapshot.ChunkSize+600_000)
	a, b := all[gap:snapshot.ChunkSize+200_005], all[snapshot.ChunkSize+200_005:2*snapshot.ChunkSize-gap]
	c, d := all[2*snapshot.ChunkSize-gap:2*snapshot.ChunkSize+300_000], all[2*snapshot.ChunkSize+300_000:]
	r := &shadowed{pieces: [][]byte{a, b, c, d}}
	asked := Watched
	if !watched {
		asked = func(p Part) Part { return p }
	}
	r.state = NewState(w, asked(Tensor("a", a)), asked(Tensors("many", [][]byte{b, nil, c})), Tensor("d", d), &r.flaky)
	for _, p := range r.pieces {
		r.live = append(r.live, bytes.Clone(p))
	}
	return r
}

// check compares everything with the expected values.
func (r *shadowed) check(t *rapid.T, when string) {
	for i, p := range r.pieces {
		if !bytes.Equal(p, r.live[i]) {
			t.Fatalf("%s: piece %d is another", when, i)
		}
	}
	if r.saved == nil {
		return
	}
	last := r.state.saved.Last().Blobs()
	for i, at := range []int{0, 1, 3, 4} {
		if !last[at].Same(r.saved[i]) {
			t.Fatalf("%s: what is saved of piece %d is another, at chunk %d", when, i, last[at].Differing(r.saved[i], func(int) bool { return true }))
		}
	}
}

func (r *shadowed) keep() {
	r.saved = nil
	for _, p := range r.live {
		r.saved = append(r.saved, bytes.Clone(p))
	}
}

// write changes a piece and its shadow.
func (r *shadowed) write(t *rapid.T, i, at int, with []byte, way string) {
	to := r.pieces[i][at : at+len(with)]
	switch way {
	case "copy":
		copy(to, with)
	case "stores":
		for j := range to {
			to[j] = with[j]
		}
	case "pipe":
		from, into, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error)
		go func() {
			_, err := into.Write(with)
			done <- errors.Join(err, into.Close())
		}()
		_, err = io.ReadFull(from, to)
		if err := errors.Join(err, <-done, from.Close()); err != nil {
			t.Fatal(err)
		}
	}
	copy(r.live[i][at:], with)
}

// After any sequence of writes, commits of both kinds, saves, restores, syncs and comparisons, the
// state is correct: every write is in the next commit, whether the kernel has reported it or not.
func TestWatchedIsTheState(t *testing.T) {
	needWatch(t)
	workers := stillWorld(t, 2, 1)
	watchAll(t)
	rapid.Check(t, func(t *rapid.T) {
		var ranks []*shadowed
		gap := rapid.SampledFrom([]int{0, 1, 4096, 5000}).Draw(t, "gap")
		asked := rapid.Bool().Draw(t, "asked")
		for _, w := range workers {
			w.verification.every = rapid.SampledFrom([]int{0, 3}).Draw(t, "verify")
			w.log = quiet()
			r := newShadowed(w, gap, asked)
			defer r.state.watch.end()
			ranks = append(ranks, r)
		}
		both := func(f func(r *shadowed) error) {
			for i, err := range errorsOf(2, func(i int) error { return f(ranks[i]) }) {
				if err != nil {
					t.Fatalf("rank %d: %v", i, err)
				}
			}
		}
		workers[0].verification = workers[1].verification
		alike := true // ranks with different states would fail --verify-state
		for step := range rapid.IntRange(1, 12).Draw(t, "steps") {
			what := rapid.SampledFrom([]string{"write", "write", "write", "all", "commit", "commit", "commit", "async", "fail", "save", "restore", "sync", "digest"}).Draw(t, "what")
			switch what {
			case "write", "all":
				i := rapid.IntRange(0, 3).Draw(t, "piece")
				n := rapid.SampledFrom([]int{1, 5, 4096, 70_000}).Draw(t, "length")
				at := rapid.IntRange(0, len(ranks[0].pieces[i])-n).Draw(t, "at")
				if what == "all" {
					n, at = len(ranks[0].pieces[i]), 0
				}
				with := bytes.Repeat([]byte{byte(step + 1)}, n)
				way := rapid.SampledFrom([]string{"copy", "stores", "pipe"}).Draw(t, "way")
				if what == "all" {
					way = "copy"
				}
				for _, r := range ranks {
					r.state.Settle()
					r.write(t, i, at, with, way)
				}
				if rapid.IntRange(0, 9).Draw(t, "differ") == 0 && workers[0].verification.every == 0 {
					ranks[0].write(t, i, at, []byte{0}, way)
					alike = false
				}
			case "commit":
				both(func(r *shadowed) error { r.keep(); return r.state.Commit() })
			case "async":
				both(func(r *shadowed) error { r.keep(); return r.state.CommitAsync() })
			case "fail": // a commit fails, and the writes before it must not be forgotten
				both(func(r *shadowed) error {
					defer func() { r.flaky.fails = false }()
					r.flaky.fails = true
					err := r.state.Commit()
					r.write(t, 0, step*10_000, []byte{byte(step + 1)}, "copy")
					if err = errors.Join(err, r.state.settled()); err == nil {
						return errors.New("the commit has not failed")
					}
					return nil
				})
			case "save":
				both(func(r *shadowed) error { r.keep(); return r.state.Save() })
			case "restore":
				if ranks[0].saved == nil {
					continue
				}
				both(func(r *shadowed) error {
					for i := range r.live {
						copy(r.live[i], r.saved[i])
					}
					return r.state.Restore()
				})
			case "sync":
				both(func(r *shadowed) error { return r.state.Sync(context.Background()) })
				for i := range ranks[0].live {
					copy(ranks[0].live[i], ranks[1].live[i])
				}
				both(func(r *shadowed) error { r.keep(); return nil })
				alike = true
			case "digest":
				if ranks[0].saved == nil {
					continue
				}
				digests := make([]uint64, 2)
				for i, err := range errorsOf(2, func(i int) (err error) { digests[i], err = ranks[i].state.Digest(); return err }) {
					if err != nil {
						t.Fatalf("rank %d: %v", i, err)
					}
				}
				if alike && digests[0] != digests[1] {
					t.Fatal("digests differ")
				}
			}
			for _, r := range ranks {
				if r.state.Settle(); what != "write" {
					r.check(t, what)
				}
			}
		}
	})
}

// lose makes the watch on the first part of a state miss the last writes, like writes that bypass
// the page tables.
func lose(t *testing.T, s *State) {
	t.Helper()
	m := s.watch.pieces[0].memory
	if err := m.Scan(); err != nil {
		t.Fatal(err)
	}
	for c := range s.watch.pieces[0].changed {
		m.Keep(c, false)
	}
}

// An undetected write is found by every comparison of live memory, and is in the next commit.
func TestUnseenWrite(t *testing.T) {
	needWatch(t)
	for _, c := range []struct {
		name string
		v    verification
		find func(s *State) error
		lost bool // the write counts as lost, which is an error
	}{
		{"digest", verification{}, func(s *State) error { _, err := s.Digest(); return err }, true},
		{"verify", verification{}, func(s *State) error { return s.Verify(t.Context()) }, true},
		{"a commit that is compared", verification{every: 5}, (*State).Commit, true},
		{"one that goes on", verification{every: 5}, (*State).CommitAsync, true},
		{"healed", verification{every: 5, heal: true}, (*State).Commit, false},
	} {
		w := stillWorld(t, 1, 0)[0]
		w.verification = c.v
		log := new(strings.Builder)
		logger := logrus.New()
		logger.SetOutput(log)
		w.log = logger
		weights := make([]byte, 4*snapshot.ChunkSize)
		s := NewState(w, Watched(Tensor("weights", weights)))
		for range 3 {
			if err := s.Commit(); err != nil {
				t.Fatal(err)
			}
		}
		weights[2*snapshot.ChunkSize+77] = 1
		lose(t, s)
		if err := s.Commit(); err != nil {
			t.Fatal(err)
		}
		if s.saved.Last().Blobs()[0].Same(weights) {
			t.Fatal("the write was seen")
		}
		err := c.find(s)
		var unseen *UnseenWriteError
		if errors.As(err, &unseen) != c.lost || c.lost && (unseen.Part != `"weights"` || unseen.Chunk != 2) {
			t.Errorf("%s: %v", c.name, err)
		}
		if !c.lost && !strings.Contains(log.String(), "must not be Watched") {
			t.Errorf("%s: the log says %q", c.name, log)
		}
		if c.lost {
			if err := s.Commit(); err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
		}
		s.Settle()
		if s.watch.watcher != nil || !s.saved.Last().Blobs()[0].Same(weights) {
			t.Errorf("%s: it is not in the commit", c.name)
		}
	}
}

// Large tensors that do not change are watched without a call of Watched. When something opens that
// can write past the page tables, commits compare them instead.
func TestWatchedByItself(t *testing.T) {
	needWatch(t)
	if why, err := dirtypages.Bypass(); why != "" || err != nil {
		t.Skip(why, err)
	}
	const chunks = 20
	weights := make([]byte, chunks*snapshot.ChunkSize)
	w := stillWorld(t, 1, 0)[0]
	w.log = quiet()
	s := NewState(w, Tensor("weights", weights), Tensor("small", make([]byte, 5000)))
	defer s.watch.end()
	changed := func() (n int) {
		t.Helper()
		if err := s.Commit(); err != nil {
			t.Fatal(err)
		}
		p := &s.watch.pieces[0]
		for _, c := range p.changed {
			if c && p.memory != nil {
				n++
			}
		}
		if !s.saved.Last().Blobs()[0].Same(weights) {
			t.Error("the commit has another value")
		}
		return n
	}
	for range 4 {
		changed()
	}
	if n := changed(); n != 0 || len(s.watch.pieces) != 1 {
		t.Errorf("nothing changes, and %d chunks of %d pieces are compared", n, len(s.watch.pieces))
	}
	weights[5*snapshot.ChunkSize+7]++
	if n := changed(); n != 1 {
		t.Errorf("one chunk changes, and %d are compared", n)
	}
	weights[6*snapshot.ChunkSize+7]++
	if err := s.Restore(); err != nil || weights[6*snapshot.ChunkSize+7] != 0 || weights[5*snapshot.ChunkSize+7] != 1 {
		t.Errorf("not restored: %v", err)
	}

	device, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		t.Skip("no device to open: ", err)
	}
	defer device.Close()
	for range 3 {
		weights[0]++
		if changed(); s.watch.pieces[0].memory != nil {
			t.Error("watched, although a device is open")
		}
	}
}

// Memory that cannot be watched is compared, and the log gives the reason.
func TestNotWatched(t *testing.T) {
	needWatch(t)
	shared, err := unix.Mmap(-1, 0, 2*snapshot.ChunkSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	step, twice := 0, make([]byte, 2*snapshot.ChunkSize)
	other := NewState(stillWorld(t, 1, 0)[0], Watched(Tensor("it", twice)))
	if err := other.Commit(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		memory []byte
		says   string
	}{
		{"shared", shared, "shared with other processes"},
		{"small", make([]byte, 20_000), "too small"},
		{"in two states", twice, "device or resource busy"},
	} {
		w := stillWorld(t, 1, 0)[0]
		log, logger := new(strings.Builder), logrus.New()
		logger.SetOutput(log)
		logger.SetLevel(logrus.DebugLevel)
		w.log = logger
		s := NewState(w, Watched(Tensor("it", c.memory)), Watched(Value("step", &step)))
		for n := range 5 {
			c.memory[len(c.memory)-1], step = byte(n), n
			if err := s.Commit(); err != nil {
				t.Fatal(err)
			}
			if !s.saved.Last().Blobs()[0].Same(c.memory) {
				t.Errorf("%s: a write is lost", c.name)
			}
		}
		if strings.Count(log.String(), c.says) != 1 {
			t.Errorf("%s: the log says %q", c.name, log)
		}
	}
	if err := other.Commit(); err != nil || !other.saved.Last().Blobs()[0].Same(twice) {
		t.Errorf("the first of two states: %v", err)
	}
}

// A replaced slice, although forbidden, is found in the next commit and watched; remapping its
// memory ends the watch.
func TestWatchedMemoryIsReplaced(t *testing.T) {
	needWatch(t)
	w := stillWorld(t, 1, 0)[0]
	w.log = quiet()
	many := [][]byte{make([]byte, 2*snapshot.ChunkSize), make([]byte, snapshot.ChunkSize)}
	s := NewState(w, Watched(Tensors("many", many)))
	commit := func() {
		t.Helper()
		if err := s.Commit(); err != nil {
			t.Fatal(err)
		}
		for i, b := range many {
			if !s.saved.Last().Blobs()[i].Same(b) {
				t.Errorf("tensor %d: a write is lost", i)
			}
		}
	}
	commit()
	commit()
	// The heap can reuse memory that a garbage State still watches.
	mapped := func() []byte {
		b, err := unix.Mmap(-1, 0, 2*snapshot.ChunkSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	many[0] = mapped()
	many[0][snapshot.ChunkSize+9] = 5
	commit()
	if s.watch.pieces[0].memory == nil {
		t.Error("the new slice is not watched")
	}
	many[0][9] = 6
	commit()
	fresh := mapped()
	many[0] = fresh
	commit()
	fresh[1] = 1
	commit()
	_, err := unix.MmapPtr(-1, 0, unsafe.Pointer(&fresh[0]), uintptr(len(fresh)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED)
	if err != nil {
		t.Fatal(err)
	}
	commit()
	if s.watch.watcher != nil {
		t.Error("what is not registered is watched")
	}
}

// The watch ends with Run, and with a State that is garbage.
func TestWatchEnds(t *testing.T) {
	needWatch(t)
	weights := make([]byte, 2*snapshot.ChunkSize)
	s := NewState(stillWorld(t, 1, 0)[0], Watched(Tensor("weights", weights)))
	err := Run(t.Context(), s, func(context.Context) error {
		if s.watch.watcher != nil {
			t.Error("it is watched before the first commit")
		}
		err := s.Commit()
		if s.watch.watcher == nil {
			t.Error("it is not watched")
		}
		return err
	})
	if err != nil || s.watch.watcher != nil {
		t.Errorf("after Run: %v", err)
	}
	if err := s.Commit(); err != nil || s.watch.watcher == nil {
		t.Errorf("a commit after Run: %v", err)
	}
	s = nil
	watcher, err := dirtypages.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer watcher.Close()
	deadline := sandbox.Limit()
	for {
		runtime.GC()
		m, errs := watcher.Watch([][]byte{weights}, snapshot.ChunkSize)
		if m[0] != nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(fmt.Errorf("its memory is still watched: %w", errs[0]))
		}
	}
	runtime.KeepAlive(weights)
}
