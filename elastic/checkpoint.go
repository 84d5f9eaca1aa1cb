package elastic

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/checkpoint"
	"github.com/hvdrun/hvdrun/elastic/image"
)

// Checkpoints has a State write commits to disk, from which another job goes on. It is given to
// NewState among the parts; [Checkpoint] makes one.
//
// Rank 0 writes, in the background: training does not wait, and a disk that is full or slow costs a
// line in the log and memory for what changes meanwhile. It writes only commits that all ranks have
// made, and when Run has brought training to its end, the last one. The format is that of package
// elastic/checkpoint, and safetensors to other tools. What [Local] parts hold on other ranks is
// sent to rank 0 within the commit that is to be written, and stays in its memory until it is; the
// job that goes on from it deals the pieces out as if all ranks had been replaced.
//
// When Run returns, the last commit is on the disk: where training has come to its end, where the
// job is stopped, by Ctrl-C or otherwise, and where it comes to an end because too few are left.
// One rank writes it, and the driver says which; that may take as long as it likes, while bytes
// reach the disk within each --drain-timeout, and SIGTERM does not disturb it. A rank that goes
// while others go on writes none; rank 0 does, where it leaves by an error of its own. A worker
// that was asked to leave, and stays because it alone has the state, pauses no longer between two.
// Where the last cannot be written, Run returns a *[CheckpointError], and hvdrun ends with status
// 7.
//
// One job at a time writes into a folder: rank 0 locks it. A job that starts from nothing and finds
// it locked by another ends, with an error that is a *checkpoint.LockedError on that rank; one that
// comes to it later, on another host, writes none and says so.
//
// Where a job starts from nothing, the first sync looks for checkpoints on all ranks: the newest
// one that is whole is read by the rank that has it, and what is in it is the state, the number of
// its commit included. Damaged ones are set aside, and the log says what was found. One that does
// not fit the program's state ends Run: nothing is overwritten by a job that begins anew.
type Checkpoints struct {
	// Dir is the folder, on this rank's host or on a file system that all share. It is made where
	// it is missing.
	Dir string
	// Keep is how many are kept, the newest. 0: 3.
	Keep int
	// Interval is the least time between two. 0: 30 seconds; negative: the next is begun when one
	// has been written.
	Interval time.Duration

	writing sync.WaitGroup
	bytes   atomic.Uint64 // that are on the disk, of all that were written
	mu      sync.Mutex
	busy    bool
	began   time.Time
	failed  int    // in a row
	written uint64 // commits of the newest on the disk; 0: none

	hurry func() bool // whether to pause no longer; nil: no

	locking sync.Mutex // not mu: a disk may be slow
	lock    *checkpoint.Lock
}

// CheckpointError says that the last commit is not on the disk when Run returns.
type CheckpointError struct {
	// Commit is its number.
	Commit uint64
	// Dir is the folder.
	Dir string
	// Err says why.
	Err error
}

// Error names commit, folder and reason.
func (e *CheckpointError) Error() string {
	return fmt.Sprintf("elastic: no checkpoint of the last commit, %d, in %s: %v", e.Commit, e.Dir, e.Err)
}

// Unwrap returns the reason.
func (e *CheckpointError) Unwrap() error { return e.Err }

// Checkpoint returns Checkpoints in a folder, the last three and two a minute. Its fields may be
// changed until NewState has it.
func Checkpoint(dir string) *Checkpoints { return &Checkpoints{Dir: dir} }

// What follows makes it a Part that holds nothing.

// Save does nothing.
func (c *Checkpoints) Save() error { return nil }

// Restore does nothing.
func (c *Checkpoints) Restore() error { return nil }

// Sync does nothing.
func (c *Checkpoints) Sync(context.Context, *collective.Group, int) error { return nil }

func (c *Checkpoints) keep() int {
	if c.Keep <= 0 {
		return 3
	}
	return c.Keep
}

// pause is the least time between the beginnings of two.
func (c *Checkpoints) pause() time.Duration {
	pause := c.Interval
	if pause == 0 {
		pause = 30 * time.Second
	}
	if c.hurry != nil && c.hurry() {
		pause = 0
	}
	if c.failed > 0 {
		pause = max(pause, min(time.Second<<min(c.failed, 6), time.Minute))
	}
	return pause
}

// due tells whether another is to be begun, and if so begins it: end must follow.
func (c *Checkpoints) due(commits uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if commits == c.written || !c.free() {
		return false
	}
	c.busy, c.began = true, time.Now()
	return true
}

