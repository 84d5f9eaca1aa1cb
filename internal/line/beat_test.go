package line

import (
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/internal/proc"
)

// hearBeat parses a heartbeat as the driver does.
func hearBeat(text []byte) (b Beat, err error) {
	if err = json.Unmarshal(text, &b); err == nil {
		err = b.Check()
	}
	return b, err
}

func TestBeat(t *testing.T) {
	for _, b := range []Beat{
		{Phase: Joins},
		{Generation: 4, Phase: Saving, Commits: 17, Written: 1 << 40},
		{Generation: math.MaxUint64, Phase: Training, Counters: &Counters{Commits: 7, CommitTime: time.Second, CommitBytes: 1 << 40, Operations: []Operations{
			{Kind: "AllReduce", Backend: "ipc+hosts", SizeClass: 9, Count: 1, Duration: time.Hour, Bytes: math.MaxUint64},
		}}},
		{Generation: 4, Phase: Training, Waits: []Wait{{7, time.Second}, {1 << 63, time.Microsecond}}, Entered: []Entered{{Joins, time.Second}, {Syncing, 1}}},
		{Generation: 4, Phase: Training, Quiet: 3 * time.Second, Trained: new(false), Lanes: []Lane{
			{Operation: 17, Waiting: true, For: 2 * time.Second, What: "AllReduce"},
			{ID: math.MaxUint64, Operation: math.MaxUint64, For: math.MaxInt64, What: "gradient α"},
		}},
	} {
		if got, err := hearBeat(Pulse(b)); err != nil || !reflect.DeepEqual(got, b) {
			t.Errorf("%+v was heard for %+v, %v", got, b, err)
		}
	}
	// Texts that are too long are truncated between two characters.
	long := Beat{Phase: Saving, Lanes: append(make([]Lane, MaxLanes), Lane{What: "beyond"})}
	long.Quiet, long.Entered, long.Waits = -1, []Entered{{Joins, -1}}, []Wait{{1, -1}} // clocks
	long.Lanes[0].What, long.Lanes[1].What, long.Lanes[2].For = strings.Repeat("é", 200), "a\xff", -1
	got, err := hearBeat(Pulse(long))
	if err != nil || len(got.Lanes) != MaxLanes || got.Lanes[0].What != strings.Repeat("é", 128) || got.Lanes[1].What != "a\uFFFD" || got.Lanes[2].For != 0 {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestBeatRefused(t *testing.T) {
	for name, spoil := range map[string]func(*Beat){
		"no phase":        func(b *Beat) { b.Phase = 0 },
		"a later phase":   func(b *Beat) { b.Phase = 99 },
		"negative quiet":  func(b *Beat) { b.Quiet = -1 },
		"lanes":           func(b *Beat) { b.Lanes = make([]Lane, MaxLanes+1) },
		"a long name":     func(b *Beat) { b.Lanes[0].What = strings.Repeat("x", maxWhat+1) },
		"a negative wait": func(b *Beat) { b.Lanes[0].For = -1 },
		"waits":           func(b *Beat) { b.Waits = make([]Wait, maxWaits+1) },
		"entered":         func(b *Beat) { b.Entered = []Entered{{9, 1}} },
		"never entered":   func(b *Beat) { b.Entered = []Entered{{Joins, -1}} },
		"operations":      func(b *Beat) { b.Counters = &Counters{Operations: make([]Operations, MaxOperations+1)} },
		"an operation":    func(b *Beat) { b.Counters = &Counters{Operations: []Operations{{Kind: "\x1b", Backend: "x"}}} },
		"usage":           func(b *Beat) { b.Usage = &proc.Usage{Processor: -1} },
	} {
		b := Beat{Phase: Training, Lanes: []Lane{{What: "x"}}}
		if err := b.Check(); err != nil {
			t.Fatal(err)
		}
		spoil(&b)
		if err := b.Check(); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
}

func TestPhasesHaveNames(t *testing.T) {
	for p := Joins; p <= Fetches; p++ {
		if strings.HasPrefix(p.String(), "in phase") {
			t.Errorf("phase %d has no name", p)
		}
	}
	if fmt.Sprint(Phase(99)) != "in phase 99" {
		t.Error(Phase(99))
	}
}

// TestFigures: a heartbeat has one value for each name; invalid names and too many names are
// refused.
func TestFigures(t *testing.T) {
	b := Beat{Phase: Training, Figures: []Figure{{Name: "loss", Value: 0.5}, {Name: "lr", Value: math.Inf(1)}}, Usage: &proc.Usage{Processor: 5, Resident: 1, Used: 2, Limit: 3}}
	got, err := hearBeat(Up("pulse", b))
	if err != nil || len(got.Figures) != 2 || got.Figures[0] != b.Figures[0] || !math.IsNaN(got.Figures[1].Value) || *got.Usage != *b.Usage {
		t.Errorf("%+v, %v", got, err)
	}
	var all []Figure
	for i := range maxFigures {
		if all, err = SetFigure(all, Figure{Name: fmt.Sprint("f", i), Value: 1}); err != nil {
			t.Fatal(err)
		}
	}
	if all, err = SetFigure(all, Figure{Name: "f3", Value: 2}); err != nil || len(all) != maxFigures || all[3].Value != 2 {
		t.Errorf("%v, %v", all, err)
	}
	for _, name := range []string{"one.too.many", "", "the loss", strings.Repeat("x", 33)} {
		if again, err := SetFigure(all, Figure{Name: name, Value: 1}); err == nil || len(again) != maxFigures {
			t.Errorf("%q is taken", name)
		}
	}
}
