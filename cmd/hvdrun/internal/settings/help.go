package settings

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// helpWidth is the number of columns of the help.
const helpWidth = 80

// Notes is the annotation of a command for what its help says after the flags.
const Notes = "notes"

const helpTemplate = `{{fill (or .Long .Short)}}

{{if or .Runnable .HasSubCommands}}{{.UsageString}}{{end}}`

const usageTemplate = `Usage:{{if .Runnable}}
  {{.UseLine}}{{end}}{{if .HasAvailableSubCommands}}
  {{.CommandPath}} [command]{{end}}{{if .HasExample}}

Examples:
{{.Example}}{{end}}{{if .HasAvailableSubCommands}}

{{commandGroups .}}{{end}}{{if .HasAvailableLocalFlags}}

{{flagSections .LocalFlags}}{{end}}{{with .Annotations.notes}}

{{fill .}}{{end}}{{if .HasAvailableSubCommands}}

Use "{{.CommandPath}} [command] --help" for more information about a command.{{end}}
`

var addHelpFuncs = sync.OnceFunc(func() {
	cobra.AddTemplateFunc("fill", fill)
	cobra.AddTemplateFunc("commandGroups", commandGroups)
	cobra.AddTemplateFunc("flagSections", flagSections)
})

// ShapeHelp makes the help of a command, and of its subcommands, fit a terminal of 80 columns, with
// the flags by the sections of the file.
func ShapeHelp(root *cobra.Command) {
	addHelpFuncs()
	root.SetHelpTemplate(helpTemplate)
	root.SetUsageTemplate(usageTemplate)
}

// fill breaks the lines of a text anew, but for paragraphs with lines that are indented.
func fill(text string) string {
	paragraphs := strings.Split(strings.TrimSpace(text), "\n\n")
	for i, p := range paragraphs {
		if !strings.HasPrefix(p, " ") && !strings.Contains(p, "\n ") {
			paragraphs[i] = wrap(p, 0)
		}
	}
	return strings.Join(paragraphs, "\n\n")
}

// wrap breaks the lines of a text anew, each but the first indented.
func wrap(text string, indent int) string {
	var b strings.Builder
	column := indent
	for i, word := range strings.Fields(text) {
		width := utf8.RuneCountInString(word)
		switch {
		case i == 0:
		case column+1+width > helpWidth:
			b.WriteString("\n" + strings.Repeat(" ", indent))
			column = indent
		default:
			b.WriteByte(' ')
			column++
		}
		b.WriteString(word)
		column += width
	}
	return b.String()
}

// commandGroups lists the subcommands of a command, by its groups where it has any.
func commandGroups(c *cobra.Command) string {
	groups := c.Groups()
	if len(groups) == 0 {
		groups = []*cobra.Group{{Title: "Commands"}}
	}
	width := 0
	for _, sub := range c.Commands() {
		width = max(width, len(sub.Name()))
	}
	var b strings.Builder
	for _, g := range groups {
		fmt.Fprintf(&b, "%s:\n", g.Title)
		for _, sub := range c.Commands() {
			if sub.GroupID == g.ID && (sub.IsAvailableCommand() || sub.Name() == "help") {
				fmt.Fprintf(&b, "  %-*s  %s\n", width, sub.Name(), wrap(sub.Short, width+4))
			}
		}
		b.WriteByte('\n')
	}
	return strings.TrimSpace(b.String())
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
		b.WriteString(title + ":\n" + of.FlagUsagesWrapped(helpWidth) + "\n")
	}
	return strings.TrimRight(b.String(), "\n")
}

// Group is commands that the help lists together.
type Group struct {
	Title    string
	Commands []string
}

// GroupCommands has the help list the subcommands of root by groups.
func GroupCommands(root *cobra.Command, groups []Group) {
	for _, g := range groups {
		root.AddGroup(&cobra.Group{ID: g.Title, Title: g.Title})
		for _, c := range root.Commands() {
			if slices.Contains(g.Commands, c.Name()) {
				c.GroupID = g.Title
			}
		}
	}
	last := groups[len(groups)-1].Title
	root.SetHelpCommandGroupID(last)
	root.SetCompletionCommandGroupID(last)
	for _, c := range root.Commands() {
		c.GroupID = cmp.Or(c.GroupID, last)
	}
}
