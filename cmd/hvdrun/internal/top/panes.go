package top

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/show"
	"github.com/hvdrun/hvdrun/internal/dashboard"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/tasks"
)

// slotLook is how slots of a state are drawn.
type slotLook struct {
	mark  string
	style ansi.Style
	words string
}

// slotStates lists the states in the order of the legend.
var slotStates = []job.SlotState{
	job.SlotTraining, job.SlotReady, job.SlotStarting, job.SlotLeaving, job.SlotStopping, job.SlotFree,
	job.SlotExcluded, job.SlotDrained, job.SlotHeld,
}

var slotLooks = map[job.SlotState]slotLook{
	job.SlotTraining: {"#", green, "training"},
	job.SlotReady:    {"+", cyan, "waits to join"},
	job.SlotStarting: {".", cyan, "starting"},
	job.SlotLeaving:  {"<", yellow, "leaving"},
	job.SlotStopping: {"x", yellow, "being stopped"},
	job.SlotFree:     {"-", faint, "free"},
	job.SlotExcluded: {"X", red, "excluded"},
	job.SlotDrained:  {"D", magenta, "drained"},
	job.SlotHeld:     {"H", magenta, "held"},
}

// cell is the position of a slot in the grid.
type cell struct {
	spot
	line, column int
}

// grid is the drawn world: hosts with their slots, and the positions of the slots.
type grid struct {
	lines []string
	cells []cell
}

// mostWithRanks is the largest number of slots of a world for which the grid shows ranks.
const mostWithRanks = 160

// grid draws the world, with several hosts side by side if there is room.
func (m *top) grid() grid {
	hosts := m.view.Status.Hosts
	name, most, slots := 0, 0, 0
	for _, h := range hosts {
		name, most, slots = max(name, ansi.StringWidth(cli.EscapeCell(h.Host))), max(most, len(h.Slots)), slots+len(h.Slots)
	}
	name = min(name, 24, m.width/3)
	wide := 1
	if slots <= mostWithRanks {
		wide = 4
	}
	block := name + 2 + most*wide
	side := max(1, (m.width+2)/(block+2))
	perLine := max(1, min(most, (m.width-name-2)/wide))
	var g grid
	var line strings.Builder
	for i, h := range hosts {
		left := (i % side) * (block + 2)
		if side > 1 && left > 0 {
			line.WriteString(strings.Repeat(" ", max(0, left-ansi.StringWidth(line.String()))))
		}
		flag := " "
		if h.Draining || !h.Listed {
			flag = yellow.Styled(map[bool]string{true: "<", false: "?"}[h.Draining])
		}
		text := ansi.Truncate(cli.EscapeCell(h.Host), name, "…")
		line.WriteString(text + strings.Repeat(" ", name-ansi.StringWidth(text)) + flag + " ")
		for k := range h.Slots {
			if k > 0 && k%perLine == 0 {
				g.lines = append(g.lines, line.String())
				line.Reset()
				line.WriteString(strings.Repeat(" ", name+2))
			}
			g.cells = append(g.cells, cell{spot{h.Host, h.Slots[k].Slot}, len(g.lines), left + name + 2 + k%perLine*wide})
			line.WriteString(m.slotText(h.Host, &h.Slots[k], wide))
		}
		if i%side == side-1 || i == len(hosts)-1 {
			g.lines = append(g.lines, line.String())
			line.Reset()
		}
	}
	return g
}

// slotText draws a slot in wide columns: its rank or the mark of its state and, if there is room,
// its problem.
func (m *top) slotText(host string, s *job.Slot, wide int) string {
	look := slotLooks[s.State]
	text, style := look.mark, look.style
	late, hung := s.Straggler.Late(), s.Where != ""
	if hung || late {
		style = magenta.Bold()
	}
	if wide == 1 {
		switch {
		case hung:
			text = "!"
		case late:
			text = "~"
		}
	} else {
		if s.State == job.SlotTraining && s.Rank != nil {
			text = fmt.Sprint(*s.Rank)
		}
		text = fmt.Sprintf("%3s", text)
		switch {
		case hung:
			text += "!"
		case late:
			text += "~"
		default:
			text += " "
		}
	}
	if m.picked == (spot{host, s.Slot}) {
		style = style.Reverse(true)
	}
	return style.Styled(text)
}

