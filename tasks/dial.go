package tasks

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
)

const (
	// reachEvery is the pause between two attempts to reach the scheduler.
	reachEvery = 50 * time.Millisecond
	tellAfter  = 2 * time.Second  // how long attempts to reach it again fail before that is logged
	tellEvery  = 10 * time.Second // shortest pause between two such log lines
)

// dialTimeout bounds an attempt to reach the scheduler: if a driver has just died, the host's agent
// holds a connection until it knows the next driver.
const dialTimeout = 5 * time.Second

// greetTimeout bounds the wait for the scheduler's answer on an established connection.
const greetTimeout = 20 * time.Second

// absentFor is how long the socket of a job may be missing while the job starts or is being
// resumed.
const absentFor = 2 * time.Second

// session is one connection to the scheduler after the handshake.
type session struct {
	conn  net.Conn
	link  *link.Link[*taskspb.ToTasks] // owns conn
	r     *link.Reader
	first *taskspb.FromTasks // the scheduler's first message, which contains the welcome
}

// greet connects once and performs the handshake. The error is a refusedError if another attempt
// cannot succeed.
func greet(ctx context.Context, dial func(context.Context) (net.Conn, error), hello func(net.Conn) *taskspb.TasksHello) (*session, error) {
	conn, err := dial(ctx)
	if err != nil {
		return nil, fmt.Errorf("tasks: connecting to the scheduler: %w", err)
	}
	s := &session{
		conn: conn, link: link.New(conn, func() *taskspb.ToTasks { return &taskspb.ToTasks{} }), r: link.NewReader(conn), first: &taskspb.FromTasks{},
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	said := hello(conn)
	_ = conn.SetDeadline(time.Now().Add(greetTimeout))
	err = s.greet(said)
	_ = conn.SetDeadline(time.Time{})
	if !stop() {
		err = errors.Join(ctx.Err(), err)
	}
	if err != nil {
		s.link.Close()
		return nil, err
	}
	return s, nil
}

// greet sends hello and reads the welcome.
func (s *session) greet(hello *taskspb.TasksHello) error {
	err := s.link.Send(hello, func(m *taskspb.ToTasks) { m.Hello = hello })
	if err == nil {
		err = s.r.Read(s.first)
	}
	switch {
	case err != nil:
		return fmt.Errorf("tasks: the scheduler does not answer: %w", err)
	case s.first.GetRefused() != "":
		return refusedError{s.first.GetRefused()}
	case s.first.GetWelcome() == nil:
		return errors.New("tasks: the scheduler's first message is not a welcome")
	}
	return nil
}

// refusedError is an answer of the scheduler that means that another attempt cannot succeed.
type refusedError struct{ why string }

func (e refusedError) Error() string {
	return "tasks: refused: " + strings.TrimPrefix(e.why, "scheduler: ")
}

// reach calls hello until it has connected, ctx ends, the scheduler refuses, or patience has
// passed (0: no limit). While another hvdrun resumes the job, the scheduler is unreachable. first
// means that there was no connection before: then reach does not retry if one end does not accept
// the other's identity, and retries only briefly if the scheduler's socket does not exist, because
// the job is over.
func reach(ctx context.Context, patience time.Duration, log logrus.FieldLogger, first bool,
	hello func(context.Context) (*session, error)) (*session, error) {
	failures := retry.Row{Least: tellEvery, Quiet: tellAfter}
	for since := time.Now(); ; {
		s, err := hello(ctx)
		var refused refusedError
		waited := time.Since(since)
		switch {
		case err == nil || errors.As(err, &refused) || first && unproven(err):
			return s, err
		case first && errors.Is(err, fs.ErrNotExist) && waited > absentFor:
			return nil, fmt.Errorf("%w any more: %w", ErrNoJob, err)
		case patience > 0 && waited > patience:
			return nil, err
		case ctx.Err() == nil:
			failures.Warn(log, time.Now(), "tasks: the scheduler is not reached", err)
		}
		select {
		case <-time.After(reachEvery):
		case <-ctx.Done():
			return nil, errors.Join(context.Cause(ctx), err)
		}
	}
}

// hearAll passes the messages of the scheduler to hear until ctx ends, or the scheduler refuses or
// is unreachable for longer than patience (0: no limit). s is the first connection; hello makes
// further ones. ended is called for each connection when it has ended, and returns false if no
// other may follow; then hearAll returns nil, as it does once ctx has ended.
func hearAll(ctx context.Context, s *session, patience time.Duration, log logrus.FieldLogger,
	hello func(context.Context) (*session, error), hear func(*taskspb.FromTasks), ended func() bool) error {
	for {
		err := s.listen(ctx, hear)
		if !ended() || ctx.Err() != nil {
			return nil
		}
		log.Debugf("tasks: the connection to the scheduler has ended: %v", err)
		var refused refusedError
		if errors.As(err, &refused) {
			return err
		}
		s, err = reach(ctx, patience, log, false, hello)
		switch {
		case err == nil: // even if ctx has ended: what hello has set up ends by a call of ended
		case ctx.Err() != nil:
			return nil
		default:
			return err
		}
	}
}

// listen passes messages to hear until the connection or ctx ends.
func (s *session) listen(ctx context.Context, hear func(*taskspb.FromTasks)) error {
	defer context.AfterFunc(ctx, func() { s.conn.Close() })()
	var m taskspb.FromTasks
	for {
		if err := s.r.Read(&m); err != nil {
			return err
		}
		if why := m.GetRefused(); why != "" {
			return refusedError{why}
		}
		hear(&m)
	}
}

// unproven reports whether an error means that one end does not accept the identity of the other,
// so that another attempt cannot succeed.
func unproven(err error) bool {
	var far *net.OpError
	var near *tls.CertificateVerificationError
	return errors.As(err, &near) || errors.As(err, &far) && far.Op == "remote error" // a TLS alert
}

// ownDial returns a function that connects this process, a worker of a job, to the scheduler of its
// driver.
func ownDial() (func(context.Context) (net.Conn, error), error) {
	own, err := ownJob()
	path := plan.OwnTasks()
	switch {
	case !errors.Is(err, ErrNoJob):
		return own.dial, err
	case path == "":
		return nil, fmt.Errorf("%w, and was not started by hvdrun tasks run", err)
	}
	if fi, err := os.Stat(path); err != nil || !fi.Mode().IsRegular() {
		return func(ctx context.Context) (net.Conn, error) { return wire.DialLocal(ctx, path) }, nil
	}
	return invited(path)
}

// invited returns a function that connects to the scheduler of a job on another machine, as the
// invitation file at path describes.
func invited(path string) (func(context.Context) (net.Conn, error), error) {
	addresses, creds, err := identity.ReadInvitation(path)
	if err != nil {
		return nil, fmt.Errorf("tasks: %s: %w", plan.EnvTasks, err)
	}
	return func(ctx context.Context) (net.Conn, error) {
		var failed []error
		for _, addr := range addresses {
			conn, err := dialer(addr, creds, identity.Driver, line.TasksProtocol)(ctx)
			if err == nil {
				return conn, nil
			}
			failed = append(failed, err)
		}
		return nil, errors.Join(failed...)
	}, nil
}

// ownPlace describes the job of this process and the place of the process in it.
type ownPlace struct {
	dial  func(context.Context) (net.Conn, error)
	slot  plan.Slot // the slot for which the process was started
	run   string
	creds *identity.Credentials
}

func ownJob() (own ownPlace, err error) {
	w, driven, err := plan.OwnWorker()
	if err != nil {
		return own, fmt.Errorf("tasks: environment: %w", err)
	}
	if !driven {
		return own, fmt.Errorf("%w: this process is not a worker of one", ErrNoJob)
	}
	creds, err := identity.Decode(w.Credentials)
	if err != nil {
		return own, fmt.Errorf("tasks: environment: %w", err)
	}
	return ownPlace{dialOwn(w, creds), w.Slot, w.RunID, creds}, nil
}

// dialOwn returns a function that connects a worker to its driver, by way of its launcher.
func dialOwn(w plan.Worker, creds *identity.Credentials) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, dialTimeout)
		defer cancel()
		return creds.DialDoor(ctx, w.LauncherAddr, line.TasksProtocol)
	}
}

// dialer returns a function that connects to a party of the job at addr, for a protocol.
func dialer(addr string, creds *identity.Credentials, role identity.Role, protocol string) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, dialTimeout)
		defer cancel()
		return creds.Dial(ctx, identity.Subject{Role: role}, addr, protocol)
	}
}
