package elastic

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
	"github.com/hvdrun/hvdrun/elastic/internal/transfer"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
)

// crew is a set of processes that a test puts into successive worlds.
type crew struct {
	t          *testing.T
	generation uint64
	log        *logrus.Logger
	said       *logtest.Hook
}

func newCrew(t *testing.T) *crew {
	c := &crew{t: t}
	c.log, c.said = logtest.NewNullLogger()
	return c
}

// crewMember is a process of a crew.
type crewMember struct {
	w     *Worker
	state *State
	shard []float32
	count int
	rng   *rand.PCG
	tags  map[string]int
	large int   // length of the shard
	sum   []int // redistributed: the first numbers of the shards, by old rank; −1: lost
	step  int
}

func (c *crew) member(replicas int, more ...Part) *crewMember {
	m := &crewMember{rng: rand.NewPCG(1, 2), tags: map[string]int{}}
	m.w = &Worker{meeting: &seated{}, log: c.log, replicas: replicas}
	m.w.reports.ctx, m.w.reports.stop = context.WithCancel(context.Background())
	m.w.member.Store(&membership{slot: plan.Slot{}, world: line.World{World: plan.World{Slots: make([]plan.Slot, 1)}}})
	m.state = NewState(m.w, append(more, Value("step", &m.step), Local("shard", &m.shard), Local("count", &m.count), Local("rng", m.rng), Local("tags", &m.tags),
		Local("sum", &m.sum, Redistribute(func(pieces []Piece[[]int], rank, size int) ([]int, error) {
			all := []int{}
			for i, p := range pieces {
				switch {
				case p.Rank != i:
					return nil, fmt.Errorf("piece %d is of rank %d", i, p.Rank)
				case p.Lost:
					all = append(all, -1)
				default:
					all = append(all, p.Value[0])
				}
			}
			return append([]int{100*rank + size}, all...), nil
		})))...)
	return m
}

type seated struct {
	solo
	update notify.Update
}

func (s *seated) Connected(context.Context) bool { return true }
func (s *seated) Latest() notify.Update          { return s.update }

// world puts members into a new world on the given hosts and synchronises them.
func (c *crew) world(root int, hosts []string, members ...*crewMember) {
	c.t.Helper()
	c.generation++
	slots := make([]plan.Slot, len(members))
	for r := range slots {
		slots[r] = plan.Slot{SlotID: plan.SlotID{Host: hosts[r]}, Rank: r}
	}
	for r, g := range collective.Local(len(members)) {
		world := line.World{World: plan.World{Generation: c.generation, Slots: slots}, Rank: r, SyncRoot: root}
		members[r].w.member.Store(&membership{world: world, slot: slots[r], group: g, unwatch: func() {}})
	}
	onAll(c.t, len(members), func(r int) error { return members[r].state.Sync(c.t.Context()) })
}

func (c *crew) warnings() (all []string) {
	for _, e := range c.said.AllEntries() {
		if e.Level == logrus.WarnLevel {
			all = append(all, e.Message)
		}
	}
	c.said.Reset()
	return all
}

// set sets a member's pieces to its own values.
func (m *crewMember) set(id, step int) {
	m.shard = slices.Repeat([]float32{float32(id)}, max(m.large, 10))
	m.shard[0] += float32(step) / 100
	m.count, m.sum, m.step = id, []int{id}, step
	m.tags = map[string]int{"id": id}
	m.rng.Seed(uint64(id), uint64(step))
}

func (m *crewMember) is(t *testing.T, id, step int) {
	t.Helper()
	if len(m.shard) == 0 || m.shard[0] != float32(id)+float32(step)/100 || m.shard[len(m.shard)-1] != float32(id) || m.count != id || m.tags["id"] != id ||
		m.step != step || *m.rng != *rand.NewPCG(uint64(id), uint64(step)) {
		t.Errorf("rank %d has shard %v…, count %d, tags %v, step %d; want those of %d in step %d", m.w.Rank(), m.shard[:min(1, len(m.shard))], m.count, m.tags, m.step, id, step)
	}
}

func commitAll(t *testing.T, members ...*crewMember) {
	t.Helper()
	onAll(t, len(members), func(r int) error { return members[r].state.Commit() })
}

func hostsNamed(names string) []string {
	var all []string
	for _, n := range names {
		all = append(all, string(n))
	}
	return all
}

