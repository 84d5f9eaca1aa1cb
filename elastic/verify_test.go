package elastic

import (
	"context"
	"encoding/gob"
	"errors"
	"io"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// imaged is a user's part with an image.
type imaged struct{ userPart }

func (f *imaged) Image() ([]byte, error)  { return []byte{byte(f.saved)}, nil }
func (f *imaged) SetImage(b []byte) error { f.live = int(b[0]); return nil }

// copies is a set of ranks with equal states.
type copies struct {
	states  []*State
	weights [][]float32
	tags    []map[string][]int
	epochs  []int
	users   []*imaged
	samples []*Sampler
}

func quiet() logrus.FieldLogger {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return log
}

func newCopies(t *testing.T, n, root int, v verification) *copies {
	c := &copies{
		states: make([]*State, n), weights: make([][]float32, n), tags: make([]map[string][]int, n), epochs: make([]int, n),
		users: make([]*imaged, n), samples: make([]*Sampler, n),
	}
	for r, w := range stillWorld(t, n, root) {
		w.verification = v
		w.log = quiet()
		c.weights[r] = make([]float32, 3*snapshot.ChunkSize/4+1)
		c.tags[r] = map[string][]int{}
		for i := range 20 {
			c.tags[r][string(rune('a'+i))] = []int{i}
		}
		c.users[r], c.samples[r] = &imaged{}, NewSampler(10, SamplerOptions{})
		c.states[r] = NewState(w, Watched(Tensor("weights", c.weights[r])), Value("tags", &c.tags[r]), Value("epoch", &c.epochs[r]),
			c.users[r], c.samples[r])
	}
	return c
}

// corruptions are the differences on one rank, with the expected error.
var corruptions = []struct {
	name string
	do   func(c *copies, rank int)
}{
	{`"weights", chunk 2, ranks `, func(c *copies, r int) { kernel.Bytes(c.weights[r])[2*snapshot.ChunkSize+17] ^= 4 }},
	{`"tags", chunk 0, ranks `, func(c *copies, r int) { c.tags[r]["c"][0]++ }},
	{`"tags", chunk 0, ranks `, func(c *copies, r int) { delete(c.tags[r], "c") }},
	{`"epoch", chunk 0, ranks `, func(c *copies, r int) { c.epochs[r] = 1 << 40 }},
	{`part 3 (*elastic.imaged), chunk 0, ranks `, func(c *copies, r int) { c.users[r].live = 5 }},
	{`part 4 (*elastic.Sampler), chunk 0, ranks `, func(c *copies, r int) { c.samples[r].Next() }},
}

// A flipped bit in one worker is found at the next comparison; all ranks report part, chunk and
// rank.
func TestVerifyStops(t *testing.T) {
	for _, corruption := range corruptions {
		for rank := range 3 {
			c := newCopies(t, 3, 0, verification{every: 2})
			onAll(t, 3, func(r int) error { return c.states[r].Sync(t.Context()) })
			corruption.do(c, rank)
			onAll(t, 3, func(r int) error { return c.states[r].Commit() })
			for r, err := range errorsOf(3, func(r int) error {
				if r == 0 {
					return c.states[r].CommitAsync()
				}
				return c.states[r].Commit()
			}) {
				var diverged *DivergedError
				if !errors.As(err, &diverged) || !strings.Contains(err.Error(), corruption.name) ||
					len(diverged.Where) != 1 || !slices.Equal(diverged.Where[0].Ranks, []int{rank}) {
					t.Errorf("rank %d: %v, want %s[%d]", r, err, corruption.name, rank)
				}
			}
		}
	}
}

// If most ranks have the same state, the others get it, live and saved.
func TestVerifyHeals(t *testing.T) {
	for _, corruption := range corruptions {
		for rank := range 3 {
			c := newCopies(t, 3, 0, verification{every: 1, heal: true})
			onAll(t, 3, func(r int) error { return c.states[r].Sync(t.Context()) })
			want, err := c.states[0].Digest()
			if err != nil {
				t.Fatal(err)
			}
			corruption.do(c, rank)
			onAll(t, 3, func(r int) error { return c.states[r].Commit() })
			onAll(t, 3, func(r int) error {
				got, err := c.states[r].Digest()
				if got != want || c.states[r].Commits() != 1 {
					t.Errorf("%s: rank %d has digest %x, want %x; commit %d", corruption.name, r, got, want, c.states[r].Commits())
				}
				return errors.Join(err, c.states[r].Save()) // the next digest is then of the live state
			})
			onAll(t, 3, func(r int) error {
				got, err := c.states[r].Digest()
				if got != want {
					t.Errorf("%s: the live state of rank %d is another than the saved one", corruption.name, r)
				}
				return err
			})
		}
	}
}

// Neither of two ranks is a majority.
func TestVerifyNeedsAMajority(t *testing.T) {
	c := newCopies(t, 2, 0, verification{every: 1, heal: true})
	onAll(t, 2, func(r int) error { return c.states[r].Sync(t.Context()) })
	c.weights[0][0]++
	var diverged *DivergedError
	for r, err := range errorsOf(2, func(r int) error { return c.states[r].Commit() }) {
		if !errors.As(err, &diverged) {
			t.Errorf("rank %d: %v", r, err)
		}
	}
	for r, err := range errorsOf(2, func(r int) error { return c.states[r].Verify(t.Context()) }) {
		if !errors.As(err, &diverged) {
			t.Errorf("rank %d: %v", r, err)
		}
	}
}

// damaged is a tensor that loses a bit in the first sync.
type damaged struct {
	ownPart
	weights []float32
	bad     bool
}

func (d *damaged) content() *content {
	c := *d.ownPart.content()
	c.self = d
	return &c
}

func (d *damaged) Sync(ctx context.Context, g *collective.Group, root int) error {
	err := d.ownPart.Sync(ctx, g, root)
	if d.bad {
		d.weights[5], d.bad = 99, false
	}
	return err
}

// Different states after a sync are detected, and healed with the root's, whichever state the
// majority has.
func TestVerifyAfterSync(t *testing.T) {
	for _, v := range []verification{{}, {heal: true}, {every: -1}} {
		for _, bad := range [][]int{{2}, {0, 2}} {
			weights := make([][]float32, 3)
			states := make([]*State, 3)
			for r, w := range stillWorld(t, 3, 1) {
				w.verification = v
				weights[r] = make([]float32, 10000)
				w.log = quiet()
				states[r] = NewState(w, &damaged{Tensor("weights", weights[r]).(ownPart), weights[r], slices.Contains(bad, r)})
			}
			for r, err := range errorsOf(3, func(r int) error { return states[r].Sync(t.Context()) }) {
				var diverged *DivergedError
				if errors.As(err, &diverged) != (v == verification{}) {
					t.Errorf("%+v: rank %d: %v", v, r, err)
				}
				if healed := weights[bad[0]][5] == 0; healed != v.heal {
					t.Errorf("%+v: rank %d: the weights are %v", v, r, weights[bad[0]][5])
				}
			}
		}
	}
}

func TestCanonical(t *testing.T) {
	type inner struct{ A, b int }
	type all struct {
		M map[string]map[int]string
		P *inner
		I any
		S []inner
		F float32
		C complex128
		T time.Time
		B []byte
		Z *int
		U [2]uint8
		Y bool
		G *rand.PCG
	}
	gob.Register(inner{})
	make := func(seed int) all {
		m := map[string]map[int]string{}
		for i := range 30 {
			k := (i*7 + seed) % 30
			m[string(rune('a'+k))] = map[int]string{k: "x", k + 1: "y"}
		}
		return all{M: m, P: &inner{1, seed}, I: inner{2, 0}, S: []inner{{3, 4}}, F: 1.5, C: 2i, T: time.Unix(5, 6).UTC(), B: []byte("b"), Y: true,
			G: rand.NewPCG(1, 2)}
	}
	canonical := func(v all) string {
		b, err := appendCanonical(nil, reflect.ValueOf(&v).Elem())
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	a := canonical(make(1))
	if b := canonical(make(2)); a != b {
		t.Error("equal values are told apart")
	}
	for i, change := range []func(*all){
		func(v *all) { v.M["a"][1] = "z" }, func(v *all) { delete(v.M, "b") }, func(v *all) { v.P = nil }, func(v *all) { v.P.A++ },
		func(v *all) { v.I = 5 }, func(v *all) { v.I = nil }, func(v *all) { v.S = nil }, func(v *all) { v.S[0].A-- },
		func(v *all) { v.F = -0.5 }, func(v *all) { v.C = 1 }, func(v *all) { v.T = v.T.Add(1) }, func(v *all) { v.B[0]++ },
		func(v *all) { v.Z = new(int) }, func(v *all) { v.U[1]++ }, func(v *all) { v.Y = false }, func(v *all) { v.G.Uint64() },
	} {
		v := make(1)
		if change(&v); canonical(v) == a {
			t.Errorf("change %d makes no difference", i)
		}
	}
}

// Parts that cannot be compared are logged once: at the start of a job with comparisons, or at the
// first explicit one.
func TestPartsThatAreLeftOut(t *testing.T) {
	const want = `leave out part 1 (*elastic.userPart), part 3 (*elastic.userPart): not elastic.Imaged`
	for name, c := range map[string]struct {
		driven bool
		every  int
		asks   bool
		lines  int
	}{
		"a job":                    {driven: true, lines: 1},
		"a job, and its program":   {driven: true, every: 1, asks: true, lines: 1},
		"a job without comparison": {driven: true, every: -1},
		"alone":                    {},
		"alone, and its program":   {asks: true, lines: 1},
	} {
		t.Run(name, func(t *testing.T) {
			log, l, w := &logs{}, logrus.New(), stillWorld(t, 1, 0)[0]
			l.SetOutput(log)
			w.log, w.driven, w.verification.every = l, c.driven, c.every
			s := NewState(w, Value("step", new(int)), &userPart{}, &imaged{}, &userPart{}, NewSampler(3, SamplerOptions{}))
			err := Run(t.Context(), s, func(ctx context.Context) error {
				if !c.asks {
					return nil
				}
				_, err := s.Digest()
				return errors.Join(err, s.Verify(ctx))
			})
			if err != nil {
				t.Fatal(err)
			}
			if got := log.String(); strings.Count(got, "leave out") != c.lines || strings.Contains(got, want) != (c.lines > 0) {
				t.Error(got)
			}
		})
	}
}
