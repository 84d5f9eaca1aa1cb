package shm

import (
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

// Tests and benchmarks with several processes run this test program again, with a role in its
// environment.

// cast is the other processes of a segment.
type cast struct {
	tb        testing.TB
	member    *Member // member of this process, with index 0
	processes []*exec.Cmd
	outputs   []io.Reader // their standard outputs
}

// perform starts a process for each other member of a new segment and joins as member 0.
func perform(tb testing.TB, role string, n int, lost func(int), extra ...string) *cast {
	tb.Helper()
	s, err := Create(n)
	if err != nil {
		tb.Fatal(err)
	}
	c := &cast{tb: tb}
	for i := 1; i < n; i++ {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), "SHM_TEST_ROLE="+role, "SHM_TEST_INVITATION="+hex.EncodeToString(s.Invitation()),
			"SHM_TEST_INDEX="+strconv.Itoa(i), "SHM_TEST_MEMBERS="+strconv.Itoa(n))
		cmd.Env = append(cmd.Env, extra...)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			tb.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			tb.Fatal(err)
		}
		c.processes, c.outputs = append(c.processes, cmd), append(c.outputs, out)
	}
	if c.member, err = s.Join(0, lost); err != nil {
		tb.Fatal(err)
	}
	return c
}

// finish waits for processes that end without being stopped.
func (c *cast) finish() {
	c.tb.Helper()
	for _, cmd := range c.processes {
		if err := cmd.Wait(); err != nil {
			c.tb.Error(err)
		}
	}
	if err := c.member.Close(); err != nil {
		c.tb.Error(err)
	}
}

// stop ends processes, some of which may have ended already.
func (c *cast) stop() {
	c.tb.Helper()
	for _, cmd := range c.processes {
		cmd.Process.Kill()
		cmd.Wait()
	}
	if err := c.member.Close(); err != nil {
		c.tb.Error(err)
	}
}

var roles = map[string]func(m *Member) error{"bench": benchRole, "mortal": mortalRole}

// play is the main function of a process with a role.
func play(role string) int {
	m, err := enter()
	if err == nil {
		err = roles[role](m)
	}
	if err == nil {
		err = m.Close()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, role, err)
		return 1
	}
	return 0
}

func enter() (*Member, error) {
	if _, is := os.LookupEnv("SHM_TEST_WATCHED"); is {
		fewWatched = number("SHM_TEST_WATCHED")
	}
	invitation, err := hex.DecodeString(os.Getenv("SHM_TEST_INVITATION"))
	if err != nil {
		return nil, err
	}
	s, err := Open(invitation, number("SHM_TEST_MEMBERS"))
	if err != nil {
		return nil, err
	}
	return s.Join(number("SHM_TEST_INDEX"), func(i int) { lostMembers <- i })
}

func number(name string) int {
	n, err := strconv.Atoi(strings.TrimSpace(os.Getenv(name)))
	if err != nil {
		panic(err)
	}
	return n
}
