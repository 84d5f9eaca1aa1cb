package client

import (
	"errors"
	"fmt"
	"syscall"
	"time"
)

// patientLeases is the number of leases for which an agent of this machine may leave a request
// undone while its process exists: on two processors shared with hundreds of processes, each runs
// rarely.
const patientLeases = 12

// errNoAnswer: the process of an agent of this machine exists, but carries out no request.
var errNoAnswer = errors.New("its process exists, but does not answer requests")

// silent returns an error if nothing arrives on a stream that seems open. It counts its calls
// instead of time: if the machine is so busy that this process did not run for a long time, the
// agent's messages have arrived and only wait to be read.
func (s *session) silent() error {
	s.mu.Lock()
	s.looks++
	looks, since := s.looks, time.Since(s.contact)
	s.mu.Unlock()
	if s.process != nil {
		return s.quiet(looks, since)
	}
	if looks > missedBeats*looksPerBeat {
		return fmt.Errorf("the agent was silent for %v", since.Round(time.Millisecond))
	}
	if looks > looksPerBeat*3/2 {
		return s.gone()
	}
	return nil
}

// quiet does the work of silent for an agent of this machine; looks is the number of calls since
// the last message. Both ends of a connection within one machine notice when it is cut, so only the
// end of the process breaks the stream. If the driver waits for something from a stopped agent,
// quiet continues the process. It returns an error if the agent has left a request undone for
// patientLeases.
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
		s.continueProcess()
	case stopped && looks == lease:
		s.log.Warnf("agent: the agent, process %d, is stopped; its workers continue", s.process.PID())
	case looks == lease:
		s.log.Infof("agent: the agent, process %d, has been silent for %v, but runs; its workers continue", s.process.PID(), since.Round(time.Second))
	}
	return nil
}

// continueProcess continues an agent of this machine that is stopped.
func (s *session) continueProcess() {
	s.log.Warnf("agent: the agent, process %d, is stopped, and is needed: it is continued", s.process.PID())
	s.process.Signal(syscall.SIGCONT)
}

// wanted returns whether the agent has left a request undone.
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

// lookEvery returns the pause between two calls of silent.
func (s *session) lookEvery() time.Duration { return max(s.beat/looksPerBeat, time.Millisecond) }
