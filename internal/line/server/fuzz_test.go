package server

import (
	"testing"

	"github.com/hvdrun/hvdrun/stacks"
)

// FuzzStacks: stacks that a worker sends are within the bounds of package stacks.
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

// TestReadStacks: the user's own code comes first, and is distinguished from libraries.
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