// A new rank takes over the piece of a rank that dies; pieces that no rank takes over are kept for
// later worlds.
func TestLocalPieces(t *testing.T) {
	c := newCrew(t)
	m := []*crewMember{c.member(1), c.member(1), c.member(1), c.member(1)}
	for i := range m {
		m[i].large = 3 * snapshot.ChunkSize / 4 / 2
		m[i].set(10+i, 0)
	}
	c.world(0, hostsNamed("aabb"), m...)
	for i := range m {
		m[i].is(t, 10+i, 0)
		m[i].set(10+i, 1)
	}
	commitAll(t, m...)
	for i := range m {
		m[i].set(10+i, 2)
		m[i].shard[len(m[i].shard)-1]++ // lost by the restore
		if err := m[i].state.Restore(); err != nil {
			t.Fatal(err)
		}
	}
	// If ranks 0 and 2 died, which keep copies for each other, a piece would be lost. Here ranks 1
	// and 2 die, whose copies are on 3 and 0.
	c.world(0, hostsNamed("ab"), m[0], m[3])
	m[0].is(t, 10, 1)
	m[3].is(t, 13, 1)
	if want := []int{2, 10, 11, 12, 13}; !slices.Equal(m[0].sum, want) {
		t.Errorf("redistributed %v, want %v", m[0].sum, want)
	}
	if said := c.warnings(); said != nil {
		t.Errorf("warned: %q", said)
	}
	// The next world has no new rank, so the orphaned pieces stay.
	c.world(1, hostsNamed("ab"), m[0], m[3])
	commitAll(t, m[0], m[3])
	// A new rank takes over the first orphaned piece; then the other keeper of the second dies.
	n := c.member(1)
	n.set(50, 7)
	c.world(0, hostsNamed("abc"), m[0], m[3], n)
	n.is(t, 11, 1)
	commitAll(t, m[0], m[3], n)
	last := c.member(1)
	last.set(60, 0)
	c.world(1, hostsNamed("bca"), m[3], n, last)
	m[3].is(t, 13, 1)
	n.is(t, 11, 1)
	if last.count != 10 { // rank 0's piece precedes the orphaned one
		t.Errorf("the newcomer has the pieces of %d", last.count)
	}
	one, two := c.member(1), c.member(1)
	two.set(70, 0)
	c.world(2, hostsNamed("bbbb"), one, two, last, m[3])
	if one.count != 11 || two.count != 12 {
		t.Errorf("the newcomers have the pieces of %d and %d", one.count, two.count)
	}
	if said := c.warnings(); said != nil {
		t.Errorf("warned: %q", said)
	}
}

// Without replicas the pieces of a rank that dies are lost, which is logged once; new ranks start
// with their initial values.
func TestLocalPiecesLost(t *testing.T) {
	c := newCrew(t)
	m := []*crewMember{c.member(0), c.member(0), c.member(0)}
	for i := range m {
		m[i].set(10+i, 0)
	}
	c.world(0, hostsNamed("aaa"), m...)
	commitAll(t, m...)
	n := c.member(0)
	n.set(50, 0)
	c.world(1, hostsNamed("aaa"), n, m[2], m[0])
	m[0].is(t, 10, 0)
	m[2].is(t, 12, 0)
	n.is(t, 50, 0)
	if want := []int{3, 10, -1, 12}; !slices.Equal(n.sum, want) {
		t.Errorf("redistributed %v, want %v", n.sum, want)
	}
	want := []string{`lost with all their copies: the pieces of local parts "shard", "count", "rng", "tags", "sum" of rank 1 of generation 1`}
	if said := c.warnings(); !slices.Equal(said, want) {
		t.Errorf("warned: %q", said)
	}
}

// A rank that leaves without a failure hands its pieces to the others, even without replicas, at a
// commit and at a check.
func TestLocalPiecesHandedOver(t *testing.T) {
	for _, check := range []bool{false, true} {
		c := newCrew(t)
		m := []*crewMember{c.member(0), c.member(0), c.member(0), c.member(0)}
		c.world(0, hostsNamed("aabb"), m...)
		for i := range m {
			m[i].set(10+i, 1)
		}
		commitAll(t, m...)
		for i := range m {
			m[i].set(10+i, 2)
			m[i].w.meeting.(*seated).update = notify.Update{Seq: 1, Change: plan.Removed}
		}
		for r, err := range errorsOf(4, func(r int) error {
			if check {
				return m[r].state.CheckHostUpdates()
			}
			return m[r].state.Commit()
		}) {
			var updated *HostsUpdatedError
			if !errors.As(err, &updated) {
				t.Fatalf("rank %d: %v", r, err)
			}
		}
		n := c.member(0)
		c.world(0, hostsNamed("ba"), m[2], n)
		m[2].is(t, 12, 2)
		n.is(t, 10, 2)
		if want := []int{102, 10, 11, 12, 13}; !slices.Equal(n.sum, want) {
			t.Errorf("redistributed %v, want %v", n.sum, want)
		}
		if said := c.warnings(); said != nil {
			t.Errorf("warned: %q", said)
		}
	}
}

