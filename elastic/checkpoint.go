package elastic

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/checkpoint"
	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

// Checkpoints makes a State write commits to disk, from which another job can continue. It is
// passed to NewState among the parts; [Checkpoint] returns one. The zero value with a Dir is valid.
//
// Rank 0 writes in the background: training does not wait, and a full or slow disk costs only a log
// line and memory for the chunks that change meanwhile. It writes only commits that all ranks have
// made, and when training ends the last one. The format is that of package elastic/checkpoint,
// which other tools read as safetensors. [Local] pieces of other ranks are sent to rank 0 within
// the commit to be written, and stay in its memory until that is done. A job that continues from
// the checkpoint assigns the pieces as if all ranks had been replaced.
//
// When Run returns, the last commit is on disk: if training has ended, if the job is stopped, for
// example by Ctrl-C, and if it ends because too few workers are left. The driver chooses the rank
// that writes it. Writing may take any time while bytes reach the disk within each --drain-timeout,
// and SIGTERM does not interrupt it. A rank that leaves while others continue writes no checkpoint,
// except rank 0 if it leaves because of its own error. A worker that was asked to leave but stays
// because no other worker has the state writes checkpoints without a pause. If the last checkpoint
// cannot be written, Run returns a *[CheckpointError] and hvdrun exits with status 7.
//
// Rank 0 locks the folder, so that one job at a time writes into it. A new job that finds it locked
// ends with an error, which on rank 0 is a *checkpoint.LockedError. A rank 0 that moves to another
// host later and finds it locked there logs that and writes no checkpoints.
//
// In a new job the first sync looks for checkpoints on all ranks. A rank with the newest intact one
// reads it, and its content becomes the state, including the number of the commit. Damaged
// checkpoints are renamed, and the result is logged. Run returns an error if a checkpoint does not
// match the program's state or the commit in its name, or could have been written by another user,
// so that a new job overwrites nothing. Run also returns an error if there are checkpoints but none
// is intact: training starts from the beginning only after a user has removed the damaged ones.
type Checkpoints struct {
	// Dir is the folder, on this rank's host or on a shared file system. It is created if missing.
	Dir string
	// Keep is the number of newest checkpoints to keep. 0 or less: 3.
	Keep int
	// Interval is the minimum time between the beginnings of two checkpoints. 0: 30 seconds;
	// negative: no pause between checkpoints.
	Interval time.Duration
	// Shared lets other users read the checkpoints: files have mode 0644 and new folders 0755,
	// instead of 0600 and 0700. hvdrun's --share-output does that too.
	Shared bool

	writing sync.WaitGroup
	bytes   atomic.Uint64 // bytes of all checkpoints that have been written to disk
	mu      sync.Mutex
	busy    bool
	began   time.Time
	failed  int    // consecutive failures
	written uint64 // commit number of the newest checkpoint on disk; 0: none

	hurry func() bool // whether to skip the pause; nil: no

	locking sync.Mutex // separate from mu, because the disk can be slow
	lock    *checkpoint.Lock
}

// CheckpointError reports that the last commit is not on disk when Run returns.
type CheckpointError struct {
	// Commit is the number of the last commit.
	Commit uint64
	// Dir is the folder of the checkpoints.
	Dir string
	// Err is the reason.
	Err error
}

// Error returns a message with the commit, the folder and the reason.
func (e *CheckpointError) Error() string {
	return fmt.Sprintf("elastic: no checkpoint of the last commit, %d, in %s: %v", e.Commit, e.Dir, safefile.Explain(e.Err))
}

// Unwrap returns the reason.
func (e *CheckpointError) Unwrap() error { return e.Err }

// Checkpoint returns Checkpoints in dir with the default Keep and Interval. The caller may change
// its fields until it is passed to NewState.
func Checkpoint(dir string) *Checkpoints { return &Checkpoints{Dir: dir} }

// The following methods make Checkpoints a Part without a value.

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

