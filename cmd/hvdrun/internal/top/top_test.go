package top

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/hvdrun/hvdrun/internal/dashboard"
	"github.com/hvdrun/hvdrun/internal/dashboard/dashboardtest"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/tasks"
)

var update = flag.Bool("update", false, "rewrite what is expected with what there is now")

// screen is top on a simulated screen.
type screen struct {
	t *testing.T
	*top
	ended bool
}

// onScreen calls f with top showing a job on a screen of this size, in virtual time.
func onScreen(t *testing.T, j dashboard.Job, width, height int, f func(s *screen)) {
	t.Helper()
	local := time.Local
	time.Local = time.UTC
	defer func() { time.Local = local }()
	synctest.Test(t, func(t *testing.T) {
		of := newTopJob(t.Context(), j)
		s := &screen{t: t, top: newTop(of)}
		s.Update(tea.WindowSizeMsg{Width: width, Height: height})
		s.do(s.Init())
		f(s)
		if err := of.close(); err != nil {
			t.Error(err)
		}
	})
}

// shows returns a simulated job in the form that top takes.
func shows(j *dashboardtest.Job) dashboard.Job {
	return dashboard.Job{Source: j, Recorded: j.Events, Command: []string{"./train", "--model", "resnet50", "--epochs", "90"}}
}

// do carries out a command of top, and the commands that follow from it, except the next look.
func (s *screen) do(cmd tea.Cmd) {
	if cmd == nil {
		return
	}
	switch msg := cmd().(type) {
	case nil, due:
	case tea.QuitMsg:
		s.ended = true
	case tea.BatchMsg:
		for _, c := range msg {
			s.do(c)
		}
	default:
		_, next := s.Update(msg)
		s.do(next)
	}
}

// lookAgain makes top ask the job for its status again.
func (s *screen) lookAgain() { s.do(s.top.look()) }

var keyCodes = map[string]tea.KeyPressMsg{
	"up": {Code: tea.KeyUp}, "down": {Code: tea.KeyDown}, "left": {Code: tea.KeyLeft}, "right": {Code: tea.KeyRight}, "tab": {Code: tea.KeyTab},
	"enter": {Code: tea.KeyEnter}, "esc": {Code: tea.KeyEscape}, "backspace": {Code: tea.KeyBackspace}, "end": {Code: tea.KeyEnd}, "home": {Code: tea.KeyHome},
	"pgdown": {Code: tea.KeyPgDown}, "ctrl+c": {Code: 'c', Mod: tea.ModCtrl}, "ctrl+u": {Code: 'u', Mod: tea.ModCtrl}, "shift+tab": {Code: tea.KeyTab, Mod: tea.ModShift},
}

// press presses keys. A word that names no key is typed.
func (s *screen) press(keys ...string) {
	for _, name := range keys {
		if k, is := keyCodes[name]; is {
			_, next := s.Update(k)
			s.do(next)
			continue
		}
		for _, r := range name {
			_, next := s.Update(tea.KeyPressMsg{Code: r, Text: string(r)})
			s.do(next)
		}
	}
}

// text returns the screen without its colours.
func (s *screen) text() string {
	s.t.Helper()
	lines := s.frame()
	if len(lines) != s.height {
		s.t.Errorf("pane %v of %dx%d has %d lines", s.pane, s.width, s.height, len(lines))
	}
	var b strings.Builder
	for _, line := range lines {
		if w := ansi.StringWidth(line); w > s.width {
			s.t.Errorf("pane %v of %dx%d has a line of %d columns: %q", s.pane, s.width, s.height, w, line)
		}
		b.WriteString(strings.TrimRight(ansi.Strip(line), " ") + "\n")
	}
	return b.String()
}

// has checks that the screen contains words.
func (s *screen) has(words ...string) {
	s.t.Helper()
	text := s.text()
	for _, w := range words {
		if !strings.Contains(text, w) {
			s.t.Errorf("the screen lacks %q:\n%s", w, text)
		}
	}
}

func (s *screen) lacks(words string) {
	s.t.Helper()
	if text := s.text(); strings.Contains(text, words) {
		s.t.Errorf("the screen has %q:\n%s", words, text)
	}
}

// storyEnd is a time at which much has happened in the story.
var storyEnd = dashboardtest.Begun.Add(102 * time.Minute)

