package driver

import (
	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/internal/identity"
)

// noteAudit turns the audit records so far into events and log lines. The events go through the
// machine like all others, so that a driver that takes over finds them in the journal and knows the
// contents of the events file.
func (l *loop) noteAudit() {
	for _, r := range l.cfg.Audit.Take() {
		r = r.Clean()
		_ = l.feed([]posted{{input: decide.Audited{Record: r}}}) // audit records never end a job
		log := l.cfg.Log.WithField(audit.Name, r)
		log.Debug("audit")
	}
}

// recordStart records that this driver has started a worker, or failed to. Workers that a previous
// driver started are not recorded.
func (l *loop) recordStart(a *decide.StartWorker, pid int, err error) {
	if a.Forked {
		return
	}
	l.cfg.Audit.Add(audit.Record{
		Who:  audit.Self(string(identity.Driver), l.cfg.RunID),
		What: "start", Host: a.Slot.Host, Slot: new(a.Slot.Index), Dir: l.cfg.Dir, Program: l.cfg.Command[0], PID: pid,
		Outcome: audit.Of(err),
	})
}
