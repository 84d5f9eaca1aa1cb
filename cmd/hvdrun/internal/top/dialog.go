package top

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"charm.land/bubbletea/v2"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/job"
)

// dialog asks the user to confirm a command to the job.
type dialog struct {
	title  string
	text   []string
	fields []field
	at     int    // index of the field being edited
	check  string // the option that k toggles; empty: none
	on     bool
	yes    string // description of the confirming key
	wrong  string // why the command failed
	sent   bool   // the command is in progress
	order  func(d *dialog) (job.Command, error)
}

// field is a text that the user enters.
type field struct{ name, text string }

const maxField = 12 // characters

// write appends text to the current field.
func (d *dialog) write(text string) {
	if d.sent || len(d.fields) == 0 {
		return
	}
	f := &d.fields[d.at]
	if text = typedText(text); len(f.text)+len(text) <= maxField {
		f.text += text
	}
}

// propose opens the dialog for a key, unless the job accepts no commands.
func (m *top) propose(key string) {
	if m.view == nil {
		return
	}
	if cannot := m.view.Cannot(); cannot != "" {
		m.tell("nothing is done: " + cannot)
		return
	}
	var d *dialog
	switch key {
	case "s":
		d = scaleDialog(&m.view.Status)
	case "S":
		d = stopDialog(&m.view.Status)
	default:
		if m.picked == (spot{}) {
			m.tell("pick a slot first, with the arrow keys")
			return
		}
		whole := key < "a"
		place, c := m.picked.host, job.Command{Host: m.picked.host}
		if !whole {
			place, c.Slot = placeText(m.picked), new(m.picked.slot)
		}
		d = placeDialog(strings.ToLower(key), cli.EscapeCell(place), whole, c)
	}
	m.dialog = d
}

func placeText(at spot) string { return fmt.Sprintf("%s:%d", at.host, at.slot) }

func placeDialog(key, place string, whole bool, c job.Command) *dialog {
	who, leave, stopped := "Its worker", "leaves", "is"
	if whole {
		who, leave, stopped = "All its workers", "leave", "are"
	}
	order := func(*dialog) (job.Command, error) { return c, nil }
	switch key {
	case "d":
		c.Verb = job.Drain
		return &dialog{title: "Drain " + place + "?", yes: "drain", order: order, text: []string{
			who + " " + leave + " at the next commit; no step is lost.", "No worker is started there until it is readmitted.",
		}}
	case "r":
		c.Verb = job.Readmit
		return &dialog{title: "Use " + place + " again?", yes: "readmit", order: order, text: []string{
			"Drains and exclusions there end, and failures are forgotten.", "Workers are started there if there is room.",
		}}
	}
	c.Verb = job.Exclude
	return &dialog{
		title: "Exclude " + place + "?", yes: "exclude", fields: []field{{"for how long, such as 30m (none: until it is readmitted)", ""}},
		text: []string{who + " " + stopped + " stopped at once; the others go back to their last commit.", "Drain (d) is the gentle way."},
		order: func(d *dialog) (_ job.Command, err error) {
			if text := d.fields[0].text; text != "" {
				if c.For, err = settings.ParseDuration(text); err != nil {
					return c, err
				}
			}
			return c, nil
		},
	}
}

func scaleDialog(s *job.Status) *dialog {
	most := ""
	if s.MaxNP > 0 {
		most = strconv.Itoa(s.MaxNP)
	}
	return &dialog{
		title: "How many workers?", yes: "scale",
		fields: []field{{"fewest with which training goes on", strconv.Itoa(s.MinNP)}, {"most (none: no bound)", most}},
		text: []string{
			fmt.Sprintf("There are %d. With more than the most, the youngest leave at the next commit;", s.Size), "where there are slots for more, workers are started at once.",
		},
		order: func(d *dialog) (job.Command, error) {
			least, err := settings.ParseCount(d.fields[0].text, 1)
			if err != nil {
				return job.Command{}, errors.New("the fewest workers must be at least 1")
			}
			most := 0
			if text := d.fields[1].text; text != "" {
				if most, err = settings.ParseCount(text, 1); err != nil {
					return job.Command{}, errors.New("most: a number of workers is at least 1")
				}
			}
			return job.Command{Verb: job.Scale, MinNP: &least, MaxNP: &most}, nil
		},
	}
}

func stopDialog(s *job.Status) *dialog {
	return &dialog{
		title: "Stop job " + cli.EscapeCell(s.Job) + "?", yes: "stop the job", check: "kill the workers at once, without a last checkpoint",
		text: []string{
			"Workers in training leave at a step boundary and write the last checkpoint,", "if the program writes any. The job ends, and cannot be resumed.",
		},
		order: func(d *dialog) (job.Command, error) { return job.Command{Verb: job.Stop, Now: d.on}, nil },
	}
}

// confirms returns the key that confirms the dialog. In a dialog with fields, y is text.
func (d *dialog) confirms() string {
	if len(d.fields) > 0 {
		return "enter"
	}
	return "y"
}

// dialogKey handles a key while a dialog is open.
func (m *top) dialogKey(name, text string) tea.Cmd {
	d := m.dialog
	switch {
	case name == "esc" || name == "n" && len(d.fields) == 0:
		m.dialog = nil // a command in progress continues
	case d.sent:
	case name == d.confirms():
		c, err := d.order(d)
		if err == nil {
			err = c.Check()
		}
		if err != nil {
			d.wrong = err.Error()
			return nil
		}
		d.sent, d.wrong = true, ""
		return m.job.order(d, c)
	case len(d.fields) == 0:
		if name == "k" && d.check != "" {
			d.on = !d.on
		}
	case name == "tab" || name == "down":
		d.at = (d.at + 1) % len(d.fields)
	case name == "shift+tab" || name == "up":
		d.at = (d.at + len(d.fields) - 1) % len(d.fields)
	case name == "backspace":
		d.fields[d.at].text = shorter(d.fields[d.at].text)
	case name == "ctrl+u":
		d.fields[d.at].text = ""
	default:
		d.write(text)
	}
	return nil
}
