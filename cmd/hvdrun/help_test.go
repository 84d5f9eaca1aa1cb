package main

import (
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
)

// TestHelpFits: the help of each command and topic fits a terminal of 80 columns. The help of
// hvdrun itself has no more lines than a terminal; with its topics it lists every command, in a
// group, and the notes.
func TestHelpFits(t *testing.T) {
	root := command(&cli.Program{})
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	help := func(c *cobra.Command) string {
		var b strings.Builder
		c.SetOut(&b)
		if err := c.Help(); err != nil {
			t.Error(err)
		}
		for line := range strings.Lines(b.String()) {
			if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > 80 {
				t.Errorf("help of %q, %d columns: %s", c.CommandPath(), n, line)
			}
		}
		return b.String()
	}
	topics := map[string]string{}
	var look func(c *cobra.Command)
	look = func(c *cobra.Command) {
		if c.IsAdditionalHelpTopicCommand() {
			topics[c.Name()] = help(c)
		}
		if !c.IsAvailableCommand() && c != root {
			return
		}
		help(c)
		for _, sub := range c.Commands() {
			look(sub)
		}
	}
	look(root)
	first, all := help(root), topics["commands"]
	if n := strings.Count(first, "\n"); n > 36 {
		t.Errorf("the first screen has %d lines", n)
	}
	_, text, _ := strings.Cut(first, "\nExamples:\n")
	examples, rest, _ := strings.Cut(text, "\n\n")
	if n := strings.Count(examples, "\n") + 1; n != 5 {
		t.Errorf("there are %d lines of examples", n)
	}
	for _, flag := range []string{"--np N", "--min-np N", "--max-np N", "-H, --hosts ", "--host-discovery-script CMD", "-d, --detach"} {
		if !strings.Contains(rest, flag) {
			t.Errorf("the first screen has no %s", flag)
		}
	}
	for _, g := range groups {
		if !strings.Contains(all, g.Title+":\n") || !strings.Contains(rest, "\n  "+g.Title+" ") {
			t.Errorf("there is no group %q", g.Title)
		}
	}
	for _, sub := range root.Commands() {
		if sub.IsAvailableCommand() && (!strings.Contains(all, "\n  "+sub.Name()+" ") || !strings.Contains(rest, " "+sub.Name())) {
			t.Errorf("%s is in no group", sub.Name())
		}
	}
	flags := topics["flags"]
	root.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden && !strings.Contains(flags, "--"+f.Name+" ") {
			t.Errorf("the topic flags lacks --%s", f.Name)
		}
	})
	if !strings.Contains(flags, strings.Fields(root.Annotations[settings.Notes])[0]) {
		t.Error("there are no notes")
	}
}

// TestHelpColumns: the descriptions of a section's flags begin in one column, which a rune of
// several bytes in the name of a value would move.
func TestHelpColumns(t *testing.T) {
	root := command(&cli.Program{})
	var b strings.Builder
	topic, _, err := root.Find([]string{"flags"})
	if err != nil {
		t.Fatal(err)
	}
	topic.SetOut(&b)
	if err := topic.Help(); err != nil {
		t.Fatal(err)
	}
	seen, column := 0, 0
	begin := regexp.MustCompile(`^(?:  -\w, |      )--\S+(?: \S+)*?   +`)
	for line := range strings.Lines(b.String()) {
		at := utf8.RuneCountInString(begin.FindString(line))
		if at > 0 {
			seen++
		}
		switch {
		case !strings.HasPrefix(line, " "):
			column = 0
		case at == 0:
		case column == 0:
			column = at
		case column != at:
			t.Errorf("the description begins in column %d, and others in %d: %s", at, column, line)
		}
	}
	if seen < 50 {
		t.Errorf("only %d flags are seen", seen)
	}
}
