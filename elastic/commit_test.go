package elastic

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
)

// holding is the content of a state of several parts, as one value.
type holding struct {
	large, small, at int
	tags             map[string]int
	pos              int
	user             int
}

func (h holding) equal(o holding) bool {
	return h.large == o.large && h.small == o.small && h.at == o.at && maps.Equal(h.tags, o.tags) && h.pos == o.pos && h.user == o.user
}

// After any sequence of changes, saves, commits, failed saves and restores, the live state is the
// last one set, and a restore sets all parts to the values of one save.
func TestStateIsOneState(t *testing.T) {
	w := stillWorld(t, 1, 0)[0]
	rapid.Check(t, func(t *rapid.T) {
		// The parts are a tensor of several chunks, of which only some change, a small tensor,
		// values, a sampler and a user's part.
		large, small, at, tags := make([]int64, 2*snapshot.ChunkSize/8+3), make([]int32, 4), 0, map[string]int{}
		bad := any(0)
		sampler, user := NewSampler(1000, SamplerOptions{}), &userPart{}
		s := NewState(w, Tensor("large", large), user, Value("at", &at), Value("tags", &tags), Value("bad", &bad), sampler, Tensor("small", small))
		places := []int{0, 1, snapshot.ChunkSize / 8, len(large) - 1}
		live := func() holding {
			for _, i := range places {
				if large[i] != large[0] {
					t.Fatalf("a mix: %d at %d, %d at 0", large[i], i, large[0])
				}
			}
			return holding{int(large[0]), int(small[3]), at, tags, sampler.Position(), user.live}
		}
		set := func(n int) {
			for _, i := range places {
				large[i] = int64(n)
			}
			small[3], at, user.live = int32(n), n, n
			tags = map[string]int{fmt.Sprint(n): n}
			sampler.Next()
		}
		var saved *holding
		commits, settled := uint64(0), true
		now := holding{tags: map[string]int{}}
		for step := range rapid.IntRange(1, 20).Draw(t, "steps") {
			switch what := rapid.SampledFrom([]string{"set", "set", "commit", "async", "save", "settle", "restore"}).Draw(t, "what"); what {
			case "set":
				s.Settle()
				settled = true
				set(step + 1)
				now = live()
			case "settle":
				s.Settle()
				settled = true
			case "restore":
				err := s.Restore()
				settled = true
				if saved == nil {
					// A restore fails only if the user's part has nothing to restore.
					if !errors.Is(err, errNothingSaved) {
						t.Fatalf("restored: %v", err)
					}
					set(step + 1)
					now = live()
					continue
				}
				if now = *saved; err != nil {
					t.Fatal(err)
				}
			default:
				fails := rapid.SampledFrom([]string{"", "", "ours", "user's"}).Draw(t, "fails")
				bad, user.fail = 0, nil
				before := user.saved
				switch fails {
				case "ours":
					bad = func() {}
				case "user's":
					user.fail = errors.New("no room")
				}
				err := map[string]func() error{"commit": s.Commit, "async": s.CommitAsync, "save": s.Save}[what]()
				if (err == nil) != (fails == "") {
					t.Fatalf("%s, %s fails: %v", what, fails, err)
				}
				bad = 0
				settled = settled && what != "async"
				if err != nil {
					user.saved = before // as a part of another package should
					continue
				}
				if what != "save" {
					commits++
				}
				h := now
				saved = &h
			}
			if got := live(); !got.equal(now) || s.Commits() != commits {
				t.Fatalf("%+v, want %+v; %d commits, want %d", got, now, s.Commits(), commits)
			}
		}
	})
}

// After a failure between CommitAsync and Settle, the state is restored to that commit, although
// counters may have changed since.
func TestCommitAsync(t *testing.T) {
	w := stillWorld(t, 1, 0)[0]
	weights, step := make([]float32, 3*snapshot.ChunkSize/4), 0
	s := NewState(w, Tensor("weights", weights), Value("step", &step))
	for n := range 5 {
		s.Settle()
		weights[0], weights[len(weights)-1], step = float32(n), float32(n), n
		if err := s.CommitAsync(); err != nil {
			t.Fatal(err)
		}
		step += 100
	}
	if err := s.Restore(); err != nil {
		t.Fatal(err)
	}
	if weights[0] != 4 || weights[len(weights)-1] != 4 || step != 4 || s.Commits() != 5 {
		t.Errorf("weights %v, step %d, %d commits", weights[:1], step, s.Commits())
	}
	s.Settle()
}