// world draws the grid with its legend, and below them the picked slot.
func (m *top) world(room int) []string {
	if len(m.view.Status.Hosts) == 0 {
		return []string{map[bool]string{false: "No hosts yet: discovery has named none.", true: "There are no hosts any more."}[m.view.Over()]}
	}
	g := m.grid()
	about := m.about()
	left := max(1, room-len(about)-3)
	from := m.scroll[paneWorld]
	if i := slices.IndexFunc(g.cells, func(c cell) bool { return c.spot == m.picked }); i >= 0 {
		from = min(max(from, g.cells[i].line-left+1), g.cells[i].line) // keep the picked slot visible
	}
	from = max(0, min(from, len(g.lines)-left))
	m.scroll[paneWorld] = from
	lines := append([]string{m.legend()}, g.lines[from:min(len(g.lines), from+left)]...)
	if hidden := len(g.lines) - left; hidden > 0 {
		lines = append(lines, faint.Styled(fmt.Sprintf("lines %d to %d of %d", from+1, from+left, len(g.lines))))
	} else {
		lines = append(lines, "")
	}
	return append(lines, about...)
}

func (m *top) legend() string {
	counts, slow, hung := map[job.SlotState]int{}, 0, 0
	for _, h := range m.view.Status.Hosts {
		for i := range h.Slots {
			counts[h.Slots[i].State]++
			switch {
			case h.Slots[i].Where != "":
				hung++
			case h.Slots[i].Straggler.Late():
				slow++
			}
		}
	}
	var all []string
	for _, s := range slotStates {
		if n := counts[s]; n > 0 {
			look := slotLooks[s]
			all = append(all, fmt.Sprintf("%s %s %s", look.style.Styled(look.mark), show.Grouped(n), look.words))
		}
	}
	if hung > 0 {
		all = append(all, fmt.Sprintf("%s %d %s up the others", magenta.Bold().Styled("!"), hung, map[bool]string{true: "holds", false: "hold"}[hung == 1]))
	}
	if slow > 0 {
		all = append(all, fmt.Sprintf("%s %d %s last", magenta.Bold().Styled("~"), slow, map[bool]string{true: "comes", false: "come"}[slow == 1]))
	}
	return strings.Join(all, "  ")
}

// about describes the picked slot.
func (m *top) about() []string {
	s := m.slot(m.picked)
	if s == nil {
		return []string{faint.Styled("The arrow keys pick a slot.")}
	}
	v := m.view
	line := bold.Styled(cli.EscapeCell(placeText(m.picked))) + "  " + show.SlotState(*s, v.Status.Time)
	if s.Rank != nil {
		line += fmt.Sprintf("  rank %d", *s.Rank)
	}
	if s.Commits != nil {
		line += "  commit " + show.Grouped(*s.Commits)
	}
	if s.PID != 0 {
		line += fmt.Sprintf("  pid %d", s.PID)
	}
	line += fmt.Sprintf("  failures %d", s.Failures)
	lines := m.wrap(line)
	for _, h := range v.Status.Hosts {
		if h.Host == m.picked.host && h.Draining {
			lines = append(lines, "its host drains")
		} else if h.Host == m.picked.host && !h.Listed {
			lines = append(lines, "its host is no longer listed")
		}
	}
	if s.What != "" {
		lines = append(lines, m.wrap("does: "+cli.EscapeCell(s.What))...)
	}
	if s.Where != "" {
		lines = append(lines, m.wrap("is at: "+cli.EscapeCell(s.Where))...)
	}
	if late := show.LateText(s.Straggler); late != "" {
		lines = append(lines, late)
	}
	if text := show.UsageText(s.Usage); text != "" {
		lines = append(lines, m.wrap("uses: "+text)...)
	}
	if text := show.FiguresText(s.Figures); text != "" {
		lines = append(lines, m.wrap("reports: "+text)...)
	}
	return lines
}

