package snapshot

import (
	"bytes"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// commit makes a snapshot of live. Blobs with even indices are copied, and blobs with odd indices
// are Given.
func commit(s *Store, number uint64, live [][]byte, async bool) {
	sources := make([]Source, len(live))
	for i, b := range live {
		if sources[i] = (Source{Bytes: b}); i%2 == 1 {
			sources[i] = Source{Bytes: slices.Clone(b), Given: true}
		}
	}
	p := s.Begin(number, sources)
	if async {
		p.Start()
		p.Wait()
	} else {
		p.Copy()
	}
	p.Seal()
}

// holds checks the bytes and checksums of a snapshot.
func holds(t interface{ Errorf(string, ...any) }, m *Snapshot, number uint64, want [][]byte) {
	if m.Number() != number || len(m.Blobs()) != len(want) {
		t.Errorf("snapshot %d of %d blobs, want %d of %d", m.Number(), len(m.Blobs()), number, len(want))
		return
	}
	for i, p := range m.Blobs() {
		if !bytes.Equal(p.Bytes(), want[i]) || p.Len() != len(want[i]) || p.Chunks() != Chunks(len(want[i])) {
			t.Errorf("snapshot %d: blob %d of %d bytes, %d chunks, is another", number, i, p.Len(), p.Chunks())
		}
		for c, sum := range p.Sums() {
			if sum != Sum(p.Chunk(c)) || p.Sum(c) != sum {
				t.Errorf("snapshot %d: the sum of chunk %d of blob %d is not its own", number, c, i)
			}
		}
	}
}

// A commit overwrites changed chunks of the last snapshot if nobody holds it, and no other chunks.
// Lent blobs report which of their chunks are gone, and an audit has the checksums of all chunks.
func TestOverwritten(t *testing.T) {
	const chunks = 4
	var s Store
	live := [][]byte{make([]byte, chunks*ChunkSize)}
	data := func() (all []*byte) {
		for i := range chunks {
			all = append(all, &s.Last().Blobs()[0].Chunk(i)[0])
		}
		return all
	}
	commit(&s, 1, live, false)
	at := data()
	number, lent := s.Lend()
	audited, done := s.Audit()
	want := s.Last().Blobs()[0].Sums()[0] // of zeros, like all chunks
	for n := range 3 {
		live[0][1]++
		live[0][2*ChunkSize+1]++
		commit(&s, uint64(2+n), live, false)
	}
	holds(t, s.Last(), 4, live)
	if !slices.Equal(data(), at) {
		t.Error("a commit that nobody holds was copied elsewhere")
	}
	buffer := make([]byte, ChunkSize)
	for i := range chunks {
		_, sum := lent[0].TrySum(i)
		if there := lent[0].TryRead(i, buffer); number != 1 || there != (i%2 == 1) || there && !bytes.Equal(buffer, make([]byte, ChunkSize)) || there && !sum {
			t.Errorf("lent chunk %d: there %v, checksum %v", i, there, sum)
		}
		if sum, ok := audited[0].TrySum(i); !ok || sum != want {
			t.Errorf("audited chunk %d: %#x %v", i, sum, ok)
		}
	}
	done()

	held := s.Hold()
	wanted := slices.Clone(live[0])
	live[0][1]++
	commit(&s, 5, live, false)
	holds(t, held, 4, [][]byte{wanted})
	if now := data(); now[0] == at[0] || now[1] != at[1] {
		t.Error("a held commit was overwritten, or more than what has changed was copied")
	}
	held.Release()

	// A snapshot that is made in the background of training is not sealed for some time, so it must
	// not overwrite the last one.
	at = data()
	live[0][1]++
	commit(&s, 6, live, true)
	if now := data(); now[0] == at[0] {
		t.Error("a snapshot in the background overwrites the last")
	}
}

// Readers of lent blobs and audits see the data of one commit each while other commits are made.
func TestLentWhileCommitting(t *testing.T) {
	const chunks, commits = 5, 60
	var s Store
	live := [][]byte{make([]byte, chunks*ChunkSize)}
	commit(&s, 0, live, false)
	stop := make(chan struct{})
	var reading sync.WaitGroup
	for range 3 {
		reading.Go(func() {
			buffer := make([]byte, ChunkSize)
			for {
				select {
				case <-stop:
					return
				default:
				}
				number, blobs := s.Lend()
				for i := range chunks {
					// Chunk i has the number of the last commit divisible by i+1 in each byte.
					want := byte(number - number%uint64(i+1))
					if blobs[0].TryRead(i, buffer) && (buffer[0] != want || buffer[ChunkSize-1] != want) {
						t.Errorf("commit %d, chunk %d: %d and %d", number, i, buffer[0], buffer[ChunkSize-1])
					}
				}
			}
		})
	}
	for n := uint64(1); n <= commits; n++ {
		for i := range chunks {
			if n%uint64(i+1) == 0 {
				copy(live[0][i*ChunkSize:], bytes.Repeat([]byte{byte(n)}, ChunkSize))
			}
		}
		commit(&s, n, live, n%7 == 0)
		want := slices.Clone(s.Last().Blobs()[0].Sums())
		blobs, done := s.Audit()
		if n%2 == 0 {
			clear(want[1:]) // only the audit has computed these
		}
		reading.Go(func() {
			defer done()
			for i, sum := range blobs[0].Sums() {
				if got, ok := blobs[0].TrySum(i); ok && (got != sum || want[i] != 0 && got != want[i]) {
					t.Errorf("commit %d, chunk %d: checksum %#x, want %#x", n, i, got, want[i])
				}
			}
		})
	}
	close(stop)
	reading.Wait()
	holds(t, s.Last(), commits, live)
}

// The chunks of a large store are allocated together, but are as independent as those of a small
// one.
func TestLargeStore(t *testing.T) {
	var s Store
	live := [][]byte{make([]byte, (2*slabChunks+3)*ChunkSize+7)}
	for n := range uint64(3) {
		for i := 0; i < len(live[0]); i += ChunkSize {
			live[0][i], live[0][min(i+ChunkSize, len(live[0]))-1] = byte(i>>20)+byte(n), byte(i>>20)^byte(n)
		}
		commit(&s, n, live, n == 1) // a commit in the background uses other memory
		holds(t, s.Last(), n, live)
	}
}

// Restore writes only to chunks that differ, and reads only chunks that may differ.
func TestRestore(t *testing.T) {
	var s Store
	live := [][]byte{make([]byte, 3*ChunkSize+5)}
	commit(&s, 1, live, false)
	p := &s.Last().Blobs()[0]
	b := make([]byte, p.Len())
	b[7], b[ChunkSize+7], b[3*ChunkSize+4] = 1, 1, 1
	p.Restore(b, []bool{false, true, true, true})
	if b[7] != 1 || b[ChunkSize+7] != 0 || b[3*ChunkSize+4] != 0 {
		t.Error("what may differ was not restored, or what may not was")
	}
	if p.Restore(b, nil); !bytes.Equal(b, live[0]) {
		t.Error("not all was restored")
	}
}

// A held snapshot does not change, whatever is committed later.
func TestSnapshotsNeverChange(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s Store
		sizes := rapid.SliceOfN(rapid.SampledFrom([]int{0, 1, 100, ChunkSize - 1, ChunkSize, 2*ChunkSize + 3}), 1, 3).Draw(t, "sizes")
		live := make([][]byte, len(sizes))
		for i, n := range sizes {
			live[i] = make([]byte, n)
		}
		type held struct {
			snapshot *Snapshot
			want     [][]byte
		}
		var all []held
		number := uint64(0)
		for range rapid.IntRange(1, 6).Draw(t, "steps") {
			for i := range live { // some chunks of some blobs change
				for at := 0; at < len(live[i]); at += ChunkSize {
					if rapid.Bool().Draw(t, "changes") {
						live[i][at+rapid.IntRange(0, min(ChunkSize, len(live[i])-at)-1).Draw(t, "at")]++
					}
				}
				if i%2 == 1 && rapid.Bool().Draw(t, "grows") { // Given bytes may have another length each time
					live[i] = append(live[i], 7)
				}
			}
			number++
			commit(&s, number, live, rapid.Bool().Draw(t, "async"))
			want := make([][]byte, len(live))
			for i := range live {
				want[i] = slices.Clone(live[i])
			}
			holds(t, s.Last(), number, want)
			if rapid.Bool().Draw(t, "hold") {
				all = append(all, held{s.Hold(), want})
			}
			if len(all) > 0 && rapid.Bool().Draw(t, "release") {
				i := rapid.IntRange(0, len(all)-1).Draw(t, "which")
				all[i].snapshot.Release()
				all = slices.Delete(all, i, i+1)
			}
			for _, h := range all {
				holds(t, h.snapshot, h.snapshot.Number(), h.want)
			}
		}
	})
}

