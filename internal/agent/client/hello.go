package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"
)

const (
	// HelloVersion is the version of Hello and Ready, and of the later messages.
	HelloVersion = 2
	// maxHello bounds the size of a hello and of its answer, in bytes.
	maxHello = 64 << 10
	// maxNoise bounds, in bytes, the other text that a remote shell may print before the answer,
	// such as a message of the day.
	maxNoise = 16 << 20
	// readyMark begins the line that answers a hello.
	readyMark = "hvdrun-agent-ready "
)

// Hello configures a job agent: one line of JSON on its standard input. It contains a secret.
type Hello struct {
	Version int
	// RunID is the job's run id, Host the job's name for the host.
	RunID, Host string
	// Credentials are the encoded credentials of the agent in the job.
	Credentials string
	// Patience is how long the agent waits for the first connection of its driver. Starter is the
	// PID of that driver if it is the agent's parent: if it ends before it has connected, the agent
	// ends too. 0: the parent is another process.
	Patience time.Duration
	Starter  int `json:",omitempty"`
	// Drain is how long workers may take to drain after the agent is asked to stop.
	Drain time.Duration
	// LogLevel is the lowest level that is logged, as logrus names it. The log goes to the driver.
	LogLevel string
	// BindGPUs makes each worker see only the GPU of its slot.
	BindGPUs bool
	// Loopback makes the agent listen only on the loopback interface. Listen, if not empty, is the
	// address to listen on instead, or an address towards which the agent's own address is chosen.
	Loopback bool
	Listen   string
	// Ports is the range of the ports to which other machines connect, in the syntax of
	// identity.ParsePorts.
	Ports string `json:",omitempty"`
	// Detach makes the process start a child in a new session, which answers.
	Detach bool
}

// Ready is a job agent's answer: one line of JSON on its standard output.
type Ready struct {
	Version int
	// Error is the reason why there is no agent; the following fields are empty then.
	Error string `json:",omitempty"`
	PID   int
	// Port is the port for drivers, Addresses are the addresses of the host.
	Port      int
	Addresses []string
	// Build names the program.
	Build string
	// Machine is equal for agents in the same container of the same machine. Empty: unknown.
	Machine string `json:",omitempty"`

	gone <-chan struct{} // closed when the agent, a child of this process, has ended; nil: not a child
	kill func()          // kills the agent; nil: this process cannot
	seek []string        // more names and addresses of the host, from its starter
}

// Starter starts the agent of a job on a host.
type Starter interface {
	// Start blocks until the agent has answered or failed. If ctx ends earlier, it leaves only
	// processes that end by themselves. Start may be called by many goroutines.
	Start(ctx context.Context, host string, hello Hello) (Ready, error)
}

// line returns the hello as a line.
func (h Hello) line() ([]byte, error) {
	h.Version = HelloVersion
	b, err := json.Marshal(h)
	if err == nil && len(b) >= maxHello {
		err = fmt.Errorf("a hello of %d bytes; an agent takes %d", len(b), maxHello)
	}
	return append(b, '\n'), err
}

// ReadHello reads a Hello and nothing beyond it. Its errors do not contain the text that was read.
func ReadHello(r io.Reader) (Hello, error) {
	var h Hello
	line, err := bufio.NewReaderSize(io.LimitReader(r, maxHello), maxHello).ReadSlice('\n')
	if err != nil {
		return h, fmt.Errorf("agent: an agent's hello has %d bytes without an end of line", len(line))
	}
	if err := json.Unmarshal(line, &h); err != nil {
		return Hello{}, errors.New("agent: an agent's hello is not valid JSON")
	}
	if h.Version != HelloVersion {
		return Hello{}, fmt.Errorf("agent: an agent's hello of version %d; this program knows version %d: "+
			"driver and hosts need the same hvdrun", h.Version, HelloVersion)
	}
	if h.RunID == "" || h.Host == "" || h.Patience <= 0 {
		return Hello{}, errors.New("agent: an agent's hello without a run, a host or patience")
	}
	return h, nil
}

// Write writes the answer to a Hello.
func (r Ready) Write(w io.Writer) error {
	r.Version = HelloVersion
	b, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("agent: %w", err)
	}
	_, err = fmt.Fprintf(w, "%s%s\n", readyMark, b)
	return err
}

// decodeReady reads an agent's answer to a Hello.
func decodeReady(answer string) (r Ready, err error) {
	text, ok := strings.CutPrefix(answer, readyMark)
	if !ok {
		return r, errors.New("its answer is not that of an agent")
	}
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		return r, fmt.Errorf("the answer is not JSON: %w", err)
	}
	switch {
	case r.Version != HelloVersion:
		err = fmt.Errorf("the host's hvdrun (%s) speaks version %d, and this one version %d", r.Build, r.Version, HelloVersion)
	case r.Error != "":
		err = errors.New(r.Error)
	case r.Port <= 0 || r.Port > 65535 || len(r.Addresses) > 256:
		err = fmt.Errorf("an answer with port %d and %d addresses", r.Port, len(r.Addresses))
	}
	return r, err
}

// Endpoints are the addresses (host:port) at which others may find a job agent, best first.
func (r Ready) Endpoints() (all []string) {
	for _, name := range append(r.seek[:len(r.seek):len(r.seek)], r.Addresses...) {
		all = append(all, net.JoinHostPort(name, strconv.Itoa(r.Port)))
	}
	return all
}
