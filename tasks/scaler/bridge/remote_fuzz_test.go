package bridge

import (
	"bytes"
	"errors"
	"net"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/tasks"
	"github.com/hvdrun/hvdrun/tasks/scaler"
	"github.com/hvdrun/hvdrun/tasks/scaler/internal/scalertest"
)

func b(text string) []byte { return []byte(text) }

// FuzzRemote: whatever a worker says, a task that it has ends by its result alone, what is kept of
// it is bounded, and a task of another worker does not end.
func FuzzRemote(f *testing.F) {
	seed := func(all ...scaler.Message) {
		var text []byte
		for _, m := range all {
			frames := scaler.Encode(m)
			text = append(append(text, byte(len(frames))), scalertest.Join(frames)...)
			text = append(text, 0xff)
		}
		f.Add(text)
	}
	seed(&scaler.Heartbeat{Processors: make([]scaler.Processor, 2)}, &scaler.ObjectRequest{IDs: [][]byte{b("a")}}, &scaler.DisconnectRequest{Worker: b("w")})
	seed(&scaler.ObjectInstruction{Kind: scaler.Create, User: b("u"), Objects: scaler.Objects{IDs: [][]byte{b("r")}, Names: [][]byte{b("n")}, Contents: [][]byte{b("c")}}},
		&scaler.TaskResult{ID: b("t"), Status: scaler.Success, Results: [][]byte{b("r")}})
	f.Fuzz(func(t *testing.T, text []byte) {
		r := &router{cfg: ServeConfig{Message: 1000, Log: quietLog(), Workers: 0}, peers: map[string]*remote{}, calls: map[string]*attempt{}, ln: identity.ScalerWorkers.Listener()}
		near, far := net.Pipe()
		defer far.Close()
		p := &remote{
			r: r, id: b("w"), connection: connection{raw: near, ended: make(chan struct{})}, heard: time.Now(),
			calls: map[string]*attempt{}, catalog: catalog{objects: map[string]*offer{}}, uploads: uploads{results: map[string][]byte{}},
		}
		p.news.L = &r.mu
		r.peers["w"] = p
		ours := p.begin("f", b("s"), b("code"), [][]byte{b("a"), b("b")})
		other := &remote{
			r: r, id: b("v"), connection: connection{raw: near, ended: make(chan struct{})}, calls: map[string]*attempt{},
			catalog: catalog{objects: map[string]*offer{}},
		}
		other.news.L = &r.mu
		theirs := other.begin("f", b("s"), b("code"), nil)
		kept := int64(0)
		for message := range bytes.SplitSeq(text, []byte{0xff}) {
			if len(message) == 0 {
				continue
			}
			m, err := scaler.Decode(scalertest.Split(message[1:]))
			if err != nil {
				continue
			}
			if result, ok := m.(*scaler.TaskResult); ok && string(result.ID) == "t" {
				result.ID = []byte(ours.id)
			}
			if err := p.message(time.Now(), m); err != nil {
				r.drop(p, err)
				break
			}
			kept = 0
			for _, content := range p.results {
				kept += int64(len(content))
			}
			if kept != p.unclaimed || kept != r.unclaimed || kept > 4*r.cfg.Message || len(p.results) > maxUnclaimed {
				t.Fatalf("%d bytes of %d results are kept, %d are counted", kept, len(p.results), p.unclaimed)
			}
		}
		select {
		case o := <-ours.done:
			if o.err != nil && o.content != nil {
				t.Errorf("%+v", o)
			}
			if len(r.calls) != 1 {
				t.Errorf("%d attempts are left", len(r.calls))
			}
		default:
			if r.calls[ours.id] != ours || p.calls[ours.id] != ours || len(p.objects) != 4 {
				t.Error("an attempt that is not over is not known")
			}
		}
		if r.calls[theirs.id] != theirs {
			t.Error("the attempt of another worker is over")
		}
		for _, o := range p.objects {
			if o.users < 0 || o.users == 0 && !o.function {
				t.Errorf("an object with %d users", o.users)
			}
		}
	})
}

// FuzzException: bytes of a worker are read as an exception within bounds, and nothing is made up:
// what is shown occurs in them.
func FuzzException(f *testing.F) {
	f.Add(scaler.Exception("ValueError", "no such shard"))
	f.Add([]byte("\x80\x05\x95M\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins\x94\x8c\nValueError\x94\x93\x94\x8c\x03bad\x94\x85\x94R\x94."))
	f.Add([]byte("\x80\x05\x8c\x16tblib.pickling_support\x94\x8c\x12unpickle_exception\x94\x93\x94(\x8c\x08__main__\x94\x8c\x02E2\x94\x93\x94\x8c\x01a\x94K\x01\x86\x94NNt\x94R\x94."))
	f.Add([]byte("\x80\x02(((2222."))
	f.Fuzz(func(t *testing.T, p []byte) {
		e := exceptionFrom(p)
		if len(e.Class) > maxName+8 || len(e.Text) > 2*maxShown || !utf8.ValidString(e.Error()) {
			t.Errorf("%d bytes of class, %d of text", len(e.Class), len(e.Text))
		}
		if e.Class == "unreadable exception" {
			return
		}
		for part := range strings.SplitSeq(e.Class, ".") {
			if part != "" && !bytes.Contains(p, []byte(part)) && utf8.Valid(p) {
				t.Errorf("%q is not of the pickle", part)
			}
		}
	})
}

// TestExceptions: what Python's pickles are read as.
func TestExceptions(t *testing.T) {
	for pickle, want := range map[string]string{
		string(scaler.Exception("ValueError", "no such shard")):                                                "ValueError: no such shard",
		string(scaler.Exception("KeyError", "")):                                                               "KeyError",
		"\x80\x05\x8c\x01m\x94\x8c\x01E\x94\x93\x94)R\x94.":                                                    "m.E",
		"\x80\x05\x8c\x01m\x8c\x01E\x93(K\x03\x8c\x01aN\x88J\xfe\xff\xff\xffG?\xe0\x00\x00\x00\x00\x00\x00tR.": "m.E: 3, a, None, True, -2, 0.5",
		"":                          "unreadable exception",
		"N.":                        "unreadable exception: 2 bytes, which are no exception",
		"I1\n.":                     "unreadable exception: 4 bytes: no pickle that can be read: opcode 0x49",
		"\x80\x05X\xff\xff\xff\xff": "unreadable exception",
	} {
		if got := exceptionFrom([]byte(pickle)).Error(); !strings.HasPrefix(got, want) {
			t.Errorf("%q: %q, want %q", pickle, got, want)
		}
	}
}

// TestOutcomes: what a result comes to.
func TestOutcomes(t *testing.T) {
	for _, s := range []scaler.Status{scaler.WorkerDied, scaler.Canceled, scaler.NotFound, scaler.NoWorker} {
		if o := outcomeFrom(s, nil, false); !errors.Is(o.err, tasks.ErrAttemptLost) {
			t.Errorf("%c: %v", s, o.err)
		}
	}
	if o := outcomeFrom(scaler.Success, b("a"), true); o.err != nil || string(o.content) != "a" {
		t.Errorf("%+v", o)
	}
	if o := outcomeFrom(scaler.Success, nil, false); o.err == nil {
		t.Error("a result without an object succeeds")
	}
}