// A reader in the background sees the data of one snapshot while other snapshots are made.
func TestHoldWhileCommitting(t *testing.T) {
	var s Store
	live := [][]byte{make([]byte, 6*ChunkSize)}
	commit(&s, 0, live, false)
	var readers sync.WaitGroup
	for number := uint64(1); number <= 20; number++ {
		m := s.Hold()
		readers.Go(func() {
			defer m.Release()
			for c := range m.Blobs()[0].Chunks() {
				b := m.Blobs()[0].Chunk(c)
				if b[0] != byte(m.Number()) || b[len(b)-1] != byte(m.Number()) || m.Blobs()[0].Sum(c) != Sum(b) {
					t.Errorf("chunk %d of snapshot %d is another's", c, m.Number())
				}
			}
		})
		for i := 0; i < len(live[0]); i += ChunkSize {
			live[0][i], live[0][i+ChunkSize-1] = byte(number), byte(number)
		}
		commit(&s, number, live, true)
	}
	readers.Wait()
}

// Unchanged chunks are not copied, and memory is reused if all chunks change.
func TestMemory(t *testing.T) {
	var s Store
	live := [][]byte{make([]byte, 8*ChunkSize+5)}
	commit(&s, 0, live, false)
	first := s.Hold()
	live[0][3*ChunkSize]++
	commit(&s, 1, live, false)
	for c := range first.Blobs()[0].Chunks() {
		shared := &first.Blobs()[0].Chunk(c)[0] == &s.Last().Blobs()[0].Chunk(c)[0]
		if shared != (c != 3) {
			t.Errorf("chunk %d: shared is %t", c, shared)
		}
	}
	first.Release()
	allocated := func() uint64 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.TotalAlloc
	}
	change := func(n uint64) {
		for i := 0; i < len(live[0]); i += 1024 {
			live[0][i]++
		}
		commit(&s, n, live, false)
	}
	change(2)
	change(3)
	before := allocated()
	for n := range uint64(10) {
		change(4 + n)
	}
	if more := allocated() - before; more > ChunkSize {
		t.Errorf("%d bytes more in ten commits", more)
	}
	// A slow reader costs memory only while it reads.
	held := []*Snapshot{s.Hold()}
	for n := range uint64(5) {
		change(20 + n)
		held = append(held, s.Hold())
	}
	for _, h := range held {
		h.Release()
	}
	if s.extra > len(live[0]) {
		t.Errorf("%d bytes are spare, of a state of %d", s.extra, len(live[0]))
	}
}