// failedBackoff is the shortest pause after checkpoints that could not be written.
var failedBackoff = retry.Backoff{First: 2 * time.Second, Most: time.Minute}

// pause returns the minimum time between the beginnings of two checkpoints.
func (c *Checkpoints) pause() time.Duration {
	pause := c.Interval
	if pause == 0 {
		pause = 30 * time.Second
	}
	if c.hurry != nil && c.hurry() {
		pause = 0
	}
	return max(pause, failedBackoff.After(c.failed))
}

// due reports whether a checkpoint is due. If so, it marks the checkpoint as begun, and the caller
// must call end.
func (c *Checkpoints) due(commits uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if commits == c.written || !c.free() {
		return false
	}
	c.busy, c.began = true, time.Now()
	return true
}

// free reports whether a checkpoint may begin now. The caller holds mu.
func (c *Checkpoints) free() bool { return !c.busy && time.Since(c.began) >= c.pause() }

// soon reports whether a checkpoint of the next commit is wanted. c may be nil.
func (c *Checkpoints) soon() bool {
	if c == nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.free()
}

// has reports whether the newest checkpoint is that of the commit and no other is being written.
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

// acquire locks the folder unless this process has locked it already. Call it before each
// checkpoint, and release after the last.
func (c *Checkpoints) acquire(job string, shared bool) error {
	c.locking.Lock()
	defer c.locking.Unlock()
	if c.lock != nil {
		return nil
	}
	host, _ := os.Hostname()
	var err error
	c.lock, err = checkpoint.Acquire(c.Dir, c.Shared || shared, checkpoint.Owner{Job: job, Process: fmt.Sprintf("process %d on %s", os.Getpid(), host)})
	return err
}

// release unlocks the folder.
func (c *Checkpoints) release() {
	c.locking.Lock()
	defer c.locking.Unlock()
	c.lock.Release()
	c.lock = nil
}

// offer starts writing the last commit in the background, if a checkpoint is due.
func (s *State) offer() {
	c := s.checkpoints
	if c == nil || s.worker.Rank() != 0 || s.saved.copying != nil || !s.agreed || !s.locals.complete() || !c.due(s.commits) {
		return
	}
	held, size, locals := s.saved.Hold(), s.worker.Size(), s.locals.gathered
	s.locals.gathered = nil
	c.writing.Go(func() {
		defer held.Release()
		err := s.write(c, held, size, locals)
		if err != nil {
			s.worker.log.Warnf("no checkpoint of commit %d: %v", held.Number(), safefile.Explain(err))
		}
		c.end(held.Number(), err)
	})
}

// write writes a snapshot. It reads no state that can change concurrently.
func (s *State) write(c *Checkpoints, m *snapshot.Snapshot, size int, locals *pieceSet) error {
	about := checkpoint.About{Commits: m.Number(), Time: time.Now().UTC().Round(time.Millisecond), Size: size}
	tensors := make([][]checkpoint.Tensor, len(s.parts.all))
	pieces := make([]snapshot.Blob, 0, len(m.Blobs()))
	local := 0
	for i, d := range s.parts.of {
		name, own := s.parts.fileName(i), m.Blobs()[s.parts.first[i]:]
		if d.local != nil {
			tensors[i], own = locals.durable(d.local, local, name)
			local++
		} else {
			tensors[i] = d.tensorsAs(name)
		}
		pieces = append(pieces, own[:len(tensors[i])]...)
		about.Parts = append(about.Parts, checkpoint.Part{Name: name, Kind: d.kindName(), Text: d.textOf(own)})
	}
	if err := c.acquire(s.worker.job, s.worker.shared); err != nil {
		return err
	}
	written := func(bytes int64) { c.bytes.Add(uint64(bytes)) }
	if err := checkpoint.Write(c.Dir, c.Shared || s.worker.shared, about, tensors, pieces, written); err != nil {
		return err
	}
	if err := checkpoint.Prune(c.Dir, m.Number(), c.keep()); err != nil {
		s.worker.log.Warnf("old checkpoints were not deleted: %v", safefile.Explain(err))
	}
	return nil
}

