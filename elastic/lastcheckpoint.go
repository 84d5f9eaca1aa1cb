package elastic

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
	"github.com/hvdrun/hvdrun/internal/line"
)

// reportTimeout bounds each report about the last checkpoint to the driver. It is long enough for a
// driver to resume.
const reportTimeout = 10 * time.Second

// finish ends the state's background work when Run ends with err, writes the last commit if this
// rank has to, and returns the result of Run.
func (s *State) finish(err error) error {
	lost := s.settled()
	c := s.checkpoints
	if c == nil {
		if lost != nil {
			s.worker.log.Warn(lost)
		}
		return err
	}
	defer c.release()
	defer c.writing.Wait()
	if !s.writesLast(err) {
		if lost != nil {
			s.worker.log.Warn(lost)
		}
		return err
	}
	failed := s.writeLast(lost)
	switch {
	case failed == nil:
		return err
	case err == nil:
		return failed
	}
	return fmt.Errorf("%w; %w", err, failed)
}

// writesLast reports whether this rank writes the last checkpoint when Run ends with err.
func (s *State) writesLast(err error) bool {
	switch {
	case !s.holds || s.commits == 0 || errors.Is(err, errLeft) || errors.Is(err, ErrFinished):
		return false
	case errors.Is(err, ErrRemoved):
		return s.worker.run.last
	case err == nil, s.worker.Size() == 1:
		return s.worker.Rank() == 0
	}
	// The others may continue, from a commit that all ranks have made.
	return s.worker.Rank() == 0 && s.agreed
}

// writeLast writes the last commit unless it is on disk already. lost is the error to return if
// this rank has no such commit.
func (s *State) writeLast(lost error) error {
	c, held := s.checkpoints, s.saved.Hold()
	defer held.Release()
	if lost == nil && c.has(held.Number()) {
		return nil
	}
	s.worker.doing.enter(line.Saving)
	s.worker.doing.last.Store(&c.bytes)
	defer s.worker.doing.last.Store(nil)
	s.reportLast(line.Writing) // before any wait: it keeps the driver from killing this process
	c.writing.Wait()
	var err error
	if !c.has(held.Number()) {
		err = s.writeSnapshot(held)
		c.end(held.Number(), err)
	}
	if err = errors.Join(lost, err); err == nil {
		s.reportLast(line.Written)
		return nil
	}
	failed := &CheckpointError{Commit: s.commits, Dir: c.Dir, Err: err}
	s.worker.log.Error(failed)
	s.reportLast(line.NotWritten)
	return failed
}

// writeSnapshot writes the last save.
func (s *State) writeSnapshot(held *snapshot.Snapshot) error {
	size, locals := s.worker.Size(), s.locals.whole()
	if locals != nil {
		size = locals.size
	} else if len(s.locals.parts) > 0 {
		return errors.New("this rank does not have the local pieces of all ranks")
	}
	return s.write(s.checkpoints, held, size, locals)
}

// reportLast reports to the driver. It only logs a failure.
func (s *State) reportLast(r line.Report) {
	if s.worker.run.deserted {
		return
	}
	ctx, stop := context.WithTimeout(context.Background(), reportTimeout)
	defer stop()
	if err := s.worker.meeting.Report(ctx, r, s.worker.Generation(), s.commits); err != nil {
		s.worker.log.Warnf("reporting the last checkpoint to the driver failed: %v", err)
	}
}