// free tells whether one could be begun. The caller holds mu.
func (c *Checkpoints) free() bool { return !c.busy && time.Since(c.began) >= c.pause() }

// soon tells whether one of the next commit is wanted. A nil c wants none.
func (c *Checkpoints) soon() bool {
	if c == nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.free()
}

// has tells whether the newest on the disk is of that commit, and none is being written.
func (c *Checkpoints) has(commits uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.busy && c.written == commits
}

func (c *Checkpoints) end(commits uint64, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.busy = false
	if err != nil {
		c.failed++
		return
	}
	c.failed, c.written = 0, commits
}

// acquire locks the folder, unless it is locked already. It must be called before each checkpoint,
// and release after the last.
func (c *Checkpoints) acquire(job string) error {
	c.locking.Lock()
	defer c.locking.Unlock()
	if c.lock != nil {
		return nil
	}
	host, _ := os.Hostname()
	var err error
	c.lock, err = checkpoint.Acquire(c.Dir, checkpoint.Owner{Job: job, Process: fmt.Sprintf("process %d on %s", os.Getpid(), host)})
	return err
}

// release lets others write into the folder.
func (c *Checkpoints) release() {
	c.locking.Lock()
	defer c.locking.Unlock()
	c.lock.Release()
	c.lock = nil
}

// durable is a part that says how it is found in a checkpoint.
type durable interface {
	kept
	// kind must be the same in the program that reads it.
	kind() string
	// tensors are its pieces, for a part of the name.
	tensors(name string) []checkpoint.Tensor
	// text shows people what the pieces hold.
	text([]image.Piece) string
}

// maxText bounds a part's text, in bytes.
const maxText = 200

func short(text string) string {
	if len(text) > maxText {
		return text[:maxText] + "…"
	}
	return text
}

func (t *tensor[T]) kind() string { return t.layout() }
func (t *tensor[T]) tensors(name string) []checkpoint.Tensor {
	return []checkpoint.Tensor{{Name: name, Type: dtype[T]()}}
}
func (t *tensor[T]) text([]image.Piece) string { return "" }

func (v *value[T]) kind() string { return v.layout() }
func (v *value[T]) tensors(name string) []checkpoint.Tensor {
	if v.plain {
		return []checkpoint.Tensor{{Name: name, Type: dtypeOf(reflect.TypeFor[T]()), Scalar: true}}
	}
	return []checkpoint.Tensor{{Name: name, Type: "U8"}}
}

func (v *value[T]) text(pieces []image.Piece) string {
	if v.plain {
		fresh := value[T]{live: new(T), plain: true}
		if fresh.decode(pieces[0].Bytes()) != nil {
			return ""
		}
		return short(fmt.Sprint(*fresh.live))
	}
	fresh, err := v.decoded(pieces[0].Bytes())
	if err != nil {
		return ""
	}
	return short(fmt.Sprint(*fresh))
}

func (s *Sampler) kind() string {
	return fmt.Sprintf("sampler of %d indices, shuffle %t, seed %d", s.n, s.opts.Shuffle, s.opts.Seed)
}

func (s *Sampler) tensors(name string) []checkpoint.Tensor {
	return []checkpoint.Tensor{{Name: name, Type: "U8"}}
}

func (s *Sampler) text(pieces []image.Piece) string {
	fresh := NewSampler(s.n, s.opts)
	if fresh.decode(pieces[0].Bytes()) != nil {
		return ""
	}
	return fmt.Sprintf("epoch %d, position %d", fresh.live.epoch, fresh.live.pos)
}

func (f foreign) kind() string { return fmt.Sprintf("%T", f.Imaged) }
func (f foreign) tensors(name string) []checkpoint.Tensor {
	return []checkpoint.Tensor{{Name: name, Type: "U8"}}
}
func (f foreign) text([]image.Piece) string { return "" }

func dtype[T collective.Element]() string {
	switch any(*new(T)).(type) {
	case collective.Float16:
		return "F16"
	case collective.BFloat16:
		return "BF16"
	}
	return dtypeOf(reflect.TypeFor[T]())
}

func dtypeOf(t reflect.Type) string {
	letter := "I"
	switch k := t.Kind(); {
	case k == reflect.Bool:
		return "BOOL"
	case k == reflect.Float32 || k == reflect.Float64:
		letter = "F"
	case k >= reflect.Uint && k <= reflect.Uint64:
		letter = "U"
	}
	return fmt.Sprint(letter, t.Bits())
}

