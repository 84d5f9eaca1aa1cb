package replay

import (
	"bytes"
	"encoding/xml"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/job"
)

// Sizes in a picture, in its units, which are pixels if it is not scaled.
const (
	width      = 900
	margin     = 24
	gridTop    = 74
	cell, gap  = 30, 6
	labelWidth = 92
	curveLeft  = 430
	lineHeight = 20

	// The picture plays as long as the job ran, within these bounds, and then stays at its end.
	least, most = 5 * time.Second, 40 * time.Second
	stay        = 3 * time.Second
	// counterPause is the time between two values of its counters.
	counterPause = 400 * time.Millisecond
)

// colours are the colours of the states of slots.
var colours = map[job.SlotState]string{
	job.SlotTraining: "#1d7a58", job.SlotStarting: "#8fb4ff", job.SlotReady: "#3a6fd0", job.SlotLeaving: "#a96a00",
	job.SlotStopping: "#c0362c", job.SlotExcluded: "#c0362c", job.SlotDrained: "#6f5aa8", job.SlotHeld: "#6f5aa8", job.SlotFree: "#e1e5ea",
}

const absent = "#ffffff" // a slot that is not listed

// legend lists the colours that the picture explains.
var legend = []struct{ colour, text string }{
	{colours[job.SlotTraining], "trains"}, {colours[job.SlotExcluded], "killed"}, {colours[job.SlotStarting], "starts"}, {colours[job.SlotFree], "free"},
}

// picture is a picture in progress.
type picture struct {
	*Recording
	out    bytes.Buffer
	begun  time.Time     // time in the job at which the picture begins
	long   time.Duration // how much of the job's time it shows
	shown  time.Duration // how long that takes in the picture
	hosts  []string      // from top to bottom
	slots  map[string]int
	bottom int // of the grid
}

var update = flag.Bool("update", false, "draw docs/faults.svg anew from the events of testdata")

// TestPicture: the picture of the README shows the events of a real job.
func TestPicture(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("testdata", "faults.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("..", "..", "docs", "faults.svg")
	got := draw(read(t, string(text)))
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if want, err := os.ReadFile(path); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("docs/faults.svg is not what the events give (%v): make picture", err)
	}
	if len(got) > 300<<10 {
		t.Errorf("the picture has %d bytes", len(got))
	}
}

// draw returns an animated SVG: a grid of the workers, the steps so far, and what happens. It
// depends on no other file, and has equal bytes for equal events. The job must have made a commit.
func draw(r *Recording) []byte {
	p := &picture{Recording: r, begun: r.Begun(), slots: map[string]int{}}
	if first := r.trend[0].at.Add(-time.Second); first.After(p.begun) {
		p.begun = first // leave out the start, which is short
	}
	p.long = max(r.Ended().Sub(p.begun), time.Millisecond)
	p.shown = min(max(p.long, least), most)
	play := r.NewPlayer()
	for _, e := range r.events {
		for _, h := range play.Status(e.Time).Hosts {
			if _, known := p.slots[h.Host]; !known {
				p.hosts = append(p.hosts, h.Host)
			}
			p.slots[h.Host] = max(p.slots[h.Host], len(h.Slots))
		}
	}
	p.bottom = max(gridTop+len(p.hosts)*(cell+gap), gridTop+5*(cell+gap))
	p.draw()
	return p.out.Bytes()
}

func (p *picture) add(format string, args ...any) { fmt.Fprintf(&p.out, format+"\n", args...) }

func (p *picture) draw() {
	height := p.bottom + 56
	p.add(`<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %d" font-family="sans-serif" font-size="13" fill="#1a1f28">`,
		width, height, height)
	p.add(`<title>%s</title>`, escape(p.summary()))
	p.add(`<rect width="100%%" height="100%%" rx="6" fill="#ffffff"/>`)
	p.add(`<text x="%d" y="34" font-size="17">%s</text>`, margin, escape(p.summary()))
	p.add(`<text x="%d" y="54" fill="#5a6473">drawn from the events of a real job</text>`, margin)
	p.grid()
	p.curve()
	p.captions()
	x := margin
	for _, l := range legend {
		p.add(`<rect x="%d" y="%d" width="12" height="12" rx="2" fill="%s"/><text x="%d" y="%d" fill="#5a6473">%s</text>`, x, p.bottom+34, l.colour, x+18,
			p.bottom+45, l.text)
		x += 82
	}
	p.add(`</svg>`)
}

