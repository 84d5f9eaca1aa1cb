package plugin

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/go-plugin/runner"
	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/proc"
)

const (
	// maxLine is the longest line of a plugin, in bytes, that is not cut.
	maxLine = 4 << 10
	// drainGrace is how long the pipes of a process that has ended may stay open. Its process group
	// is gone by then; only a process that left the group can hold them.
	drainGrace = time.Second
	// keptLines is the number of the last lines that an error quotes.
	keptLines = 3
)

// process is a plugin's process. It implements go-plugin's runner.Runner. It leads a process group,
// which ends with it, and the kernel kills it when this process dies.
type process struct {
	cfg          Config
	log          logrus.FieldLogger
	handshakeEnv []string

	exited chan struct{} // closed when the process has ended
	status error         // how it ended; set before exited is closed
	output sync.WaitGroup

	pipes

	mu      sync.Mutex
	child   *proc.Child // nil: it has not been started
	killed  bool
	last    []string // the last lines that it printed
	words   proc.LastWords
	greeted bool  // there was a handshake
	refused error // why the process is refused
}

// pipes are what go-plugin reads: on stdout only the handshake, if that is valid, and on stderr
// nothing.
type pipes struct {
	stdout, stderr       *io.PipeReader
	stdoutEnd, stderrEnd *io.PipeWriter
}

var _ runner.Runner = (*process)(nil)

func newProcess(cfg Config, log logrus.FieldLogger) *process {
	p := &process{cfg: cfg, log: log, exited: make(chan struct{})}
	p.stdout, p.stdoutEnd = io.Pipe()
	p.stderr, p.stderrEnd = io.Pipe()
	return p
}

// Start implements runner.Runner.
func (p *process) Start(context.Context) error {
	stdout, stdoutEnd, err := os.Pipe()
	if err != nil {
		return err
	}
	stderr, stderrEnd, err := os.Pipe()
	if err != nil {
		stdout.Close()
		stdoutEnd.Close()
		return err
	}
	cmd := exec.Command(p.cfg.Path, p.cfg.Args...)
	// go-plugin communicates with a plugin by variables PLUGIN_*. Remove those in this process's
	// environment, which may come from a program that runs this one as its plugin, or from a
	// Kubernetes Service.
	cmd.Env = slices.DeleteFunc(cmd.Environ(), func(v string) bool { return strings.HasPrefix(v, "PLUGIN_") })
	cmd.Env = append(append(cmd.Env, p.cfg.Env...), p.handshakeEnv...)
	cmd.Stdout, cmd.Stderr = stdoutEnd, stderrEnd
	child, err := proc.Start(cmd)
	if p.cfg.Started != nil {
		pid := 0
		if err == nil {
			pid = child.PID
		}
		p.cfg.Started(pid, err)
	}
	stdoutEnd.Close()
	stderrEnd.Close()
	if err != nil {
		stdout.Close()
		stderr.Close()
		return err
	}
	p.mu.Lock()
	p.child = child
	if p.killed {
		child.Signal(syscall.SIGKILL)
	}
	p.mu.Unlock()
	p.output.Go(func() {
		<-child.Ended()
		status, err := child.Reap()
		if p.status = err; err == nil {
			p.status = errors.New(proc.EndText(status))
		}
		close(p.exited)
		late := time.Now().Add(drainGrace)
		stdout.SetReadDeadline(late)
		stderr.SetReadDeadline(late)
	})
	p.output.Go(func() { p.readStdout(stdout) })
	p.output.Go(func() { p.readStderr(stderr) })
	return nil
}

// readStdout passes the first line to go-plugin if it is a handshake, and logs the others.
func (p *process) readStdout(pipe *os.File) {
	defer pipe.Close()
	first := true
	readLines(pipe, func(line string) {
		if !first {
			if p.cfg.Stray != nil {
				p.cfg.Stray(line)
			}
			p.say(line)
			return
		}
		first = false
		if err := checkHandshake(line); err != nil {
			p.refuse(err)
		} else {
			p.mu.Lock()
			p.greeted = true
			p.mu.Unlock()
			_, _ = io.WriteString(p.stdoutEnd, line+"\n")
		}
		p.stdoutEnd.Close()
	})
	if first { // go-plugin will kill the process, and its further output would be lost
		select {
		case <-p.exited:
		case <-time.After(lastWords):
		}
	}
	p.stdoutEnd.Close()
}

func (p *process) readStderr(pipe *os.File) {
	defer pipe.Close()
	defer p.stderrEnd.Close() // go-plugin need not log anything itself
	readLines(pipe, p.say)
}

// readLines calls take with each line until the pipe ends.
func readLines(pipe io.Reader, take func(line string)) {
	r := bufio.NewReaderSize(pipe, maxLine)
	for {
		line, more, err := r.ReadLine()
		if err != nil {
			return
		}
		take(string(line))
		for more && err == nil { // skip the rest of a line that is too long
			_, more, err = r.ReadLine()
		}
	}
}

