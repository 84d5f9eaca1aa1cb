package main

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
	"github.com/spf13/pflag"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
)

// manDir is the folder of the manual pages, which make man sets. Only this test needs the
// generator, so hvdrun itself does not link it.
var manDir = flag.String("man", "", "folder for the manual pages; empty: a temporary one")

// TestManPages: every command has a manual page with all its flags.
func TestManPages(t *testing.T) {
	dir := *manDir
	if dir == "" {
		dir = t.TempDir()
	} else if err := os.MkdirAll(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	root := command((&cli.Program{}))
	root.InitDefaultCompletionCmd()
	root.DisableAutoGenTag = true
	root.Long += "\n\n" + root.Annotations[settings.Notes]
	flags := map[*cobra.Command][]string{}
	showMetavars(root, flags)
	if err := doc.GenManTree(root, &doc.GenManHeader{Section: "1", Source: "hvdrun", Manual: "hvdrun"}, dir); err != nil {
		t.Fatal(err)
	}
	cleanPages(t, dir)
	pages := 0
	var check func(c *cobra.Command)
	check = func(c *cobra.Command) {
		page := filepath.Join(dir, strings.ReplaceAll(c.CommandPath(), " ", "-")+".1")
		text, err := os.ReadFile(page)
		if err != nil {
			t.Error(err)
			return
		}
		pages++
		shown := strings.NewReplacer(`\-`, "-", `\fP`, "", `\fB`, "").Replace(string(text))
		for _, flag := range flags[c] {
			if !strings.Contains(shown, flag+"\n") {
				t.Errorf("%s lacks the flag %s", page, flag)
			}
		}
		for _, sub := range c.Commands() {
			if sub.IsAvailableCommand() {
				check(sub)
			}
		}
	}
	check(root)
	if pages < 20 {
		t.Errorf("there are %d pages", pages)
	}
}

// showMetavars makes the generator print the name of a flag's value from --help, such as N or FILE,
// in place of the default, which follows the flag's text, as in --help. It records the flags of
// each command.
func showMetavars(c *cobra.Command, flags map[*cobra.Command][]string) {
	c.InitDefaultHelpFlag()
	show := func(f *pflag.Flag) {
		metavar, text := pflag.UnquoteUsage(f)
		if !slices.Contains([]string{"", "0", "0s", "false", "[]"}, f.DefValue) {
			text += " (default " + f.DefValue + ")"
		}
		if !f.Hidden {
			flags[c] = append(flags[c], strings.TrimSpace("--"+f.Name+" "+metavar))
		}
		f.Usage, f.DefValue = text, metavar
	}
	c.LocalNonPersistentFlags().VisitAll(show)
	c.PersistentFlags().VisitAll(show)
	for _, sub := range c.Commands() {
		showMetavars(sub, flags)
	}
}

// cleanPages writes a flag and its value as --help does: "--np N", and nothing after a switch.
func cleanPages(t *testing.T, dir string) {
	pages, err := filepath.Glob(filepath.Join(dir, "*.1"))
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		clean := flagLine.ReplaceAllStringFunc(string(text), func(line string) string {
			m := flagLine.FindStringSubmatch(line)
			return strings.TrimSpace(m[1] + " " + strings.Trim(m[2], `"[]=`))
		})
		if err := os.WriteFile(page, []byte(clean), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

var flagLine = regexp.MustCompile(`(?m)^(\\fB.*-[\w.-]+\\fP)(\[?=.*)$`)
