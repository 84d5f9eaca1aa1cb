package main

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/pflag"
	"github.com/spf13/viper"
	"go.yaml.in/yaml/v3"

	"github.com/hvdrun/hvdrun/plan"
)

// origin is where the text of a setting came from, and the text.
type origin struct{ name, text string }

// flagText is a flag's value as it was written. It is read together with those of the environment and the file, so that
// all three are understood, and refused, in the same words.
type flagText struct {
	text    string
	setting *setting
	given   bool
}

// Set takes what was written.
func (f *flagText) Set(text string) error {
	if f.given && f.setting.repeat {
		text = f.text + f.setting.separator() + text
	}
	f.text, f.given = text, true
	return nil
}

// String returns what was written.
func (f *flagText) String() string { return f.text }

// Type is what the help writes for the value.
func (f *flagText) Type() string {
	if f.setting.arg == "" {
		return "boolfunc" // pflag's word for a switch whose text it does not judge
	}
	return f.setting.arg
}

// addFlags defines the flags of the table. With sourceOnly the others are taken too, but the help does not show them: then
// the word discover can be put into the command line of a job.
func addFlags(fs *pflag.FlagSet, sourceOnly bool) {
	fs.SortFlags = false
	for i := range table {
		addFlag(fs, &table[i]).Hidden = sourceOnly && !table[i].source
	}
}

func addFlag(fs *pflag.FlagSet, st *setting) *pflag.Flag {
	f := fs.VarPF(&flagText{setting: st}, st.name, st.short, st.usage)
	if st.arg == "" {
		f.NoOptDefVal = "true"
	}
	return f
}

// settingsOf returns those of which the flags are in the set.
func settingsOf(fs *pflag.FlagSet) (known []*setting) {
	fs.VisitAll(func(f *pflag.Flag) {
		if text, ok := f.Value.(*flagText); ok {
			known = append(known, text.setting)
		}
	})
	return known
}

// load merges flags, environment and file, the earlier before the later, for the settings of which fs has the flags.
func load(fs *pflag.FlagSet, env []string) (settings, error) {
	s := settings{discoveryTimeout: 30 * time.Second, logLevel: logrus.WarnLevel, origins: map[string]string{}}
	known := settingsOf(fs)
	fromEnv, err := environment(env, known)
	if err != nil {
		return s, err
	}
	path := ""
	if f := fs.Lookup(configFile); f != nil {
		path = f.Value.String()
	}
	if path == "" {
		path = fromEnv[configFile].text
	}
	var fromFile map[string]origin
	if path != "" {
		if fromFile, err = readFile(path, known); err != nil {
			return s, err
		}
	}
	merged := viper.New()
	for _, layer := range []map[string]origin{fromFile, fromEnv} {
		values := map[string]any{}
		for name, o := range layer {
			values[name], s.origins[name] = o.text, o.name
		}
		if err := merged.MergeConfigMap(values); err != nil {
			return s, err
		}
	}
	if err := merged.BindPFlags(fs); err != nil {
		return s, err
	}
	fs.Visit(func(f *pflag.Flag) { s.origins[f.Name] = flagName(f.Name) })
	for _, st := range known {
		if s.given(st.name) {
			if err := st.set(&s, merged.GetString(st.name)); err != nil {
				return s, fmt.Errorf("%s: %w", s.origins[st.name], err)
			}
		}
	}
	if s.verbose && !s.given("log-level") {
		s.logLevel = logrus.InfoLevel
	}
	return s, nil
}

// workerVariables bear the name of a flag, but are given to every worker: where hvdrun runs inside one they are not what a
// person has set.
var workerVariables = []string{plan.EnvEncryptData, plan.EnvNetworkInterfaces, plan.EnvTimelineFilename,
	plan.EnvFusionThreshold, plan.EnvCycleTime, plan.EnvStallWarning,
	plan.EnvVerifyState, plan.EnvHealState}

