package decide

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// all has one input of each kind.
var all = []Input{
	HostsFound{[]plan.Host{{Name: "a", Slots: 2}, {Name: "b", Slots: 1, Draining: true}}},
	HostsFound{},
	SourceFailed{Cause{errors.New("no such script")}},
	SourceStale{Cause{errors.New("exit status 1")}},
	WorkerForked{"w1", 4711},
	WorkerJoined{"w1", Join{
		After: 3, Commits: 17, HoldsState: true, DataAddrs: []string{"10.0.0.1:7", "[::1]:7"},
		Cause: "connection reset: \"é\"", Lost: []int{1, 3},
	}},
	WorkerJoined{"w2", Join{}},
	WorkerReported{"w1", ReportDone, 4, 0},
	WorkerReported{"w1", ReportLeaving, 4, 0},
	WorkerReported{"w1", ReportCommitted, 4, 18},
	WorkerReported{"w1", ReportDraining, 4, 18},
	WorkerEnded{ID: "w1", Exit: job.Exit{}},
	WorkerEnded{ID: "w1", Exit: job.Exit{Code: 7}},
	WorkerEnded{ID: "w1", Exit: job.Exit{Code: 137, Signal: syscall.SIGKILL}},
	WorkerEnded{ID: "w1", Exit: job.Exit{Code: 127, Err: errors.New("no such file")}},
	WorkerEnded{ID: "w1", Exit: job.Exit{Code: 143, Signal: syscall.SIGTERM, Evicted: true}},
	WorkerEnded{ID: "w1", Exit: job.Exit{Code: 137, Err: errors.New("process 7 is still there"), Unkillable: true}},
	Interrupted{Cause{job.StopSignal{Signal: syscall.SIGTERM}}},
	Interrupted{Cause{errors.New("driver: serving the rendezvous: no such luck")}},
	WorkerStalled{"w1", 4, "silent for 5s", 0},
	WorkerStirred{"w1", 4},
	WorkerHung{"w1", 4, "silent for 2m0s"},
	WorldJammed{4, "all 2 ranks", 0},
	WorldStuck{4, "ranks 0 1 in AllReduce"},
	DeadlinePassed{},
	Commanded{job.Command{Verb: job.Drain, Host: "a"}},
	Commanded{job.Command{Verb: job.Exclude, Host: "fe80::1", Slot: new(0), For: 90 * time.Second}},
	Commanded{job.Command{Verb: job.Scale, MinNP: new(1), MaxNP: new(0)}},
	Commanded{job.Command{Verb: job.Readmit, Host: "a", Slot: new(3)}},
	Resumed{},
	WorkerWrites{"w1"},
	WorkerDying{"w1", "was killed by signal 6 (aborted) and dumps its core", 0},
	WorkerMoved{"w1", 4, 700 * time.Millisecond},
	BackendTold{"w1", 4, "ipc+hosts"},
	WorkerFailing{"w1", "ValueError: bad (train.py:3)"},
	Commanded{job.Command{Verb: job.Drain, Host: "a", By: audit.Who{UID: "1000", PID: 7}}},
	Audited{audit.Record{
		Time: time.Unix(1_700_000_000, 0).UTC(), Who: audit.Who{UID: "1000", PID: 7}, What: "start", Host: "a", Slot: new(1),
		Dir: "/home/alice", Program: "./train", PID: 8, Outcome: audit.Done,
	}},
	WorkerTrains{"w1", 4},
	WorkerJoined{"w2", Join{After: 3, Trained: new(false)}},
	WorkerDying{"w1", "was killed by signal 9 (killed)", syscall.SIGKILL},
	WorkerStalled{"w1", 4, "silent for 5s", 5 * time.Second},
	WorldJammed{4, "all 2 ranks", 6 * time.Second},
	WorldStirred{4},
	WorldTrains{4},
	WorkerJoined{"w2", Join{After: 3, Commits: 17, HoldsState: true, Undone: 700 * time.Millisecond}},
	TasksTold{job.TaskEvent{Name: job.TaskFailed, Function: "f", Client: "a:7", N: 3, Reason: "poison", Text: "it kills", Dropped: 2}},
	TasksTold{job.TaskEvent{Name: job.TaskWorkerLeft, Worker: "a:8", Host: "a", Lost: true}},
	WorkerEnded{ID: "w1", Exit: job.Exit{Code: 7}, Ran: []string{"f/v1", "g/v1"}},
	TasksTold{job.TaskEvent{Name: job.TaskWorkerStuck, Worker: "a:8", Incarnation: "w1", Function: "f", N: 3, Text: "cancelled, has not ended for 30s"}},
}