// bench commits blobs repeatedly, after change has modified them.
func bench(b *testing.B, size int, change func(live []byte)) {
	var s Store
	live := make([]byte, size)
	for i := range live {
		live[i] = byte(rand.Uint32())
	}
	sources := []Source{{Bytes: live}}
	run := func(n uint64) {
		p := s.Begin(n, sources)
		p.Copy()
		p.Seal()
	}
	for n := range uint64(3) {
		change(live)
		run(n)
	}
	b.SetBytes(int64(size))
	for b.Loop() {
		b.StopTimer()
		change(live)
		b.StartTimer()
		run(9)
	}
}

func BenchmarkCommit(b *testing.B) {
	const size = 256 << 20
	all := func(live []byte) {
		for i := 0; i < len(live); i += 64 {
			live[i]++
		}
	}
	b.Run("all changed", func(b *testing.B) { bench(b, size, all) })
	b.Run("last byte of each chunk changed", func(b *testing.B) {
		bench(b, size, func(live []byte) {
			for i := ChunkSize - 1; i < len(live); i += ChunkSize {
				live[i]++
			}
		})
	})
	b.Run("tenth changed", func(b *testing.B) { bench(b, size, func(live []byte) { all(live[:size/10]) }) })
	b.Run("nothing changed", func(b *testing.B) { bench(b, size, func([]byte) {}) })
	b.Run("plain copy", func(b *testing.B) {
		live, saved := make([]byte, size), make([]byte, size)
		all(live)
		copy(saved, live)
		b.SetBytes(size)
		for b.Loop() {
			b.StopTimer()
			all(live)
			b.StartTimer()
			copy(saved, live)
		}
	})
}

