package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/test/steplog"
)

// strikes lets other processes make this process kill itself during a commit. If the directory
// contains a file strike.PID, this process sends itself SIGKILL during the next commit. The file
// contains the time of the signal, as a fraction of the usual duration of a commit. If the word
// shortest follows, it is a fraction of the shortest duration so far, in which the commit did not
// wait for other ranks. The process's activity at that moment is appended to the file strikes.
type strikes struct {
	dir   string // empty: disabled
	usual time.Duration
	least time.Duration
	began time.Time
	saved atomic.Bool // values are encoded and tensors are copied
	over  atomic.Bool // the commit has returned
}

// begin is called at the start of a commit of t.
func (s *strikes) begin(t *training) error {
	if s.dir == "" {
		return nil
	}
	s.began = time.Now()
	text, err := os.ReadFile(filepath.Join(s.dir, fmt.Sprintf("strike.%d", os.Getpid())))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	number, word, _ := strings.Cut(strings.TrimSpace(string(text)), " ")
	share, err := strconv.ParseFloat(number, 64)
	if err != nil {
		return err
	}
	whole := s.usual
	if word == "shortest" {
		whole = s.least
	}
	s.saved.Store(false)
	s.over.Store(false)
	at := s.began.Add(time.Duration(share * float64(whole)))
	line, group := t.line(steplog.Step), t.worker.Group()
	go func() {
		runtime.LockOSThread()
		for time.Now().Before(at) {
			// A sleep would be too coarse.
		}
		doing := steplog.Returned
		if !s.over.Load() {
			doing = steplog.Encoding
			if s.saved.Load() {
				doing = steplog.Copying
			}
			if p := group.Progress(); len(p) > 0 && p[0].Waiting {
				doing = steplog.Agreeing
			}
		}
		if err := s.write(steplog.Strike{PID: line.PID, Rank: line.Rank, Generation: line.Generation, Step: line.Step, Moment: doing}); err != nil {
			fmt.Fprintln(os.Stderr, "trainer:", err)
		}
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}()
	return nil
}

// end is called at the end of a commit, successful or not.
func (s *strikes) end() {
	if s.dir == "" {
		return
	}
	s.over.Store(true)
	took := time.Since(s.began)
	s.usual += (took - s.usual) / 4
	if s.least == 0 || took < s.least {
		s.least = took
	}
}

func (s *strikes) write(strike steplog.Strike) error {
	b, err := json.Marshal(strike)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(s.dir, "strikes"), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o666)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.Write(append(b, '\n'))
	return err
}