// TestRecordFormat: the records of each kind of input equal those that an earlier build of this
// version wrote.
func TestRecordFormat(t *testing.T) {
	limit := 3
	var got bytes.Buffer
	enc := json.NewEncoder(&got)
	first := JobRecord{
		Version: JournalVersion, Begun: 1_700_000_000_000_000_000,
		Size:       job.Size{NP: 4, Min: 2, Max: 8, Elastic: true},
		Blame:      job.Blame{Policy: job.BlameHost, CooldownMin: time.Second, CooldownMax: time.Minute, ResetLimit: &limit},
		MasterPort: 4001,
	}
	first.Timeouts = first.Timeouts.WithDefaults()
	if err := enc.Encode(first); err != nil {
		t.Fatal(err)
	}
	for i, in := range all {
		if err := enc.Encode(NewRecord(time.Unix(1_700_000_000, int64(i)), in, []string{"x", "y"}[:i%3%2])); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join("testdata", "journal", fmt.Sprintf("v%d.jsonl", JournalVersion))
	if *update {
		if err := os.WriteFile(path, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got.String() != string(want) {
		t.Errorf("the format has changed, and with it must JournalVersion:\n%s", diff(string(want), got.String()))
	}
	lines := bytes.Split(bytes.TrimSpace(want), []byte("\n"))
	var back JobRecord
	if err := decode(lines[0], &back); err != nil || !reflect.DeepEqual(back, first) {
		t.Errorf("%+v was read for %+v, %v", back, first, err)
	}
	for i, in := range all {
		var r Record
		if err := decode(lines[i+1], &r); err != nil {
			t.Fatal(err)
		}
		back, err := r.input()
		if err != nil || dump(&back) != dump(&in) || r.Time != time.Unix(1_700_000_000, int64(i)).UnixNano() {
			t.Errorf("%#v was read for %#v, %v", back, in, err)
		}
	}
}

func TestReplayRefuses(t *testing.T) {
	first, err := json.Marshal(JobRecord{Version: JournalVersion, Size: job.Size{NP: 1, Min: 1, Elastic: true}})
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ records, says string }{
		"another version":              {`{"version":1,"strange":1}`, "of version 1; this program knows version 8"},
		"garbage":                      {`garbage`, "of version 0"},
		"an unknown event":             {string(first) + "\n" + `{"t":1,"flood":{}}`, `unknown field "flood": this version of hvdrun is too old`},
		"an unknown field":             {string(first) + "\n" + `{"t":1,"deadline":{},"colour":"red"}`, `unknown field "colour": this version of hvdrun is too old`},
		"bad hosts":                    {string(first) + "\n" + `{"t":1,"hosts":{"Hosts":[{"Name":"a","Slots":-1}]}}`, "slots"},
		"a start too few":              {string(first) + "\n" + `{"t":1,"hosts":{"Hosts":[{"Name":"a","Slots":1}]}}`, "decided otherwise"},
		"a start too many":             {string(first) + "\n" + `{"t":1,"ids":["x"],"hosts":{}}`, "decided otherwise"},
		"an unknown field of an input": {string(first) + "\n" + `{"t":1,"forked":{"colour":"red"}}`, `unknown field "colour": this version of hvdrun is too old`},
		"an unknown field of an exit":  {string(first) + "\n" + `{"t":1,"ended":{"Exit":{"Colour":1}}}`, `unknown field "Colour": this version of hvdrun is too old`},
		"no input":                     {string(first) + "\n" + `{"t":1,"joined":null}`, "a record has no input"},
		"two inputs":                   {string(first) + "\n" + `{"t":1,"resumed":{},"deadline":{}}`, "a record has two inputs"},
		"no command":                   {string(first) + "\n" + `{"t":1,"commanded":{}}`, "command"},
		"a late snapshot":              {string(first) + "\n" + `{"t":1,"deadline":{}}` + "\n" + `{"t":1,"snapshot":{}}`, "snapshot"},
		"a bad snapshot":               {string(first) + "\n" + `{"t":1,"snapshot":{"machine":{"size":{"NP":1},"members":["x"]}}}`, "the world is not valid"},
		"a bad command":                {string(first) + "\n" + `{"t":1,"commanded":{"verb":"scale","min_np":0}}`, "at least 1"},
	} {
		p := &Replay{}
		var err error
		for line := range strings.SplitSeq(c.records, "\n") {
			if err = p.Next([]byte(line)); err != nil {
				break
			}
		}
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: got %v, want %q", name, err, c.says)
		}
	}
}

// TestReplayOfEveryBeginning: the records up to any of them restore the machine as it was then, in
// every field. Package journal ensures that a journal ends after a complete record.
func TestReplayOfEveryBeginning(t *testing.T) {
	for seed := range rounds(12) {
		s := newSim(t, seed)
		dumps := []string{"", dump(s.m)} // by the number of records
		s.stepped = func() { dumps = append(dumps, dump(s.m)) }
		for range 60 {
			s.trouble()
		}
		s.calm()
		for n := range len(s.log) + 1 {
			p := &Replay{}
			for _, r := range s.log[:n] {
				if err := p.Next(r); err != nil {
					t.Fatalf("seed %d, %d records of %d: %v", seed, n, len(s.log), err)
				}
			}
			if n == 0 {
				continue // there is no machine yet
			}
			if got := dump(p.Machine); got != dumps[n] {
				t.Fatalf("seed %d, %d records of %d: the machine is another\n%s", seed, n, len(s.log),
					diff(strings.ReplaceAll(dumps[n], " ", "\n"), strings.ReplaceAll(got, " ", "\n")))
			}
		}
	}
}

// FuzzReplay: any records are either refused or restore a machine.
func FuzzReplay(f *testing.F) {
	for seed := range uint64(3) {
		s := newSim(&testing.T{}, seed)
		for range 40 {
			s.trouble()
		}
		f.Add(bytes.Join(s.log, []byte("\n")))
		records, err := s.m.Records(s.job, nil, nil)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(bytes.Join(append(records, []byte(`{"t":1,"deadline":{}}`)), []byte("\n")))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		p := &Replay{}
		for line := range bytes.SplitSeq(text, []byte("\n")) {
			if p.Next(line) != nil {
				return
			}
		}
	})
}

