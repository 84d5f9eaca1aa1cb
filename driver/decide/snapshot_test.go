package decide

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/hvdrun/hvdrun/driver/decide/internal/hosts"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// notSaved lists the fields of a machine and of its hosts that are recomputed instead of saved, and
// why.
var notSaved = map[string]string{
	"Machine.newID":   "it is the driver's",
	"Machine.out":     "it has been returned",
	"Machine.noted":   "it is empty between two steps",
	"Machine.due":     "the next step finds it",
	"Machine.spoken":  "workers that are added tell it",
	"fleet.free":      "the next step asks the hosts",
	"fleet.freeAt":    "as free",
	"fleet.rampUntil": "the next step finds it",
	"fleet.holder":    "the next step finds it before it looks at it",
	"Table.changes":   "as free",
	"Table.next":      "it is what was found at the last change",
}

// state returns the relevant state of a machine.
func state(m *Machine) string {
	var b strings.Builder
	dumpTo(&b, reflect.ValueOf(m).Elem(), func(of reflect.Type, field string) bool {
		return notSaved[of.Name()+"."+field] != ""
	})
	return b.String()
}

// again saves a machine and restores another from the snapshot.
func again(t testing.TB, m *Machine) *Machine {
	t.Helper()
	b, err := json.Marshal(m.save())
	if err != nil {
		t.Fatal(err)
	}
	var s snapshot
	if err := decode(b, &s); err != nil {
		t.Fatal(err)
	}
	made := New(Config{Size: m.size, Blame: m.blame, Timeouts: m.wait}, m.newID)
	if err := made.load(s); err != nil {
		t.Fatal(err)
	}
	return made
}

func sameState(t testing.TB, want, got *Machine, format string, args ...any) {
	t.Helper()
	if w, g := state(want), state(got); w != g {
		t.Fatalf("%s: the machine is another\n%s", fmt.Sprintf(format, args...),
			diff(strings.ReplaceAll(w, " ", "\n"), strings.ReplaceAll(g, " ", "\n")))
	}
}

// TestSnapshotHasEveryField: a snapshot contains every field of the machine and of its parts. A new
// field must be saved or listed in notSaved.
func TestSnapshotHasEveryField(t *testing.T) {
	m := full()
	sameState(t, m, again(t, m), "filled")
	empty := New(Config{Size: job.Size{NP: 1, Min: 1, Elastic: true}}, nil)
	sameState(t, empty, again(t, empty), "new")
	// The comparison of states covers every field.
	for _, field := range reflect.VisibleFields(reflect.TypeFor[Machine]()) {
		other, v := full(), reflect.Value{}
		owner := reflect.TypeFor[Machine]()
		for _, i := range field.Index[:len(field.Index)-1] {
			owner = owner.Field(i).Type
		}
		if v = reflect.ValueOf(other).Elem().FieldByIndex(field.Index); field.Anonymous || notSaved[owner.Name()+"."+field.Name] != "" {
			continue
		}
		if v = reflect.NewAt(v.Type(), unsafe.Pointer(v.UnsafeAddr())).Elem(); v.IsZero() {
			t.Errorf("full leaves %s zero", field.Name)
		}
		if v.SetZero(); field.Name != "hosts" && state(m) == state(other) {
			t.Errorf("state does not see %s", field.Name)
		}
	}
}

// full returns a machine in which every field has a value, distinct where possible.
func full() *Machine {
	f := &filler{}
	m := &Machine{}
	f.fill(reflect.ValueOf(m).Elem())
	m.size = job.Size{NP: 3, Min: 2, Max: 5, Spares: 2, Starts: 7, TasksOnly: true, Elastic: true}
	m.blame = job.Blame{Policy: job.BlameHost, CooldownMin: time.Second, CooldownMax: time.Minute}
	m.Result.Err = &storedError{"the state is lost, and somebody has stopped it", []error{job.ErrStateLost, job.StopSignal{Signal: syscall.SIGTERM}}}
	// Redundant fields have equal values.
	gone := m.published.Members[0]
	m.byID, m.bySlot = map[string]*Worker{}, map[plan.SlotID]*Worker{}
	workers := m.workers
	for m.workers = nil; len(workers) > 0; workers = workers[1:] {
		m.add(consistent(workers[0]))
	}
	m.published.World, m.published.Members = m.Current, []*Worker{consistent(gone), m.workers[0]}
	m.published.Root = 1
	// The configuration of hosts is derived from the job's.
	saved := m.hosts.State()
	m.hosts, _ = hosts.Restore(cooldownsOf(m.blame), saved)
	return m
}

func consistent(w *Worker) *Worker {
	w.start.ID, w.slot, w.Phase = w.id, w.start.Slot.SlotID, stopping
	return w
}

// filler sets all fields, exported or not.
type filler struct{ n int }

func (f *filler) fill(v reflect.Value) {
	f.n++
	if v.CanAddr() {
		v = reflect.NewAt(v.Type(), unsafe.Pointer(v.UnsafeAddr())).Elem()
	}
	switch v.Interface().(type) {
	case time.Time:
		v.Set(reflect.ValueOf(time.Unix(int64(f.n), 7).UTC()))
		return
	case plan.Host:
		v.Set(reflect.ValueOf(plan.Host{Name: fmt.Sprint("h", f.n), Slots: f.n, Draining: true}))
		return
	}
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		v.SetInt(int64(f.n))
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(uint64(f.n % 250))
	case reflect.String:
		v.SetString(fmt.Sprint("s", f.n))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		f.fill(v.Elem())
	case reflect.Struct:
		for i := range v.NumField() {
			f.fill(v.Field(i))
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		f.fill(v.Index(0))
		f.fill(v.Index(1))
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		f.fill(key)
		f.fill(value)
		v.SetMapIndex(key, value)
	case reflect.Interface:
		if v.Type() == reflect.TypeFor[error]() {
			v.Set(reflect.ValueOf(fmt.Errorf("error %d", f.n)))
		}
	}
}

