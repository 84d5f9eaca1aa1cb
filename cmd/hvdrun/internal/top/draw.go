package top

import (
	"fmt"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/show"
	"github.com/hvdrun/hvdrun/job"
)

const (
	// leastWidth and leastHeight are the size of the smallest screen that is drawn on.
	leastWidth, leastHeight = 40, 12
	// tallHeight is the height of a screen from which all panes show the last events.
	tallHeight = 36
)

var (
	plain   = ansi.NewStyle()
	bold    = plain.Bold()
	faint   = plain.Faint()
	reverse = plain.Reverse(true)
	red     = plain.ForegroundColor(ansi.Red)
	green   = plain.ForegroundColor(ansi.Green)
	yellow  = plain.ForegroundColor(ansi.Yellow)
	magenta = plain.ForegroundColor(ansi.Magenta)
	cyan    = plain.ForegroundColor(ansi.Cyan)
)

// View draws the screen.
func (m *top) View() tea.View {
	v := tea.NewView(strings.Join(m.frame(), "\n"))
	v.AltScreen, v.WindowTitle = true, "hvdrun top"
	return v
}

// frame returns the lines of the screen. No line is wider than the screen.
func (m *top) frame() []string {
	if m.width < leastWidth || m.height < leastHeight {
		return m.fit([]string{fmt.Sprintf("The terminal is too small: %d×%d,", m.width, m.height), fmt.Sprintf("%d×%d is the least.", leastWidth, leastHeight)}, m.height)
	}
	if m.view == nil {
		return m.fit([]string{"", "  looking at the job…"}, m.height)
	}
	lines := append(m.header(), m.banners()...)
	lines = append(lines, m.tabs(), "")
	var last []string
	if m.height >= tallHeight && m.pane != paneEvents && m.pane != paneOutput && m.dialog == nil && !m.help {
		last = append([]string{"", bold.Styled("Events")}, m.lastEvents((m.height-tallHeight)/2+6)...)
	}
	room := m.height - len(lines) - len(last) - 1
	lines = append(lines, m.fit(m.body(room), room)...)
	lines = append(lines, last...)
	return append(m.fit(lines, m.height-1), m.cut(m.footer()))
}

// fit truncates the lines to the width of the screen, and returns at most many of them.
func (m *top) fit(lines []string, many int) []string {
	out := make([]string, 0, many)
	for _, line := range lines[:min(len(lines), many)] {
		out = append(out, m.cut(line))
	}
	for len(out) < many {
		out = append(out, "")
	}
	return out
}

func (m *top) cut(line string) string { return ansi.Truncate(line, m.width, "…") }

// wrap breaks a text into lines of the screen's width.
func (m *top) wrap(text string) []string { return strings.Split(ansi.Wrap(text, m.width, " "), "\n") }

// body draws the pane, or the dialog or help in its place, in room lines.
func (m *top) body(room int) []string {
	switch {
	case m.dialog != nil:
		return m.dialog.draw()
	case m.help:
		return helpLines()
	case m.pane == paneWorld:
		return m.world(room)
	case m.pane == paneRanks:
		return m.ranks(room)
	case m.pane == paneOutput:
		return m.outputLines(room)
	case m.pane == paneEvents:
		return append([]string{m.filterLine()}, m.scrolled(m.events(), room-1)...)
	case m.pane == paneWorlds:
		head, rows := m.generations()
		return append([]string{head}, m.scrolled(rows, room-1)...)
	case m.pane == paneTasks:
		return m.scrolled(m.tasks(), room)
	}
	return m.scrolled(m.time(), room)
}

// scrolled returns the lines of a pane that are visible at its scroll position.
func (m *top) scrolled(lines []string, room int) []string {
	from := max(0, min(m.scroll[m.pane], len(lines)-room))
	m.scroll[m.pane] = from
	lines = lines[from:]
	if room > 0 && len(lines) > room {
		lines = append(lines[:room-1:room-1], faint.Styled(fmt.Sprintf("… %d more lines", len(lines)-room+1)))
	}
	return lines
}