// TestTopFrames: the screens equal the files in testdata/top.
func TestTopFrames(t *testing.T) {
	output := t.TempDir()
	if err := os.MkdirAll(filepath.Join(output, "rank.22"), 0o700); err != nil {
		t.Fatal(err)
	}
	printed := "epoch 1\tloss 0.71\r\nstep 10\rstep 20\rstep 30\n\x1b[31mred\x1b[0m \x1b]0;title\x07and plain\n" + strings.Repeat("long ", 40) + "\nlast line\n"
	if err := os.WriteFile(filepath.Join(output, "rank.22", "stdout"), []byte(printed), 0o600); err != nil {
		t.Fatal(err)
	}
	pick := []string{"right", "end", "up", "up", "right", "right", "right", "right", "right", "right"} // gpu-a4:6, rank 22
	change := func(f func(j *dashboardtest.Job)) func() *dashboardtest.Job {
		return func() *dashboardtest.Job {
			j := dashboardtest.Story()
			f(j)
			return j
		}
	}
	for name, c := range map[string]struct {
		width, height int
		job           func() *dashboardtest.Job
		keys          []string
		with          func(*dashboard.Job)
	}{
		"world":       {width: 80, height: 24, job: dashboardtest.Story, keys: pick},
		"world-large": {width: 132, height: 43, job: dashboardtest.Story, keys: pick},
		"ranks":       {width: 80, height: 24, job: dashboardtest.Story, keys: append(pick, "2")},
		"time":        {width: 80, height: 40, job: dashboardtest.Story, keys: []string{"3"}},
		"time-small":  {width: 60, height: 16, job: dashboardtest.Story, keys: []string{"3"}},
		"generations": {width: 80, height: 24, job: dashboardtest.Story, keys: []string{"4"}},
		"events":      {width: 80, height: 24, job: dashboardtest.Story, keys: []string{"5"}},
		"filter":      {width: 80, height: 24, job: dashboardtest.Story, keys: []string{"/", "failure gpu-b2"}},
		"output":      {width: 80, height: 24, job: dashboardtest.Story, keys: append(pick, "o"), with: func(j *dashboard.Job) { j.Output = output }},
		"tasks": {width: 80, height: 24, job: dashboardtest.Story, keys: []string{"7"}, with: func(j *dashboard.Job) {
			j.Tasks = func(context.Context) (json.RawMessage, error) {
				return json.Marshal(tasks.Status{Running: 3, Ready: 1, Waiting: 2})
			}
		}},
		"help":     {width: 80, height: 24, job: dashboardtest.Story, keys: []string{"?"}},
		"drain":    {width: 80, height: 24, job: dashboardtest.Story, keys: append(pick, "d")},
		"exclude":  {width: 80, height: 24, job: dashboardtest.Story, keys: append(pick, "X", "30m")},
		"scale":    {width: 80, height: 24, job: dashboardtest.Story, keys: []string{"s", "tab", "backspace", "backspace", "x", "enter"}},
		"stop":     {width: 80, height: 24, job: dashboardtest.Story, keys: []string{"S", "k"}},
		"death":    {width: 80, height: 24, job: change(func(j *dashboardtest.Job) { j.Death(storyEnd) })},
		"growth":   {width: 100, height: 30, job: change(func(j *dashboardtest.Job) { j.Growth(storyEnd) })},
		"hang":     {width: 80, height: 24, job: change(func(j *dashboardtest.Job) { j.Hang(storyEnd) }), keys: []string{"end", "up", "right", "right"}},
		"hang-tab": {width: 100, height: 24, job: change(func(j *dashboardtest.Job) { j.Hang(storyEnd) }), keys: []string{"2", "end"}},
		"gone":     {width: 80, height: 24, job: change(func(j *dashboardtest.Job) { j.Change(func(s *job.Status) { s.Driver = 0 }) })},
		"failed": {width: 80, height: 24, job: change(func(j *dashboardtest.Job) {
			j.Change(func(s *job.Status) {
				s.State, s.Driver, s.Message, s.Hosts = job.Failed, 0, "state lost: the last worker that had it has left", nil
			})
		})},
		"stopped": {width: 80, height: 24, job: change(func(j *dashboardtest.Job) {
			j.Change(func(s *job.Status) {
				s.State, s.Driver, s.Message, s.Stopped, s.Hosts = job.Failed, 0, "stopped by signal: terminated", true, nil
			})
		})},
		"thousand": {width: 80, height: 24, job: func() *dashboardtest.Job {
			j := dashboardtest.Large(dashboardtest.Begun, 125, 8)
			j.Stir(40)
			return j
		}, keys: []string{"end"}},
		"thousand-large": {width: 160, height: 50, job: func() *dashboardtest.Job {
			j := dashboardtest.Large(dashboardtest.Begun, 125, 8)
			j.Stir(40)
			return j
		}},
		"too-small": {width: 39, height: 12, job: dashboardtest.Story},
	} {
		t.Run(name, func(t *testing.T) {
			shown := shows(c.job())
			if c.with != nil {
				c.with(&shown)
			}
			onScreen(t, shown, c.width, c.height, func(s *screen) {
				s.press(c.keys...)
				s.lookAgain()
				golden(t, filepath.Join("testdata", "top", name+".txt"), s.text())
			})
		})
	}
}

