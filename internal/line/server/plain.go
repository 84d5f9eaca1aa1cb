package server

import (
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/notify"
)

const (
	beatEvery  = time.Second
	leastPause = beatEvery / 10
)

// phases maps their words in lines to the phases.
var phases = map[string]line.Phase{
	"joining": line.Joins, "connecting": line.Connecting, "outside": line.Outside,
	"syncing": line.Syncing, "training": line.Training, "saving": line.Saving,
}

// The lines to a worker that package line does not define.
type (
	helloLine struct {
		Is          string     `json:"is"` // hello
		Version     int        `json:"version"`
		Run         string     `json:"run"`
		Host        string     `json:"host"`
		Slot        int        `json:"slot"`
		Incarnation string     `json:"incarnation"`
		Store       *storeAddr `json:"store,omitempty"`
		Library     string     `json:"library,omitempty"`
	}
	storeAddr struct {
		Host string `json:"host"`
		Port int    `json:"port"`
	}
	worldLine struct {
		Is         string       `json:"is"` // world
		Generation uint64       `json:"generation"`
		Rank       int          `json:"rank"`
		Size       int          `json:"size"`
		LocalRank  int          `json:"local_rank"`
		LocalSize  int          `json:"local_size"`
		CrossRank  int          `json:"cross_rank"`
		CrossSize  int          `json:"cross_size"`
		Root       int          `json:"root"`
		Seq        uint64       `json:"seq"`
		Handles    []string     `json:"handles"`
		Members    []memberLine `json:"members"`
		DataKey    string       `json:"data_key"`
		Store      *storeAddr   `json:"store,omitempty"`
	}
	memberLine struct {
		Host      string   `json:"host"`
		Slot      int      `json:"slot"`
		Addresses []string `json:"addresses"`
	}
)

// beatLine is a program's report of its current activity.
type beatLine struct {
	Phase     string     `json:"phase"`
	Commits   uint64     `json:"commits"`
	Written   uint64     `json:"written"`
	Operation *operation `json:"operation"`
}

// operation is the collective operation in which a worker is, or its last one.
type operation struct {
	Number  uint64 `json:"number"`
	What    string `json:"what"`
	Waiting bool   `json:"waiting"`
}

// plain speaks the full protocol on behalf of a program that does not.
type plain struct {
	t       *talk
	program string    // the name that it gives itself
	news    wake.Flag // send a beat at once
	looking
	joined func() // ends the reports before the first join
	store  *driverStore
	loss   notify.Loss // the newest; the talk's lock guards it

	mu        sync.Mutex
	joining   bool
	wide      bool       // it was asked to widen
	place     line.Place // in the newest world that it has received; generation 0: none
	committed uint64     // the last generation whose first commit was reported
	beat      beatLine   // the newest
	changed   time.Time  // time of the last change of beat
	trace     line.Trace // of the phases in which it enters its world
	figures   []line.Figure
}

// looking measures what the process uses, for the pulse.
type looking struct {
	usage  func(pid int) proc.Usage
	usedAt time.Time // time of the last measurement
}

// newPlain starts the reports and the pulse of a program.
func newPlain(t *talk, program string) (*plain, error) {
	p := &plain{t: t, news: wake.New(), changed: time.Now(), looking: looking{usage: proc.UsageOf}}
	named := line.CleanError(program)
	p.program = cmp.Or(strings.ToValidUTF8(named[:min(len(named), 64)], ""), "unnamed")
	p.store = &driverStore{t: t}
	if err := p.store.open(); err != nil {
		return nil, err
	}
	preparing, joined := context.WithCancel(t.ctx)
	p.joined = joined
	t.wg.Go(func() { line.Prepare(preparing, p.prepares) })
	t.wg.Go(p.pulse)
	return p, nil
}

func (p *plain) close() {
	p.joined()
	p.store.close()
}

// prepares reports that the program prepares, unless it does not read its lines: then it cannot
// join either.
func (p *plain) prepares(context.Context) {
	if !p.t.behind() {
		p.t.up(line.Up("report", line.ReportLine{What: "fetching"}), "fetching")
	}
}

// asks fills in what the program leaves out of a join.
func (p *plain) asks(j *line.Joining) {
	p.joined()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.joining = true
	p.setBeat(beatLine{Phase: "joining", Commits: j.Commits})
	j.After, j.Program, j.Has = p.place.Generation, p.program, p.place.Number()
	j.CanWiden = len(j.DataAddrs) > 0 && !p.wide
}

// widens records that the program is asked to widen.
func (p *plain) widens() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wide = true
}

// world returns the lines that describe a world to the program.
func (p *plain) world(m line.Message, tail []byte) []byte {
	p.mu.Lock()
	before := p.place
	p.mu.Unlock()
	place, err := line.ReadPlace(&m, tail, before.Generation, &before)
	var w line.World
	if err == nil {
		w, err = place.World()
	}
	if err == nil {
		err = p.store.follow(w.Store)
	}
	if err != nil {
		return line.Error(err.Error(), true)
	}
	p.mu.Lock()
	p.joining, p.place = false, place
	p.setBeat(beatLine{Phase: "outside"})
	p.mu.Unlock()
	text := line.Text(p.worldLine(w))
	p.t.mu.Lock()
	defer p.t.mu.Unlock()
	p.t.heard.Seq = max(p.t.heard.Seq, w.Seq)
	if p.loss.Generation == w.Generation { // it may arrive before the world
		text = append(append(text, '\n'), line.Lost(p.loss)...)
	}
	return text
}

