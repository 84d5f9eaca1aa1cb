package settings

import (
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/pflag"
	"github.com/spf13/viper"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/plan"
)

// Dynamic returns the names of the settings that are given and that name sources of hosts for the
// whole duration of the job. The sources are merged in this order (see discovery.Merge).
func (s *Settings) Dynamic() (names []string) {
	if s.Slurm.On { // Slurm replaces all other sources
		return []string{"slurm"}
	}
	for _, name := range []string{"host-discovery-script", "discovery-plugin", "gossip-join"} {
		if s.Given(name) {
			names = append(names, name)
		}
	}
	return names
}

// origin is the text of a setting, and the flag, variable or line of a file that set it.
type origin struct{ name, text string }

// flagText is a flag's value as text. Load parses it together with the values of the environment
// and the file, so that all three have the same syntax and the same errors.
type flagText struct {
	text    string
	setting *setting
	given   bool
}

// Set implements pflag.Value. It keeps the text.
func (f *flagText) Set(text string) error {
	if f.given && f.setting.repeat {
		text = f.text + f.setting.separator() + text
	}
	f.text, f.given = text, true
	return nil
}

// String returns the text.
func (f *flagText) String() string { return f.text }

// Type returns the placeholder of the value in the help.
func (f *flagText) Type() string {
	if f.setting.arg == "" {
		return "boolfunc" // pflag's type of a switch whose text it does not parse
	}
	return f.setting.arg
}

// AddFlags defines the flags of Table. If sourceOnly is true, flags that are not about sources are
// hidden from the help but accepted, so that the command line of a job works with the word discover
// added.
func AddFlags(fs *pflag.FlagSet, sourceOnly bool) {
	fs.SortFlags = false
	for i := range Table {
		AddFlag(fs, &Table[i]).Hidden = sourceOnly && !Table[i].Source
	}
}

// AddFlag defines the flag of a setting.
func AddFlag(fs *pflag.FlagSet, st *setting) *pflag.Flag {
	usage := st.usage
	if st.unset != "" {
		usage += " (default: " + st.unset + ")"
	}
	f := fs.VarPF(&flagText{setting: st}, st.Name, st.short, usage)
	if st.arg == "" {
		f.NoOptDefVal = "true"
	} else {
		f.DefValue = st.def // for the help
	}
	return f
}

// settingsOf returns the settings whose flags are in the set.
func settingsOf(fs *pflag.FlagSet) (known []*setting) {
	fs.VisitAll(func(f *pflag.Flag) {
		if text, ok := f.Value.(*flagText); ok {
			known = append(known, text.setting)
		}
	})
	return known
}

// Load returns the settings whose flags are in fs. A flag takes precedence over an environment
// variable, and a variable over the config file.
func Load(fs *pflag.FlagSet, env []string) (Settings, error) { return load(fs, env, "") }

// OfArgs returns the settings of a job with these arguments, as Normalize returns them, and its
// command. text is that of the config file; empty: the file is read.
func OfArgs(args, env []string, text string) (s Settings, command []string, err error) {
	fs := pflag.NewFlagSet("hvdrun", pflag.ContinueOnError)
	fs.SetInterspersed(false)
	fs.SetOutput(io.Discard)
	AddFlags(fs, false)
	if err = fs.Parse(args); err == nil {
		s, err = load(fs, env, text)
	}
	return s, fs.Args(), err
}

// load is like Load, but takes the text of the config file. If text is empty, it reads the file.
func load(fs *pflag.FlagSet, env []string, text string) (Settings, error) {
	s := Settings{
		sourceSettings: sourceSettings{DiscoveryTimeout: 30 * time.Second},
		OutputSettings: OutputSettings{LogLevel: logrus.InfoLevel},
		Provenance:     Provenance{Origins: map[string]string{}, texts: map[string]string{}},
	}
	known := settingsOf(fs)
	fromEnv, err := environment(env, known)
	if err != nil {
		return s, err
	}
	s.mistyped = mistyped(env)
	path := ""
	if f := fs.Lookup(configFile); f != nil {
		path = f.Value.String()
	}
	if path == "" {
		path = fromEnv[configFile].text
	}
	fromFile, err := s.readConfig(path, text)
	if err != nil {
		return s, err
	}
	// viper decides whether a flag, a variable or the file counts. It does not read variables and
	// the file itself, for two reasons: it would use the environment of this process, but hvdrun
	// resume needs that of the job's first driver; and it keeps neither the line of a value, which
	// errors name, nor its text, which is parsed in the same way for all three.
	merged := viper.New()
	for _, layer := range []map[string]origin{fromFile, fromEnv} {
		values := map[string]any{}
		for _, st := range known {
			if o, ok := valueOf(layer, st); ok {
				values[st.Name], s.Origins[st.Name] = o.text, o.name
			}
		}
		if err := merged.MergeConfigMap(values); err != nil {
			return s, err
		}
	}
	if err := merged.BindPFlags(fs); err != nil {
		return s, err
	}
	fs.Visit(func(f *pflag.Flag) { s.Origins[f.Name] = flagName(f.Name) })
	for _, st := range known {
		if s.Given(st.Name) {
			s.texts[st.Name] = merged.GetString(st.Name)
			if err := st.set(&s, s.texts[st.Name]); err != nil {
				return s, fmt.Errorf("%s: %w", s.Origins[st.Name], err)
			}
		}
	}
	switch {
	case s.Given("log-level"):
	case s.verbose:
		s.LogLevel = logrus.DebugLevel
	case s.quiet:
		s.LogLevel = logrus.WarnLevel
	}
	if s.Slurm.On && !s.Given("elastic-timeout") {
		s.Timeouts.Elastic = slurmPatience
	}
	return s, s.contradictions()
}

