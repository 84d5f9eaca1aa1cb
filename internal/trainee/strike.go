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

	"github.com/hvdrun/hvdrun/internal/trainee/diary"
)

// strikes let others have this process killed at a moment of a commit. Where the folder holds a
// file strike.PID, SIGKILL comes during the next commit: after a share of the time that one usually
// takes, or of the shortest that one has taken, which knows of no wait for other ranks. The file
// has that share and, for the latter, the word shortest. What the process was doing then is added
// to the file strikes.
type strikes struct {
	dir   string // empty: nobody strikes
	usual time.Duration
	least time.Duration
	began time.Time
	saved atomic.Bool // values are written down, and tensors are copied
	over  atomic.Bool // the commit has returned
}

// begin is the beginning of a commit of t.
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
	line, group := t.line(diary.Step), t.worker.Group()
	go func() {
		runtime.LockOSThread()
		for time.Now().Before(at) {
			// A sleep would be too long.
		}
		doing := diary.Returned
		if !s.over.Load() {
			doing = diary.Encoding
			if s.saved.Load() {
				doing = diary.Copying
			}
			if p := group.Progress(); len(p) > 0 && p[0].Waiting {
				doing = diary.Agreeing
			}
		}
		if err := s.write(diary.Strike{PID: line.PID, Rank: line.Rank, Generation: line.Generation, Step: line.Step, Moment: doing}); err != nil {
			fmt.Fprintln(os.Stderr, "trainee:", err)
		}
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}()
	return nil
}

// end is the end of a commit, well or not.
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

func (s *strikes) write(strike diary.Strike) error {
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
