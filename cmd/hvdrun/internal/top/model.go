package top

import (
	"context"
	"slices"
	"strings"
	"time"

	"charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/hvdrun/hvdrun/internal/dashboard"
	"github.com/hvdrun/hvdrun/job"
)

// pane is the content of the middle of the screen.
type pane int

const (
	paneWorld pane = iota
	paneRanks
	paneTime
	paneWorlds
	paneEvents
	paneOutput
	paneTasks
	panes
)

var paneNames = [panes]string{"World", "Ranks", "Time", "Generations", "Events", "Output", "Tasks"}

// The messages of top, besides those of the terminal.
type (
	// looked is the result of a new look at the job.
	looked struct{ view *dashboard.View }
	// due: it is time for a new look, unless there was one since the turn.
	due struct{ turn int }
	// ordered is the result of a command.
	ordered struct {
		by   *dialog
		done string
		err  error
	}
	// printed is a part of a worker's output.
	printed struct {
		of   outputOf
		text dashboard.Output
		err  error
	}
)

// outputOf names a worker's output.
type outputOf struct {
	rank   int
	stderr bool
}

const (
	// topPause is the pause between two looks.
	topPause = time.Second
	// maxShownOutput bounds the output that is kept of one rank, in bytes.
	maxShownOutput = 256 << 10
	// noticeLooks is the number of looks for which a notice is shown.
	noticeLooks = 6
)

// spot is a slot of a host.
type spot struct {
	host string
	slot int
}

// top is the state of the screen. Update replaces it, and View draws it.
type top struct {
	job           *topJob
	width, height int
	view          *dashboard.View // nil: there was no look yet
	turn          int             // number of looks
	looking       bool
	again         bool // look again after the look in progress

	pane   pane
	scroll [panes]int // first line that is shown
	picked spot       // the zero spot: none
	filter string     // of events
	typing bool       // the filter
	help   bool
	dialog *dialog // the open dialog; nil: none
	notice notice

	out shownOutput
}

// notice is the result of the last command, and the turn in which it was first shown.
type notice struct {
	text string
	turn int
}

// shownOutput is the part of a rank's output that has been read.
type shownOutput struct {
	of   outputOf
	text string
	to   int64  // offset up to which it was read; negative: nothing was read
	gone string // why there is no output
}

func newTop(j *topJob) *top {
	return &top{job: j, width: 80, height: 24, out: shownOutput{to: -1}, looking: true}
}

// Init implements tea.Model. It returns the first look.
func (m *top) Init() tea.Cmd { return m.look() }

func (m *top) look() tea.Cmd {
	m.looking, m.again = true, false
	return m.job.ask(func(ctx context.Context) tea.Msg { return looked{m.job.feed.Look(ctx, time.Now())} })
}

// Update implements tea.Model. It handles a message and returns the next command of the terminal.
func (m *top) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case tea.KeyPressMsg:
		return m, m.key(msg)
	case tea.PasteMsg:
		m.write(msg.Content)
	case looked:
		return m, m.took(msg.view)
	case due:
		if msg.turn == m.turn && !m.looking {
			return m, m.look()
		}
	case ordered:
		return m, m.answered(msg)
	case printed:
		m.print(msg)
	}
	return m, nil
}

// took handles a new look at the job.
func (m *top) took(v *dashboard.View) tea.Cmd {
	m.view, m.looking = v, false
	m.turn++
	if m.turn-m.notice.turn > noticeLooks {
		m.notice.text = ""
	}
	if m.picked != (spot{}) && m.slot(m.picked) == nil {
		m.picked = spot{}
	}
	if m.again {
		return tea.Batch(m.look(), m.follow())
	}
	turn := m.turn
	return tea.Batch(tea.Tick(topPause, func(time.Time) tea.Msg { return due{turn} }), m.follow())
}

