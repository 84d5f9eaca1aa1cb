package cluster

import (
	"fmt"
	"os"
	"time"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

// auditFile is the file of a Dir with a line of JSON for each use, and each refused use, of the
// keys of the cluster.
const auditFile = "audit.jsonl"

// RecordDriver records that this process has issued itself a driver's certificate.
func (d *Dir) RecordDriver(creds *identity.Credentials) error {
	who := creds.Subject()
	return d.Record(audit.Record{
		What: "issue", How: "a driver's certificate, serial number " + creds.Serial(), Run: who.RunID, As: who.User, Outcome: audit.Done,
	})
}

// Record appends a record to auditFile. A record without a Who is one of this process.
func (d *Dir) Record(r audit.Record) error {
	if r.Time.IsZero() {
		r.Time = time.Now()
	}
	if r.Who == (audit.Who{}) {
		r.Who = audit.Self("", "")
	}
	f, err := safefile.AppendPlain(d.file(auditFile), os.O_WRONLY, safefile.Private)
	if err != nil {
		return fmt.Errorf("cluster: %w", err)
	}
	defer f.Close()
	if _, err := f.WriteString(r.String() + "\n"); err != nil { // in one write: several processes append
		return fmt.Errorf("cluster: %w", err)
	}
	return nil
}
