package settings

import (
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

// maxConfig bounds a config file, in bytes.
const maxConfig = 1 << 20

// readConfigFile reads a config file. The file may belong to any user, for instance to a member of
// the team, but it must not be writable by everybody, since it determines what is run. The path may
// name a pipe. exposed reports whether everybody may read the file.
func readConfigFile(path string) (text string, exposed bool, err error) {
	f, err := safefile.ReadStream(path)
	if err != nil {
		return "", false, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return "", false, err
	}
	if perm := fi.Mode().Perm(); fi.Mode().IsRegular() && perm&0o002 != 0 && safefile.Network(path) == "" {
		return "", false, fmt.Errorf("everybody may write to %s (mode %#o), which names the command to run: chmod o-w it", path, perm)
	}
	all, err := safefile.ReadAll(f, maxConfig)
	return string(all), fi.Mode().Perm()&0o004 != 0, err
}

// maxHostfile bounds a list of hosts, in bytes.
const maxHostfile = 64 << 20

// StandardInput is the name of a hostfile that stands for standard input.
const StandardInput = "-"

// ReadHosts returns the text of the hostfile, which may belong to any user and may be a pipe or
// StandardInput. It reads the hostfile once: later calls, and later drivers of the job, get the
// same text.
func (s *Settings) ReadHosts() (text string, err error) {
	if s.HostsText != "" {
		return s.HostsText, nil
	}
	f := os.Stdin
	if s.Hostfile != StandardInput {
		if f, err = safefile.ReadStream(s.Hostfile); err != nil {
			return "", err
		}
		defer f.Close()
	}
	all, err := safefile.ReadAll(f, maxHostfile)
	s.HostsText = string(all)
	return s.HostsText, err
}

// config is the content of a config file. A key is at the top level, or in its section.
type config struct {
	path    string
	values  map[string]origin // of settings, by keyName
	lines   map[string]string // position of each key and section, by keyName
	command []string
	env     []string // NAME=value
	dir     string
}

// jobSection is the section of jobKeys.
const jobSection = "job"

// jobKeys are the keys that are not settings: only a file can set them.
var jobKeys = map[string]func(c *config, value *yaml.Node) error{
	"command": (*config).setCommand, "env": (*config).setEnv, "dir": (*config).setDir,
}

// sections returns the sections of the file, in the order of the settings.
func sections() (names []string) {
	for _, st := range everySetting() {
		if st.section != "" && !slices.Contains(names, st.section) {
			names = append(names, st.section)
		}
	}
	return names
}

// everySetting returns the settings of jobs and of agents.
func everySetting() (all []*setting) {
	for _, list := range [][]setting{Table, AgentTable} {
		for i := range list {
			all = append(all, &list[i])
		}
	}
	return all
}

// parseConfig reads the text of a YAML file. Its errors begin with the file and the line.
func parseConfig(path, text string) (*config, error) {
	c := &config{path: path, values: map[string]origin{}, lines: map[string]string{}}
	docs := yaml.NewDecoder(strings.NewReader(text))
	var doc, more yaml.Node
	switch err := docs.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return c, nil // empty, or comments only
	case err != nil:
		return nil, c.broken(err)
	}
	if err := docs.Decode(&more); !errors.Is(err, io.EOF) {
		if err != nil {
			return nil, c.broken(err)
		}
		return nil, fmt.Errorf("%s:%d: a second document begins; write one only", path, more.Line)
	}
	top := target(doc.Content[0])
	if top.Kind != yaml.MappingNode {
		return nil, fmt.Errorf("%s:%d: want lines of \"key: value\"", path, top.Line)
	}
	return c, c.each(top, "")
}

var yamlError = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)

// broken returns an error of the YAML parser in the form of all other errors, with the file and the
// line.
func (c *config) broken(err error) error {
	text := err.Error()
	where := c.path
	if m := yamlError.FindStringSubmatch(text); m != nil {
		text = text[len(m[0]):]
		if m[1] != "" {
			where += ":" + m[1]
		}
	}
	return fmt.Errorf("%s: not YAML: %s", where, text)
}

