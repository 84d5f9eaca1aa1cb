package launch

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// patientLeases is how many leases an agent of this machine may leave unanswered what it was asked,
// as long as its process is there: processes that share two processors with hundreds of others run
// rarely.
const patientLeases = 12

// errNoAnswer says that an agent of this machine lives, and has done nothing of what it was asked.
var errNoAnswer = errors.New("its process is there, and does nothing of what it was asked")

// vital is what the kernel of this machine tells of an agent's process. Nobody counts as dead by a
// clock whom it calls alive.
type vital struct {
	pid   int
	birth uint64          // in ticks after boot, by which a later process with the number is told apart; 0: it was not known
	gone  <-chan struct{} // closed when a child of this process has ended; nil: it is no child
}

// vitalOf returns that of a process that runs and is not a child of this one.
func vitalOf(pid int) *vital {
	v := &vital{pid: pid}
	if line, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline"); err == nil &&
		bytes.Contains(line, []byte("\x00"+strings.Join(agentArgs, "\x00"))) { // nobody else has the number by now
		v.birth, _, _ = born(pid)
	}
	return v
}

// there returns an error once the process has ended.
func (v *vital) there() error {
	if v.gone != nil {
		select {
		case <-v.gone:
			return errors.New("its process has ended")
		default:
			return nil
		}
	}
	if birth, state, err := born(v.pid); err != nil || state == 'Z' || state == 'X' || birth != v.birth {
		return errors.New("its process has ended")
	}
	return nil
}

// stopped tells whether a signal or a debugger has stopped the process.
func (v *vital) stopped() bool {
	_, state, err := born(v.pid)
	return err == nil && (state == 'T' || state == 't') && v.there() == nil
}

// signal sends a signal to a process that is there.
func (v *vital) signal(sig syscall.Signal) {
	if v.there() == nil {
		_ = syscall.Kill(v.pid, sig) // fails where it has just ended
	}
}

// born returns when a process began, in ticks after boot, and its state as proc_pid_stat(5) has it.
func born(pid int) (birth uint64, state byte, err error) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, 0, err
	}
	const startTime = 22 // counted from 1; after the name, the third comes first
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) <= startTime-3 {
		return 0, 0, fmt.Errorf("launch: /proc/%d/stat is not understood", pid)
	}
	birth, err = strconv.ParseUint(string(fields[startTime-3]), 10, 64)
	return birth, fields[0][0], err
}

// quiet is silent for an agent of this machine, after so many looks without a word of it. The
// connection to it cannot be cut without either end's hearing of it, so only the end of the process
// breaks the stream. One that is stopped is continued where something is wanted of it; one that
// does nothing of that for very long is given up.
func (s *agentSession) quiet(looks int, since time.Duration) error {
	if err := s.gone(); err != nil {
		return err
	}
	lease := int(s.a.Lease/s.lookEvery()) + 1
	if looks%lease != 0 {
		return nil
	}
	stopped, wanted := s.vital.stopped(), s.wanted()
	switch {
	case wanted && looks >= patientLeases*lease:
		return fmt.Errorf("%w for %v", errNoAnswer, since.Round(time.Second))
	case wanted && stopped:
		s.log.Warnf("launch: the agent, process %d, is stopped, and something is wanted of it: it is continued", s.vital.pid)
		s.vital.signal(syscall.SIGCONT)
	case stopped && looks == lease:
		s.log.Warnf("launch: the agent, process %d, is stopped; its workers go on", s.vital.pid)
	case looks == lease:
		s.log.Infof("launch: the agent, process %d, has said nothing for %v, but runs; its workers go on", s.vital.pid, since.Round(time.Second))
	}
	return nil
}

// wanted tells whether the agent has been asked for something that it has not done.
func (s *agentSession) wanted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.workers {
		if !w.known || w.stop > 0 {
			return true
		}
	}
	return s.finished
}

// lookEvery is the pause between two looks at a stream.
func (s *agentSession) lookEvery() time.Duration { return max(s.beat/looksPerBeat, time.Millisecond) }