// answered handles the result of a command. A refusal is shown in the command's dialog, if that is
// still open.
func (m *top) answered(o ordered) tea.Cmd {
	open := m.dialog == o.by
	switch {
	case o.err != nil && open:
		m.dialog.sent, m.dialog.wrong = false, o.err.Error()
	case o.err != nil:
		m.tell(o.err.Error())
	default:
		m.tell(o.done)
		if open {
			m.dialog = nil
		}
	}
	if m.looking {
		m.again = true
		return nil
	}
	return m.look()
}

// tell shows a notice for noticeLooks looks.
func (m *top) tell(text string) { m.notice = notice{text, m.turn} }

// follow reads the new output of the picked rank if its pane is shown.
func (m *top) follow() tea.Cmd {
	if m.pane != paneOutput || m.view == nil {
		return nil
	}
	if s := m.slot(m.picked); s != nil && s.Rank != nil && *s.Rank != m.out.of.rank {
		m.out.of.rank = *s.Rank
		m.forget()
	}
	return m.job.read(m.out.of, m.out.to)
}

// forget drops the output that was read, because another rank or stream is shown.
func (m *top) forget() { m.out.text, m.out.to, m.out.gone, m.scroll[paneOutput] = "", -1, "", 0 }

func (m *top) print(p printed) {
	switch {
	case p.of != m.out.of:
		return
	case p.err != nil:
		m.out.text, m.out.to, m.out.gone = "", -1, p.err.Error()
		return
	case p.text.From != m.out.to:
		m.out.text = ""
	}
	m.out.gone, m.out.to = "", p.text.To
	m.out.text += p.text.Text
	if n := len(m.out.text); n > maxShownOutput {
		m.out.text = strings.ToValidUTF8(m.out.text[n-maxShownOutput:], "")
	}
}

// key handles a key.
func (m *top) key(k tea.KeyPressMsg) tea.Cmd {
	name := k.String()
	switch {
	case name == "ctrl+c":
		return tea.Quit
	case name == "ctrl+z":
		return tea.Suspend
	case m.dialog != nil:
		return m.dialogKey(name, k.Text)
	case m.typing:
		m.filterKey(name, k.Text)
		return nil
	case m.help:
		m.help = false
		return nil
	}
	if name >= "1" && name <= string(rune('0'+panes)) && len(name) == 1 {
		return m.turnTo(pane(name[0] - '1'))
	}
	switch name {
	case "q":
		return tea.Quit
	case "?":
		m.help = true
	case "tab":
		return m.turnTo((m.pane + 1) % panes)
	case "shift+tab":
		return m.turnTo((m.pane + panes - 1) % panes)
	case "/":
		m.pane, m.typing = paneEvents, true
	case "esc":
		m.filter, m.picked, m.notice.text = "", spot{}, ""
	case "o":
		return m.turnTo(paneOutput)
	case "e":
		if m.pane == paneOutput {
			m.out.of.stderr = !m.out.of.stderr
			m.forget()
			return m.follow()
		}
	case "d", "D", "x", "X", "r", "R", "s", "S":
		m.propose(name)
	default:
		return m.move(name)
	}
	return nil
}

func (m *top) turnTo(to pane) tea.Cmd {
	m.pane = to
	return m.follow()
}

// filterKey edits the filter of the events.
func (m *top) filterKey(name, text string) {
	m.scroll[paneEvents] = 0
	switch name {
	case "enter", "tab", "up", "down":
		m.typing = false
	case "esc":
		m.typing, m.filter = false, ""
	case "ctrl+u":
		m.filter = ""
	case "backspace":
		m.filter = shorter(m.filter)
	default:
		m.filter += typedText(text)
	}
}

// write handles pasted text.
func (m *top) write(text string) {
	switch {
	case m.dialog != nil:
		m.dialog.write(text)
	case m.typing:
		m.filter += typedText(text)
	}
}

