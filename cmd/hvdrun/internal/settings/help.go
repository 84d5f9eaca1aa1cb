package settings

import (
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// flagsOfHelp is the part of cobra's template that lists the flags, sectionsOfHelp what takes its
// place.
const (
	flagsOfHelp    = "Flags:\n{{.LocalFlags.FlagUsages | trimTrailingWhitespaces}}"
	sectionsOfHelp = "{{flagSections .LocalFlags | trimTrailingWhitespaces}}"
)

var addFlagSections = sync.OnceFunc(func() { cobra.AddTemplateFunc("flagSections", flagSections) })

// GroupFlags makes the help of the command, and of its subcommands, list the flags by the sections
// of the file.
func GroupFlags(root *cobra.Command) {
	addFlagSections()
	root.SetUsageTemplate(strings.Replace(root.UsageTemplate(), flagsOfHelp, sectionsOfHelp, 1))
}

// flagSections lists flags by the sections of the file, and then the others.
func flagSections(fs *pflag.FlagSet) string {
	var b strings.Builder
	for _, name := range append(sections(), "") {
		of := pflag.NewFlagSet("", pflag.ContinueOnError)
		of.SortFlags = false
		fs.VisitAll(func(f *pflag.Flag) {
			section := ""
			if text, ok := f.Value.(*flagText); ok {
				section = text.setting.section
			}
			if section == name {
				of.AddFlag(f)
			}
		})
		if !of.HasAvailableFlags() {
			continue
		}
		title := "Section " + name
		switch {
		case name == "" && b.Len() == 0:
			title = "Flags"
		case name == "":
			title = "Others"
		}
		b.WriteString(title + ":\n" + of.FlagUsages() + "\n")
	}
	return b.String()
}
