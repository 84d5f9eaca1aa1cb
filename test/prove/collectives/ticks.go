package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/collective"
)

// A rank counts ticks without progress. A tick passes only while the process has CPU time, so that
// a suspended or starved process counts few.
const (
	tick         = 100 * time.Millisecond
	tellEach     = 10                    // ticks without progress
	computing    = 20 * time.Millisecond // CPU time in a tick above which the rank does not merely wait
	leastBytes   = 4096                  // bytes in a tick; more than the traffic of idle engines
	maxIdle      = 60                    // ticks without progress on all ranks that count as a hang
	maxSpinning  = 900                   // the same while ranks compute
	maxSilence   = 3000                  // ticks without a message of any rank
	maxEndsSlack = 100                   // ticks within which a process ends after it was asked to
)

// sample is a measurement of a rank's progress.
type sample struct {
	operations string // counters of all groups, and the step
	bytes      int64  // read and written
	processor  time.Duration
	wanted     time.Duration // time in which threads ran or waited for a CPU; 0: unknown
	at         time.Duration // since an arbitrary time
}

// pulse counts ticks without progress.
type pulse struct {
	last                   sample
	idle, spinning         int
	toldIdle, toldSpinning bool // such ticks have been reported
}

// beat handles the sample of a tick and reports whether the counts have to be sent.
func (p *pulse) beat(s sample) bool {
	p.idle, p.spinning = p.idle+1, p.spinning+1
	if s.operations != p.last.operations || s.bytes-p.last.bytes >= leastBytes {
		p.idle, p.spinning = 0, 0
	}
	if s.processor-p.last.processor >= computing || s.starved(p.last) {
		p.idle = 0
	}
	p.last = s
	switch {
	case p.spinning > 0 && p.spinning%tellEach == 0:
		p.toldIdle, p.toldSpinning = p.idle > 0, true
		return true
	case p.idle == 0 && p.toldIdle, p.spinning == 0 && p.toldSpinning:
		p.toldIdle, p.toldSpinning = false, p.spinning > 0 && p.toldSpinning
		return true
	}
	return false
}

// starved reports whether a thread waited for a CPU most of the time since an earlier sample.
func (s sample) starved(since sample) bool {
	return s.wanted > 0 && since.wanted > 0 && (s.wanted-since.wanted)*5 > (s.at-since.at)*3
}

// watch reports ticks without progress while the process lives.
func (a *actor) watch(g *collective.Group) {
	var p pulse
	io, began := meter{}, time.Now()
	for range time.Tick(tick) {
		progress := g.Progress()
		s := sample{operations: fmt.Sprint(a.at.Load(), progress), bytes: io.bytes(), processor: processorTime(), at: time.Since(began)}
		if p.spinning > 0 { // sampling it is not free
			s.wanted = wantedTime()
		}
		if p.beat(s) {
			a.say(message{Idle: &idle{Ticks: p.idle, Spinning: p.spinning, Step: int(a.at.Load()), Progress: progress}})
		}
	}
}

// meter measures the bytes that this process has read and written.
type meter struct{ own int64 }

// bytes excludes the measurement's own reads.
func (m *meter) bytes() int64 {
	text, err := os.ReadFile("/proc/self/io")
	if err != nil {
		return 0
	}
	var sum int64
	for line := range bytes.Lines(text) {
		name, value, _ := bytes.Cut(line, []byte(": "))
		if string(name) == "rchar" || string(name) == "wchar" {
			n, _ := strconv.ParseInt(string(bytes.TrimSpace(value)), 10, 64)
			sum += n
		}
	}
	sum -= m.own
	m.own += int64(len(text))
	return sum
}

// processorTime returns this process's CPU time.
func processorTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// wantedTime returns how long the threads of this process ran or waited for a CPU; 0 if the kernel
// does not report it.
func wantedTime() (sum time.Duration) {
	files, _ := filepath.Glob("/proc/self/task/*/schedstat")
	for _, name := range files {
		text, _ := os.ReadFile(name) // fails if the thread has ended
		var ran, waited int64
		fmt.Sscan(string(text), &ran, &waited)
		sum += time.Duration(ran + waited)
	}
	return sum
}

// watchdog detects hangs. It has no clock: it counts reported ticks.
type watchdog struct {
	ranks   []watched
	stopped int // number of suspended processes
	silence int // own ticks since the last message
}

type watched struct {
	gone     bool // has ended
	idle     idle
	base     int // idle ticks before a suspended process continued; they do not count
	spinBase int
}

func newWatchdog(ranks int) *watchdog { return &watchdog{ranks: make([]watched, ranks)} }

// heard records a message of a rank.
func (w *watchdog) heard(rank int, i *idle) {
	w.silence = 0
	r := &w.ranks[rank]
	switch {
	case i == nil:
		r.idle.Ticks, r.idle.Spinning, r.base, r.spinBase = 0, 0, 0, 0
		return
	case i.Ticks < r.idle.Ticks:
		r.base = 0
	}
	if i.Spinning < r.idle.Spinning {
		r.spinBase = 0
	}
	r.idle = *i
}

// ended records the end of a rank's process.
func (w *watchdog) ended(rank int) { w.ranks[rank].gone = true }

// stop and resume record that a process is suspended and continued.
func (w *watchdog) stop() { w.stopped++ }

func (w *watchdog) resume() {
	w.stopped--
	for i := range w.ranks {
		r := &w.ranks[i]
		r.base, r.spinBase = r.idle.Ticks, r.idle.Spinning
	}
}

// tick counts a tick of the watchdog.
func (w *watchdog) tick() { w.silence++ }

// hangs reports whether all living ranks wait without progress.
func (w *watchdog) hangs() bool {
	if w.silence >= maxSilence {
		return true
	}
	if w.stopped > 0 {
		return false
	}
	waiting := 0
	for _, r := range w.ranks {
		if r.gone {
			continue
		}
		if r.idle.Ticks-r.base < maxIdle && r.idle.Spinning-r.spinBase < maxSpinning {
			return false
		}
		waiting++
	}
	return waiting > 0
}