// environment returns the settings that are set as variables: HVD_MIN_NP, or an alias of it.
func environment(env []string, known []*setting) (map[string]origin, error) {
	_, nested := lookup(env, plan.EnvDriverAddr)
	found := map[string]origin{}
	for _, st := range known {
		for _, name := range append([]string{st.name}, st.aliases...) {
			name = "HVD_" + strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
			text, ok := lookup(env, name)
			if !ok || text == "" || nested && slices.Contains(workerVariables, name) {
				continue
			}
			if had, twice := found[st.name]; twice && had.text != text {
				return nil, fmt.Errorf("%s=%s and %s=%s contradict each other", had.name, had.text, name, text)
			}
			found[st.name] = origin{name, text}
		}
	}
	return found, nil
}

func lookup(env []string, name string) (text string, ok bool) {
	for _, e := range env {
		if n, t, _ := strings.Cut(e, "="); n == name {
			text, ok = t, true // the last counts, as in a process's environment made by os/exec
		}
	}
	return text, ok
}

// readFile returns the settings of a YAML file by their canonical names. Lists are joined with commas.
func readFile(path string, known []*setting) (map[string]origin, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("--config-file: %w", err)
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return nil, fmt.Errorf("--config-file: %s: %w", path, err)
	}
	found := map[string]origin{}
	if len(doc.Content) == 0 {
		return found, nil // empty, or comments only
	}
	top := doc.Content[0]
	if top.Kind != yaml.MappingNode {
		return nil, fmt.Errorf("--config-file: %s:%d: want lines of \"key: value\"", path, top.Line)
	}
	for i := 0; i+1 < len(top.Content); i += 2 {
		key, value := top.Content[i], top.Content[i+1]
		where := fmt.Sprintf("%s:%d: %s", path, key.Line, key.Value)
		name := canonical(key.Value)
		st, err := settingOfKey(name, known)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", where, err)
		}
		if had, twice := found[name]; twice {
			return nil, fmt.Errorf("%s: set already (%s)", where, had.name)
		}
		text, err := valueText(value, st)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", where, err)
		}
		found[name] = origin{where, text}
	}
	return found, nil
}

func settingOfKey(name string, known []*setting) (*setting, error) {
	if name == configFile {
		return nil, fmt.Errorf("a file cannot name another")
	}
	for _, st := range known {
		if st.name == name {
			return st, nil
		}
	}
	if settingNamed(name) != nil {
		return nil, fmt.Errorf("an agent has no such setting")
	}
	if why := advice(name); why != "" {
		return nil, fmt.Errorf("a key of horovodrun that is not taken: %s", why)
	}
	if like := nearest(name); like != "" {
		return nil, fmt.Errorf("unknown key; did you mean %s?", like)
	}
	return nil, fmt.Errorf("unknown key; keys are the names of the flags, without dashes before them")
}

// valueText returns the text of a value as it stands in the file, so that a 010 stays one.
func valueText(n *yaml.Node, st *setting) (string, error) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	var words []string
	switch {
	case n.Kind == yaml.ScalarNode && n.Tag == "!!null":
		return "", fmt.Errorf("there is no value")
	case n.Kind == yaml.ScalarNode:
		return n.Value, nil
	case n.Kind == yaml.SequenceNode:
		for _, item := range n.Content {
			if item.Kind != yaml.ScalarNode {
				return "", fmt.Errorf("want one value, or a list of them")
			}
			words = append(words, item.Value)
		}
		return strings.Join(words, st.separator()), nil
	case n.Kind == yaml.MappingNode && st.pairs:
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i+1].Kind != yaml.ScalarNode {
				return "", fmt.Errorf("want one value for %s", n.Content[i].Value)
			}
			words = append(words, n.Content[i].Value+"="+n.Content[i+1].Value)
		}
		return strings.Join(words, st.separator()), nil
	}
	return "", fmt.Errorf("want one value, or a list of them")
}