// After a commit that only some ranks have counted, every rank has its piece of the root's commit,
// whichever rank is the root.
func TestLocalPiecesOfTornCommit(t *testing.T) {
	for torn := range 3 {
		for root := range 2 {
			c := newCrew(t)
			m := []*crewMember{c.member(1), c.member(1), c.member(1)}
			for i := range m {
				m[i].set(10+i, 0)
			}
			c.world(0, hostsNamed("abc"), m...)
			commitAll(t, m...)
			for i := range m {
				m[i].set(10+i, 1)
			}
			// Rank 2 dies in the agreement; ranks below torn have counted the commit, the others
			// have only passed the barrier.
			errorsOf(3, func(r int) error {
				s := m[r].state
				if err := s.replicate(); err != nil {
					t.Error(err)
				}
				if r == 2 || r < torn {
					if err := s.save(s.commits + 1); err != nil {
						t.Error(err)
					}
					s.commits++
					s.locals.counted()
				}
				return nil
			})
			for r := range 2 {
				m[r].w.Group().Abort(errGone)
				if err := m[r].state.Restore(); err != nil {
					t.Fatal(err)
				}
			}
			n := c.member(1)
			c.world(root, hostsNamed("abc"), m[0], m[1], n)
			step := 0
			if root < torn {
				step = 1
			}
			for i, m := range []*crewMember{m[0], m[1], n} {
				m.is(t, 10+i, step)
			}
		}
	}
}

// A checkpoint has the pieces of all ranks and orphaned ones, and the next job assigns them.
func TestLocalCheckpoint(t *testing.T) {
	for _, async := range []bool{false, true} {
		for _, size := range []int{1, 2, 4} {
			c := newCrew(t)
			dir := t.TempDir()
			folder := func() Part { return &Checkpoints{Dir: dir, Interval: -1} }
			m := []*crewMember{c.member(1, folder()), c.member(1, folder()), c.member(1, folder())}
			for i := range m {
				m[i].set(10+i, 0)
			}
			c.world(0, hostsNamed("abc"), m...)
			commitAll(t, m...)
			c.world(0, hostsNamed("ab"), m[0], m[1]) // the piece with the value 12 is orphaned
			for i := range m[:2] {
				m[i].set(10+i, 1)
			}
			onAll(t, 2, func(r int) error {
				if async {
					return m[r].state.CommitAsync()
				}
				return m[r].state.Commit()
			})
			onAll(t, 2, func(r int) error { return m[r].state.locals.gather(t.Context(), true) })
			for r := range 3 {
				if err := m[r].state.finish([]error{nil, nil, errLeft}[r]); err != nil && r < 2 {
					t.Error(err)
				}
			}

			c = newCrew(t)
			next := make([]*crewMember, size)
			for i := range next {
				next[i] = c.member(0, folder())
				next[i].set(50+i, 9)
			}
			c.world(size-1, hostsNamed("aaaa"), next...)
			for i, m := range next {
				switch {
				case i < 2:
					m.is(t, 10+i, 1)
				case i == 2 && m.count != 12 || i == 3 && m.count != 53:
					t.Errorf("rank %d of %d has the pieces of %d", i, size, m.count)
				}
				if want := []int{100*i + size, 10, 11}; !slices.Equal(m.sum, want) || m.state.Commits() != 2 {
					t.Errorf("rank %d of %d: redistributed %v, want %v; commit %d", i, size, m.sum, want, m.state.Commits())
				}
				m.state.finish(errLeft)
			}
			if said := c.warnings(); said != nil {
				t.Errorf("warned: %q", said)
			}
		}
	}
}