// resume returns the root of a sync. If the world's root has no state yet, it is the rank with the
// newest intact checkpoint, which that rank has read; without a checkpoint it is the world's root.
func (s *State) resume(ctx context.Context, g *collective.Group, root int) (int, error) {
	c := s.checkpoints
	if c == nil {
		return root, nil
	}
	if g.Rank() != 0 {
		c.release() // another process is rank 0 now
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
		elected, commits, err := elect(ctx, g, mine)
		if err != nil {
			return root, err
		}
		if elected < 0 {
			if err := s.beginsAnew(ctx, g); err != nil {
				return root, err
			}
			if g.Rank() == root {
				s.worker.log.Infof("there is no checkpoint in %s: training starts from the beginning", c.Dir)
			}
			return root, nil
		}
		damaged, err := s.loadOn(ctx, g, elected, commits)
		if err != nil || !damaged {
			return elected, err
		}
		if elected == g.Rank() {
			mine = mine[1:]
		}
	}
}

// beginsAnew returns an error on all ranks if one rank has checkpoints and all of these are
// damaged, because training must start from the beginning only if a user wants that.
func (s *State) beginsAnew(ctx context.Context, g *collective.Group) error {
	dir := s.checkpoints.Dir
	aside, err := checkpoint.Aside(dir)
	if err != nil {
		return fmt.Errorf("elastic: checkpoints: %w", err)
	}
	word := []uint64{0}
	if len(aside) > 0 {
		word[0] = math.MaxUint32 - uint64(g.Rank())
	}
	if err := collective.AllReduce(ctx, g, word, collective.Max); err != nil || word[0] == 0 {
		return err
	}
	awaitAllInformed(ctx, g)
	if len(aside) > 0 {
		return fmt.Errorf("elastic: no checkpoint in %s is intact, and training does not start from the beginning by itself: put an intact "+
			"one there, or remove the damaged ones to start from the beginning: %s", dir, strings.Join(aside, " "))
	}
	return fmt.Errorf("elastic: no checkpoint of rank %d is intact", math.MaxUint32-word[0])
}

// elect returns the newest checkpoint that any rank has, and the lowest of the ranks that have it;
// -1: no rank has one. mine are this rank's checkpoints, newest first.
func elect(ctx context.Context, g *collective.Group, mine []uint64) (rank int, commits uint64, err error) {
	word := []uint64{0}
	if len(mine) > 0 {
		word[0] = mine[0] + 1
	}
	if err := collective.AllReduce(ctx, g, word, collective.Max); err != nil || word[0] == 0 {
		return -1, 0, err
	}
	commits = word[0] - 1
	word[0] = 0
	if len(mine) > 0 && mine[0] == commits {
		word[0] = math.MaxUint32 - uint64(g.Rank())
	}
	if err := collective.AllReduce(ctx, g, word, collective.Max); err != nil {
		return -1, 0, err
	}
	return int(math.MaxUint32 - word[0]), commits, nil
}

// loadOn reads a checkpoint on one rank and reports on all ranks whether it is damaged. If it does
// not match this state or cannot be read, all ranks return an error.
func (s *State) loadOn(ctx context.Context, g *collective.Group, rank int, commits uint64) (damaged bool, err error) {
	outcome := []uint8{whole}
	if rank == g.Rank() {
		if err = s.load(commits); errors.Is(err, checkpoint.ErrDamaged) || errors.Is(err, fs.ErrNotExist) {
			outcome[0] = torn
		} else if err != nil {
			outcome[0] = misfit
		}
	}
	if cerr := collective.Broadcast(ctx, g, outcome, rank); cerr != nil {
		return false, cerr
	}
	if outcome[0] != misfit {
		return outcome[0] == torn, nil
	}
	awaitAllInformed(ctx, g)
	if rank != g.Rank() {
		err = fmt.Errorf("elastic: rank %d cannot continue from its checkpoint of commit %d", rank, commits)
	}
	return false, err
}