// fileName names part i in a checkpoint.
func (s *State) fileName(i int) string {
	if o := s.own[i]; o != nil && o.name() != "" {
		return o.name()
	}
	return fmt.Sprintf("part.%d", i)
}

// checkDurable tells whether all parts can be in a checkpoint.
func (s *State) checkDurable() error {
	for i := range s.parts {
		if s.kept[i] == nil {
			return fmt.Errorf("elastic: %s cannot be in a checkpoint: it is not elastic.Imaged", s.partName(i))
		}
	}
	return nil
}

// offer has the last commit written, where that is due. It returns at once.
func (s *State) offer() {
	c := s.checkpoints
	if c == nil || s.worker.Rank() != 0 || s.copying != nil || !s.agreed || !s.locals.complete() || !c.due(s.commits) {
		return
	}
	held, size, locals := s.saved.Hold(), s.worker.Size(), s.locals.gathered
	s.locals.gathered = nil
	c.writing.Go(func() {
		defer held.Release()
		err := s.write(c, held, size, locals)
		if err != nil {
			s.worker.log.Warnf("no checkpoint of commit %d: %v", held.Number(), err)
		}
		c.end(held.Number(), err)
	})
}

// write writes an image. It uses nothing of the state that changes.
func (s *State) write(c *Checkpoints, m *image.Image, size int, locals *pieceSet) error {
	about := checkpoint.About{Commits: m.Number(), Time: time.Now().UTC().Round(time.Millisecond), Size: size}
	tensors := make([][]checkpoint.Tensor, len(s.parts))
	pieces := make([]image.Piece, 0, len(m.Pieces()))
	for i, k := range s.kept {
		d, name := k.(durable), s.fileName(i)
		own := m.Pieces()[s.first[i]:]
		if l, ok := k.(localPart); ok {
			tensors[i], own = locals.durable(l, s.locals.index(l), name)
		} else {
			tensors[i] = d.tensors(name)
		}
		pieces = append(pieces, own[:len(tensors[i])]...)
		about.Parts = append(about.Parts, checkpoint.Part{Name: name, Kind: d.kind(), Text: d.text(own)})
	}
	if err := c.acquire(s.worker.job); err != nil {
		return err
	}
	told := func(bytes int64) { c.bytes.Add(uint64(bytes)) }
	if err := checkpoint.WriteTelling(c.Dir, about, tensors, pieces, told); err != nil {
		return err
	}
	if err := checkpoint.Prune(c.Dir, c.keep()); err != nil {
		s.worker.log.Warnf("old checkpoints stay: %v", err)
	}
	return nil
}

// resume returns the root of a sync. Where the world's has no state yet it is the rank with the
// newest whole checkpoint, which it has read; the world's own where there is none.
func (s *State) resume(ctx context.Context, g *collective.Group, root int) (int, error) {
	c := s.checkpoints
	if c == nil {
		return root, nil
	}
	if g.Rank() != 0 {
		c.release() // another writes from here on
	}
	begun := []uint8{0}
	if s.holds {
		begun[0] = 1
	}
	if err := collective.Broadcast(ctx, g, begun, root); err != nil || begun[0] != 0 {
		return root, err
	}
	if err := s.claim(ctx, g); err != nil {
		return root, err
	}
	mine, err := checkpoint.List(c.Dir)
	if err != nil {
		return root, fmt.Errorf("elastic: checkpoints: %w", err)
	}
	for {
		// The newest of all, and of ranks that have it the lowest.
		word := []uint64{0}
		if len(mine) > 0 {
			word[0] = mine[0] + 1
		}
		if err := collective.AllReduce(ctx, g, word, collective.Max); err != nil {
			return root, err
		}
		newest := word[0]
		if newest == 0 {
			if g.Rank() == root {
				s.worker.log.Infof("there is no checkpoint in %s: training starts from nothing", c.Dir)
			}
			return root, nil
		}
		word[0] = 0
		if len(mine) > 0 && mine[0]+1 == newest {
			word[0] = math.MaxUint32 - uint64(g.Rank())
		}
		if err := collective.AllReduce(ctx, g, word, collective.Max); err != nil {
			return root, err
		}
		elected := int(math.MaxUint32 - word[0])
		outcome := []uint8{whole}
		if elected == g.Rank() {
			if err = s.load(mine[0]); errors.Is(err, checkpoint.ErrDamaged) || errors.Is(err, fs.ErrNotExist) {
				outcome[0] = torn
				mine = mine[1:]
			} else if err != nil {
				outcome[0] = misfit
			}
		}
		if cerr := collective.Broadcast(ctx, g, outcome, elected); cerr != nil {
			return root, cerr
		}
		switch outcome[0] {
		case whole:
			return elected, nil
		case misfit:
			untilAllKnow(ctx, g)
			if elected != g.Rank() {
				err = fmt.Errorf("elastic: rank %d cannot go on from its checkpoint of commit %d", elected, newest-1)
			}
			return root, err
		}
	}
}