// stateStyle returns the colour of a job's state.
func stateStyle(s *job.Status) ansi.Style {
	switch s.State {
	case job.Running, job.Done:
		return green
	case job.Failed:
		return red
	case job.Waiting, job.Stopping:
		return yellow
	}
	return cyan
}

func (m *top) header() []string {
	s := &m.view.Status
	state := stateStyle(s).Bold().Styled(string(s.State))
	switch {
	case s.Stopped:
		state = yellow.Bold().Styled("stopped")
	case s.Driver == 0 && !m.view.Over():
		state = red.Bold().Styled("no driver")
	}
	first := bold.Styled("hvdrun top") + "  " + cli.EscapeCell(s.Job) + "  " + state
	clock := show.ClockTime(s.Time, s.Time)
	if room := m.width - ansi.StringWidth(first) - len(clock); room > 0 {
		first += strings.Repeat(" ", room) + faint.Styled(clock)
	}
	return []string{first, faint.Styled(show.ShortCommand(m.view.Command)), m.facts()}
}

// facts returns as many figures of the job as fit, the most important first.
func (m *top) facts() string {
	v, s := m.view, &m.view.Status
	size := "–"
	if s.Size > 0 {
		size = show.Grouped(s.Size)
	}
	all := []string{bold.Styled(size) + " workers (" + show.SizeText(*s) + ")"}
	if v.Commits > 0 {
		text := "commit " + bold.Styled(show.Grouped(v.Commits))
		if v.Rate > 0 {
			text += fmt.Sprintf(", %s/s", rateText(v.Rate))
		}
		all = append(all, text)
	}
	if g := s.Goodput; m.spent() {
		all = append(all, fmt.Sprintf("trained %s of %v", bold.Styled(fmt.Sprintf("%.1f %%", 100*g.Of(job.PartTraining)/g.Seconds)), seconds(g.Seconds)))
	}
	all = append(all, fmt.Sprintf("generation %d", s.Generation), show.Plural(s.Resets, "reset"))
	line := all[0]
	for _, text := range all[1:] {
		if ansi.StringWidth(line)+2+ansi.StringWidth(text) <= m.width {
			line += "  " + text
		}
	}
	return line
}

// spent reports whether the goodput of the job is known. It is not known for a program without
// hvdrun's library.
func (m *top) spent() bool {
	s := &m.view.Status
	return s.Goodput.Seconds > 0 && (s.Generation > 0 || s.Goodput.Of(job.PartTraining) > 0)
}

// banners returns the lines that the user should see first.
func (m *top) banners() []string {
	v, s := m.view, &m.view.Status
	var all []string
	add := func(style ansi.Style, text string) {
		for i, line := range m.wrap(text) {
			if i < 3 {
				all = append(all, style.Styled(line))
			}
		}
	}
	switch {
	case s.Stopped:
		add(yellow, "The job was "+cli.EscapeCell(s.Message))
	case s.State == job.Failed:
		add(red, "The job has failed: "+cli.EscapeCell(s.Message))
	case s.State == job.Done:
		add(green, "The job is done. "+cli.EscapeCell(s.Message))
	case v.Problem != "":
		add(red, "The job cannot be asked: "+cli.EscapeCell(v.Problem))
	case s.Driver == 0:
		add(red, fmt.Sprintf("The job's hvdrun is gone; this is how the job was at %s. Its workers may train on: `hvdrun resume %s` takes the job over.",
			show.ClockTime(s.Last, s.Time), cli.EscapeCell(s.Job)))
	}
	if s.Journal != "" {
		add(yellow, "The job could not be resumed now, its journal is "+cli.EscapeCell(s.Journal))
	}
	if s.Driver != 0 && !v.Over() {
		for _, h := range s.Hosts {
			for _, slot := range h.Slots {
				if slot.Where != "" {
					add(magenta, fmt.Sprintf("%s holds up the others at %s", workerText(h.Host, &slot), cli.EscapeCell(slot.Where)))
				}
			}
		}
		for _, w := range s.Waits {
			add(yellow, fmt.Sprintf("waiting for %s, %v left", cli.EscapeCell(w.For), job.Round(max(0, w.Until.Sub(s.Time)))))
		}
	}
	most := max(3, m.height/6)
	if len(all) > most {
		all = append(all[:most-1], faint.Styled(fmt.Sprintf("… %d more lines", len(all)-most+1)))
	}
	return all
}