// ranks draws a table of the workers. The picked worker is visible.
func (m *top) ranks(room int) []string {
	all := m.workers()
	if len(all) == 0 {
		return []string{"No workers at the moment."}
	}
	left := max(1, room-1)
	from := m.scroll[paneRanks]
	if i := slices.Index(all, m.picked); i >= 0 {
		from = min(max(from, i-left+1), i)
	}
	from = max(0, min(from, len(all)-left))
	m.scroll[paneRanks] = from
	place := 4
	for _, at := range all {
		place = max(place, ansi.StringWidth(cli.EscapeCell(placeText(at))))
	}
	place = min(place, 30, m.width/3)
	lines := []string{bold.Styled(fmt.Sprintf("%5s  %-*s  %-9s  %10s  %5s  %5s  %s", "RANK", place, "SLOT", "STATE", "COMMIT", "FAILS", "LAST", "DOES"))}
	for _, at := range all[from:min(len(all), from+left)] {
		s := m.slot(at)
		rank, commit, last := "–", "–", "–"
		if s.Rank != nil {
			rank = fmt.Sprint(*s.Rank)
		}
		if s.Commits != nil {
			commit = show.Grouped(*s.Commits)
		}
		if s.Straggler != nil {
			last = fmt.Sprintf("%.0f %%", 100*s.Straggler.Last)
		}
		does := s.What
		if s.Where != "" {
			does = "at " + s.Where + ": " + does
		}
		name := ansi.Truncate(cli.EscapeCell(placeText(at)), place, "…")
		name += strings.Repeat(" ", place-ansi.StringWidth(name))
		style := slotLooks[s.State].style
		if s.Where != "" || s.Straggler.Late() {
			style = magenta
		}
		line := fmt.Sprintf("%5s  %s  %s  %10s  %5d  %5s  %s", rank, name, style.Styled(fmt.Sprintf("%-9s", s.State)), commit, s.Failures, last, cli.EscapeCell(does))
		if at == m.picked {
			line = reverse.Styled(ansi.Strip(line) + strings.Repeat(" ", max(0, m.width-ansi.StringWidth(line))))
		}
		lines = append(lines, line)
	}
	return lines
}

// kindLooks are the colours of kinds, and their names, for kinds that are not shown by their own
// name.
var kindLooks = map[job.Kind]struct {
	style ansi.Style
	name  string
}{
	job.KindStart: {plain, ""}, job.KindFailure: {red, ""}, job.KindStall: {magenta, ""}, job.KindExcluded: {yellow, "exclusion"},
	job.KindDrained: {magenta, "drain"}, job.KindScaled: {cyan, ""}, job.KindGrown: {green, "growth"}, job.KindShrunk: {yellow, "removal"},
	job.KindChanged: {cyan, "hosts changed"}, job.KindDriver: {cyan, "new driver"}, job.KindAsked: {cyan, "command"},
	job.KindEnded: {bold, "end"}, job.KindOther: {faint, ""},
}

func kindName(k job.Kind) string { return cmp.Or(kindLooks[k].name, string(k)) }

// generations returns the head and the rows of the table of worlds, newest first.
func (m *top) generations() (head string, rows []string) {
	v := m.view
	if len(v.Worlds) == 0 {
		return "The first begins when enough workers have joined.", nil
	}
	wide := max(len("PUBLISHED"), m.timeWidth())
	head = bold.Styled(fmt.Sprintf("%4s  %-*s  %-9s  %-13s  %6s  %s", "NO", wide, "PUBLISHED", "WORKERS", "CAUSE", "TOOK", "WHY"))
	for i := len(v.Worlds) - 1; i >= 0; i-- {
		w := &v.Worlds[i]
		size, took := show.Grouped(w.Size), "–"
		if i > 0 && w.Size != v.Worlds[i-1].Size {
			size += fmt.Sprintf(" (%+d)", w.Size-v.Worlds[i-1].Size)
		}
		if !w.First.IsZero() {
			took = show.Brief(w.Lost)
		}
		cause := kindLooks[w.Kind].style.Styled(fmt.Sprintf("%-13s", kindName(w.Kind)))
		rows = append(rows, fmt.Sprintf("%4d  %-*s  %-9s  %s  %6s  %s", w.Generation, wide, shortTime(w.Time, v.Status.Time), size, cause, took, cli.EscapeCell(w.Why)))
	}
	if v.Forgotten > 0 {
		rows = append(rows, faint.Styled(fmt.Sprintf("%d generations before these are in the events file", v.Forgotten)))
	}
	return head, rows
}

// timeWidth returns the width of the times of the job's events.
func (m *top) timeWidth() int { return len(shortTime(m.view.Status.Begun, m.view.Status.Time)) }

