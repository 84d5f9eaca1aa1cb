package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/cuda"
	"github.com/hvdrun/hvdrun/internal/identity"
)

// duty is the task of a rank. It is sent on standard input because credentials must not be visible
// to others.
type duty struct {
	Credentials string
	Key         []byte // of data connections
	Rank, Size  int
	Task        string
	Backend     string
	Options     options
}

// answer is the result of a rank.
type answer struct {
	Error   string `json:",omitempty"`
	Skip    string `json:",omitempty"`
	Aborted bool   `json:",omitempty"` // the error is another rank's
	Speeds  []speed
	Growth  int64 // bytes
}

// crew runs a task in n processes, which meet without a driver, and returns their results.
func crew(ctx context.Context, o *options, n int, task, backend string, env ...string) ([]answer, error) {
	authority, err := identity.NewAuthority("gpucheck")
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	key, said := identity.NewDataKey(), &locked{}
	var ins []io.WriteCloser
	var outs []*json.Decoder
	for rank := range n {
		c, err := authority.Issue(identity.Subject{Role: identity.Worker, Host: "here", Index: rank, Incarnation: fmt.Sprint("rank", rank)})
		if err != nil {
			return nil, err
		}
		cmd := exec.CommandContext(ctx, self, "rank")
		cmd.Env = append(os.Environ(), env...)
		cmd.Stderr = said
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		in, err1 := cmd.StdinPipe()
		out, err2 := cmd.StdoutPipe()
		if err := errors.Join(err1, err2, cmd.Start()); err != nil {
			return nil, err
		}
		defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
		ins, outs = append(ins, in), append(outs, json.NewDecoder(bufio.NewReader(out)))
		if err := json.NewEncoder(in).Encode(duty{c.Encode(), key.Bytes(), rank, n, task, backend, *o}); err != nil {
			return nil, err
		}
	}
	addrs := make([][]string, n)
	for rank := range n {
		if err := outs[rank].Decode(&addrs[rank]); err != nil {
			return nil, fmt.Errorf("rank %d: %w: %s", rank, err, tail(said.String()))
		}
	}
	for rank := range n {
		if err := json.NewEncoder(ins[rank]).Encode(addrs); err != nil {
			return nil, fmt.Errorf("rank %d: %w", rank, err)
		}
	}
	answers := make([]answer, n)
	for rank := range n {
		if err := outs[rank].Decode(&answers[rank]); err != nil {
			return nil, fmt.Errorf("rank %d has ended without an answer: %w: %s", rank, err, tail(said.String()))
		}
	}
	return answers, judge(answers)
}

// judge returns the first error that is not a consequence of another rank's.
func judge(answers []answer) error {
	var consequence error
	for rank, a := range answers {
		switch {
		case a.Skip != "":
			return skipped{a.Skip}
		case a.Error != "" && !a.Aborted:
			return fmt.Errorf("rank %d: %s", rank, a.Error)
		case a.Error != "":
			consequence = fmt.Errorf("rank %d: %s", rank, a.Error)
		}
	}
	return consequence
}

// locked is a buffer for concurrent writers.
type locked struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *locked) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// seat is a rank.
type seat struct {
	duty
	endpoint *collective.Endpoint
	addrs    [][]string
	device   *cuda.Device

	mu   sync.Mutex
	over string // the backend of the newest world
}

// asRank runs a rank: it prints its address, reads all addresses, runs its task and prints its
// result.
func asRank(ctx context.Context) error {
	s := &seat{}
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	if err := in.Decode(&s.duty); err != nil {
		return err
	}
	c, err := identity.Decode(s.Credentials)
	if err != nil {
		return err
	}
	s.endpoint, err = collective.Listen(collective.Config{Credentials: c, ListenAddr: "127.0.0.1:0", Backend: func(_ uint64, name string) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.over = name
	}})
	if err != nil {
		return err
	}
	defer s.endpoint.Close()
	if err := out.Encode(s.endpoint.Addrs()); err != nil {
		return err
	}
	if err := in.Decode(&s.addrs); err != nil {
		return err
	}
	var a answer
	err = s.perform(ctx, &a)
	var skip skipped
	if errors.As(err, &skip) {
		a.Skip = skip.reason
	} else if err != nil {
		a.Error, a.Aborted = err.Error(), errors.Is(err, collective.ErrAborted)
	}
	return out.Encode(a)
}

func (s *seat) perform(ctx context.Context, a *answer) (err error) {
	index := 0
	if s.Backend == cuda.BackendNCCL { // every version of NCCL supports one rank per device
		all, err := cuda.Devices(s.Options.Driver)
		if err != nil {
			return err
		}
		index = s.Rank % len(all)
	}
	config := cuda.Config{Device: index, Library: s.Options.Driver, NCCL: s.Options.NCCL, Backend: s.Backend}
	if s.device, err = cuda.Open(config); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.device.Close()) }()
	switch s.Task {
	case "exchange":
		return s.exchange(ctx, a)
	case "generations":
		return s.generations(ctx, a)
	}
	return fmt.Errorf("there is no task %q", s.Task)
}

// meet connects the ranks of a world.
func (s *seat) meet(ctx context.Context, generation uint64) (*collective.Group, error) {
	key, err := identity.ParseDataKey(s.Key)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return s.endpoint.Connect(ctx, collective.Peers{Generation: generation, Key: key, Rank: s.Rank, Addrs: s.addrs,
		Hosts: slices.Repeat([]string{"here"}, s.Size)})
}

// backend returns the backend of the newest world; empty: none yet.
func (s *seat) backend() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.over
}
