package agent

import (
	"context"
	"crypto/tls"
	"errors"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
)

// newRecorder returns a recorder that writes records to the log, as the field audit of a line.
func newRecorder(log logrus.FieldLogger, level logrus.Level) *audit.Recorder {
	return audit.NewRecorder(func(r audit.Record) { log.WithField(audit.Name, r).Log(level, "agent: "+audit.Name) })
}

// note records a request of a driver, or of somebody who has not proven to be one.
func (srv *server) note(by audit.Who, what, how, outcome string) {
	srv.audit.Add(audit.Record{Who: by, What: what, How: how, Run: by.Run, Host: srv.host, Outcome: outcome})
}

// caller returns the caller of a handler, as a subject and as records name it.
func caller(ctx context.Context) (identity.Subject, audit.Who, error) {
	var who audit.Who
	from, err := wire.Caller(ctx, func(cs tls.ConnectionState) (_ identity.Subject, err error) {
		if who, err = identity.Who(cs); err != nil {
			return identity.Subject{}, err
		}
		return identity.SubjectOf(cs)
	})
	if _, far := wire.PeerAddrs(ctx); far.IsValid() {
		who.From = far.String()
	}
	return from, who, err
}

// recordAttach records that a driver has requested a session.
func (srv *server) recordAttach(by audit.Who, m *agentpb.Attach, err error) {
	how, outcome := "", audit.Done
	switch {
	case m.GetTakeOver():
		how = "takes over from another driver"
	case m.GetResume():
		how = "again, after the stream broke"
	}
	if err != nil {
		outcome = audit.Refused(statusText(err))
	}
	srv.note(by, "attach", how, outcome)
}

// statusText returns the message of a gRPC status.
func statusText(err error) error {
	return errors.New(status.Convert(err).Message())
}

// record records a request about a worker by the driver on the session's stream; the lock is held.
func (s *session) record(what string, w *worker, how, outcome string) {
	r := audit.Record{Who: s.by, What: what, How: how, Run: s.run, Host: s.srv.host, Outcome: outcome}
	if w != nil {
		r.Slot, r.PID, r.Program, r.Dir = new(w.id.Index), w.pid, w.program, w.dir
	}
	if s.as != nil && what == "start" {
		r.As = s.as.As.Name
	}
	s.srv.audit.Add(r)
}

// recordViolation records a message because of which the session is refused; the lock is not held.
func (s *session) recordViolation(m *agentpb.ToAgent, why error) {
	what := "message"
	if kind := m.ProtoReflect().WhichOneof(m.ProtoReflect().Descriptor().Oneofs().ByName("what")); kind != nil {
		what = string(kind.Name())
	}
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	s.record(what, nil, "", audit.Refused(why))
}

// programOf returns the first word of a command. The other words may contain secrets.
func programOf(command [][]byte) string {
	if len(command) == 0 {
		return ""
	}
	return string(command[0])
}
