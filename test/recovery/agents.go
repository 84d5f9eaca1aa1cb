package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"
)

// agent is a process of `hvdrun agent` on loopback.
type agent struct {
	cmd *exec.Cmd
	log bytes.Buffer
}

// agent starts an agent of a host with so many slots; seed is the address at which agents find each
// other.
func (b *bench) agent(name string, slots int, bind, seed, key string) (*agent, error) {
	a := &agent{cmd: exec.Command(b.programs.Hvdrun, "agent", "--name", name, "--slots", strconv.Itoa(slots),
		"--bind", bind, "--join", seed, "--key-file", key)}
	a.cmd.Stdout, a.cmd.Stderr = &a.log, &a.log
	a.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return a, a.cmd.Start()
}

// stop makes the agent leave gracefully and waits for its end.
func (a *agent) stop() error {
	if err := a.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	if err := a.cmd.Wait(); err != nil {
		return fmt.Errorf("an agent: %w\n%s", err, a.log.String())
	}
	return nil
}

// arriveSome runs a job over a cluster of agents; n times another agent with room for one worker
// starts and leaves again.
func (b *bench) arriveSome(ctx context.Context, n int) (_ []sample, err error) {
	key := filepath.Join(b.dir, "key")
	if out, err := exec.CommandContext(ctx, b.programs.Hvdrun, "agent", "--generate-key", key).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	seed, err := freeAddr()
	if err != nil {
		return nil, err
	}
	first, err := b.agent("first", b.workers, seed, seed, key)
	if err != nil {
		return nil, err
	}
	w, err := b.endless("arrivals", []string{"-np", strconv.Itoa(b.workers), "--min-np", "1",
		"--gossip-join", seed, "--gossip-key-file", key, "--gossip-bind", "127.0.0.1:0", "--drain-timeout", "2s"}, nil)
	if err != nil {
		return nil, err
	}
	var samples []sample
	after := uint64(0)
	for i := range n {
		if err = w.settled(ctx, b.workers, after); err != nil {
			break
		}
		s := sample{at: time.Now(), generation: w.Generation}
		var a *agent
		if a, err = b.agent(fmt.Sprintf("other-%d", i), 1, "127.0.0.1:0", seed, key); err != nil {
			break
		}
		if err = w.settled(ctx, b.workers+1, s.generation); err != nil {
			break
		}
		after, samples = w.Generation, append(samples, s)
		if err = a.stop(); err != nil {
			break
		}
	}
	res, err := w.finish(b.size, err)
	if err != nil {
		return nil, err
	}
	for i := range samples {
		samples[i].growth(res)
		samples[i].heard = samples[i].hear(res.Lines)
	}
	if err := first.stop(); err != nil {
		return nil, err
	}
	return samples, b.remove(w.Dir)
}

// freeAddr returns a free loopback address.
func freeAddr() (string, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer ln.Close()
	return ln.Addr().String(), nil
}
