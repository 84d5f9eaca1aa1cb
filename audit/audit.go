// Package audit records who made which request, and the outcome. A Recorder passes records on, and
// a Trail collects them for one reader. Records are among the events of a job, in the log of an
// agent, and in the folder of a cluster.
//
// A record contains no secret: of a command line it has only the program, and of an environment
// nothing. Texts from other processes are shortened, and their unprintable characters are replaced.
package audit

import (
	"encoding/json"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/hvdrun/hvdrun/internal/wake"
)

// Name is the name of the event, and of the log field, that holds a record.
const Name = "audit"

// Who is the author of a request. Unknown fields are empty.
type Who struct {
	// Role, Run, Host, Incarnation, User, UID and Serial are from a certificate. A holder of a
	// token has the role token.
	Role        string `json:"role,omitempty"`
	Run         string `json:"run,omitempty"`
	Host        string `json:"host,omitempty"`
	Incarnation string `json:"incarnation,omitempty"`
	// User is a name from the certificate. UID is a decimal number from the certificate or, without
	// a serial number, from the kernel.
	User string `json:"user,omitempty"`
	UID  string `json:"uid,omitempty"`
	// PID is the process at the other end of a unix socket, or this process.
	PID int `json:"pid,omitempty"`
	// Serial is the serial number of the certificate, hexadecimal.
	Serial string `json:"serial,omitempty"`
	// From is the address of the other end of a TCP connection.
	From string `json:"from,omitempty"`
}

// Self returns the Who of this process in the given run. role may be empty.
func Self(role, run string) Who {
	return Who{Role: role, Run: run, UID: strconv.Itoa(os.Getuid()), PID: os.Getpid()}
}

// Record is one line: who made which request, on what object, and the outcome. Fields that do not
// apply are empty.
type Record struct {
	Time time.Time `json:"time"`
	Who  Who       `json:"who"`
	// What is the request in one word: stop, start, attach.
	What string `json:"what"`
	// How holds details: "now", "for 1m0s".
	How string `json:"how,omitempty"`
	// Run, Host and Slot are the object of the request. Dir and Program are the folder and the
	// first word of a command, As is the user that runs it, and PID its process.
	Run     string `json:"run,omitempty"`
	Host    string `json:"host,omitempty"`
	Slot    *int   `json:"slot,omitempty"`
	Dir     string `json:"dir,omitempty"`
	Program string `json:"program,omitempty"`
	As      string `json:"as,omitempty"`
	PID     int    `json:"pid,omitempty"`
	// Outcome is "done", or a result of Refused or Failed.
	Outcome string `json:"outcome"`
	// Dropped is the number of refusals before this one that have no record, because there were too
	// many.
	Dropped int `json:"dropped,omitempty"`
}

// Done is the outcome of a successful request.
const Done = "done"

const (
	refused = "refused: "
	failed  = "failed: "
	// maxText bounds each text of a record, in bytes; cut marks the end of a longer text.
	maxText = 300
	cut     = "…"
)

// Refused is the outcome of a request that was not tried.
func Refused(why error) string { return refused + why.Error() }

// Failed is the outcome of a request that was tried and failed.
func Failed(why error) string { return failed + why.Error() }

// Of returns Done, or Failed if there is an error.
func Of(err error) string {
	if err != nil {
		return Failed(err)
	}
	return Done
}

// IsRefusal reports whether the outcome is one of Refused.
func (r Record) IsRefusal() bool { return strings.HasPrefix(r.Outcome, refused) }

// Clean returns the record with all texts short and printable.
func (r Record) Clean() Record {
	for _, text := range []*string{
		&r.Who.Role, &r.Who.Run, &r.Who.Host, &r.Who.Incarnation, &r.Who.User, &r.Who.UID, &r.Who.Serial, &r.Who.From,
		&r.What, &r.How, &r.Run, &r.Host, &r.Dir, &r.Program, &r.As, &r.Outcome,
	} {
		*text = clean(*text)
	}
	return r
}

func clean(text string) string {
	if len(text) > maxText {
		text = text[:maxText-len(cut)] + cut
	}
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) || r == utf8.RuneError {
			return '?'
		}
		return r
	}, text)
}

// MarshalJSON encodes the record as one object, cleaned.
func (r Record) MarshalJSON() ([]byte, error) {
	type plain Record
	r = r.Clean()
	r.Time = r.Time.UTC()
	return json.Marshal(plain(r))
}

// String returns the JSON of the record.
func (r Record) String() string {
	text, err := json.Marshal(r)
	if err != nil {
		return err.Error() // a record contains nothing that cannot be encoded
	}
	return string(text)
}

const (
	// mostRefusals is the largest number of records of refusals within refusalWindow. Otherwise
	// anyone who can reach a listener could fill the disk with them.
	mostRefusals  = 30
	refusalWindow = time.Minute
)

// Recorder passes records on. It limits the refusals that it passes on in each minute, and counts
// the rest. Its methods are safe for concurrent use. A nil Recorder drops everything.
type Recorder struct {
	write func(Record)

	mu      sync.Mutex
	window  time.Time // start of the current refusalWindow
	count   int
	dropped int
}

// NewRecorder returns a Recorder that calls write, possibly concurrently, with each record.
func NewRecorder(write func(Record)) *Recorder { return &Recorder{write: write} }

// Add passes a record on. If its Time is zero, Add sets it to now.
func (c *Recorder) Add(r Record) {
	if c == nil {
		return
	}
	if r.Time.IsZero() {
		r.Time = time.Now()
	}
	if r.IsRefusal() {
		var pass bool
		if r.Dropped, pass = c.admit(r.Time); !pass {
			return
		}
	}
	c.write(r)
}

// admit reports whether a refusal may pass, and how many have been dropped since the last one that
// passed.
func (c *Recorder) admit(now time.Time) (dropped int, pass bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if since := now.Sub(c.window); since >= refusalWindow || since < 0 {
		c.window, c.count = now, 0
	}
	if c.count >= mostRefusals {
		c.dropped++
		return 0, false
	}
	c.count++
	dropped, c.dropped = c.dropped, 0
	return dropped, true
}

// mostWaiting is the largest number of records that a Trail holds.
const mostWaiting = 16 << 10

// Trail holds records until its one reader takes them. Its methods are safe for concurrent use.
// Adding never blocks.
type Trail struct {
	*Recorder
	wake wake.Flag

	mu      sync.Mutex
	records []Record
}

// NewTrail returns an empty trail.
func NewTrail() *Trail {
	t := &Trail{wake: wake.New()}
	t.Recorder = NewRecorder(t.keep)
	return t
}

func (t *Trail) keep(r Record) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.records) < mostWaiting {
		t.records = append(t.records, r)
	}
	t.wake.Set()
}

// News returns a channel that receives a value when there may be records to take.
func (t *Trail) News() <-chan struct{} { return t.wake }

// Take returns the records, in the order in which they were added.
func (t *Trail) Take() (records []Record) {
	t.mu.Lock()
	defer t.mu.Unlock()
	records, t.records = t.records, nil
	return records
}
