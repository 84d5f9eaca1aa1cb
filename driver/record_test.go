package driver

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

	"github.com/hvdrun/hvdrun/driver/control"
	"github.com/hvdrun/hvdrun/driver/journal"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/rendezvous"
)

// all is one event of each kind.
var all = []event{
	hostsFound{[]plan.Host{{Name: "a", Slots: 2}, {Name: "b", Slots: 1, Draining: true}}},
	hostsFound{},
	sourceFailed{errors.New("no such script")},
	sourceStale{errors.New("exit status 1"), 3 * time.Second},
	workerForked{"w1", 4711},
	workerJoined{"w1", rendezvous.Joining{
		After: 3, Commits: 17, HoldsState: true, DataAddrs: []string{"10.0.0.1:7", "[::1]:7"}, NotifyAddr: "10.0.0.1:8",
		Cause: "connection reset: \"é\"",
	}},
	workerJoined{"w2", rendezvous.Joining{}},
	workerReport{"w1", rendezvous.Done, 4, 0},
	workerReport{"w1", rendezvous.Leaving, 4, 0},
	workerReport{"w1", rendezvous.Committed, 4, 18},
	workerReport{"w1", rendezvous.Draining, 4, 18},
	workerEnded{"w1", Exit{}},
	workerEnded{"w1", Exit{Code: 7}},
	workerEnded{"w1", Exit{Code: 137, Signal: syscall.SIGKILL}},
	workerEnded{"w1", Exit{Code: 127, Err: errors.New("no such file")}},
	workerEnded{"w1", Exit{Code: 143, Signal: syscall.SIGTERM, Evicted: true}},
	workerEnded{"w1", Exit{Code: 137, Err: errors.New("process 7 is still there"), Unkillable: true}},
	interrupted{StopSignal{syscall.SIGTERM}},
	interrupted{errors.New("driver: serving the rendezvous: no such luck")},
	workerStalled{"w1", 4, "silent for 5s"},
	workerStirred{"w1", 4},
	workerHung{"w1", 4, "silent for 2m0s"},
	worldJammed{4, "all 2 ranks"},
	worldStuck{4, "ranks 0 1 in AllReduce"},
	deadlinePassed{},
	commanded{control.Command{Verb: control.Drain, Host: "a"}},
	commanded{control.Command{Verb: control.Exclude, Host: "fe80::1", Slot: new(0), For: 90 * time.Second}},
	commanded{control.Command{Verb: control.Scale, MinNP: new(1), MaxNP: new(0)}},
	commanded{control.Command{Verb: control.Readmit, Host: "a", Slot: new(3)}},
	resumed{},
	workerWrites{"w1"},
	workerDying{"w1", "was killed by signal 6 (aborted) and dumps its core"},
	workerMoved{"w1", 4, 700 * time.Millisecond},
}

// TestRecordFormat: what is written of each kind of event is what an earlier build of this version wrote.
func TestRecordFormat(t *testing.T) {
	limit := 3
	var got bytes.Buffer
	enc := json.NewEncoder(&got)
	job := jobRecord{
		Version: recordVersion, Begun: 1_700_000_000_000_000_000,
		Size:   Size{NP: 4, Min: 2, Max: 8, Elastic: true},
		Blame:  Blame{Policy: BlameHost, CooldownMin: time.Second, CooldownMax: time.Minute, ResetLimit: &limit},
		Listen: "127.0.0.1:4000", MasterPort: 4001,
	}
	job.Timeouts = job.Timeouts.withDefaults()
	if err := enc.Encode(job); err != nil {
		t.Fatal(err)
	}
	for i, ev := range all {
		if err := enc.Encode(newRecord(time.Unix(1_700_000_000, int64(i)), ev, []string{"x", "y"}[:i%3%2])); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join("testdata", "journal", fmt.Sprintf("v%d.jsonl", recordVersion))
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
		t.Errorf("the format has changed, and with it must recordVersion:\n%s", diff(string(want), got.String()))
	}
	lines := bytes.Split(bytes.TrimSpace(want), []byte("\n"))
	var back jobRecord
	if err := decode(lines[0], &back); err != nil || !reflect.DeepEqual(back, job) {
		t.Errorf("%+v was read for %+v, %v", back, job, err)
	}
	for i, ev := range all {
		var r record
		if err := decode(lines[i+1], &r); err != nil {
			t.Fatal(err)
		}
		back, err := r.event()
		if err != nil || dump(&back) != dump(&ev) || r.Time != time.Unix(1_700_000_000, int64(i)).UnixNano() {
			t.Errorf("%#v was read for %#v, %v", back, ev, err)
		}
	}
}

