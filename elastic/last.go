package elastic

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hvdrun/hvdrun/elastic/image"
	"github.com/hvdrun/hvdrun/rendezvous"
)

// sayBound is how long a rank tries to tell the driver of its last checkpoint: also a driver that
// has just been resumed hears of it.
const sayBound = 10 * time.Second

// finish ends what the state has begun, where Run ends with err. It has the last commit written
// where that is this rank's to do, and returns what Run returns.
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

// writesLast tells whether it is this rank that writes the last checkpoint, where Run ends with
// err.
func (s *State) writesLast(err error) bool {
	switch {
	case !s.holds || s.commits == 0 || errors.Is(err, errLeft) || errors.Is(err, ErrFinished):
		return false
	case errors.Is(err, ErrRemoved):
		return s.worker.last
	case err == nil, s.worker.Size() == 1:
		return s.worker.Rank() == 0
	}
	// The others may go on, from a commit that all have made.
	return s.worker.Rank() == 0 && s.agreed
}

// writeLast has the last commit written, unless it is on the disk already. lost is why there is
// none on this rank.
func (s *State) writeLast(lost error) error {
	c, held := s.checkpoints, s.saved.Hold()
	defer held.Release()
	if lost == nil && c.has(held.Number()) {
		return nil
	}
	s.worker.doing.enter(rendezvous.Saving)
	s.worker.doing.last.Store(&c.bytes)
	defer s.worker.doing.last.Store(nil)
	s.tellLast(rendezvous.Writing) // also where one is being written: this process may be killed meanwhile
	c.writing.Wait()
	var err error
	if !c.has(held.Number()) {
		err = s.writeImage(held)
		c.end(held.Number(), err)
	}
	if err = errors.Join(lost, err); err == nil {
		s.tellLast(rendezvous.Written)
		return nil
	}
	failed := &CheckpointError{Commit: s.commits, Dir: c.Dir, Err: err}
	s.worker.log.Error(failed)
	s.tellLast(rendezvous.NotWritten)
	return failed
}

// writeImage writes the last save.
func (s *State) writeImage(held *image.Image) error {
	size, locals := s.worker.Size(), s.locals.whole()
	if locals != nil {
		size = locals.size
	} else if len(s.locals.parts) > 0 {
		return errors.New("what local parts were on other ranks is not here")
	}
	return s.write(s.checkpoints, held, size, locals)
}

// tellLast tells the driver, if it can be reached.
func (s *State) tellLast(r rendezvous.Report) {
	if s.worker.deserted {
		return
	}
	ctx, stop := context.WithTimeout(context.Background(), sayBound)
	defer stop()
	if err := s.worker.meeting.report(ctx, r, s.worker.Generation(), s.commits); err != nil {
		s.worker.log.Warnf("the driver could not be told of the last checkpoint: %v", err)
	}
}