// benchState returns a state of the given size, in tensors of about 16 MB.
func benchState(b *testing.B, bytes int) (*State, [][]float32) {
	b.Helper()
	w, err := newWorker(b.Context(), solo{}).arrive(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = w.Close() })
	var parts []Part
	var all [][]float32
	for i := 0; bytes > 0; i++ {
		n := min(bytes, 16<<20)
		bytes -= n
		t := make([]float32, n/4)
		for j := range t {
			t[j] = float32(i + j)
		}
		all = append(all, t)
		parts = append(parts, Tensor(fmt.Sprint(i), t))
	}
	return NewState(w, parts...), all
}

// touch changes all elements of the first tensors.
func touch(all [][]float32, parts int) {
	for _, t := range all[:parts] {
		for i := 0; i < len(t); i += 16 {
			t[i]++
		}
	}
}

// BenchmarkCommit alternates between a commit of 256 MB and a plain copy of the same bytes, and
// reports how long each blocks training.
func BenchmarkCommit(b *testing.B) {
	const size = 256 << 20
	for _, c := range []struct {
		name    string
		changed int // number of changed tensors, of 16
		async   bool
	}{{"all changed", 16, false}, {"an eighth changed", 2, false}, {"nothing changed", 0, false}, {"async", 16, true}} {
		b.Run(c.name, func(b *testing.B) {
			s, all := benchState(b, size)
			plain := make([][]float32, len(all))
			for i := range all {
				plain[i] = slices.Clone(all[i])
			}
			commit := s.Commit
			if c.async {
				commit = s.CommitAsync
			}
			for range 3 {
				touch(all, 16)
				if err := s.Commit(); err != nil {
					b.Fatal(err)
				}
			}
			var commits, copies []float64
			for b.Loop() {
				touch(all, c.changed)
				commits = append(commits, milliseconds(func() {
					if err := commit(); err != nil {
						b.Fatal(err)
					}
				}))
				s.Settle()
				touch(all, c.changed)
				copies = append(copies, milliseconds(func() {
					for i := range all {
						copy(plain[i], all[i])
					}
				}))
			}
			slices.Sort(commits)
			slices.Sort(copies)
			b.ReportMetric(commits[len(commits)/2], "ms/commit")
			b.ReportMetric(copies[len(copies)/2], "ms/copy")
			b.ReportMetric(commits[len(commits)/2]/copies[len(copies)/2], "ratio")
		})
	}
}

// BenchmarkChanges measures how long a commit of 256 MB and a plain copy of the changed part block,
// and the additional time of the step before. In each step either the same part of the state
// changes, or the next one in turn.
func BenchmarkChanges(b *testing.B) {
	const size = 256 << 20
	for _, c := range []struct {
		name   string
		bytes  int // changed bytes
		inTurn bool
	}{{"nothing", 0, false}, {"1 percent", size / 100 &^ 63, false}, {"1 percent in turn", size / 100 &^ 63, true},
		{"an eighth", size / 8, false}, {"an eighth in turn", size / 8, true}, {"all", size, false}} {
		for _, way := range []string{"compared", "watched"} {
			b.Run(c.name+" "+way, func(b *testing.B) {
				s, all := benchState(b, size)
				for _, p := range s.parts.all {
					if way == "watched" {
						Watched(p)
					}
				}
				plain := make([][]float32, len(all))
				for i := range all {
					plain[i] = slices.Clone(all[i])
				}
				at := 0 // offset in the elements of all tensors
				change := func(f func(t, kept []float32)) {
					for n := 0; n < c.bytes/4; {
						i, from := (at+n)/len(all[0])%len(all), (at+n)%len(all[0])
						to := min(len(all[i]), from+c.bytes/4-n)
						f(all[i][from:to], plain[i][from:to])
						n += to - from
					}
				}
				var commits, copies, steps []float64
				for i := -12; b.Loop(); i++ {
					if c.inTurn {
						at += c.bytes / 4
					}
					// Both the copy and the commit follow writes; only the first writes after a
					// commit are slower.
					write := func() {
						change(func(t, _ []float32) {
							for i := 0; i < len(t); i += 16 {
								t[i]++
							}
						})
					}
					step := milliseconds(write)
					plainly := milliseconds(func() { change(func(t, kept []float32) { copy(kept, t) }) })
					write()
					commit := milliseconds(func() {
						if err := s.Commit(); err != nil {
							b.Fatal(err)
						}
					})
					if i >= 0 {
						steps, commits, copies = append(steps, step), append(commits, commit), append(copies, plainly)
					}
				}
				report := func(of []float64, unit string) float64 {
					slices.Sort(of)
					if len(of) == 0 {
						return 0
					}
					b.ReportMetric(of[len(of)/2], unit)
					return of[len(of)/2]
				}
				report(steps, "ms/step")
				b.ReportMetric(report(commits, "ms/commit")/max(report(copies, "ms/copy"), 1e-6), "ratio")
			})
		}
	}
}

