package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
)

// unknownCommand returns an error for a word that stands in the place of a subcommand but is not
// one, as in hvdrun cluster iniit or hvdrun help statsu.
func unknownCommand(root *cobra.Command, args []string) error {
	if len(args) > 0 && args[0] == "help" {
		args = args[1:]
	} else if len(args) < 2 || !isCommandOf(root, args[0]) {
		return nil // the first word of a job is the program
	}
	c, rest, err := root.Find(args)
	if err != nil || len(rest) == 0 || !c.HasSubCommands() || strings.HasPrefix(rest[0], "-") {
		return nil
	}
	word, like := rest[0], settings.NearestOf(rest[0], namesOf(c))
	switch path := strings.TrimSpace(strings.TrimPrefix(c.CommandPath()+" ", root.Name()+" ")); {
	case c.Runnable() && c != root && (like == "" || strings.Trim(word, "0123456789abcdef") == ""):
		return nil // the word names a job
	case like != "":
		return fmt.Errorf("no command %q; did you mean %q?", strings.TrimSpace(path+" "+word), strings.TrimSpace(path+" "+like))
	default:
		return fmt.Errorf("no command %q; `%s --help` lists the commands", strings.TrimSpace(path+" "+word), c.CommandPath())
	}
}

func isCommandOf(c *cobra.Command, name string) bool {
	for _, sub := range c.Commands() {
		if sub.Name() == name {
			return true
		}
	}
	return false
}

// namesOf returns the names of the subcommands that a command's help shows.
func namesOf(c *cobra.Command) (names []string) {
	for _, sub := range c.Commands() {
		if !sub.Hidden && !sub.IsAdditionalHelpTopicCommand() {
			names = append(names, sub.Name())
		}
	}
	return names
}

// explainUse extends the errors of a command and of its subcommands: an error about arguments also
// shows the usage, and an error about an unknown flag suggests a similar one. The usage of a
// command is its Use, which names the flags.
func explainUse(c *cobra.Command) {
	c.DisableFlagsInUseLine = true
	if check := c.Args; check != nil {
		c.Args = func(c *cobra.Command, args []string) error {
			runs := strings.Contains(c.UseLine(), "command [args") // the arguments are a program and its arguments
			var wrong string
			switch err := check(c, args); {
			case err == nil && (runs || !slices.Contains(args, "")):
				return nil
			case err == nil: // an empty argument, as from an unset variable, must not select the only job
				wrong = `an argument is empty (""); a variable of the shell may be unset`
			case len(args) == 0 && runs:
				wrong = "no command to run"
			case len(args) == 0:
				wrong = "its arguments are missing"
			default:
				wrong = fmt.Sprintf("these arguments do not fit: %s", strings.Join(args, " "))
			}
			return fmt.Errorf("%s: %s\nusage: %s", c.Name(), wrong, c.UseLine())
		}
	}
	c.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		unknown, is := errors.AsType[*pflag.NotExistError](err)
		if !is {
			return err
		}
		var known []string
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if !f.Hidden {
				known = append(known, f.Name)
			}
		})
		if like := settings.NearestOf(unknown.GetSpecifiedName(), known); like != "" {
			return fmt.Errorf("unknown flag --%s; did you mean --%s?", unknown.GetSpecifiedName(), like)
		}
		dashes := "--"
		if unknown.GetSpecifiedShortnames() != "" {
			dashes = "-"
		}
		return fmt.Errorf("unknown flag %s%s; `%s --help` lists the flags", dashes, unknown.GetSpecifiedName(), c.CommandPath())
	})
	for _, sub := range c.Commands() {
		explainUse(sub)
	}
}