func (p *plain) worldLine(w line.World) worldLine {
	own := w.Slots[w.Rank]
	text := worldLine{
		Is: "world", Generation: w.Generation, Rank: w.Rank, Size: w.Size(), LocalRank: own.LocalRank, LocalSize: own.LocalSize,
		CrossRank: own.CrossRank, CrossSize: own.CrossSize, Root: w.SyncRoot, Seq: w.Seq,
		Handles: make([]string, w.Size()), Members: make([]memberLine, w.Size()), DataKey: hex.EncodeToString(w.Key.Bytes()),
	}
	if w.Store != 0 {
		text.Store = p.store.addr()
	}
	addresses, handles := w.DataAddrs(), w.Handles()
	for r, s := range w.Slots {
		text.Members[r] = memberLine{s.Host, s.Index, append([]string{}, addresses[r]...)}
		if len(handles) > 0 {
			text.Handles[r] = string(handles[r])
		}
	}
	return text
}

// reports fills in what the program leaves out of a report. It returns false if the driver does not
// need the report.
func (p *plain) reports(r *line.ReportLine) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	r.Generation = p.place.Generation
	switch r.What {
	case "failed":
		text := r.Error
		if r.Where != "" {
			text = fmt.Sprintf("%s (%s)", text, r.Where)
		}
		r.Error, r.Where = cmp.Or(line.CleanError(text), "an error without a text"), ""
	case "committed":
		told := p.committed == r.Generation
		p.committed = r.Generation
		p.trace.Enter(line.Saving, time.Now())
		p.beat.Commits = r.Commits
		return !told // beats report the later commits
	}
	return true
}

// beats handles a report of the program's activity, or of its figures.
func (p *plain) beats(do string, text []byte) error {
	if do == "figures" {
		var f struct {
			Figures map[string]*float64 `json:"figures"` // null: not finite
		}
		err := json.Unmarshal(text, &f)
		p.hearFigures(f.Figures)
		return err
	}
	var b beatLine
	if err := json.Unmarshal(text, &b); err != nil {
		return err
	}
	if b.Operation != nil && len(b.Operation.What) > 256 {
		return errors.New("the operation's name is longer than 256 bytes")
	}
	if _, is := phases[b.Phase]; !is {
		p.t.complain(fmt.Sprintf("the phase %.64q of a beat is unknown", b.Phase))
		return nil
	}
	p.hearBeat(b)
	return nil
}

// hearBeat records the program's activity, unless it is joining.
func (p *plain) hearBeat(b beatLine) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.joining {
		p.setBeat(b)
	}
}

// hearFigures records the figures that the program reports.
func (p *plain) hearFigures(all map[string]*float64) {
	p.mu.Lock()
	var err error
	for _, name := range slices.Sorted(maps.Keys(all)) {
		f := line.Figure{Name: name, Value: math.NaN()}
		if value := all[name]; value != nil {
			f.Value = *value
		}
		if p.figures, err = line.SetFigure(p.figures, f); err != nil {
			break
		}
	}
	p.mu.Unlock()
	if err != nil {
		p.t.complain("figures: " + err.Error())
	}
}

// setBeat records the program's activity; the lock is held.
func (p *plain) setBeat(b beatLine) {
	was := p.beat
	entered := was.Phase != b.Phase
	if entered || was.Written != b.Written || (was.Operation == nil) != (b.Operation == nil) || b.Operation != nil && *was.Operation != *b.Operation {
		p.changed = time.Now()
	}
	p.beat = b
	if entered {
		p.trace.Enter(phases[b.Phase], time.Now())
		p.news.Set()
	}
}

// pulse sends the program's heartbeats, about once a second and when it enters a phase.
func (p *plain) pulse() {
	every := beatEvery
	if w := p.t.env.StallWarning; w > 0 {
		every = min(every, w/2)
	}
	timer := time.NewTimer(every)
	defer timer.Stop()
	var last time.Time
	for {
		select {
		case <-timer.C:
		case <-p.news:
			if pause := leastPause - time.Since(last); pause > 0 {
				timer.Reset(pause)
				continue
			}
		case <-p.t.ctx.Done():
			return
		}
		last = time.Now()
		if proc.Stopped(p.t.pid) { // the driver should notice its silence, as that of other workers
			timer.Reset(every)
			continue
		}
		next := every / 4
		if p.t.server.cfg.Driver() {
			b, size := p.nextBeat(time.Now())
			p.t.up(line.Pulse(b), "pulse")
			if b.Entered != nil {
				p.trace.Sent()
			}
			next = every * time.Duration(line.BeatSpacing(size))
		}
		timer.Reset(next)
	}
}

// nextBeat returns the heartbeat and the size of the world.
func (p *plain) nextBeat(now time.Time) (line.Beat, int) {
	var usage *proc.Usage
	if now.Sub(p.usedAt) >= beatEvery/2 { // measuring takes a millisecond, too long for the beats of a reset
		usage, p.usedAt = new(p.usage(p.t.pid)), now
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	was := p.beat
	b := line.Beat{Generation: p.place.Generation, Phase: phases[was.Phase], Quiet: now.Sub(p.changed)}
	if b.Phase == 0 {
		b.Phase = line.Outside // it has only said hello
	}
	if b.Phase != line.Joins {
		b.Commits = was.Commits
	}
	if b.Phase == line.Saving {
		b.Written = was.Written
	}
	if o := was.Operation; o != nil && b.Phase != line.Joins {
		b.Lanes = []line.Lane{{Operation: o.Number, Waiting: o.Waiting, For: b.Quiet, What: o.What}}
	}
	b.Entered, b.Figures, b.Usage = p.trace.Told(now), slices.Clone(p.figures), usage
	return b, max(1, p.place.Size)
}