// summary describes the job.
func (p *picture) summary() string {
	deaths, most := 0, 0
	for _, e := range p.events {
		most = max(most, e.Size)
		if e.Name == job.WorkerExited && e.Cause == "failed" {
			deaths++
		}
	}
	return fmt.Sprintf("training in up to %d workers, of which %d are killed in %d seconds", most, deaths, int(p.long.Round(time.Second).Seconds()))
}

// share returns a time as a share of the picture's duration.
func (p *picture) share(at time.Time) float64 {
	x := at.Sub(p.begun).Seconds() / p.long.Seconds()
	return min(max(x, 0), 1) * p.shown.Seconds() / (p.shown + stay).Seconds()
}

// values are the values of an attribute over time, each from its time on.
type values struct {
	times  []float64
	values []string
}

func (v *values) set(at float64, value string) {
	switch n := len(v.times); {
	case n > 0 && v.values[n-1] == value:
	case n > 0 && fmt.Sprintf("%.4f", v.times[n-1]) == fmt.Sprintf("%.4f", at):
		v.values[n-1] = value
	case n == 0:
		v.times, v.values = append(v.times, 0), append(v.values, value)
	default:
		v.times, v.values = append(v.times, at), append(v.values, value)
	}
}

// animate writes the animation of an attribute of the enclosing element.
func (p *picture) animate(element, attribute string, v values, more string) {
	times := make([]string, len(v.times))
	for i, t := range v.times {
		times[i] = strings.TrimRight(strings.TrimRight(fmt.Sprintf("%.4f", t), "0"), ".")
	}
	p.add(`<%s attributeName="%s"%s dur="%gs" repeatCount="indefinite" keyTimes="%s" values="%s"/>`, element, attribute, more, (p.shown + stay).Seconds(),
		strings.Join(times, ";"), strings.Join(v.values, ";"))
}

// grid draws the slots of each host in a row.
func (p *picture) grid() {
	fills := map[string][]values{}
	for _, name := range p.hosts {
		fills[name] = make([]values, p.slots[name])
		for i := range fills[name] {
			fills[name][i].set(0, absent)
		}
	}
	play := p.NewPlayer()
	for _, e := range p.events {
		there := map[string]bool{}
		for _, h := range play.Status(e.Time).Hosts {
			there[h.Host] = true
			for i, slot := range h.Slots {
				fills[h.Host][i].set(p.share(e.Time), colours[slot.State])
			}
		}
		for _, name := range p.hosts {
			for i := range fills[name] {
				if !there[name] {
					fills[name][i].set(p.share(e.Time), absent)
				}
			}
		}
	}
	for row, name := range p.hosts {
		y := gridTop + row*(cell+gap)
		p.add(`<text x="%d" y="%d" fill="#5a6473">%s</text>`, margin, y+20, escape(name))
		for i, v := range fills[name] {
			p.add(`<rect x="%d" y="%d" width="%d" height="%[3]d" rx="4" fill="%s">`, margin+labelWidth+i*(cell+gap), y, cell, v.values[0])
			if len(v.times) > 1 {
				p.animate("animate", "fill", v, ` calcMode="discrete"`)
			}
			p.add(`</rect>`)
		}
	}
}

