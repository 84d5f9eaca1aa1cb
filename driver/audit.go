package driver

import (
	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/internal/identity"
)

// noteAudit makes events and lines of the log of the records so far. Events go through the machine,
// as all events do: a driver that takes over finds them in the journal, and knows what the events
// file has to hold.
func (l *loop) noteAudit() {
	for _, r := range l.cfg.Audit.Take() {
		r = r.Clean()
		_ = l.feed([]posted{{input: decide.Audited{Record: r}}}) // which ends no job
		log := l.cfg.Log.WithField(audit.Name, r)
		log.Debug("audit")
	}
}

// recordStart records the start of a worker, of this driver and not of one before.
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
