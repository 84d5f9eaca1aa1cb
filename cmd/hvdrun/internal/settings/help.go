package settings

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// helpWidth is the number of columns of the help.
const helpWidth = 80

// Notes is the annotation of the root command with the text that its help shows after the flags.
const Notes = "notes"

// help returns the help of a command: its description, and its usage.
func help(c *cobra.Command) string {
	text := fill(cmp.Or(c.Long, c.Short)) + "\n\n"
	if c.Runnable() || c.HasSubCommands() {
		text += c.UsageString()
	}
	return text
}

// usageOf returns the usage of a command other than hvdrun itself.
func usageOf(c *cobra.Command) string {
	var b strings.Builder
	b.WriteString("Usage:")
	if c.Runnable() {
		b.WriteString("\n  " + c.UseLine())
	}
	if c.HasAvailableSubCommands() {
		b.WriteString("\n  " + c.CommandPath() + " [command]")
	}
	if c.HasExample() {
		b.WriteString("\n\nExamples:\n" + c.Example)
	}
	if c.HasAvailableSubCommands() {
		b.WriteString("\n\n" + commandGroups(c))
	}
	if c.HasAvailableLocalFlags() {
		b.WriteString("\n\n" + flagSections(c.LocalFlags()))
	}
	if c.HasAvailableSubCommands() {
		b.WriteString("\n\nUse \"" + c.CommandPath() + " [command] --help\" for more information about a command.")
	}
	return b.String() + "\n"
}

// firstScreen returns the usage of hvdrun itself. It fits one screen; the topics contain the rest.
func firstScreen(root *cobra.Command) string {
	return fmt.Sprintf(`Usage:
  %s
  %[2]s [command]

Examples:
%[3]s

Flags:
%[4]s

Commands:
%[5]s

%[2]s help flags       all flags, such as --port-range, and variables
%[2]s help commands    what each command does
%[2]s COMMAND --help   the flags and examples of a command
`, root.UseLine(), root.CommandPath(), root.Example, firstFlags(root.LocalFlags()), commandNames(root))
}

// ShapeHelp formats the help of a command and its subcommands for a terminal of 80 columns. The
// help of root is one screen. Two topics have the rest: flags, by sections of the config file and
// with the notes, and commands, by groups.
func ShapeHelp(root *cobra.Command) {
	// Not by cobra's templates: whatever executes a template makes the linker keep all methods of
	// all types.
	root.SetHelpFunc(func(c *cobra.Command, _ []string) { fmt.Fprint(c.OutOrStdout(), help(c)) })
	root.SetUsageFunc(func(c *cobra.Command) error {
		usage := usageOf
		if c == root {
			usage = firstScreen
		}
		_, err := fmt.Fprint(c.OutOrStderr(), usage(c))
		return err
	})
	addTopic(root, "flags", func() string {
		root.InitDefaultHelpFlag()
		return flagSections(root.LocalFlags()) + "\n\n" + fill(root.Annotations[Notes])
	})
	addTopic(root, "commands", func() string {
		return commandGroups(root) + "\n\n" + fill(root.CommandPath()+" COMMAND --help has the flags and examples of a command.")
	})
}

// addTopic adds a topic to the help of root. A program with the topic's name can still be run,
// since a topic is not a command.
func addTopic(root *cobra.Command, name string, text func() string) {
	topic := &cobra.Command{Use: name}
	topic.SetHelpFunc(func(c *cobra.Command, _ []string) { fmt.Fprintln(c.OutOrStdout(), text()) })
	root.AddCommand(topic)
}

// firstFlags lists the flags of the first screen.
func firstFlags(fs *pflag.FlagSet) string {
	first := pflag.NewFlagSet("", pflag.ContinueOnError)
	first.SortFlags = false
	fs.VisitAll(func(f *pflag.Flag) {
		if text, ok := f.Value.(*flagText); ok && text.setting.first != "" {
			g := *f
			g.Usage = text.setting.first
			first.AddFlag(&g)
		}
	})
	return strings.TrimRight(flagLines(first), "\n")
}

// commandNames lists the names of a command's subcommands, one line per group.
func commandNames(c *cobra.Command) string {
	width := 0
	for _, g := range c.Groups() {
		width = max(width, len(g.Title))
	}
	var b strings.Builder
	for _, g := range c.Groups() {
		var names []string
		for _, sub := range c.Commands() {
			if sub.GroupID == g.ID && (sub.IsAvailableCommand() || sub.Name() == "help") {
				names = append(names, sub.Name())
			}
		}
		fmt.Fprintf(&b, "  %-*s  %s\n", width, g.Title, wrap(strings.Join(names, " "), width+4))
	}
	return strings.TrimRight(b.String(), "\n")
}

// flagLines returns the lines of the flags. All descriptions begin in the same column, since the
// names of values are ASCII: pflag aligns by bytes.
func flagLines(fs *pflag.FlagSet) string { return fs.FlagUsagesWrapped(helpWidth) }

// fill wraps the paragraphs of a text, except those with indented lines.
func fill(text string) string {
	paragraphs := strings.Split(strings.TrimSpace(text), "\n\n")
	for i, p := range paragraphs {
		if !strings.HasPrefix(p, " ") && !strings.Contains(p, "\n ") {
			paragraphs[i] = wrap(p, 0)
		}
	}
	return strings.Join(paragraphs, "\n\n")
}

// wrap wraps a text and indents each line but the first.
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

// commandGroups lists the subcommands of a command, by groups if it has any.
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

// flagSections lists the flags by sections of the config file, and then the other flags.
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
		b.WriteString(title + ":\n" + flagLines(of) + "\n")
	}
	return strings.TrimRight(b.String(), "\n")
}

// Group is a group of commands that the help lists together.
type Group struct {
	Title    string
	Commands []string
}

// GroupCommands makes the help list the subcommands of root by groups.
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