// TestSnapshotAtEveryStep: a machine restored from a snapshot equals the original and reacts
// identically to all further inputs.
func TestSnapshotAtEveryStep(t *testing.T) {
	for seed := range rounds(16) {
		s := newSim(t, seed)
		var twins []*Machine // made at some steps, and fed the rest
		dice := rand.New(rand.NewPCG(seed, 9))
		n := 0
		s.stepped = func() {
			n++
			var r Record
			if err := decode(s.log[len(s.log)-1], &r); err != nil {
				t.Fatal(err)
			}
			for i, twin := range twins {
				feed(t, twin, r)
				sameState(t, s.m, twin, "seed %d, step %d, twin %d", seed, n, i)
			}
			made := again(t, s.m)
			sameState(t, s.m, made, "seed %d, step %d", seed, n)
			if len(twins) < 3 && dice.IntN(20) == 0 {
				twins = append(twins, made)
			} else if len(twins) > 0 && dice.IntN(30) == 0 {
				twins[dice.IntN(len(twins))] = made
			}
		}
		for range 100 {
			s.trouble()
		}
		s.calm()
	}
}

// feed steps a machine with a record.
func feed(t testing.TB, m *Machine, r Record) {
	t.Helper()
	in, err := r.input()
	if err != nil {
		t.Fatal(err)
	}
	ids := r.IDs
	m.newID = func(plan.SlotID) string {
		if len(ids) == 0 {
			t.Fatal("it starts other workers")
		}
		id := ids[0]
		ids = ids[1:]
		return id
	}
	m.Step(time.Unix(0, r.Time).UTC(), in)
	if len(ids) > 0 {
		t.Fatal("it starts fewer workers")
	}
}

// TestSnapshotInTheJournal: a journal that begins with a snapshot restores the same machine and
// recent events as all records, and reports the events since the snapshot.
func TestSnapshotInTheJournal(t *testing.T) {
	for seed := range uint64(8) {
		s := newSim(t, seed)
		for range 80 {
			s.trouble()
		}
		s.calm()
		whole := &Replay{}
		var told []job.Event
		whole.Told = func(e job.Event) { told = append(told, e) }
		for n, b := range s.log {
			if err := whole.Next(b); err != nil {
				t.Fatal(err)
			}
			if n%7 != 0 || n == 0 {
				continue
			}
			records, err := whole.Machine.Records(s.job, whole.Recent, json.RawMessage(fmt.Sprint(len(told))))
			if err != nil {
				t.Fatal(err)
			}
			if bytes.Contains(records[1], []byte(simCause)) {
				t.Fatal("a snapshot has why a worker has left its world")
			}
			part, before := &Replay{}, -1
			var after []job.Event
			part.Marked = func(b json.RawMessage) { _, _ = fmt.Sscan(string(b), &before) }
			part.Told = func(e job.Event) { after = append(after, e) }
			rest := &Replay{}
			for _, b := range s.log {
				if err := rest.Next(b); err != nil {
					t.Fatal(err)
				}
			}
			for _, b := range append(records, s.log[n+1:]...) {
				if err := part.Next(b); err != nil {
					t.Fatalf("seed %d, snapshot after %d: %v", seed, n, err)
				}
			}
			sameState(t, rest.Machine, part.Machine, "seed %d, snapshot after %d", seed, n)
			all := append(append([]job.Event{}, told...), after...)
			if want := events(t, s.log); texts(t, all) != texts(t, want) || before != len(told) {
				t.Fatalf("seed %d, snapshot after %d: %d and %d events are told, %d marked, of %d", seed, n, len(told), len(after), before, len(want))
			}
			a, _ := rest.Recent.Texts()
			b, _ := part.Recent.Texts()
			if fmt.Sprintf("%s", a) != fmt.Sprintf("%s", b) {
				t.Fatalf("seed %d, snapshot after %d: recent are\n%s\n%s", seed, n, a, b)
			}
		}
	}
}

func texts(t *testing.T, all []job.Event) string {
	b, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func events(t *testing.T, log [][]byte) (all []job.Event) {
	p := &Replay{Told: func(e job.Event) { all = append(all, e) }}
	for _, b := range log {
		if err := p.Next(b); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// TestSnapshotFormat: the format of a snapshot is that of an earlier build of this version.
func TestSnapshotFormat(t *testing.T) {
	got, err := json.MarshalIndent(full().save(), "", "\t")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("testdata", "journal", fmt.Sprintf("v%d-snapshot.json", JournalVersion))
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("the format has changed, and with it must JournalVersion:\n%s", diff(string(want), string(got)))
	}
}

// TestEarlierSnapshot: a snapshot without what was added to the format later can be read. The order
// of its parts does not matter.
func TestEarlierSnapshot(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("testdata", "journal", "v8-earlier-snapshot.json"))
	if err != nil {
		t.Fatal(err)
	}
	var earlier snapshot
	if err := decode(text, &earlier); err != nil {
		t.Fatal(err)
	}
	m := New(Config{Size: earlier.Size}, nil)
	if err := m.load(earlier); err != nil {
		t.Fatal(err)
	}
	got, err := json.Marshal(m.save())
	if err != nil {
		t.Fatal(err)
	}
	if want, got := sorted(t, text), sorted(t, got); got != want {
		t.Errorf("it was read as something else:\n%s", diff(want, got))
	}
}

// sorted returns a JSON text with the keys of its objects in order.
func sorted(t *testing.T, text []byte) string {
	var v any
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		t.Fatal(err)
	}
	b, err := json.MarshalIndent(v, "", "\t")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