// golden compares a text with a file.
func golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s: the screen is now\n%s", path, got)
	}
}

// TestTopFits: no pane of any job is wider or higher than the screen.
func TestTopFits(t *testing.T) {
	hang := dashboardtest.Story()
	hang.Hang(storyEnd)
	wide := dashboardtest.New(dashboardtest.Begun, 96, "a-host-with-a-name-that-is-longer-than-anything.example.org", "漢字のホスト")
	none := dashboardtest.New(dashboardtest.Begun, 0)
	for name, j := range map[string]*dashboardtest.Job{
		"story": hang, "wide": wide, "none": none, "thousand": dashboardtest.Large(dashboardtest.Begun, 125, 8),
	} {
		t.Run(name, func(t *testing.T) {
			onScreen(t, shows(j), 80, 24, func(s *screen) {
				for _, size := range [][2]int{{1, 1}, {39, 50}, {40, 12}, {53, 13}, {80, 24}, {81, 36}, {99, 60}, {200, 37}, {400, 120}} {
					s.Update(tea.WindowSizeMsg{Width: size[0], Height: size[1]})
					for p := range panes {
						s.press(string(rune('1' + p)))
						for _, key := range []string{"down", "pgdown", "end", "right", "home", "?", "?", "s", "esc", "S", "esc", "x", "esc"} {
							s.press(key)
							s.text()
						}
					}
				}
			})
		})
	}
}

// TestTopAsks: top asks before each command, sends nothing if the user declines, and otherwise
// sends the command that it asked about.
func TestTopAsks(t *testing.T) {
	const pick = "right" // gpu-a1:0
	for name, c := range map[string]struct {
		open, yes []string
		title     string
		want      job.Command
	}{
		"drain a slot":   {[]string{pick, "d"}, []string{"y"}, "Drain gpu-a1:0?", job.Command{Verb: job.Drain, Host: "gpu-a1", Slot: new(0)}},
		"drain a host":   {[]string{pick, "D"}, []string{"y"}, "Drain gpu-a1?", job.Command{Verb: job.Drain, Host: "gpu-a1"}},
		"readmit a slot": {[]string{pick, "r"}, []string{"y"}, "Use gpu-a1:0 again?", job.Command{Verb: job.Readmit, Host: "gpu-a1", Slot: new(0)}},
		"readmit a host": {[]string{pick, "R"}, []string{"y"}, "Use gpu-a1 again?", job.Command{Verb: job.Readmit, Host: "gpu-a1"}},
		"exclude a slot": {[]string{pick, "x"}, []string{"enter"}, "Exclude gpu-a1:0?", job.Command{Verb: job.Exclude, Host: "gpu-a1", Slot: new(0)}},
		"exclude a host for a time": {[]string{pick, "X"}, []string{"90s", "enter"}, "Exclude gpu-a1?",
			job.Command{Verb: job.Exclude, Host: "gpu-a1", For: 90 * time.Second}},
		"scale": {[]string{"s"}, []string{"ctrl+u", "4", "tab", "ctrl+u", "16", "enter"}, "How many workers?",
			job.Command{Verb: job.Scale, MinNP: new(4), MaxNP: new(16)}},
		"scale without a bound": {[]string{"s"}, []string{"tab", "ctrl+u", "enter"}, "How many workers?",
			job.Command{Verb: job.Scale, MinNP: new(8), MaxNP: new(0)}},
		"stop":         {[]string{"S"}, []string{"y"}, "Stop job 26a4bfccb49cce88?", job.Command{Verb: job.Stop}},
		"stop at once": {[]string{"S"}, []string{"k", "y"}, "Stop job 26a4bfccb49cce88?", job.Command{Verb: job.Stop, Now: true}},
	} {
		t.Run(name, func(t *testing.T) {
			j := dashboardtest.Story()
			onScreen(t, shows(j), 80, 24, func(s *screen) {
				s.press(c.open...)
				s.has(c.title)
				s.press("esc")
				s.lacks(c.title)
				s.press(c.open[len(c.open)-1])
				if n := len(j.Commands()); n != 0 {
					t.Fatalf("%d commands before one was confirmed", n)
				}
				j.Refuse("fewer than --min-np slots would be left")
				s.press(c.yes...)
				s.has(c.title, "fewer than --min-np slots")
				j.Refuse("")
				s.press(c.yes[len(c.yes)-1])
				s.lacks(c.title)
				s.has(string(c.want.Verb) + " is done")
				all := j.Commands()
				if len(all) != 2 || jsonText(t, all[1]) != jsonText(t, c.want) {
					t.Errorf("commands %s, want %s", jsonText(t, all), jsonText(t, c.want))
				}
			})
		})
	}
}