// claim makes rank 0 lock the folder. If another job has locked it, all ranks return an error.
// Other failures are logged when a checkpoint is written.
func (s *State) claim(ctx context.Context, g *collective.Group) error {
	taken := []uint8{0}
	var locked *checkpoint.LockedError
	if g.Rank() == 0 && errors.As(s.checkpoints.acquire(s.worker.job, s.worker.shared), &locked) {
		taken[0] = 1
	}
	if err := collective.Broadcast(ctx, g, taken, 0); err != nil || taken[0] == 0 {
		return err
	}
	awaitAllInformed(ctx, g)
	if g.Rank() == 0 {
		return fmt.Errorf("elastic: %w", locked)
	}
	return errors.New("elastic: another job writes to the checkpoint folder of rank 0")
}

// awaitAllInformed waits until the other ranks know the reason, before this rank leaves. Otherwise
// they would only see that it has failed.
func awaitAllInformed(ctx context.Context, g *collective.Group) {
	_ = collective.Barrier(ctx, g) // a rank in the barrier knows the reason
}

// Outcomes of loading a checkpoint.
const (
	whole = iota
	torn
	misfit
)

// load sets the state from a checkpoint. If the checkpoint cannot be read, the state stays
// unchanged. If a part does not accept its content, other parts may have changed already.
func (s *State) load(commits uint64) error {
	if s.saved.Last() == nil { // local parts keep their values of the last save
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
	s.saved.mark = snapshotID{}
	p := s.saved.Begin(commits, sources)
	p.Copy()
	p.Seal()
	if locals != nil {
		s.locals.sets, s.locals.current = []*pieceSet{locals}, locals.id
	}
	pieces := s.saved.Last().Blobs()
	for i, c := range s.parts.of {
		if err := c.restore(pieces[s.parts.first[i]:], allChanged); err != nil {
			return fmt.Errorf("elastic: %s: %s: %w", path, s.parts.name(i), err)
		}
	}
	s.commits = commits
	s.checkpoints.end(commits, nil)
	s.worker.log.Infof("training goes on from commit %d, of %s", commits, path)
	return nil
}

// read returns the checked content of a checkpoint of this state: the sources of a snapshot, with
// the Local parts of the last save, and the pieces of all ranks of Local parts.
func (s *State) read(path string) ([]snapshot.Source, *pieceSet, error) {
	f, err := checkpoint.OpenOwn(path)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	last, sources := s.saved.Last().Blobs(), make([]snapshot.Source, s.parts.blobs)
	locals := make([][][]byte, 0, len(s.locals.parts))
	if have, want := len(f.About.Parts), len(s.parts.all); have != want {
		return nil, nil, fmt.Errorf("elastic: %s has %d parts, the state has %d", path, have, want)
	}
	for i, d := range s.parts.of {
		p, name := f.About.Parts[i], s.parts.fileName(i)
		if p.Name != name || p.Kind != d.kindName() || d.local == nil && len(p.Tensors) != len(d.tensorsAs(name)) {
			return nil, nil, fmt.Errorf("elastic: %s has %q, a %s, where the state has %q, a %s", path, p.Name, p.Kind, name, d.kindName())
		}
		tensors, err := f.Read(p)
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", path, err)
		}
		if d.local != nil {
			locals = append(locals, tensors)
			tensors = [][]byte{last[s.parts.first[i]].Bytes()} // this rank's own piece stays
		}
		for j, b := range tensors {
			sources[s.parts.first[i]+j] = snapshot.Source{Bytes: b, Given: true}
		}
	}
	if path != checkpoint.Path(s.checkpoints.Dir, f.About.Commits) {
		return nil, nil, fmt.Errorf("elastic: %s has commit %d, not that of its name: give it the name %s, or remove it", path,
			f.About.Commits, filepath.Base(checkpoint.Path(s.checkpoints.Dir, f.About.Commits)))
	}
	set, err := s.locals.loaded(f.About, locals)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	return sources, set, nil
}