// claim has rank 0 lock the folder. Where another job has it the error is every rank's; what else
// can be wrong with it costs checkpoints, and that is said when one is written.
func (s *State) claim(ctx context.Context, g *collective.Group) error {
	taken := []uint8{0}
	var locked *checkpoint.LockedError
	if g.Rank() == 0 && errors.As(s.checkpoints.acquire(s.worker.job), &locked) {
		taken[0] = 1
	}
	if err := collective.Broadcast(ctx, g, taken, 0); err != nil || taken[0] == 0 {
		return err
	}
	untilAllKnow(ctx, g)
	if g.Rank() == 0 {
		return fmt.Errorf("elastic: %w", locked)
	}
	return errors.New("elastic: another job writes into rank 0's folder of checkpoints")
}

// untilAllKnow waits for those who are to hear what ends this rank before they hear that it is
// gone.
func untilAllKnow(ctx context.Context, g *collective.Group) {
	_ = collective.Barrier(ctx, g) // who is in it knows
}

// What came of a checkpoint.
const (
	whole = iota
	torn
	misfit
)

// load makes the state that of a checkpoint, or leaves it as it was.
func (s *State) load(commits uint64) error {
	if s.saved.Last() == nil { // a save says which pieces there are
		if err := s.Save(); err != nil {
			return err
		}
	}
	path := checkpoint.Path(s.checkpoints.Dir, commits)
	sources, locals, err := s.read(path)
	if errors.Is(err, checkpoint.ErrDamaged) {
		s.worker.log.Warnf("%v; it is set aside", err)
		if err := checkpoint.SetAside(path); err != nil {
			s.worker.log.Warn(err)
		}
	}
	if err != nil {
		return err
	}
	s.mark = imageID{}
	p := s.saved.Begin(commits, sources)
	p.Copy()
	p.Seal()
	if locals != nil {
		s.locals.sets, s.locals.current = []*pieceSet{locals}, locals.id
	}
	pieces := s.saved.Last().Pieces()
	for i, k := range s.kept {
		if err := k.restore(pieces[s.first[i]:]); err != nil {
			return fmt.Errorf("elastic: %s: %s: %w", path, s.partName(i), err)
		}
	}
	s.commits = commits
	s.checkpoints.end(commits, nil)
	s.worker.log.Infof("training goes on from commit %d, of %s", commits, path)
	return nil
}

// read returns what is in a checkpoint of this state, all of it checked; of Local parts, of which
// it is no rank's, all pieces.
func (s *State) read(path string) ([]image.Source, *pieceSet, error) {
	f, err := checkpoint.Open(path)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	sources := slices.Clone(s.sources)
	locals := make([][][]byte, 0, len(s.locals.parts))
	if len(f.About.Parts) != len(s.parts) {
		return nil, nil, fmt.Errorf("elastic: %s has %d parts, the state %d", path, len(f.About.Parts), len(s.parts))
	}
	for i, k := range s.kept {
		p, d := f.About.Parts[i], k.(durable)
		_, local := k.(localPart)
		if p.Name != s.fileName(i) || p.Kind != d.kind() || !local && len(p.Tensors) != len(d.tensors(p.Name)) {
			return nil, nil, fmt.Errorf("elastic: %s has %q, a %s, where the state has %q, a %s", path, p.Name, p.Kind, s.fileName(i), d.kind())
		}
		tensors, err := f.Read(p)
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", path, err)
		}
		if local {
			locals = append(locals, tensors)
			continue
		}
		for j, b := range tensors {
			sources[s.first[i]+j] = image.Source{Bytes: b, Given: true}
		}
	}
	set, err := s.locals.loaded(f.About, locals)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	return sources, set, nil
}
