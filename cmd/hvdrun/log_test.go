package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/hvdrun/hvdrun/driver/control"
	"github.com/hvdrun/hvdrun/internal/cluster"
	"github.com/hvdrun/hvdrun/plan"
)

// foreign is what a host, a plugin or a worker may say: it clears the screen, begins a line of the
// log, breaks a table, and is no UTF-8.
const foreign = "\x1b[2Ja\n12:00:00.000 INFO  all is well\nhvdrun: done\tb\u009b1m\u202e\xff"

// tame checks that a text, of so many lines, commands no terminal and that no line of it is one of
// a foreign text.
func tame(t *testing.T, what, text string, lines int) {
	t.Helper()
	if !utf8.ValidString(text) || strings.ContainsFunc(text, func(r rune) bool { return unicode.IsControl(r) && r != '\n' && r != '\t' || r == '\u202e' }) {
		t.Errorf("%s: %q", what, text)
	}
	if n := strings.Count(text, "\n"); lines > 0 && n != lines {
		t.Errorf("%s: %d lines: %q", what, n, text)
	}
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "12:00:00") || strings.HasPrefix(line, "hvdrun: done") {
			t.Errorf("%s: %q", what, text)
		}
	}
	if !strings.Contains(text, `\x1b[2J`) && !strings.Contains(text, `\u009b1m`) {
		t.Errorf("%s: it is not shown: %q", what, text)
	}
}

// TestForeignWords: what others call themselves, and what they say, is shown escaped.
func TestForeignWords(t *testing.T) {
	for what, c := range map[string]struct {
		lines int
		print func(p *program) error
	}{
		"jobs": {2, func(p *program) error {
			return p.printJobs([]jobLine{{Job: foreign, Command: []string{foreign}}})
		}},
		"discover": {3, func(p *program) error {
			return p.printHosts(understood{Hosts: []understoodHost{{Host: foreign}}}, false)
		}},
		"discover --watch": {0, func(p *program) error {
			w := &watchPrinter{out: p.stdout, now: time.Now}
			w.failed(errors.New(foreign), time.Second)
			w.found([]plan.Host{{Name: foreign, Slots: 1}})
			return nil
		}},
		"discover --verify": {0, func(p *program) error {
			(&verifier{ctx: t.Context(), out: p.stdout}).check("x", func() error { return errors.New(foreign) })
			return nil
		}},
		"check": {0, func(p *program) error {
			return p.printChecked([]*checked{{Host: foreign, Problems: []string{foreign}}, {Host: "b", ok: true, Version: foreign}})
		}},
		"status": {0, func(p *program) error {
			_, err := io.WriteString(p.stdout, (&jobDir{}).picture(foreignStatus(t)))
			return err
		}},
		"status --watch": {0, func(p *program) error { return (&statusLines{out: p.stdout}).show(foreignStatus(t)) }},
	} {
		var out bytes.Buffer
		if err := c.print(&program{stdout: &out, stderr: &out}); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		tame(t, what, out.String(), c.lines)
	}
}

func foreignStatus(t *testing.T) control.Status {
	t.Helper()
	event, err := json.Marshal(map[string]string{"event": "host_excluded", "host": foreign, "time": foreign})
	if err != nil {
		t.Fatal(err)
	}
	return control.Status{
		Job: foreign, State: control.Running, Driver: 1, Message: foreign, Events: []json.RawMessage{event},
		Waits: []control.Wait{{For: foreign}},
		Hosts: []control.Host{{Host: foreign, Slots: []control.Slot{{What: foreign}}}, {Host: foreign}},
	}
}

// TestForeignHosts: a host of a cluster can have no such name, and a state that says so is shown
// escaped.
func TestForeignHosts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cluster")
	dir, err := cluster.Init(path, cluster.Grant{Expires: time.Now().Add(time.Hour)}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	err = dir.Update(func(s *cluster.State) error {
		s.Issued(foreign, time.Now().Add(time.Hour), time.Now())
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if status := run([]string{"cluster", "hosts", path}, os.Stdin, &out, &out, nil); status != 0 {
		t.Fatalf("exits with %d: %s", status, &out)
	}
	tame(t, "cluster hosts", out.String(), 2)
}

// failingSource is a source whose error is foreign, as that of a plugin is.
type failingSource struct{}

func (failingSource) Discover(context.Context) ([]plan.Host, error) { return nil, errors.New(foreign) }

// TestForeignErrors: what a source of hosts says of its failure, to the end of a program.
func TestForeignErrors(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"fails": "#!/bin/sh\ncat " + dir + "/words >&2\nexit 3\n",
		"lists": "#!/bin/sh\ncat " + dir + "/words\n",
		"words": foreign,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, script := range []string{"fails", "lists"} {
		var out, errs bytes.Buffer
		args := []string{"discover", "--host-discovery-script", filepath.Join(dir, script)}
		if status := run(args, os.Stdin, &out, &errs, os.Environ()); status != 6 || out.Len() > 0 {
			t.Errorf("%s: exits with %d: %s", script, status, &out)
		}
		tame(t, script, errs.String(), 0)
	}
	var out bytes.Buffer
	v := &verifier{ctx: t.Context(), out: &out, source: failingSource{}}
	v.first()
	tame(t, "verify", out.String(), 0)
}

// FuzzEscape: nothing commands a terminal, and what is escaped stays as it is.
func FuzzEscape(f *testing.F) {
	f.Add(foreign)
	f.Add("plain\n")
	f.Add("\xf0\x9f\x98")
	f.Fuzz(func(t *testing.T, text string) {
		commands := func(r rune) bool {
			return unicode.IsControl(r) && r != '\n' && r != '\t' || unicode.Is(unicode.Bidi_Control, r)
		}
		for _, escaped := range []string{escape(text), escapeLines(text), escapeCell(text)} {
			if !utf8.ValidString(escaped) || strings.ContainsFunc(escaped, commands) || escape(escaped) != escaped {
				t.Errorf("%q becomes %q", text, escaped)
			}
		}
		if cell := escapeCell(text); strings.ContainsAny(cell, "\n\t") {
			t.Errorf("%q becomes %q", text, cell)
		}
		for i, line := range strings.Split(escapeLines(text), "\n") {
			if i > 0 && !strings.HasPrefix(line, "    ") {
				t.Errorf("%q: line %d is %q", text, i, line)
			}
		}
	})
}
