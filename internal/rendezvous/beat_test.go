package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/wire/rendezvouspb"
)

// ear is a Handler that also receives heartbeats.
type ear struct {
	recorder
	beats chan Beat
	from  chan identity.Subject
}

func (e ear) Beaten(from identity.Subject, b Beat) { e.from <- from; e.beats <- b }

func (j *job) listen() ear {
	e := ear{j.heard, make(chan Beat, 1000), make(chan identity.Subject, 1000)}
	j.server.cfg.Handler = e
	return e
}

// beat sends a heartbeat as soon as there is a connection.
func beat(t testing.TB, c *Client, b Beat) {
	t.Helper()
	for {
		err := c.Beat(t.Context(), b)
		if err == nil {
			return
		}
		if !errors.Is(err, ErrNotConnected) {
			t.Fatal(err)
		}
		c.ready(t.Context(), time.Now().Add(time.Minute))
	}
}

func TestBeat(t *testing.T) {
	j := newJob(t)
	ear := j.listen()
	c := j.client("a")
	for _, b := range []Beat{
		{Phase: Joins},
		{Generation: 4, Phase: Saving, Commits: 17, Written: 1 << 40},
		{Generation: 4, Phase: Training, Counters: &Counters{Commits: 7, CommitTime: time.Second, CommitBytes: 1 << 40, Operations: []Operations{
			{Kind: "AllReduce", Backend: "ipc+hosts", SizeClass: 9, Count: 1, Duration: time.Hour, Bytes: math.MaxUint64},
		}}},
		{Generation: 4, Phase: Training, Waits: []Wait{{7, time.Second}, {1 << 63, time.Microsecond}}, Entered: []Entered{{Joins, time.Second}, {Syncing, 1}}},
		{Generation: 4, Phase: Training, Quiet: 3 * time.Second, Lanes: []Lane{
			{Operation: 17, Waiting: true, For: 2 * time.Second, What: "AllReduce"},
			{ID: math.MaxUint64, Operation: math.MaxUint64, For: math.MaxInt64, What: "gradient α"},
		}},
	} {
		beat(t, c, b)
		if got := <-ear.beats; !reflect.DeepEqual(got, b) {
			t.Errorf("%+v was heard for %+v", got, b)
		}
		if from := <-ear.from; from.Incarnation != "a" {
			t.Errorf("it was heard of %v", from)
		}
	}
	// Texts that are too long are truncated between two characters.
	beat(t, c, Beat{Phase: Saving, Quiet: -1, Lanes: append(make([]Lane, MaxLanes), Lane{What: "beyond"})})
	if got := <-ear.beats; len(got.Lanes) != MaxLanes || got.Quiet != 0 {
		t.Errorf("%+v", got)
	}
	beat(t, c, Beat{Phase: Saving, Lanes: []Lane{{What: strings.Repeat("é", 200)}, {What: "a\xff"}}})
	if got := <-ear.beats; got.Lanes[0].What != strings.Repeat("é", 128) || got.Lanes[1].What != "a\uFFFD" {
		t.Errorf("%+v", got)
	}
}

// TestBeatOfNobodysInterest: heartbeats are accepted without a BeatHandler.
func TestBeatOfNobodysInterest(t *testing.T) {
	beat(t, newJob(t).client("a"), Beat{Phase: Outside})
}

func TestBeatWithoutDriver(t *testing.T) {
	j := newJob(t)
	c := j.client("a")
	beat(t, c, Beat{Phase: Outside})
	j.stop()
	for c.Beat(t.Context(), Beat{Phase: Outside}) == nil {
	}
	began := time.Now()
	for range 100 {
		if err := c.Beat(t.Context(), Beat{Phase: Outside}); err == nil {
			t.Fatal("a driver that is gone has heard a beat")
		}
	}
	if d := time.Since(began); d > 50*time.Second { // of 100, where each waits for its answer
		t.Errorf("100 beats without a driver took %v", d)
	}
}

