package settings

import (
	"io"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
)

// ConfigCommand returns the command hvdrun config, which prints the settings of a job. possible
// returns an error if no job can have them.
func ConfigCommand(p *cli.Program, possible func(*Settings) error) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "config [flags] [-- command [args…]]",
		Short: "Print all settings as a job with these flags would have them, and where each comes from",
		Long: `config prints the settings that a job with the same flags, variables and file would have, and those of an agent, as a file
for --config-file: by sections, with a comment at each that names its origin. Settings that are not set are comments. The
printed file gives the same settings again. It does not contain values that look like secrets.

config refuses contradictory settings, as a job does.`,
		Example: `  hvdrun config -np 2 --min-np 1 --host-discovery-script ./discover.sh \
      -- ./train --epochs 3 > job.yaml
  hvdrun --config-file job.yaml`,
		RunE: func(cmd *cobra.Command, command []string) error {
			s, err := Load(cmd.Flags(), p.Env)
			if err != nil {
				return err
			}
			if len(command) > 0 {
				s.Command, s.Origins["command"] = command, "the command line"
			}
			if err := possible(&s); err != nil {
				return err
			}
			agents := pflag.NewFlagSet("", pflag.ContinueOnError)
			for i := range AgentTable {
				AddFlag(agents, &AgentTable[i])
			}
			agents.AddFlag(cmd.Flags().Lookup(configFile))
			a, err := Load(agents, p.Env)
			if err != nil {
				return err
			}
			return cli.Failed(printConfig(p.Stdout, effective(&s, &a), asJSON))
		},
	}
	AddFlags(cmd.Flags(), false)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object: for each section and key its value and where it comes from")
	return cmd
}

// configEntry is a setting to be printed. Value is a string, a []string, a map[string]string, or
// nil if the setting has no value.
type configEntry struct {
	section, name string
	Value         any    `json:"value"`
	From          string `json:"from"`
	Note          string `json:"note,omitempty"` // what applies without a value
}

const secretNote = "not shown"

// effective returns all settings: those of a job from s, and those of agents from a.
func effective(s, a *Settings) (all []configEntry) {
	add := func(name string, value any) {
		if s.Given(name) {
			all = append(all, configEntry{section: jobSection, name: name, Value: value, From: place(s.Origins[name])})
		}
	}
	add("command", s.Command)
	add("dir", s.Dir)
	if s.Given("env") {
		add("env", keyed(s.Env))
	}
	for _, name := range sections() {
		for _, st := range everySetting() {
			if st.section == name {
				from := s
				if name == "agent" {
					from = a
				}
				all = append(all, from.entry(st))
			}
		}
	}
	return all
}

func (s *Settings) entry(st *setting) configEntry {
	e := configEntry{section: st.section, name: st.Name, From: "default", Note: st.unset}
	text := st.def
	if s.Given(st.Name) {
		text, e.From, e.Note = s.texts[st.Name], place(s.Origins[st.Name]), ""
	}
	switch {
	case text == "" && e.From == "default":
	case st.pairs:
		e.Value = keyed(strings.Split(text, "\n"))
	case (st.list || st.repeat) && strings.Contains(text, ","):
		e.Value = strings.Split(text, ",")
	case st.arg == "":
		on, _ := parseSwitch(text) // has been validated already
		e.Value = strconv.FormatBool(on)
	default:
		e.Value = text
	}
	return e
}

// place returns an origin without the key, which is printed beside it.
func place(origin string) string {
	if i := strings.LastIndex(origin, ": "); i >= 0 {
		return origin[:i]
	}
	return origin
}

func printConfig(w io.Writer, all []configEntry, asJSON bool) error {
	if asJSON {
		tree := map[string]map[string]configEntry{}
		for _, e := range all {
			if tree[e.section] == nil {
				tree[e.section] = map[string]configEntry{}
			}
			if m, ok := e.Value.(map[string]string); ok {
				rest, secrets := withoutSecrets(m)
				if e.Value = rest; len(secrets) > 0 {
					e.Note = secretNote + ": " + strings.Join(secrets, ", ")
				}
			}
			tree[e.section][e.name] = e
		}
		return cli.WriteJSON(w, tree)
	}
	_, err := io.WriteString(w, configText(all))
	return err
}

// configText returns the settings as a config file.
func configText(all []configEntry) string {
	var lines [][2]string // line and comment
	section := ""
	for _, e := range all {
		if e.section != section {
			section = e.section
			lines = append(lines, [2]string{section + ":", ""})
		}
		lines = append(lines, e.lines()...)
	}
	width := 0
	for _, l := range lines {
		if n := utf8.RuneCountInString(l[0]); n <= 48 {
			width = max(width, n)
		}
	}
	var b strings.Builder
	for _, l := range lines {
		b.WriteString(l[0])
		if l[1] != "" {
			b.WriteString(strings.Repeat(" ", max(0, width-utf8.RuneCountInString(l[0]))) + "  # " + l[1])
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// lines returns the lines of one setting.
func (e *configEntry) lines() (lines [][2]string) {
	from := strings.Map(func(r rune) rune {
		if !strconv.IsPrint(r) {
			return '?' // in the name of a file
		}
		return r
	}, e.From)
	switch value := e.Value.(type) {
	case nil:
		note := e.Note
		if note == "" {
			note = "none"
		}
		return [][2]string{{"  # " + e.name + " (" + note + ")", from}}
	case []string:
		words := make([]string, len(value))
		for i, w := range value {
			words[i] = yamlText(w)
		}
		return [][2]string{{"  " + e.name + ": [" + strings.Join(words, ", ") + "]", from}}
	case map[string]string:
		rest, secrets := withoutSecrets(value)
		if len(rest) == 0 {
			lines = append(lines, [2]string{"  " + e.name + ": {}", from})
		} else {
			lines = append(lines, [2]string{"  " + e.name + ":", from})
		}
		for _, name := range slices.Sorted(maps.Keys(rest)) {
			lines = append(lines, [2]string{"    " + yamlText(name) + ": " + yamlText(rest[name]), ""})
		}
		for _, name := range secrets {
			lines = append(lines, [2]string{"    # " + yamlText(name) + " (" + secretNote + ")", ""})
		}
		return lines
	}
	text, _ := e.Value.(string)
	return [][2]string{{"  " + e.name + ": " + yamlText(text), from}}
}

var (
	plainText = regexp.MustCompile(`^[A-Za-z0-9_./][A-Za-z0-9_./+@%=-]*(:[A-Za-z0-9_./+@%=-]+)*$`)
	nullText  = regexp.MustCompile(`^(?i:null)$`)
)

// yamlText formats a text as a YAML value.
func yamlText(text string) string {
	if plainText.MatchString(text) && !nullText.MatchString(text) {
		return text
	}
	return strconv.Quote(text) // YAML has the same escapes
}