// say logs a line and keeps it for errors.
func (p *process) say(line string) {
	if strings.TrimSpace(line) == "" {
		return
	}
	logLine(p.log, line)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.words.Write([]byte(line + "\n"))
	if p.last = append(p.last, line); len(p.last) > keptLines {
		p.last = p.last[1:]
	}
}

// exitFault returns an error that says how the process has ended and what it printed last. Its
// output must have been read.
func (p *process) exitFault() error {
	p.wait()
	return p.withLastWords(p.status)
}

// refuse records why the process is refused.
func (p *process) refuse(why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refused = why
}

// startFault returns why the process, which is gone, could not be started. err is the error from
// go-plugin.
func (p *process) startFault(err error) error {
	p.mu.Lock()
	started, refused, greeted := p.child != nil, p.refused, p.greeted
	p.mu.Unlock()
	switch {
	case refused != nil:
		return refused
	case !started:
		return fmt.Errorf("it could not be started: %w", err)
	case !greeted:
		return fmt.Errorf("it is not a discovery plugin, or not one of hvdrun: it %w", p.exitFault())
	}
	return p.withLastWords(err)
}

// withLastWords returns err with the last lines that the process has printed or, if it has crashed,
// with the line that says why.
func (p *process) withLastWords(err error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	why := p.words.Crash()
	if why == "" {
		why = strings.Join(p.last, " ")
	}
	if why == "" {
		return err
	}
	return fmt.Errorf("%w: %s", err, why)
}

// signal sends a signal to the process group, if it exists yet.
func (p *process) signal(sig syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.child != nil {
		p.child.Signal(sig)
	}
}

// kill kills the process group, now or as soon as it exists.
func (p *process) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.killed = true
	if p.child != nil {
		p.child.Signal(syscall.SIGKILL)
	}
}

// wait blocks until the process, if it was started, is gone and its output has been read.
func (p *process) wait() { p.output.Wait() }

// Wait implements runner.Runner.
func (p *process) Wait(context.Context) error {
	p.wait()
	return nil
}

// Kill implements runner.Runner.
func (p *process) Kill(context.Context) error {
	p.kill()
	return nil
}

// Stdout implements runner.Runner.
func (p *process) Stdout() io.ReadCloser { return p.stdout }

// Stderr implements runner.Runner.
func (p *process) Stderr() io.ReadCloser { return p.stderr }

// Name implements runner.Runner.
func (p *process) Name() string { return p.cfg.Path }

// ID implements runner.Runner. It is never empty, because otherwise go-plugin would not remove its
// temporary folder.
func (p *process) ID() string { return p.cfg.Path }

// Diagnose implements runner.Runner.
func (p *process) Diagnose(context.Context) string { return "" }

// PluginToHost implements runner.Runner.
func (p *process) PluginToHost(network, addr string) (string, string, error) {
	return network, addr, nil
}

// HostToPlugin implements runner.Runner.
func (p *process) HostToPlugin(network, addr string) (string, string, error) {
	return network, addr, nil
}

// versionError means that a plugin speaks another version of internal/wire/discovery.proto.
type versionError struct {
	Plugin, Host int
}

// Error names both versions.
func (e *versionError) Error() string {
	return fmt.Sprintf("it speaks version %d of the discovery protocol, and this hvdrun version %d", e.Plugin, e.Host)
}

// shortestCert is shorter than any certificate in a handshake.
const shortestCert = 100

// checkHandshake returns an error if the first line that a plugin has printed must not reach
// go-plugin.
func checkHandshake(line string) error {
	fields := strings.Split(strings.TrimSpace(line), "|")
	if len(fields) < 4 || fields[0] != "1" {
		return fmt.Errorf("it is not a discovery plugin: it printed %q", shorten(line))
	}
	version, err := strconv.Atoi(fields[1])
	if err != nil {
		return fmt.Errorf("it is not a discovery plugin: it printed %q", shorten(line))
	}
	if version != protocolVersion {
		return &versionError{Plugin: version, Host: protocolVersion}
	}
	host, _, _ := net.SplitHostPort(fields[3])
	ip := net.ParseIP(host)
	switch {
	case len(fields) < 5 || fields[4] != "grpc":
		return fmt.Errorf("it does not serve gRPC: it printed %q", shorten(line))
	case fields[2] != "unix" && (fields[2] != "tcp" || !ip.IsLoopback()):
		return fmt.Errorf("it must serve on a unix socket or a port of 127.0.0.1, but printed %q", shorten(line))
	case len(fields) < 6 || len(fields[5]) < shortestCert:
		return fmt.Errorf("it serves without TLS: its handshake has no certificate: %q", shorten(line))
	}
	return nil
}

// shorten limits the length of a plugin's output in an error.
func shorten(line string) string {
	if len(line) > 100 {
		return line[:100] + "…"
	}
	return line
}
