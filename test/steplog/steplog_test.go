package steplog

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSharesSumToTotal(t *testing.T) {
	const n = 64
	for size := 1; size <= 9; size++ {
		for step := 1; step <= 5; step++ {
			sum, share := make([]float32, n), make([]float32, n)
			for rank := range size {
				Share(share, step, rank, size)
				for i := range sum {
					sum[i] += share[i]
				}
			}
			if !IsTotal(sum, step) {
				t.Fatalf("the shares of step %d in a world of %d do not sum to its total", step, size)
			}
			if IsTotal(sum, step+1) {
				t.Fatalf("steps %d and %d have the same total", step, step+1)
			}
		}
	}
}

// TestHistoriesDiffer: steps that were lost, repeated, swapped or mixed change the digest.
func TestHistoriesDiffer(t *testing.T) {
	const n = 32
	run := func(steps ...int) string {
		weights, sum := make([]float32, n), make([]float32, n)
		for _, s := range steps {
			Share(sum, s, 0, 1)
			Begin(weights)
			Complete(weights, sum)
		}
		return Digest(weights)
	}
	right := run(1, 2, 3, 4)
	if right != Digest(Weights(4, n)) {
		t.Error("the weights after four steps are not those of the four steps")
	}
	for _, wrong := range [][]int{{1, 2, 4}, {1, 2, 3}, {1, 2, 2, 3, 4}, {1, 3, 2, 4}, {1, 2, 3, 4, 4}} {
		if run(wrong...) == right {
			t.Errorf("steps %v lead to the weights of steps 1 2 3 4", wrong)
		}
	}
}

// story makes the lines of one process of rank 0 from words: "enter:G:S", "step:G:S", "none:G:S",
// "aborted:G:S", "end:G:S", with the generation G and the step S.
func story(words string) []Line {
	const steps, n = 4, 8
	var lines []Line
	for _, word := range strings.Fields(words) {
		f := strings.Split(word, ":")
		step := int(f[2][0] - '0')
		chain := uint64(0)
		for s := 1; s <= step; s++ {
			chain = Chain(chain, s)
		}
		l := Line{Event: Step, Outcome: OK, Generation: uint64(f[1][0] - '0'), Step: step, Chain: FormatChain(chain), Size: 1, PID: 7}
		switch f[0] {
		case "enter":
			l.Event, l.Outcome = Enter, ""
		case "aborted":
			l.Outcome = Aborted
		case "none":
			l.Outcome = None
		case "end":
			l.Event, l.Outcome, l.Digest = End, "", Digest(Weights(step, n))
		}
		lines = append(lines, l)
	}
	return lines
}