func jsonText(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestTopRefusesNonsense: the dialog reports invalid input, and the job gets no command. The same
// holds if no slot is selected or the job accepts no commands.
func TestTopRefusesNonsense(t *testing.T) {
	j := dashboardtest.Story()
	onScreen(t, shows(j), 80, 24, func(s *screen) {
		s.press("d")
		s.has("pick a slot first")
		s.press("right", "x", "soon", "enter")
		s.has("is not a duration")
		s.press("esc", "s", "ctrl+u", "0", "enter")
		s.has("the fewest workers must be at least 1")
		s.press("esc")
		j.Change(func(st *job.Status) { st.Driver = 0 })
		s.lookAgain()
		s.press("S")
		s.has("nothing is done: the job has no driver")
		j.Change(func(st *job.Status) { st.State = job.Done })
		s.lookAgain()
		s.press("S")
		s.has("nothing is done: the job has ended")
		if n := len(j.Commands()); n != 0 {
			t.Errorf("%d commands", n)
		}
		for _, key := range []string{"q", "ctrl+c"} {
			s.ended = false
			if s.press(key); !s.ended {
				t.Errorf("%s does not end top", key)
			}
		}
	})
}

// TestTopGoesOn: top keeps showing the last status of a job that does not answer, and continues
// with the job's next driver.
func TestTopGoesOn(t *testing.T) {
	j := dashboardtest.Story()
	onScreen(t, shows(j), 80, 24, func(s *screen) {
		j.Change(func(st *job.Status) { st.Driver = 0 })
		s.lookAgain()
		s.has("no driver", "`hvdrun resume 26a4bfccb49cce88`")
		j.Fail(errors.New("a socket that does not answer"))
		s.lookAgain()
		s.has("a socket that does not answer")
		j.Fail(nil)
		j.Change(func(st *job.Status) { st.Driver = 31000 })
		j.Tell(storyEnd, job.Resumed)
		j.Pass(time.Second, 12)
		s.lookAgain()
		s.lacks("no driver")
		s.press("5")
		s.has("another driver has taken over", "commit 84,322")
	})
}

// TestTopHostileTexts: no text of a job controls the terminal.
func TestTopHostileTexts(t *testing.T) {
	const evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
	j := dashboardtest.New(dashboardtest.Begun, 2, "host"+evil)
	j.World(dashboardtest.Begun, 2, time.Second, 1)
	j.Change(func(s *job.Status) {
		s.Hosts[0].Slots[0].What, s.Hosts[0].Slots[0].Where = "what"+evil, "where"+evil
		s.Waits = []job.Wait{{For: "wait" + evil, Until: dashboardtest.Begun}}
		s.Journal, s.Job = "journal"+evil, "job"+evil
		s.Goodput = dashboardtest.Goodput(time.Hour, job.Goodput{StalledBy: []job.StalledBy{{Host: "stalled" + evil}}})
	})
	j.Tell(dashboardtest.Begun, job.DiscoveryFailed, "error", "error"+evil)
	shown := shows(j)
	shown.Command = []string{"./train" + evil}
	shown.Tasks = func(context.Context) (json.RawMessage, error) {
		return json.Marshal(tasks.Status{Journal: "tasks" + evil})
	}
	onScreen(t, shown, 200, 60, func(s *screen) {
		seen := ""
		check := func() {
			raw := strings.Join(s.frame(), "\n")
			seen += raw
			for _, r := range ansi.Strip(raw) {
				if r < ' ' && r != '\n' || r >= 0x7f && r < 0xa0 || r == 0x202e {
					t.Errorf("pane %v has %q", s.pane, r)
				}
			}
			if strings.Contains(raw, "\x1b]") || strings.Contains(raw, "\x1b[2J") {
				t.Errorf("pane %v commands the terminal: %q", s.pane, raw)
			}
		}
		s.press("right")
		for p := range panes {
			s.press(string(rune('1' + p)))
			check()
		}
		s.press("D")
		check()
		j.Refuse("refused" + evil)
		s.press("y")
		check()
		j.Fail(errors.New("problem" + evil))
		s.press("esc")
		s.lookAgain()
		check()
		for _, word := range []string{"host", "what", "where", "wait", "journal", "job", "stalled", "error", "./train", "tasks", "refused", "problem"} {
			if !strings.Contains(seen, word+`\x1b]0;owned`) {
				t.Errorf("%s is not on the screen", word)
			}
		}
	})
}