// curve draws the curve of the steps, with the deaths below it.
func (p *picture) curve() {
	right, top, bottom := width-margin, gridTop, p.bottom-16
	x := func(at time.Time) float64 {
		s := at.Sub(p.begun).Seconds() / p.long.Seconds()
		return curveLeft + min(max(s, 0), 1)*float64(right-curveLeft)
	}
	last := max(p.trend[len(p.trend)-1].commits, 1)
	var line strings.Builder
	fmt.Fprintf(&line, "%d,%d", curveLeft, bottom)
	for _, at := range p.trend {
		fmt.Fprintf(&line, " %.1f,%.1f", x(at.at), float64(bottom)-at.commits/last*float64(bottom-top))
	}
	p.add(`<path d="M%d %d V%d H%d" fill="none" stroke="#cfd5dd"/>`, curveLeft, top, bottom, right)
	p.add(`<polyline points="%s" fill="none" stroke="#e1e5ea" stroke-width="3"/>`, line.String())
	p.add(`<clipPath id="played"><rect x="%d" y="0" height="%d" width="0">`, curveLeft, p.bottom)
	end := p.share(p.Ended())
	p.animate("animate", "width", values{[]float64{0, end, 1}, []string{"0", fmt.Sprint(right - curveLeft), fmt.Sprint(right - curveLeft)}}, "")
	p.add(`</rect></clipPath><g clip-path="url(#played)">`)
	p.add(`<polyline points="%s" fill="none" stroke="#1d7a58" stroke-width="3"/>`, line.String())
	for _, e := range p.events {
		if e.Name == job.WorkerExited && e.Cause == "failed" {
			p.add(`<path d="M%.1f %d v10" stroke="#c0362c" stroke-width="2"/>`, x(e.Time), bottom+3)
		}
	}
	p.add(`</g>`)
	p.rolls("counts", curveLeft+12, top+16, 15, p.counts())
}

// moment is a text that is shown from a time on.
type moment struct {
	at   float64
	text string
}

// counts returns the steps so far and the number of workers, at regular times.
func (p *picture) counts() (all []moment) {
	play := p.NewPlayer()
	pause := time.Duration(float64(counterPause) * p.long.Seconds() / p.shown.Seconds())
	for at := p.begun; !at.After(p.Ended()); at = at.Add(pause) {
		s := play.Status(at)
		all = append(all, moment{p.share(at), fmt.Sprintf("step %d, %d workers", p.Commits(at), s.Size)})
	}
	return append(all, moment{p.share(p.Ended()), fmt.Sprintf("step %d", p.Commits(p.Ended()))})
}

// captions writes captions that say what happens.
func (p *picture) captions() {
	var all []moment
	say := func(at time.Time, text string) { all = append(all, moment{p.share(at), text}) }
	say(p.begun, "")
	for _, e := range p.events {
		_, text := e.Words()
		switch e.Name {
		case job.WorkerExited:
			if e.Cause == "failed" {
				say(e.Time, text)
			}
		case job.FirstCommit:
			how := fmt.Sprintf("world %d trains", e.Generation)
			if e.Generation > 1 {
				how += fmt.Sprintf(", %.0f ms after the one before", 1000*e.Seconds)
			}
			say(e.Time, how)
		case job.JobDone:
			say(e.Time, text)
		}
	}
	p.rolls("events", margin, p.bottom+18, 13, all)
}

// rolls writes texts of which one is visible at a time.
func (p *picture) rolls(id string, x, y, size int, all []moment) {
	// Clipped groups, since an svg within the svg would have a separate clock.
	p.add(`<clipPath id="%s"><rect width="%d" height="%d"/></clipPath>`, id, width-x, lineHeight)
	p.add(`<g transform="translate(%d %d)" clip-path="url(#%s)"><g font-size="%d">`, x, y-size, id, size)
	var v values
	for i, m := range all {
		if m.text != "" {
			p.add(`<text y="%d">%s</text>`, i*lineHeight+size, escape(m.text))
		}
		v.set(m.at, fmt.Sprintf("0 %d", -i*lineHeight))
	}
	p.animate("animateTransform", "transform", v, ` type="translate" calcMode="discrete"`)
	p.add(`</g></g>`)
}

func escape(text string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(text)) // a Builder never fails
	return b.String()
}
