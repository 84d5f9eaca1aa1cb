package dashboard

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/hvdrun/hvdrun/job"
)

// View is everything that the page and the terminal show of a job.
type View struct {
	// Status is the job's status, without its events.
	Status job.Status
	// Command is the job's command line.
	Command []string
	// Problem is the reason why the job's status cannot be read; empty: it can.
	Problem string
	// Commits is the number of the newest commit, Rate the commits per second since the last look,
	// or 0.
	Commits    uint64
	Rate       float64
	Worlds     []World
	Forgotten  int // number of worlds before these
	Recoveries Recoveries
	Points     []Point
	// Curves are the numbers that rank 0 has reported, by name.
	Curves map[string][]Point
	// Events are the last events, oldest first.
	Events []Event
	// Tasks is the status of the job's scheduler of tasks; nil: it has none.
	Tasks json.RawMessage
	// Output is whether the workers' output is kept and can be read.
	Output bool
}

// Over reports whether the job has ended.
func (v *View) Over() bool { return v.Status.State.Ended() }

// Cannot returns the reason why the job accepts no commands, or "".
func (v *View) Cannot() string {
	switch {
	case v.Over():
		return "the job has ended"
	case v.Status.Driver == 0:
		return "the job has no driver"
	}
	return ""
}

// commitsOf returns the number of the newest commit in a status.
func commitsOf(s *job.Status) (newest uint64) {
	for _, h := range s.Hosts {
		for _, slot := range h.Slots {
			if slot.Commits != nil && slot.State == job.SlotTraining {
				newest = max(newest, *slot.Commits)
			}
		}
	}
	return newest
}

// figuresOf returns the figures that rank 0 reports.
func figuresOf(s *job.Status) []job.Figure {
	for _, h := range s.Hosts {
		for _, slot := range h.Slots {
			if slot.Rank != nil && *slot.Rank == 0 {
				return slot.Figures
			}
		}
	}
	return nil
}

// shown is a view as JSON texts, by the names of its parts on the page. A patch has the parts that
// differ from the view before. The slots are separate, since they change most.
type shown struct {
	parts   map[string][]byte
	slots   [][]byte // of all hosts in order, without commits
	commits []byte
	seq     int // Seq of the last event
}

// head is a status without the parts that are separate, and with what else the page needs.
type head struct {
	job.Status
	Command []string `json:"command"`
	Problem string   `json:"problem"`
	Output  bool     `json:"output"`
	Cannot  string   `json:"cannot"`
	// Commits is the number of commits of a job that has ended.
	Commits uint64 `json:"commits,omitempty"`
}

// hostHead is a host with the indices of its slots instead of the slots.
type hostHead struct {
	job.Host
	Slots []int `json:"slots"`
}

// shownSlot is a slot, with whether its worker is late.
type shownSlot struct {
	job.Slot
	Late bool `json:"late,omitempty"`
}

// MarshalJSON implements json.Marshaler: it returns [milliseconds since 1970, rate].
func (p Point) MarshalJSON() ([]byte, error) {
	b := append([]byte{'['}, strconv.FormatInt(p.Time.UnixMilli(), 10)...)
	b = append(b, ',')
	b = strconv.AppendFloat(b, p.Rate, 'g', 5, 64)
	return append(b, ']'), nil
}

// show returns the texts of a view.
func show(v *View) (*shown, error) {
	s := v.Status
	hosts := make([]hostHead, 0, len(s.Hosts))
	slots := []shownSlot{}
	commits := []*uint64{}
	for _, h := range s.Hosts {
		hh := hostHead{h, []int{}}
		for _, slot := range h.Slots {
			hh.Slots = append(hh.Slots, slot.Slot)
			commits = append(commits, slot.Commits)
			slot.Commits = nil
			slots = append(slots, shownSlot{slot, slot.Straggler.Late()})
		}
		hosts = append(hosts, hh)
	}
	waits, goodput := list(s.Waits), s.Goodput
	s.Time, s.Hosts, s.Waits, s.Events, s.Goodput = time.Time{}, nil, nil, nil, job.Goodput{}
	out := &shown{parts: map[string][]byte{}, slots: make([][]byte, len(slots))}
	ended := uint64(0)
	if v.Over() {
		ended = v.Commits
	}
	var err error
	put := func(value any) (text []byte) {
		if err == nil {
			text, err = json.Marshal(value)
		}
		return text
	}
	for name, value := range map[string]any{
		"job":   head{s, list(v.Command), v.Problem, v.Output, v.Cannot(), ended},
		"hosts": hosts, "waits": waits, "goodput": goodput, "worlds": list(v.Worlds), "forgotten": v.Forgotten,
		"recoveries": v.Recoveries, "points": list(v.Points), "curves": v.Curves, "tasks": v.Tasks,
	} {
		out.parts[name] = put(value)
	}
	for i := range slots {
		out.slots[i] = put(slots[i])
	}
	out.commits = put(commits)
	if n := len(v.Events); n > 0 {
		out.seq = v.Events[n-1].Seq
	}
	if err != nil {
		return nil, fmt.Errorf("dashboard: %w", err)
	}
	return out, nil
}