// BenchmarkLoop runs a training loop on one processor whose forward and backward pass takes twice
// as long as a copy of its state. It alternates between no commits, Commit, CommitAsync, and a
// plain copy by a goroutine. Each measured step includes the copy of the previous one.
func BenchmarkLoop(b *testing.B) {
	s, all := benchState(b, 256<<20)
	plain := make([][]float32, len(all))
	for i := range all {
		plain[i] = slices.Clone(all[i])
	}
	sum := float32(0)
	pass := func() { // arithmetic in the cache, as in most forward and backward passes
		t := all[0][:32<<10]
		for range 60 {
			for _, x := range t {
				sum += x * x
			}
		}
	}
	touch(all, 16)
	least := func(f func()) float64 {
		return min(milliseconds(f), milliseconds(f), milliseconds(f), milliseconds(f), milliseconds(f))
	}
	copying := least(func() {
		for i := range all {
			copy(plain[i], all[i])
		}
	})
	one := least(pass)
	passes := max(1, int(2*copying/one))
	var beside sync.WaitGroup
	step := func() {
		for range passes {
			pass()
		}
		s.Settle()
		beside.Wait()
		touch(all, 16)
	}
	ways := []struct {
		name   string
		commit func() error
		times  []float64
	}{{"none", func() error { return nil }, nil}, {"commit", s.Commit, nil}, {"async", s.CommitAsync, nil}, {"copy", func() error {
		beside.Go(func() {
			for i := range all {
				copy(plain[i], all[i])
			}
		})
		return nil
	}, nil}}
	const steps = 5
	for b.Loop() {
		for i := range ways {
			w := &ways[i]
			var began time.Time
			for n := range 1 + steps {
				if n == 1 {
					began = time.Now()
				}
				step()
				if err := w.commit(); err != nil {
					b.Fatal(err)
				}
			}
			w.times = append(w.times, float64(time.Since(began))/1e6/steps)
			s.Settle()
			beside.Wait()
		}
	}
	b.ReportMetric(copying, "ms/copy")
	for i := range ways {
		slices.Sort(ways[i].times)
	}
	none := ways[0].times
	b.ReportMetric(none[len(none)/2], "ms/step")
	for _, w := range ways[1:] {
		b.ReportMetric(w.times[len(w.times)/2]/none[len(none)/2], w.name+"/step")
		// The minimum is the measurement with the least interference.
		b.ReportMetric(w.times[0]/none[0], "least-"+w.name+"/step")
	}
}

// BenchmarkSmallCommit measures a commit of a small state in a world of one, with the agreement.
func BenchmarkSmallCommit(b *testing.B) {
	w, err := newWorker(b.Context(), solo{}).arrive(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	defer w.Close()
	weights, epoch, batch := make([]float64, 650), 1, 2
	s := NewState(w, Tensor("weights", weights), Value("epoch", &epoch), Value("batch", &batch), NewSampler(100, SamplerOptions{}))
	for b.Loop() {
		weights[0]++
		if err := s.Save(); err != nil {
			b.Fatal(err)
		}
	}
}

func milliseconds(f func()) float64 {
	began := time.Now()
	f()
	return float64(time.Since(began)) / 1e6
}

// TestCommitOfOneRank: if one rank commits while another calls a collective operation, the errors
// on both ranks name Commit as one of the operations that do not match.
func TestCommitOfOneRank(t *testing.T) {
	workers := stillWorld(t, 2, 0)
	for rank, err := range errorsOf(2, func(r int) error {
		data := []float64{1, 2}
		s := NewState(workers[r], Tensor("data", data))
		return Run(t.Context(), s, func(ctx context.Context) error {
			if r == 0 {
				return s.Commit()
			}
			return fmt.Errorf("the user's: %w", collective.AllReduce(ctx, workers[r].Group(), data, collective.Sum))
		})
	}) {
		want := "calls do not match: rank 0 calls Commit or CheckHostUpdates, rank 1 calls AllReduce of 2 float64 (sum): all ranks must"
		if err == nil || !strings.Contains(err.Error(), want) || rank == 1 && !strings.HasPrefix(err.Error(), "the user's: ") {
			t.Errorf("rank %d: %v", rank, err)
		}
		if mismatch, is := errors.AsType[*collective.MismatchError](err); !is || mismatch.Ranks != [2]int{0, 1} {
			t.Errorf("rank %d: %#v", rank, err)
		}
	}
}