// workerText names a worker by its rank, if it has one, and its place.
func workerText(host string, s *job.Slot) string {
	if s.Rank == nil {
		return cli.EscapeCell(placeText(spot{host, s.Slot}))
	}
	return fmt.Sprintf("rank %d on %s", *s.Rank, cli.EscapeCell(placeText(spot{host, s.Slot})))
}

func (m *top) tabs() string {
	var all []string
	short := m.width < 78
	for i, name := range paneNames {
		if short && pane(i) != m.pane {
			name = name[:3]
		}
		text := fmt.Sprintf(" %d %s ", i+1, name)
		if pane(i) == m.pane {
			text = reverse.Bold().Styled(text)
		}
		all = append(all, text)
	}
	return strings.Join(all, "")
}

func (m *top) footer() string {
	switch {
	case m.notice.text != "" && m.dialog == nil:
		return bold.Styled(cli.EscapeCell(m.notice.text))
	case m.typing:
		return faint.Styled("enter keeps the filter, esc ends it")
	case m.dialog != nil || m.help:
		return ""
	}
	keys := "? keys  tab  d drain  x exclude  r readmit  s scale  S stop  / filter  q quit"
	if m.width < len(keys) {
		keys = "? keys  tab  d drain  S stop  q quit"
	}
	return faint.Styled(keys)
}

func helpLines() (lines []string) {
	for _, k := range [][2]string{
		{"1…7, tab", "the panes"},
		{"arrows, hjkl", "pick a slot; page up and down, home, end go further"},
		{"d", "drain the picked slot; D its whole host"},
		{"x", "exclude it; X its whole host"},
		{"r", "readmit it; R its whole host"},
		{"s", "change the number of workers"},
		{"S", "stop the job"},
		{"/", "filter the events by words or kinds"},
		{"o", "output of the picked slot's worker; e: stderr or stdout"},
		{"esc", "end the filter, and pick nothing"},
		{"ctrl+z", "suspend top; fg brings it back"},
		{"q, ctrl+c", "leave; the job goes on"},
	} {
		lines = append(lines, fmt.Sprintf("  %s  %s", bold.Styled(fmt.Sprintf("%-12s", k[0])), k[1]))
	}
	return append(lines, "", faint.Styled("  d, x, r, s and S ask first. Any key goes back."))
}

// draw draws the dialog.
func (d *dialog) draw() []string {
	lines := []string{bold.Styled("  " + d.title), ""}
	for _, text := range d.text {
		lines = append(lines, "  "+text)
	}
	lines = append(lines, "")
	for i, f := range d.fields {
		text := fmt.Sprintf(" %-*s", maxField, cli.EscapeCell(f.text))
		if i == d.at {
			text = reverse.Styled(fmt.Sprintf(" %-*s", maxField, cli.EscapeCell(f.text)+"_"))
		}
		lines = append(lines, "  "+text+"  "+f.name)
	}
	if d.check != "" {
		lines = append(lines, fmt.Sprintf("  %s %s  %s", map[bool]string{false: "[ ]", true: "[x]"}[d.on], d.check, faint.Styled("k changes that")), "")
	}
	if len(d.fields) > 0 {
		lines = append(lines, "")
	}
	if d.wrong != "" {
		lines = append(lines, "  "+red.Styled(cli.EscapeCell(d.wrong)), "")
	}
	if d.sent {
		return append(lines, "  "+faint.Styled("…"))
	}
	keys := fmt.Sprintf("%s %s   esc cancel", d.confirms(), d.yes)
	if len(d.fields) > 1 {
		keys += "   tab next field"
	}
	return append(lines, "  "+bold.Styled(keys))
}

// seconds converts seconds to a rounded duration.
func seconds(s float64) time.Duration { return job.Round(time.Duration(s * float64(time.Second))) }

func rateText(r float64) string {
	switch {
	case r >= 100:
		return show.Grouped(int(r + 0.5))
	case r >= 10:
		return fmt.Sprintf("%.1f", r)
	}
	return fmt.Sprintf("%.2f", r)
}