// readConfig applies the keys that only a file can set, and returns the settings in the file,
// including those for other commands.
func (s *Settings) readConfig(path, text string) (map[string]origin, error) {
	if path == "" {
		return nil, nil
	}
	if text == "" {
		var err error
		if text, s.configExposed, err = readConfigFile(path); err != nil {
			return nil, fmt.Errorf("--config-file: %w", err)
		}
	}
	doc, err := parseConfig(path, text)
	if err != nil {
		return nil, err
	}
	s.ConfigText, s.Command, s.Env = text, doc.command, doc.env
	if doc.dir != "" {
		if s.Dir, err = filepath.Abs(doc.dir); err != nil {
			return nil, fmt.Errorf("%s: %w", doc.lines["dir"], err)
		}
	}
	for name := range jobKeys {
		if where, ok := doc.lines[name]; ok {
			s.Origins[name] = where
		}
	}
	return doc.values, nil
}

// contradictions returns an error for settings that contradict each other.
func (s *Settings) contradictions() error {
	for _, c := range []struct {
		low, high   string
		least, most int
	}{
		{"min-np", "np", s.MinNP, s.Np}, {"np", "max-np", s.Np, s.MaxNP}, {"min-np", "max-np", s.MinNP, s.MaxNP},
	} {
		if s.Given(c.low) && s.Given(c.high) && c.least > c.most {
			return fmt.Errorf("%s is %d, and %s is %d: they must be min-np ≤ np ≤ max-np", s.Origin(c.low), c.least, s.Origin(c.high), c.most)
		}
	}
	if warn, end := s.Timeouts.StallWarning, s.Timeouts.Stall; end > 0 && warn > end {
		return fmt.Errorf("%s is %v, more than the %v of %s", s.Origin("stall-warning"), warn, end, s.Origin("stall-timeout"))
	}
	if err := s.checkSlurm(); err != nil {
		return err
	}
	var sources []string
	fixed := false
	for _, name := range []string{"hosts", "hostfile"} {
		if s.Given(name) {
			sources, fixed = append(sources, s.Origin(name)), true
		}
	}
	for _, name := range s.Dynamic() {
		sources = append(sources, s.Origin(name))
	}
	if fixed && len(sources) > 1 {
		return fmt.Errorf("%s: each names the hosts; give only one of them", strings.Join(sources, " and "))
	}
	if s.Given("discovery-config") && !s.Given("discovery-plugin") && !s.Slurm.On {
		return fmt.Errorf("%s: it needs --discovery-plugin", s.Origin("discovery-config"))
	}
	return s.checkGossip()
}

// workerVariables are variables that have the name of a flag but are set for every worker. If
// hvdrun runs inside a worker, the user did not set them.
var workerVariables = []string{plan.EnvEncryptData, plan.EnvNetworkInterfaces, plan.EnvListen, plan.EnvTimelineFilename,
	plan.EnvShareOutput,
	plan.EnvConnections, plan.EnvFusionThreshold, plan.EnvCycleTime, plan.EnvStallWarning,
	plan.EnvVerifyState, plan.EnvHealState, plan.EnvCommitReplicas}

// environment returns the settings that environment variables set, such as HVD_MIN_NP or an alias
// of it.
func environment(env []string, known []*setting) (map[string]origin, error) {
	_, nested := cli.Lookup(env, plan.EnvLauncherAddr)
	found := map[string]origin{}
	for _, st := range known {
		for _, name := range append([]string{st.Name}, st.aliases...) {
			name = "HVD_" + strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
			text, ok := cli.Lookup(env, name)
			if !ok || text == "" || nested && slices.Contains(workerVariables, name) || ofService(env, name, text) {
				continue
			}
			if had, twice := found[st.Name]; twice && had.text != text {
				return nil, fmt.Errorf("%s=%s and %s=%s contradict each other", had.name, had.text, name, text)
			}
			found[st.Name] = origin{name, text}
		}
	}
	return found, nil
}

// ofService reports whether Kubernetes has set the variable for a Service: for a Service hvd-ssh,
// HVD_SSH_PORT is tcp://IP:PORT.
func ofService(env []string, name, text string) bool {
	service, is := strings.CutSuffix(name, "_PORT")
	if !is || !strings.Contains(text, "://") {
		return false
	}
	_, is = cli.Lookup(env, service+"_SERVICE_HOST")
	return is
}

// mistyped returns a line for each variable whose name is similar to that of a setting. Inside a
// worker it returns nothing, since the user did not write its variables.
func mistyped(env []string) (lines []string) {
	if _, nested := cli.Lookup(env, plan.EnvLauncherAddr); nested {
		return nil
	}
	for _, e := range env {
		variable, _, _ := strings.Cut(e, "=")
		name, ours := strings.CutPrefix(variable, "HVD_")
		name = strings.ToLower(strings.ReplaceAll(name, "_", "-"))
		if !ours || len(name) < 4 || variable == plan.EnvSlot || SettingNamed(canonical(name)) != nil {
			continue
		}
		like := nearest(name)
		if like != "" && distance(name, like) <= 2 {
			lines = append(lines, fmt.Sprintf("%s is not a setting; did you mean HVD_%s?", variable, strings.ToUpper(strings.ReplaceAll(like, "-", "_"))))
		}
	}
	return lines
}
