package main

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// manDir is where make man wants the manual pages. The generator is needed by this test alone, so
// hvdrun itself does not link it.
var manDir = flag.String("man", "", "folder for the manual pages; empty: a temporary one")

// TestManPages: every command has a manual page with all its flags.
func TestManPages(t *testing.T) {
	dir := *manDir
	if dir == "" {
		dir = t.TempDir()
	} else if err := os.MkdirAll(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	root := (&program{}).command()
	root.InitDefaultCompletionCmd()
	root.DisableAutoGenTag = true
	if err := doc.GenManTree(root, &doc.GenManHeader{Section: "1", Source: "hvdrun", Manual: "hvdrun"}, dir); err != nil {
		t.Fatal(err)
	}
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
		for _, line := range strings.Split(c.LocalFlags().FlagUsages(), "\n") {
			if _, name, found := strings.Cut(line, "--"); found {
				name = strings.FieldsFunc(name, func(r rune) bool { return r == ' ' || r == '=' })[0]
				if !strings.Contains(strings.ReplaceAll(string(text), `\-`, "-"), "--"+name) {
					t.Errorf("%s lacks the flag --%s", page, name)
				}
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