func TestReplayRefuses(t *testing.T) {
	job, err := json.Marshal(jobRecord{Version: recordVersion, Size: Size{NP: 1, Min: 1, Elastic: true}})
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ records, says string }{
		"another version":   {`{"version":1,"strange":1}`, "of version 1; this program knows version 4"},
		"garbage":           {`garbage`, "of version 0"},
		"an unknown event":  {string(job) + "\n" + `{"t":1,"event":"flood"}`, `unknown kind "flood"`},
		"an unknown field":  {string(job) + "\n" + `{"t":1,"event":"deadline","colour":"red"}`, "colour"},
		"bad hosts":         {string(job) + "\n" + `{"t":1,"event":"hosts","hosts":[{"Name":"a","Slots":-1}]}`, "slots"},
		"a start too few":   {string(job) + "\n" + `{"t":1,"event":"hosts","hosts":[{"Name":"a","Slots":1}]}`, "decided otherwise"},
		"a start too many":  {string(job) + "\n" + `{"t":1,"event":"hosts","ids":["x"]}`, "decided otherwise"},
		"a join of nothing": {string(job) + "\n" + `{"t":1,"event":"joined","worker":"x"}`, "says nothing"},
		"no command":        {string(job) + "\n" + `{"t":1,"event":"commanded"}`, "asks for nothing"},
		"no snapshot":       {string(job) + "\n" + `{"t":1,"event":"snapshot"}`, "snapshot"},
		"a late snapshot":   {string(job) + "\n" + `{"t":1,"event":"deadline"}` + "\n" + `{"t":1,"event":"snapshot","snapshot":{}}`, "snapshot"},
		"a bad snapshot":    {string(job) + "\n" + `{"t":1,"event":"snapshot","snapshot":{"machine":{"size":{"NP":1},"members":["x"]}}}`, "the world makes no sense"},
		"a bad command":     {string(job) + "\n" + `{"t":1,"event":"commanded","command":{"verb":"scale","min_np":0}}`, "at least one"},
	} {
		p := &replay{}
		var err error
		for line := range strings.SplitSeq(c.records, "\n") {
			if err = p.next([]byte(line)); err != nil {
				break
			}
		}
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: got %v, want %q", name, err, c.says)
		}
	}
}

// TestReplayFromEveryCut: wherever the journal of a job is cut, between records and within them, the machine that is made
// of it is the one that had written so much, in every field.
func TestReplayFromEveryCut(t *testing.T) {
	for seed := range rounds(12) {
		s := newSim(t, seed)
		dumps := []string{"", dump(s.m)} // by the number of records
		s.stepped = func() { dumps = append(dumps, dump(s.m)) }
		for range 60 {
			s.trouble()
		}
		s.calm()
		path := filepath.Join(t.TempDir(), "journal")
		j, err := journal.Create(path, "sim")
		if err != nil {
			t.Fatal(err)
		}
		ends := []int64{j.Size()}
		for _, r := range s.log {
			if err := j.Append(r); err != nil {
				t.Fatal(err)
			}
			ends = append(ends, j.Size())
		}
		j.Close()
		whole, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for n, end := range ends {
			within := end
			if n+1 < len(ends) {
				within += 1 + s.rnd.Int64N(ends[n+1]-end-1)
			}
			for _, cut := range []int64{end, within} {
				p := &replay{}
				if _, _, err := journal.Read(bytes.NewReader(whole[:cut]), p.next); err != nil {
					t.Fatalf("seed %d, cut at %d: %v", seed, cut, err)
				}
				if n == 0 {
					continue // no machine yet
				}
				if got := dump(p.m); got != dumps[n] {
					t.Fatalf("seed %d, %d records of %d: the machine is another\n%s", seed, n, len(s.log),
						diff(strings.ReplaceAll(dumps[n], " ", "\n"), strings.ReplaceAll(got, " ", "\n")))
				}
			}
		}
	}
}

// FuzzReplay: whatever a journal's records say, it is refused or makes a machine.
func FuzzReplay(f *testing.F) {
	for seed := range uint64(3) {
		s := newSim(&testing.T{}, seed)
		for range 40 {
			s.trouble()
		}
		f.Add(bytes.Join(s.log, []byte("\n")))
		records, err := (&loop{m: s.m, job: s.job}).records()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(bytes.Join(append(records, []byte(`{"t":1,"event":"deadline"}`)), []byte("\n")))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		p := &replay{}
		for line := range bytes.SplitSeq(text, []byte("\n")) {
			if p.next(line) != nil {
				return
			}
		}
	})
}

// dump writes down a value with all that it holds, in the same words for the same content. Errors are told by their text,
// functions not at all; there is no difference between no slice and an empty one.
func dump(v any) string {
	var b strings.Builder
	dumpTo(&b, reflect.ValueOf(v).Elem(), func(reflect.Type, string) bool { return false })
	return b.String()
}

// dumpTo does so but for the fields that are to be skipped.
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
				fmt.Fprintf(b, "error(%q,%d)", x.Error(), Status(x))
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
		fmt.Fprint(b, entries) // in order of keys
	default:
		fmt.Fprintf(b, "%#v", v.Interface())
	}
}
