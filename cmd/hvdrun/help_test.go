package main

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
)

// TestHelpFits: the help of each command fits a terminal of 80 columns, and that of hvdrun has
// examples before all commands and flags, and every command in a group.
func TestHelpFits(t *testing.T) {
	root := command(&cli.Program{})
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	var look func(c *cobra.Command)
	look = func(c *cobra.Command) {
		if !c.IsAvailableCommand() && c != root {
			return
		}
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
		if c == root {
			_, text, _ := strings.Cut(b.String(), "\nExamples:\n")
			examples, rest, _ := strings.Cut(text, "\n\n")
			if n := strings.Count(examples, "\n") + 1; n != 5 {
				t.Errorf("there are %d lines of examples", n)
			}
			for _, g := range groups {
				if !strings.Contains(rest, "\n"+g.Title+":\n") && !strings.HasPrefix(rest, g.Title+":\n") {
					t.Errorf("there is no group %q", g.Title)
				}
			}
			for _, sub := range root.Commands() {
				if sub.IsAvailableCommand() && !strings.Contains(rest, "\n  "+sub.Name()+" ") {
					t.Errorf("%s is in no group", sub.Name())
				}
			}
			if !strings.Contains(rest, strings.Fields(root.Annotations[settings.Notes])[0]) {
				t.Error("there are no notes")
			}
		}
		for _, sub := range c.Commands() {
			look(sub)
		}
	}
	look(root)
}