// dump prints a value with everything that it contains, in a canonical form. Errors are printed as
// text, functions not at all; a nil slice equals an empty one.
func dump(v any) string {
	var b strings.Builder
	dumpTo(&b, reflect.ValueOf(v).Elem(), func(reflect.Type, string) bool { return false })
	return b.String()
}

// dumpTo is like dump, without the fields for which skip returns true.
func dumpTo(b *strings.Builder, v reflect.Value, skip func(of reflect.Type, field string) bool) {
	if v.CanAddr() {
		v = reflect.NewAt(v.Type(), unsafe.Pointer(v.UnsafeAddr())).Elem() // fields that are not exported too
	}
	if v.CanInterface() {
		switch x := v.Interface().(type) {
		case time.Time:
			fmt.Fprint(b, x.UnixNano())
			return
		case error:
			if x != nil && v.Kind() == reflect.Interface {
				fmt.Fprintf(b, "error(%q,%d)", x.Error(), job.ExitStatus(x))
				return
			}
		}
	}
	switch v.Kind() {
	case reflect.Func:
	case reflect.Pointer, reflect.Interface:
		if v.IsNil() {
			b.WriteString("nil")
			return
		}
		e := v.Elem()
		if v.Kind() == reflect.Interface { // to be addressable
			p := reflect.New(e.Type())
			p.Elem().Set(e)
			e = p.Elem()
			b.WriteString(e.Type().String())
		}
		dumpTo(b, e, skip)
	case reflect.Struct:
		b.WriteString("{ ")
		for i := range v.NumField() {
			if skip(v.Type(), v.Type().Field(i).Name) {
				continue
			}
			b.WriteString(v.Type().Field(i).Name + ":")
			dumpTo(b, v.Field(i), skip)
			b.WriteString(" ")
		}
		b.WriteString("}")
	case reflect.Slice:
		b.WriteString("[ ")
		for i := range v.Len() {
			dumpTo(b, v.Index(i), skip)
			b.WriteString(" ")
		}
		b.WriteString("]")
	case reflect.Map:
		entries := map[string]string{}
		for it := v.MapRange(); it.Next(); {
			p := reflect.New(it.Value().Type())
			p.Elem().Set(it.Value())
			var e strings.Builder
			dumpTo(&e, p.Elem(), skip)
			entries[fmt.Sprint(it.Key().Interface())] = e.String()
		}
		fmt.Fprint(b, entries) // in the order of the keys
	default:
		fmt.Fprintf(b, "%#v", v.Interface())
	}
}

// TestStopIsRecorded: the next driver knows who stopped the job, and that this is not a failure.
func TestStopIsRecorded(t *testing.T) {
	for _, cause := range []error{job.StopCommand{UID: "1000"}, job.StopCommand{}, job.StopSignal{Signal: syscall.SIGINT}} {
		text, err := json.Marshal(Cause{cause})
		if err != nil {
			t.Fatal(err)
		}
		var back Cause
		if err := decode(text, &back); err != nil || back.Err.Error() != cause.Error() || job.ExitStatus(back.Err) != job.ExitStatus(cause) {
			t.Errorf("%v was read for %v, %v", back.Err, cause, err)
		}
	}
}