func TestCheck(t *testing.T) {
	for name, test := range map[string]struct{ words, fault string }{
		"undisturbed":         {"enter:1:0 step:1:1 step:1:2 step:1:3 step:1:4 end:1:4", ""},
		"graceful":            {"enter:1:0 step:1:1 enter:2:1 step:2:2 step:2:3 step:2:4 end:2:4", ""},
		"aborted and kept":    {"enter:1:0 step:1:1 aborted:1:2 enter:2:2 step:2:3 step:2:4 end:2:4", ""},
		"aborted and redone":  {"enter:1:0 step:1:1 aborted:1:2 enter:3:1 step:3:2 step:3:3", ""},
		"saved by another":    {"enter:1:0 step:1:1 enter:2:2 step:2:3", ""},
		"no commit, redone":   {"enter:1:0 step:1:1 none:1:2 none:1:3 enter:2:1 step:2:2 step:2:3", ""},
		"begins late":         {"enter:1:1 step:1:2", "the last step before it was"},
		"lost":                {"enter:1:0 step:1:1 step:1:2 enter:2:1 step:2:2", "had been committed"},
		"lost by another way": {"enter:1:0 step:1:1 step:1:2 enter:2:2 enter:3:1", "had been committed"},
		"left out":            {"enter:1:0 step:1:1 enter:2:3", "the last step before it was"},
		"gap":                 {"enter:1:0 step:1:1 step:1:3", "the step before this one was 1"},
		"repeated":            {"enter:1:0 step:1:1 step:1:1", "the step before this one was 1"},
		"not entered":         {"step:1:1", "the step before this one"},
		"entered twice":       {"enter:1:0 step:1:1 enter:1:1", "in this world already"},
		"end too early":       {"enter:1:0 step:1:1 end:1:1", "the end is after step 4"},
	} {
		err := Check(story(test.words), 4, 8)
		if (err == nil) != (test.fault == "") || (err != nil && !strings.Contains(err.Error(), test.fault)) {
			t.Errorf("%s: %q: got %v, want %q", name, test.words, err, test.fault)
		}
	}
	wrong := story("enter:1:0 step:1:1 step:1:2 step:1:3 step:1:4 end:1:4")
	wrong[2].Chain = wrong[1].Chain
	if err := Check(wrong, 4, 8); err == nil {
		t.Error("a wrong chain passes")
	}
	wrong = story("enter:1:0 step:1:1 step:1:2 step:1:3 step:1:4 end:1:4")
	wrong[5].Digest = Digest(Weights(3, 8))
	if err := Check(wrong, 4, 8); err == nil {
		t.Error("wrong weights pass")
	}
	wrong = story("enter:1:0 step:1:1")
	wrong[1].PID = 8
	if err := Check(wrong, 4, 8); err == nil {
		t.Error("two processes of one rank pass")
	}
}

func TestCheckWorlds(t *testing.T) {
	lines := story("enter:1:0 step:1:1 step:1:2 enter:2:2 step:2:3 step:2:4")
	for i := range lines {
		lines[i].Host = "a"
	}
	right := []World{{1, 2, 1, 1, "a:0", 0}, {3, 4, 2, 1, "a:0", 0}}
	if err := CheckWorlds(lines, right); err != nil {
		t.Error(err)
	}
	for i, wrong := range [][]World{
		{{1, 2, 1, 1, "a:0", 0}, {3, 4, 3, 1, "a:0", 0}},
		{{1, 2, 1, 2, "a:0", 0}, {3, 4, 2, 1, "a:0", 0}},
		{{1, 2, 1, 1, "a:1", 0}, {3, 4, 2, 1, "a:0", 0}},
		{{1, 2, 1, 1, "a:0", 1}, {3, 4, 2, 1, "a:0", 0}},
		{{1, 3, 1, 1, "a:0", 0}, {4, 4, 2, 1, "a:0", 0}},
		{{1, 2, 1, 1, "a:0", 0}, {3, 5, 2, 1, "a:0", 0}},
		{{1, 2, 1, 1, "a:0", 0}},
	} {
		if err := CheckWorlds(lines, wrong); err == nil {
			t.Errorf("case %d: %+v passes", i, wrong)
		}
	}
}

func TestFollowTakesWholeLines(t *testing.T) {
	path := filepath.Join(t.TempDir(), "steplog")
	f := Follow[Line](path)
	next := func(want ...int) {
		t.Helper()
		lines, err := f.Next()
		if err != nil {
			t.Fatal(err)
		}
		var got []int
		for _, l := range lines {
			got = append(got, l.Step)
		}
		if len(got) != len(want) {
			t.Fatalf("got steps %v, want %v", got, want)
		}
		for i := range got {
			if got[i] != want[i] {
				t.Fatalf("got steps %v, want %v", got, want)
			}
		}
	}
	next()
	file, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for _, l := range story("step:1:1 step:1:2") {
		if err := l.Append(file); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := file.WriteString(`{"step":`); err != nil {
		t.Fatal(err)
	}
	next(1, 2)
	next()
	if _, err := file.WriteString("3}\n"); err != nil {
		t.Fatal(err)
	}
	next(3)
	if _, err := file.WriteString(`{"time":1,"event":"st`); err != nil { // by a process that is killed here
		t.Fatal(err)
	}
	if err := story("step:1:4")[0].Append(file); err != nil {
		t.Fatal(err)
	}
	next(4)
}