// shortTime formats a time of day, with the month and day if it is not today.
func shortTime(t, now time.Time) string {
	t, now = t.Local(), now.Local()
	if t.Format(time.DateOnly) == now.Format(time.DateOnly) {
		return t.Format(time.TimeOnly)
	}
	return t.Format("01-02 15:04:05")
}

func (m *top) filterLine() string {
	n := len(m.chosen())
	text := show.Plural(n, "event") + ", newest first"
	if m.typing || m.filter != "" {
		cursor := ""
		if m.typing {
			cursor = "_"
		}
		text = fmt.Sprintf("filter: %s%s  %d of %s", bold.Styled(cli.EscapeCell(m.filter)), cursor, n, show.Plural(len(m.view.Events), "event"))
	}
	return text
}

// chosen returns the events that contain all words of the filter, newest first; without a filter,
// the events that are not folded.
func (m *top) chosen() (all []*dashboard.Event) {
	words := strings.Fields(strings.ToLower(m.filter))
	for i := len(m.view.Events) - 1; i >= 0; i-- {
		e := &m.view.Events[i]
		if e.Folded && len(words) == 0 {
			continue
		}
		text := strings.ToLower(e.Text + " " + e.Name + " " + kindName(e.Kind))
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(text, w) }) {
			all = append(all, e)
		}
	}
	return all
}

// events returns the lines of the chosen events.
func (m *top) events() (lines []string) {
	for _, e := range m.chosen() {
		lines = append(lines, m.eventLines(e)...)
	}
	if len(lines) == 0 {
		lines = []string{map[bool]string{true: "Nothing has happened yet.", false: "No event is like that."}[m.filter == ""]}
	}
	return lines
}

func (m *top) eventLines(e *dashboard.Event) []string {
	at := fmt.Sprintf("%-*s", m.timeWidth(), shortTime(e.Time, m.view.Status.Time))
	indent := strings.Repeat(" ", len(at)+3)
	text := strings.Split(ansi.Wrap(cli.EscapeCell(e.Text), max(10, m.width-len(indent)), " "), "\n")
	lines := []string{faint.Styled(at) + kindLooks[e.Kind].style.Styled(" ▌ ") + text[0]}
	for _, more := range text[1:] {
		lines = append(lines, indent+more)
	}
	return lines
}

// lastEvents returns room lines of the newest events.
func (m *top) lastEvents(room int) (lines []string) {
	for i := len(m.view.Events) - 1; i >= 0 && len(lines) < room; i-- {
		lines = append(lines, m.eventLines(&m.view.Events[i])...)
	}
	for len(lines) < room {
		lines = append(lines, "")
	}
	return lines[:room]
}

// outputLines returns the end of the picked rank's output.
func (m *top) outputLines(room int) []string {
	stream, other := "stdout", "stderr"
	if m.out.of.stderr {
		stream, other = other, stream
	}
	head := fmt.Sprintf("%s of rank %d", stream, m.out.of.rank) + faint.Styled("   left and right: another rank   e: "+other)
	if m.out.gone != "" {
		return append([]string{head}, m.wrap(cli.EscapeLines(m.out.gone))...)
	}
	var lines []string
	for line := range strings.Lines(ansi.Strip(m.out.text)) {
		line = strings.TrimRight(line, "\r\n")
		line = line[strings.LastIndexByte(line, '\r')+1:] // the visible rest of an overwritten line
		line = strings.ReplaceAll(cli.Escape(line), "\t", "    ")
		lines = append(lines, strings.Split(ansi.Hardwrap(line, m.width, true), "\n")...)
	}
	if len(lines) == 0 {
		return []string{head, "This rank has printed nothing."}
	}
	left := max(1, room-1)
	m.scroll[paneOutput] = max(0, min(m.scroll[paneOutput], len(lines)-left))
	to := len(lines) - m.scroll[paneOutput]
	return append([]string{head}, lines[max(0, to-left):to]...)
}

// tasks returns the tables of hvdrun tasks.
func (m *top) tasks() []string {
	var s tasks.Status
	if len(m.view.Tasks) == 0 || json.Unmarshal(m.view.Tasks, &s) != nil {
		return []string{"This job runs no tasks."}
	}
	var b strings.Builder
	_ = show.PrintTasks(&b, s) // cannot fail: it writes to memory
	var lines []string
	for line := range strings.Lines(b.String()) {
		lines = append(lines, cli.EscapeCell(strings.TrimRight(line, "\n")))
	}
	return lines
}