func BenchmarkSmallCommit(b *testing.B) {
	var s Store
	live := make([]byte, 4096)
	given := []byte{1, 2, 3}
	sources := []Source{{Bytes: live}, {Bytes: given, Given: true}, {Bytes: given, Given: true}}
	for b.Loop() {
		live[0]++
		p := s.Begin(1, sources)
		p.Copy()
		p.Seal()
	}
}

func BenchmarkSum(b *testing.B) {
	data := make([]byte, ChunkSize)
	b.SetBytes(ChunkSize)
	for b.Loop() {
		Sum(data)
	}
}

// The next snapshot uses the reserved memory if the newest is held. Trim returns the memory that no
// snapshot uses to the system.
func TestReserve(t *testing.T) {
	var s Store
	live := make([]byte, 20*ChunkSize+7)
	commit := func(number uint64) {
		for c := 0; c < len(live); c += ChunkSize {
			live[c] = byte(number)
		}
		p := s.Begin(number, []Source{{Bytes: live}})
		p.Copy()
		p.Seal()
	}
	s.Reserve() // the store is empty: nothing is reserved
	commit(1)
	s.Reserve()
	s.Reserve() // enough is reserved already
	if s.extra != len(live) {
		t.Fatalf("%d bytes are reserved, of %d", s.extra, len(live))
	}
	held := s.Hold()
	_, lent := s.Lend()
	commit(2)
	if s.extra != 0 {
		t.Errorf("%d reserved bytes are unused", s.extra)
	}
	commit(3)
	for i, c := range []*Snapshot{held, s.Last()} {
		b := c.Blobs()[0].Bytes()
		if want := []byte{1, 3}[i]; b[0] != want || b[20*ChunkSize] != want {
			t.Errorf("commit %d is overwritten", c.Number())
		}
	}
	held.Release()
	if s.extra != len(live) {
		t.Errorf("%d bytes are left, of %d", s.extra, len(live))
	}
	unused := s.spare[ChunkSize][3].data
	if n := resident(t, unused); n == 0 {
		t.Error("memory that was written to is not there")
	}
	s.Trim()
	if n := resident(t, unused); n != 0 {
		t.Errorf("after Trim: %d pages of memory that no snapshot uses", n)
	}
	if lent[0].TryRead(0, make([]byte, ChunkSize)) {
		t.Error("after Trim: a lent blob is still there")
	}
	commit(4)
	if b := s.Last().Blobs()[0].Bytes(); s.extra != 0 || b[0] != 4 || !bytes.Equal(b, live) {
		t.Errorf("after Trim: %d bytes beside the newest snapshot", s.extra)
	}
}

// resident returns the number of pages of b that are in memory, without the first and the last
// page.
func resident(t *testing.T, b []byte) (n int) {
	t.Helper()
	size := os.Getpagesize()
	from := size - int(uintptr(unsafe.Pointer(&b[0])))&(size-1)
	pages := make([]byte, len(b)/size-2)
	if _, _, err := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&b[from])), uintptr(len(pages)*size), uintptr(unsafe.Pointer(&pages[0]))); err != 0 {
		t.Fatal(err)
	}
	for _, p := range pages {
		n += int(p & 1)
	}
	return n
}

// inPlace makes a snapshot of live in place.
func inPlace(s *Store, number uint64, live [][]byte) {
	sources := make([]Source, len(live))
	for i, b := range live {
		sources[i] = Source{Bytes: b, InPlace: true}
	}
	p := s.Begin(number, sources)
	p.Copy()
	p.Seal()
}

