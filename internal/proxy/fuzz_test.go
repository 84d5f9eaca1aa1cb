package proxy

import (
	"bufio"
	"bytes"
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/internal/rendezvous"
	"github.com/hvdrun/hvdrun/stacks"
)

// FuzzLine: what is taken of a worker is within its bounds, and written again is read as the same.
func FuzzLine(f *testing.F) {
	f.Add([]byte(`{"do":"hello","version":1,"program":"torch 2.14.1"}`))
	f.Add([]byte(`{"do":"join","handle":"h","addresses":["10.0.0.1:5"],"commits":12,"holds_state":true,"trained":false,"lost":[2],"cause":"c"}`))
	f.Add([]byte(`{"do":"report","what":"backend","backend":"gloo"}`))
	f.Add([]byte(`{"do":"beat","phase":"training","commits":1,"operation":{"number":99,"what":"all_reduce","waiting":true}}`))
	f.Add([]byte(`{"do":"stacks","id":3,"text":"Thread 0x1:\n  File \"a.py\", line 1 in f"}`))
	f.Add([]byte(`{"do":"join","lost":[-1],"addresses":null}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		r, err := parse(line)
		if err != nil {
			return
		}
		if len(r.Handle) > rendezvous.MaxHandle || len(r.Addresses) > maxStrings || len(r.Lost) > maxStrings || len(r.Cause) > maxCause {
			t.Errorf("taken: %+v", r)
		}
		again, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		back, err := parse(again)
		if len(r.Addresses) == 0 {
			r.Addresses = nil
		}
		if len(r.Lost) == 0 {
			r.Lost = nil
		}
		if err != nil || !reflect.DeepEqual(back, r) {
			t.Errorf("%+v became %+v, %v", r, back, err)
		}
	})
}

// FuzzStacks: stacks that a worker tells are within the bounds of the package stacks.
func FuzzStacks(f *testing.F) {
	f.Add("Current thread 0x00007f (most recent call first):\n  File \"train.py\", line 12 in step\n  File \"/usr/lib/python3/x.py\", line 1 in y\n")
	f.Fuzz(func(t *testing.T, text string) {
		all := readStacks(text)
		if len(all) > stacks.MaxGroups {
			t.Errorf("%d threads", len(all))
		}
		for _, g := range all {
			if len(g.Frames) > stacks.MaxFrames {
				t.Errorf("%d frames", len(g.Frames))
			}
		}
	})
}

// TestManyLost: more lost ranks than are kept are no mistake, as a rack may fail at once.
func TestManyLost(t *testing.T) {
	lost, err := json.Marshal(slices.Repeat([]int{7}, 3*maxStrings))
	if err != nil {
		t.Fatal(err)
	}
	if r, err := parse(append(append([]byte(`{"do":"join","lost":`), lost...), '}')); err != nil || len(r.Lost) != maxStrings {
		t.Errorf("%d are kept, %v", len(r.Lost), err)
	}
}

// TestReadLine: lines of any length up to the bound arrive whole, and one that is cut is none.
func TestReadLine(t *testing.T) {
	long := strings.Repeat("x", maxLine-1)
	in := bufio.NewReaderSize(strings.NewReader("a\n\n"+long+"\nx"+long+"\n"), 16)
	var buf []byte
	for _, want := range []string{"a", "", long} {
		line, err := readLine(in, buf)
		if err != nil || string(line) != want {
			t.Fatalf("%d bytes, %v", len(line), err)
		}
		buf = line
	}
	if _, err := readLine(in, buf); err != errLong {
		t.Error(err)
	}
	if _, err := readLine(bufio.NewReader(bytes.NewReader([]byte("cut"))), nil); err == nil {
		t.Error("a line without an end was taken")
	}
}

// TestReadStacks: the user's own code comes first, and libraries are told from it.
func TestReadStacks(t *testing.T) {
	all := readStacks(`Thread 0x01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/home/u/.cache/hvdrun/python-0123/hvdrun/_worker.py", line 283 in stacks

Current thread 0x02 (most recent call first):
  File "/home/u/train.py", line 12 in step
  File "/home/u/train.py", line 99 in <module>
`)
	if len(all) != 2 || len(all[0].Frames) != 2 || all[0].Frames[0] != (stacks.Frame{Func: "train.step", File: "/home/u/train.py", Line: 12}) {
		t.Fatalf("%+v", all)
	}
	for _, f := range all[1].Frames {
		if f.User() {
			t.Errorf("%+v counts as the user's", f)
		}
	}
}