// target returns the node that an alias refers to, or n itself if it is not an alias.
func target(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

// each handles the keys of a mapping: the whole file, or a section of it.
func (c *config) each(n *yaml.Node, section string) error {
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], target(n.Content[i+1])
		if key.Kind != yaml.ScalarNode {
			return fmt.Errorf("%s:%d: a key must be one word", c.path, key.Line)
		}
		where := fmt.Sprintf("%s:%d: %s", c.path, key.Line, key.Value)
		name := canonical(key.Value)
		if had, twice := c.lines[keyName(section, name)]; twice {
			return fmt.Errorf("%s: set already (%s)", where, had)
		}
		c.lines[keyName(section, name)] = where
		var err error
		if section == "" && slices.Contains(sections(), name) {
			err = c.section(where, name, value)
		} else if err = c.key(where, section, name, value); err != nil {
			err = fmt.Errorf("%s: %w", where, err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *config) section(where, name string, value *yaml.Node) error {
	switch {
	case isNull(value): // the whole section is commented out
		return nil
	case value.Kind != yaml.MappingNode:
		return fmt.Errorf("%s: a section; want lines of \"key: value\" in it", where)
	}
	return c.each(value, name)
}

func (c *config) key(where, section, name string, value *yaml.Node) error {
	if take, ok := jobKeys[name]; ok {
		if section != jobSection {
			return fmt.Errorf("it belongs in the section %s", jobSection)
		}
		return take(c, value)
	}
	if name == configFile {
		return errors.New("a file cannot name another")
	}
	of := settingsOfKey(name)
	if len(of) == 0 {
		return unknownKey(name, section)
	}
	if section != "" && !slices.ContainsFunc(of, func(st *setting) bool { return st.section == section }) {
		var in []string
		for _, st := range of {
			in = append(in, st.section)
		}
		return fmt.Errorf("it belongs in the section %s", strings.Join(in, " or "))
	}
	text, err := valueText(value, of[0])
	if err != nil {
		return err
	}
	c.values[keyName(section, name)] = origin{where, text}
	return nil
}

// settingsOfKey returns the settings with the given name: a job and an agent may each have one.
func settingsOfKey(name string) (of []*setting) {
	for _, st := range everySetting() {
		if st.Name == name {
			of = append(of, st)
		}
	}
	return of
}

// keyName returns the name of a key, with its section if settings in several sections have the
// name. A key at the top level of the file applies to all of them.
func keyName(section, name string) string {
	if section != "" && len(settingsOfKey(name)) > 1 {
		return section + "." + name
	}
	return name
}

// valueOf returns the value of a setting in the file.
func valueOf(values map[string]origin, st *setting) (o origin, ok bool) {
	if o, ok = values[keyName(st.section, st.Name)]; !ok {
		o, ok = values[st.Name]
	}
	return o, ok
}

func unknownKey(name, section string) error {
	if of, why := advice(name); of != "" {
		return fmt.Errorf("hvdrun does not have this key of %s: %s", of, why)
	}
	var known []string
	for _, st := range everySetting() {
		known = append(append(known, st.Name), st.aliases...)
	}
	for key := range jobKeys {
		known = append(known, key)
	}
	if section == "" {
		known = append(known, sections()...)
	}
	slices.Sort(known)
	if like := NearestOf(name, known); like != "" {
		return fmt.Errorf("unknown key; did you mean %s?", canonical(like))
	}
	if section == "" {
		return fmt.Errorf("unknown key; keys are the names of the flags, without dashes before them, and the sections %s",
			strings.Join(sections(), ", "))
	}
	return errors.New("unknown key; keys are the names of the flags, without dashes before them")
}

// valueText returns the text of a value as written in the file, so that 010 stays 010.
func valueText(n *yaml.Node, st *setting) (string, error) {
	switch {
	case isNull(n):
		return "", errors.New("there is no value")
	case n.Kind == yaml.ScalarNode:
		return n.Value, nil
	case n.Kind == yaml.SequenceNode && (st.list || st.repeat):
		words, err := scalars(n)
		return strings.Join(words, st.separator()), err
	case n.Kind == yaml.MappingNode && st.pairs:
		words, err := pairs(n)
		if err == nil && slices.ContainsFunc(words, func(w string) bool { return strings.Contains(w, "\n") }) {
			err = errors.New("want values of one line each")
		}
		return strings.Join(words, st.separator()), err
	case st.pairs:
		return "", errors.New("want lines of \"key: value\"")
	case st.list || st.repeat:
		return "", errors.New("want one value, or a list of them")
	}
	return "", errors.New("want one value")
}

// scalars returns the texts of the items of a list.
func scalars(n *yaml.Node) ([]string, error) {
	var words []string
	for _, item := range n.Content {
		item = target(item)
		if item.Kind != yaml.ScalarNode || isNull(item) {
			return nil, fmt.Errorf("want one value in each place of the list (line %d)", item.Line)
		}
		words = append(words, item.Value)
	}
	return words, nil
}

// pairs returns a mapping as key=value.
func pairs(n *yaml.Node) ([]string, error) {
	var words []string
	lines := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], target(n.Content[i+1])
		switch line, twice := lines[key.Value]; {
		case key.Kind != yaml.ScalarNode || key.Value == "" || strings.ContainsAny(key.Value, "=\n\x00"):
			return nil, fmt.Errorf("line %d: %q is not a name", key.Line, key.Value)
		case twice:
			return nil, fmt.Errorf("line %d: %s is set in line %d already", key.Line, key.Value, line)
		case value.Kind != yaml.ScalarNode || isNull(value):
			return nil, fmt.Errorf("line %d: want one value for %s", key.Line, key.Value)
		}
		lines[key.Value] = key.Line
		words = append(words, key.Value+"="+value.Value)
	}
	return words, nil
}

func (c *config) setCommand(n *yaml.Node) (err error) {
	switch {
	case n.Kind == yaml.SequenceNode:
		c.command, err = scalars(n)
	case n.Kind == yaml.ScalarNode && !isNull(n) && !strings.ContainsAny(n.Value, " \t\n"):
		c.command = []string{n.Value}
	default:
		return errors.New("want a list of words, like [train, --epochs, \"3\"]")
	}
	if err == nil && (len(c.command) == 0 || c.command[0] == "") {
		err = errors.New("there is no command")
	}
	return noZeros(c.command, err)
}

func (c *config) setEnv(n *yaml.Node) (err error) {
	if n.Kind != yaml.MappingNode {
		return errors.New("want lines of \"NAME: value\"")
	}
	c.env, err = pairs(n)
	return noZeros(c.env, err)
}

func (c *config) setDir(n *yaml.Node) error {
	if n.Kind != yaml.ScalarNode || isNull(n) || n.Value == "" {
		return errors.New("want the name of a folder")
	}
	c.dir = n.Value
	return noZeros([]string{c.dir}, nil)
}

// noZeros returns an error for words with zero bytes, which no process can receive.
func noZeros(words []string, err error) error {
	if err == nil && strings.ContainsRune(strings.Join(words, ""), 0) {
		err = errors.New("a byte 0 cannot be passed on")
	}
	return err
}
