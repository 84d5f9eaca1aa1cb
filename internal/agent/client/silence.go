package client

import (
	"errors"
	"fmt"
	"syscall"
	"time"
)

// patientLeases is how many leases an agent of this machine may leave unanswered what it was asked,
// as long as its process is there: processes that share two processors with hundreds of others run
// rarely.
const patientLeases = 12

// errNoAnswer is the end of an agent of this machine that lives, and does nothing that it is asked
// to do.
var errNoAnswer = errors.New("its process is there, and does nothing of what it was asked")

// silent returns an error where the stream may be open, but nothing comes of it. It counts its
// calls and not the time: of a machine so busy that this process did not run for long, what the
// agent has sent waits to be read.
func (s *session) silent() error {
	s.mu.Lock()
	s.looks++
	looks, since := s.looks, time.Since(s.contact)
	s.mu.Unlock()
	if s.process != nil {
		return s.quiet(looks, since)
	}
	if looks > missedBeats*looksPerBeat {
		return fmt.Errorf("nothing was heard of the agent for %v", since.Round(time.Millisecond))
	}
	if looks > looksPerBeat*3/2 {
		return s.gone()
	}
	return nil
}

// quiet is silent for an agent of this machine, after so many looks without a message. The
// connection to it cannot be cut without either end's notice, so only the end of the process
// breaks the stream. One that is stopped is continued where something is wanted of it; one that
// does nothing of that for very long is given up.
func (s *session) quiet(looks int, since time.Duration) error {
	if err := s.gone(); err != nil {
		return err
	}
	lease := int(s.a.cfg.Lease/s.lookEvery()) + 1
	if looks%lease != 0 {
		return nil
	}
	stopped, wanted := s.process.Stopped(), s.wanted()
	switch {
	case wanted && looks >= patientLeases*lease:
		return fmt.Errorf("%w for %v", errNoAnswer, since.Round(time.Second))
	case wanted && stopped:
		s.log.Warnf("agent: the agent, process %d, is stopped, and something is wanted of it: it is continued", s.process.PID())
		s.process.Signal(syscall.SIGCONT)
	case stopped && looks == lease:
		s.log.Warnf("agent: the agent, process %d, is stopped; its workers go on", s.process.PID())
	case looks == lease:
		s.log.Infof("agent: the agent, process %d, has said nothing for %v, but runs; its workers go on", s.process.PID(), since.Round(time.Second))
	}
	return nil
}

// wanted returns whether the agent has been asked for something that it has not done.
func (s *session) wanted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.workers {
		if !w.known || w.stop > 0 {
			return true
		}
	}
	return s.end != ongoing
}

// lookEvery is the pause between two looks at a stream.
func (s *session) lookEvery() time.Duration { return max(s.beat/looksPerBeat, time.Millisecond) }