// list returns a list that JSON never encodes as null.
func list[T any](all []T) []T {
	if all == nil {
		return []T{}
	}
	return all
}

// names are the names of the parts of a view, in the order in which they are written.
var names = []string{"job", "hosts", "waits", "goodput", "worlds", "forgotten", "recoveries", "points", "tasks"}

// object builds a JSON object from texts.
type object struct {
	bytes.Buffer
	some bool
}

func (o *object) put(name string, text []byte) {
	o.WriteByte(map[bool]byte{false: '{', true: ','}[o.some])
	o.some = true
	fmt.Fprintf(o, "%q:%s", name, text)
}

// full returns the whole view, with these of its events.
func (s *shown) full(now time.Time, seq int, rate float64, events []Event) []byte {
	var o object
	s.begin(&o, now, seq, rate)
	for _, name := range names {
		o.put(name, s.parts[name])
	}
	o.put("curves", s.parts["curves"])
	o.put("slots", array(s.slots))
	o.put("commits", s.commits)
	text, _ := json.Marshal(list(events)) // cannot fail: strings, numbers and times
	o.put("events", text)
	o.WriteByte('}')
	return o.Bytes()
}

func (s *shown) begin(o *object, now time.Time, seq int, rate float64) {
	o.put("seq", strconv.AppendInt(nil, int64(seq), 10))
	o.put("now", strconv.AppendInt(nil, now.UnixMilli(), 10))
	o.put("rate", strconv.AppendFloat(nil, rate, 'g', 6, 64))
}

// patch returns the differences from the earlier view: changed parts as a whole; new points alone,
// as "more"; changed slots by their numbers; all commits if one is new; and new events. It leaves
// out the curves, to which the page adds the figures of rank 0.
func (s *shown) patch(before *shown, now time.Time, seq int, rate float64, events []Event) []byte {
	var o object
	s.begin(&o, now, seq, rate)
	for _, name := range names {
		was, is := before.parts[name], s.parts[name]
		switch more, grown := bytes.CutPrefix(is, was[:len(was)-1]); {
		case bytes.Equal(is, was):
		case name == "points" && grown && len(was) > 2:
			o.put("more", append([]byte{'['}, more[1:]...))
		default:
			o.put(name, is)
		}
	}
	if !bytes.Equal(s.parts["hosts"], before.parts["hosts"]) {
		o.put("slots", array(s.slots))
	} else {
		var some object
		for i, text := range s.slots {
			if !bytes.Equal(text, before.slots[i]) {
				some.put(strconv.Itoa(i), text)
			}
		}
		if some.some {
			some.WriteByte('}')
			o.put("changed", some.Bytes())
		}
	}
	if !bytes.Equal(s.commits, before.commits) {
		o.put("commits", s.commits)
	}
	fresh := events
	for len(fresh) > 0 && fresh[0].Seq <= before.seq {
		fresh = fresh[1:]
	}
	if len(fresh) > 0 {
		text, _ := json.Marshal(fresh) // cannot fail: strings, numbers and times
		o.put("events", text)
	}
	o.WriteByte('}')
	return o.Bytes()
}

func array(texts [][]byte) []byte {
	var b bytes.Buffer
	b.WriteByte('[')
	for i, text := range texts {
		if i > 0 {
			b.WriteByte(',')
		}
		b.Write(text)
	}
	b.WriteByte(']')
	return b.Bytes()
}