// typedText returns text without the characters that control a terminal, as one line.
func typedText(text string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return -1
		}
		return r
	}, ansi.Strip(text))
}

// shorter returns text without its last character.
func shorter(text string) string {
	r := []rune(text)
	return string(r[:max(0, len(r)-1)])
}

// move moves the picked slot, or scrolls a pane.
func (m *top) move(name string) tea.Cmd {
	page := max(1, m.height-12)
	step, is := map[string]int{"up": -1, "down": 1, "pgup": -page, "pgdown": page, "home": -1 << 30, "end": 1 << 30, "k": -1, "j": 1, "g": -1 << 30, "G": 1 << 30}[name]
	sideways := map[string]int{"left": -1, "right": 1, "h": -1, "l": 1}[name]
	switch {
	case m.view == nil:
	case m.pane == paneWorld && (is || sideways != 0):
		m.moveInWorld(step, sideways)
	case m.pane == paneRanks && is:
		m.pickRank(step)
	case m.pane == paneOutput && sideways != 0:
		m.pickRank(sideways)
		return m.follow()
	case m.pane == paneOutput && is:
		m.scroll[m.pane] = max(0, m.scroll[m.pane]-step) // the position counts from the end
	case is:
		m.scroll[m.pane] = max(0, m.scroll[m.pane]+step) // View bounds the position
	}
	return nil
}

// slot returns the slot of a spot; nil: the spot has no slot.
func (m *top) slot(at spot) *job.Slot {
	if m.view == nil {
		return nil
	}
	for hi := range m.view.Status.Hosts {
		h := &m.view.Status.Hosts[hi]
		if h.Host != at.host {
			continue
		}
		for si := range h.Slots {
			if h.Slots[si].Slot == at.slot {
				return &h.Slots[si]
			}
		}
	}
	return nil
}

// workers returns the spots of slots with workers: those with ranks by rank, then the others.
func (m *top) workers() (all []spot) {
	ranks := map[spot]int{}
	for _, h := range m.view.Status.Hosts {
		for _, s := range h.Slots {
			if s.PID == 0 && s.Rank == nil {
				continue
			}
			at, rank := spot{h.Host, s.Slot}, 1<<30
			if s.Rank != nil {
				rank = *s.Rank
			}
			all, ranks[at] = append(all, at), rank
		}
	}
	slices.SortStableFunc(all, func(a, b spot) int { return ranks[a] - ranks[b] })
	return all
}

// pickRank moves the selection down by step rows.
func (m *top) pickRank(step int) {
	all := m.workers()
	if len(all) == 0 {
		return
	}
	at := slices.Index(all, m.picked)
	if at < 0 && step > 0 {
		step--
		at = 0
	}
	m.picked = all[min(len(all)-1, max(0, at+step))]
}

// moveInWorld moves the selection forward by sideways places or, if sideways is 0, down by step
// lines.
func (m *top) moveInWorld(step, sideways int) {
	cells := m.grid().cells
	if len(cells) == 0 {
		return
	}
	at := slices.IndexFunc(cells, func(c cell) bool { return c.spot == m.picked })
	switch {
	case at < 0 && abs(step) <= 1:
		at = 0
	case sideways != 0:
		at = min(len(cells)-1, max(0, at+sideways))
	default:
		at = nearestCell(cells, max(0, at), step)
	}
	m.picked = cells[at].spot
}

// nearestCell returns the index of the cell that is nearest to the one with index at, in the line
// that is step lines lower, or in the last line in that direction.
func nearestCell(cells []cell, at, step int) int {
	from, best := cells[at], at
	last := cells[len(cells)-1].line
	to := min(last, max(0, from.line+step))
	for i, c := range cells {
		away, was := abs(c.line-to), abs(cells[best].line-to)
		if away < was || away == was && abs(c.column-from.column) < abs(cells[best].column-from.column) {
			best = i
		}
	}
	return best
}

func abs(n int) int { return max(n, -n) }