func TestBeatRefused(t *testing.T) {
	good := func() *rendezvouspb.BeatRequest {
		return Beat{Phase: Training, Lanes: []Lane{{What: "x"}}}.toWire()
	}
	if _, err := beatFromWire(good()); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*rendezvouspb.BeatRequest){
		"no phase":                 func(r *rendezvouspb.BeatRequest) { r.Phase = 0 },
		"negative phase":           func(r *rendezvouspb.BeatRequest) { r.Phase = -1 },
		"a later phase":            func(r *rendezvouspb.BeatRequest) { r.Phase = 99 },
		"quiet for ever":           func(r *rendezvouspb.BeatRequest) { r.QuietNanoseconds = math.MaxUint64 },
		"lanes":                    func(r *rendezvouspb.BeatRequest) { r.Lanes = make([]*rendezvouspb.Lane, MaxLanes+1) },
		"a long name":              func(r *rendezvouspb.BeatRequest) { r.Lanes[0].What = strings.Repeat("x", maxWhat+1) },
		"a name that is not UTF-8": func(r *rendezvouspb.BeatRequest) { r.Lanes[0].What = "\xff" },
		"waits for ever":           func(r *rendezvouspb.BeatRequest) { r.Lanes[0].Nanoseconds = 1 << 63 },
	} {
		r := good()
		spoil(r)
		if _, err := beatFromWire(r); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
	if _, err := beatFromWire(&rendezvouspb.BeatRequest{Phase: 1, Lanes: []*rendezvouspb.Lane{nil}}); err != nil {
		t.Errorf("an empty lane: %v", err)
	}
}

func TestPhasesHaveNames(t *testing.T) {
	for p := Joins; p <= Resetting; p++ {
		if strings.HasPrefix(p.String(), "in phase") {
			t.Errorf("phase %d has no name", p)
		}
		if _, known := rendezvouspb.Phase_name[int32(p)]; !known {
			t.Errorf("phase %d is not on the wire", p)
		}
	}
	if fmt.Sprint(Phase(99)) != "in phase 99" {
		t.Error(Phase(99))
	}
}

// BenchmarkBeat measures one heartbeat, client and server together.
func BenchmarkBeat(b *testing.B) {
	c := newJob(b).client("a")
	said := Beat{Generation: 4, Phase: Training, Lanes: []Lane{{Operation: 17, Waiting: true, For: time.Second, What: "AllReduce"}}}
	beat(b, c, said)
	for b.Loop() {
		if err := c.Beat(context.Background(), said); err != nil {
			b.Fatal(err)
		}
	}
}

// TestFigures: a heartbeat has one value of each name, and a name or a number of names out of
// bounds is refused.
func TestFigures(t *testing.T) {
	b := Beat{Phase: Training, Figures: []Figure{{"loss", 0.5}, {"lr", math.Inf(1)}}, Usage: &proc.Usage{Processor: 5, Resident: 1, Used: 2, Limit: 3}}
	got, err := beatFromWire(b.toWire())
	if err != nil || !reflect.DeepEqual(got.Figures, b.Figures) || *got.Usage != *b.Usage {
		t.Errorf("%+v, %v", got, err)
	}
	var all []Figure
	for i := range MaxFigures {
		if all, err = SetFigure(all, Figure{fmt.Sprint("f", i), 1}); err != nil {
			t.Fatal(err)
		}
	}
	if all, err = SetFigure(all, Figure{"f3", 2}); err != nil || len(all) != MaxFigures || all[3].Value != 2 {
		t.Errorf("%v, %v", all, err)
	}
	for _, name := range []string{"one.too.many", "", "the loss", strings.Repeat("x", 33)} {
		if again, err := SetFigure(all, Figure{name, 1}); err == nil || len(again) != MaxFigures {
			t.Errorf("%q is taken", name)
		}
	}
}