// The other hosts keep the copies in turn, and after them the rank's own host.
func TestKeepers(t *testing.T) {
	for _, c := range []struct {
		hosts string
		rank  int
		want  []int
	}{
		{"aabbcc", 0, []int{2, 4, 3, 5, 1}},
		{"aabbcc", 3, []int{5, 1, 4, 0, 2}},
		{"aaa", 1, []int{2, 0}},
		{"aaab", 2, []int{3, 0, 1}},
		{"aaab", 3, []int{0, 1, 2}},
		{"a", 0, nil},
	} {
		hosts := hostsNamed(c.hosts)
		if got := keepers(hosts, c.rank, len(hosts)); !slices.Equal(got, c.want) {
			t.Errorf("%s, rank %d: %v, want %v", c.hosts, c.rank, got, c.want)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		hosts := rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "c", "d"}), 1, 12).Draw(t, "hosts")
		rank := rapid.IntRange(0, len(hosts)-1).Draw(t, "rank")
		all := keepers(hosts, rank, len(hosts))
		own := false
		for _, r := range all {
			if own = own || hosts[r] == hosts[rank]; own && hosts[r] != hosts[rank] {
				t.Errorf("the own host comes before another: %v", all)
			}
		}
		slices.Sort(all)
		if want := slices.Delete(slices.Collect(func(yield func(int) bool) {
			for r := range hosts {
				if !yield(r) {
					return
				}
			}
		}), rank, rank+1); !slices.Equal(all, want) {
			t.Errorf("%v", all)
		}
		k := rapid.IntRange(-1, 20).Draw(t, "count")
		if got := keepers(hosts, rank, k); len(got) != min(max(k, 0), len(hosts)-1) {
			t.Errorf("%d of %d", len(got), k)
		}
	})
}

