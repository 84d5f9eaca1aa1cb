package main

import (
	"testing"
	"time"
)

// TestPulse: ticks count while there is no progress, and ticks with computation count separately.
func TestPulse(t *testing.T) {
	var p pulse
	s := sample{operations: "a"}
	told := 0
	beat := func(n int) {
		for range n {
			if p.beat(s) {
				told++
			}
		}
	}
	beat(1)
	if beat(25); p.idle != 25 || p.spinning != 25 || told != 2 {
		t.Errorf("%+v, told %d times", p, told)
	}
	s.processor += time.Second
	if beat(1); p.idle != 0 || p.spinning != 26 || told != 3 {
		t.Errorf("after computing: %+v, told %d times", p, told)
	}
	s.bytes += 10 << 10
	if beat(1); p.spinning != 0 || told != 4 {
		t.Errorf("after bytes: %+v, told %d times", p, told)
	}
	s.bytes += leastBytes - 1
	s.operations = "b"
	if beat(1); p.spinning != 0 || told != 4 {
		t.Errorf("after an operation: %+v, told %d times", p, told)
	}
	s.bytes += leastBytes - 1
	if beat(1); p.idle != 1 {
		t.Errorf("a few bytes are no progress: %+v", p)
	}
	s.wanted = 1
	beat(1)
	s.wanted, s.at = s.wanted+90*time.Millisecond, 100*time.Millisecond
	if beat(1); p.idle != 0 || p.spinning != 3 {
		t.Errorf("after waiting for a processor: %+v", p)
	}
	s.wanted, s.at = s.wanted+40*time.Millisecond, 200*time.Millisecond
	if beat(1); p.idle != 1 {
		t.Errorf("after waiting for a processor now and then: %+v", p)
	}
}

func TestWatchdog(t *testing.T) {
	w := newWatchdog(2)
	at := func(rank, idleTicks, spinning int) { w.heard(rank, &idle{Ticks: idleTicks, Spinning: spinning}) }
	if at(0, maxIdle, maxIdle); w.hangs() {
		t.Error("one of two waits")
	}
	if at(1, 0, maxIdle); w.hangs() {
		t.Error("the other one computes")
	}
	if at(1, maxIdle, maxIdle+9); !w.hangs() {
		t.Error("all wait")
	}
	if w.stop(); w.hangs() {
		t.Error("a process is stopped")
	}
	if w.resume(); w.hangs() {
		t.Error("a process goes on")
	}
	if at(0, 2*maxIdle-1, 2*maxIdle); w.hangs() {
		t.Error("one has waited long enough since")
	}
	if at(0, 2*maxIdle, 2*maxIdle); w.hangs() {
		t.Error("the other one has not")
	}
	if w.heard(1, nil); w.hangs() {
		t.Error("the other one did something")
	}
	if w.ended(1); !w.hangs() {
		t.Error("the one that is left waits")
	}
	if w.ended(0); w.hangs() {
		t.Error("nobody is left")
	}
	for range maxSilence {
		w.tick()
	}
	if !w.hangs() {
		t.Error("silence")
	}
	w = newWatchdog(1)
	if at(0, 0, maxSpinning); !w.hangs() {
		t.Error("it computes without end")
	}
}