func TestInPlace(t *testing.T) {
	const chunks = 3
	live := [][]byte{make([]byte, chunks*ChunkSize-5)}
	var s Store
	inPlace(&s, 1, live)
	m := s.Last()
	if !s.InPlace() || &m.Blobs()[0].Chunk(1)[0] != &live[0][ChunkSize] {
		t.Fatal("the snapshot does not lie in place")
	}
	holds(t, m, 1, live)
	number, lent := s.Lend()
	audited, done := s.Audit()
	defer done()
	zeros := Sum(live[0][:ChunkSize])
	held := s.Hold()
	before := [][]byte{slices.Clone(live[0])}
	holds(t, held, 1, before)

	if !s.Vacate() || s.Vacate() || s.Last() != nil {
		t.Error("the snapshot is there after Vacate")
	}
	for i := range live[0] {
		live[0][i] = 1
	}
	buffer := make([]byte, ChunkSize)
	if lent[0].TryRead(0, buffer) || number != 1 {
		t.Error("a changed chunk is lent")
	}
	if sum, ok := audited[0].TrySum(0); !ok || sum != zeros {
		t.Errorf("the audited checksum of a changed chunk: %#x %v, want %#x", sum, ok, zeros)
	}
	holds(t, held, 1, before)
	held.Release()
	if s.extra != len(live[0]) {
		t.Errorf("%d bytes are kept for another copy, want %d", s.extra, len(live[0]))
	}

	// A save that is copied does not take over the chunks that lie in place, and ends their use.
	inPlace(&s, 2, live)
	_, lent = s.Lend()
	commit(&s, 3, live, false)
	copied := s.Last()
	live[0][0] = 9
	if s.InPlace() || copied.Blobs()[0].Chunk(0)[0] != 1 || lent[0].TryRead(0, buffer) {
		t.Error("a copy lies in place, or what lay there is still lent")
	}

	// A save in place that follows another without Vacate has the current bytes, with their
	// checksums.
	inPlace(&s, 4, live)
	old := s.Last().Blobs()[0].Sum(0)
	live[0][0] = 8
	inPlace(&s, 5, live)
	if sum := s.Last().Blobs()[0].Sum(0); sum == old || sum != Sum(live[0][:ChunkSize]) {
		t.Errorf("the checksum of a chunk that has changed unannounced is %#x, was %#x", sum, old)
	}

	// After Abandon nobody waits for a snapshot.
	s.Vacate()
	s.Abandon()
	if m := s.Hold(); m != nil {
		t.Error("a snapshot is there after Vacate")
	}
}

// Readers and holders see the data of one commit each, while the live memory in which the commit
// lies changes.
func TestInPlaceWhileChanging(t *testing.T) {
	const chunks, commits = 3, 40
	live := [][]byte{make([]byte, chunks*ChunkSize)}
	var s Store
	inPlace(&s, 0, live)
	stop := make(chan struct{})
	var reading sync.WaitGroup
	for i := range 4 {
		reading.Go(func() {
			buffer := make([]byte, ChunkSize)
			for {
				select {
				case <-stop:
					return
				default:
				}
				if i%2 == 0 {
					held := s.Hold()
					for c := range chunks {
						if b := held.Blobs()[0].Chunk(c); b[0] != byte(held.Number()) || b[ChunkSize-1] != b[0] {
							t.Errorf("held commit %d, chunk %d: %d and %d", held.Number(), c, b[0], b[ChunkSize-1])
						}
					}
					held.Release()
					continue
				}
				number, blobs := s.Lend()
				for c := range chunks {
					if blobs[0].TryRead(c, buffer) && (buffer[0] != byte(number) || buffer[ChunkSize-1] != buffer[0]) {
						t.Errorf("lent commit %d, chunk %d: %d and %d", number, c, buffer[0], buffer[ChunkSize-1])
					}
				}
			}
		})
	}
	for n := uint64(1); n <= commits; n++ {
		s.Vacate()
		for i := range live[0] {
			live[0][i] = byte(n)
		}
		inPlace(&s, n, live)
	}
	close(stop)
	reading.Wait()
}