func TestHandOverBounded(t *testing.T) {
	for _, c := range []struct {
		replicas  int
		sum, most uint64
		want      int
	}{{0, handOverLimit, handOverLimit, 9}, {0, 3 << 30, 3 << 30, 1}, {3, 3 << 30, 3 << 30, 3}, {0, 2 << 30, 1 << 28, 4}, {0, 2 << 30, 1 << 20, 9}} {
		if got := holders(10, c.replicas, c.sum, c.most); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
}

// Truncated or modified messages are refused without a panic and without allocating more than their
// size.
func FuzzPieces(f *testing.F) {
	l := &locals{parts: make([]localPart, 2)}
	id, before := saveID{3, 7}, saveID{3, 6}
	whole := bundle{transfer.NewValue([]byte("some bytes"), nil), transfer.NewValue(make([]byte, snapshot.ChunkSize+1), nil)}
	base := &pieceSet{id: before, of: map[int]bundle{1: whole}}
	changed := bundle{transfer.NewValue([]byte("other bytes"), whole[0]), transfer.NewValue(append(make([]byte, snapshot.ChunkSize), 1), whole[1])}
	good := appendBundle(appendBundle(appendHead(nil, id, before, 2), 1, 1, changed), 4, -1, bundle{nil, transfer.NewValue(nil, nil)})
	got, err := l.parse(good, id, base)
	if err != nil || len(got) != 2 || string(got[1][0].Bytes()) != "other bytes" || !bytes.Equal(got[1][1].Bytes(), changed[1].Bytes()) ||
		got[4][0] != nil || got[4][1].Len() != 0 {
		f.Fatal(got, err)
	}
	if len(good) > 200 {
		f.Fatalf("%d bytes for a few that have changed", len(good))
	}
	f.Add(good)
	f.Add(appendBundle(appendHead(nil, id, saveID{}, 1), 1, -1, bundle{transfer.NewValue([]byte("x"), nil), nil}))
	f.Add(appendHead(nil, id, before, 1<<40))
	f.Fuzz(func(t *testing.T, m []byte) {
		all, err := l.parse(m, id, base)
		if err != nil && all != nil {
			t.Error("an error and a result")
		}
		for _, b := range all {
			for _, p := range b {
				if p != nil && len(p.Bytes()) != p.Len() {
					t.Errorf("%d bytes of %d", len(p.Bytes()), p.Len())
				}
			}
		}
	})
	known := []string{"some bytes", "other bytes", "", string(changed[1].Bytes()), string(whole[1].Bytes())}
	for i := range good {
		for _, m := range [][]byte{good[:i], slices.Concat(good[:i], []byte{good[i] ^ 1}, good[i+1:])} {
			got, err := l.parse(m, id, base)
			for _, b := range got {
				for _, p := range b {
					if p != nil && (err != nil || !slices.Contains(known, string(p.Bytes()))) {
						f.Errorf("byte %d: %v, %v", i, p, err)
					}
				}
			}
		}
	}
}

// A value that cannot be encoded fails the commit on its rank before any other rank has received a
// piece.
func TestLocalRefuses(t *testing.T) {
	w := stillWorld(t, 1, 0)[0]
	bad := any(func() {})
	s := NewState(w, Local("bad", &bad))
	if err := s.Commit(); err == nil || s.Commits() != 0 {
		t.Errorf("%v, %d commits", err, s.Commits())
	}
	if err := NewState(w, Local[int]("nil", nil)).Save(); err == nil {
		t.Error("saved nil")
	}
	if err := NewState(w, Local[[]int]("nil", nil)).Save(); err == nil {
		t.Error("saved nil")
	}
}

// The time of a commit of a state with 1 KiB or 64 MiB per rank, on two ranks over sockets: without
// Local parts, with 0 copies and with one; with all chunks changed, none or one.
func BenchmarkLocalCommit(b *testing.B) {
	for _, size := range []int{1 << 10, 64 << 20} {
		for _, c := range []struct {
			name     string
			local    bool
			replicas int
			changed  int // number of chunks whose first byte changes
		}{{"as a Tensor", false, 0, 64}, {"no copy", true, 0, 64}, {"one copy", true, 1, 64}, {"one copy, one chunk changes", true, 1, 1}, {"one copy, nothing changes", true, 1, 0}} {
			b.Run(fmt.Sprintf("%d KiB/%s", size>>10, c.name), func(b *testing.B) {
				benchmarkLocalCommit(b, size, c.local, c.replicas, c.changed)
			})
		}
		b.Run(fmt.Sprintf("%d KiB/the exchange alone", size>>10), func(b *testing.B) {
			groups, data := socketGroups(b, 2), make([]byte, size)
			var times []float64
			for b.Loop() {
				times = append(times, milliseconds(func() {
					errorsOf(2, func(r int) error {
						parts := [][]byte{data, data}
						parts[r] = nil
						_, err := collective.AllToAll(b.Context(), groups[r], parts)
						return err
					})
				}))
			}
			slices.Sort(times)
			b.ReportMetric(times[len(times)/2], "ms/commit")
		})
	}
}

func benchmarkLocalCommit(b *testing.B, size int, isLocal bool, replicas, changed int) {
	groups := socketGroups(b, 2)
	states, data := make([]*State, 2), make([][]byte, 2)
	slots := []plan.Slot{{SlotID: plan.SlotID{Host: "a"}}, {SlotID: plan.SlotID{Host: "b"}, Rank: 1}}
	for r, g := range groups {
		world := line.World{World: plan.World{Generation: 1, Slots: slots}, Rank: r}
		w, err := newWorker(b.Context(), &still{world: world, group: g}).arrive(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		w.replicas = replicas
		data[r] = make([]byte, size)
		if isLocal {
			states[r] = NewState(w, Local("data", &data[r]))
		} else {
			states[r] = NewState(w, Tensor("data", data[r]))
		}
	}
	both := func(f func(r int) error) {
		if err := errors.Join(errorsOf(2, f)...); err != nil {
			b.Fatal(err)
		}
	}
	commit := func(r int) error {
		for c := 0; c < min(changed, snapshot.Chunks(size)); c++ {
			data[r][c*snapshot.ChunkSize]++
		}
		return states[r].Commit()
	}
	both(func(r int) error { return states[r].Sync(b.Context()) })
	for range 3 {
		both(commit)
	}
	var times []float64
	for b.Loop() {
		times = append(times, milliseconds(func() { both(commit) }))
	}
	slices.Sort(times)
	b.ReportMetric(times[len(times)/2], "ms/commit")
	both(func(r int) error { return groups[r].Close() })
}

// socketGroups returns the groups of n ranks connected by sockets.
func socketGroups(b *testing.B, n int) []*collective.Group {
	authority, err := identity.NewAuthority("bench")
	if err != nil {
		b.Fatal(err)
	}
	groups, addrs := make([]*collective.Group, n), make([][]string, n)
	ends := make([]*collective.Endpoint, n)
	for r := range n {
		creds, err := authority.Issue(identity.Subject{Role: identity.Worker, Host: "h", Index: r, Incarnation: fmt.Sprint("i", r)})
		if err != nil {
			b.Fatal(err)
		}
		if ends[r], err = collective.Listen(collective.Config{Credentials: creds, ListenAddr: "127.0.0.1:0", OnlySockets: true}); err != nil {
			b.Fatal(err)
		}
		addrs[r] = ends[r].Addrs()
		b.Cleanup(func() { _ = ends[r].Close() })
	}
	key := identity.NewDataKey()
	for _, err := range errorsOf(n, func(r int) (err error) {
		groups[r], err = ends[r].Connect(b.Context(), collective.Peers{Generation: 1, Key: key, Rank: r, Addrs: addrs})
		return err
	}) {
		if err != nil {
			b.Fatal(err)
		}
	}
	return groups
}
