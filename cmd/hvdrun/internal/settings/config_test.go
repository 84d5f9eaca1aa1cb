package settings

import (
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"pgregory.net/rapid"

	"github.com/hvdrun/hvdrun/job"
)

// checkSame writes settings as a config file, and checks that reading it returns the same settings.
func checkSame(t *testing.T, s *Settings, read func(t *testing.T, text string) (Settings, error)) {
	t.Helper()
	text := configText(effective(s, &Settings{}))
	again, err := read(t, text)
	if err != nil {
		t.Fatalf("%v, in\n%s", err, text)
	}
	if _, hidden := withoutSecrets(keyed(s.Env)); hidden != nil {
		return
	}
	if _, hidden := withoutSecrets(s.PluginSettings); hidden != nil {
		return
	}
	env, envAgain := slices.Sorted(slices.Values(s.Env)), slices.Sorted(slices.Values(again.Env))
	a, b := *s, again
	a.setDefaults()
	b.setDefaults()
	if got, want := fmt.Sprintf("%+v", b), fmt.Sprintf("%+v", a); got != want || !slices.Equal(env, envAgain) {
		t.Errorf("\n%s\nbecame\n%s\nby\n%s", want, got, text)
	}
}

// setDefaults sets the defaults of settings that are not given, and removes the origins of all.
func (s *Settings) setDefaults() {
	for _, st := range everySetting() {
		if !s.Given(st.Name) && st.def != "" {
			if err := st.set(s, st.def); err != nil {
				panic(err)
			}
		}
	}
	if s.Blame.ResetLimit != nil {
		s.Np += 1000 * *s.Blame.ResetLimit // the address of a pointer does not count
	}
	s.Env, s.Origins, s.texts, s.ConfigText, s.Blame.ResetLimit = nil, nil, nil, "", nil
}

func TestConfigRoundTrip(t *testing.T) {
	read := func(t *testing.T, text string) (Settings, error) { return loadArgs(t, "", nil, text) }
	for _, c := range []struct{ args, file string }{
		{"", ""},
		{"-np 4 --min-np 2 --max-np 8 --host-discovery-script ./d.sh --verbose", "log-format: json\n"},
		{"-H a:2,b:4 --network-interfaces lo --network-interfaces eth0 --fusion-threshold-mb 0 --cycle-time-ms 0.5", ""},
		{"--blacklist-cooldown-range 1 600 --reset-limit 0 --reset-window 90s --stall-warning 0 --failure-policy host", "encrypt-data: yes\n"},
		{"--discovery-plugin x --discovery-config a=b=c --discovery-config null=null", "job: {command: [train, \"\", a b, ~x], dir: /tmp}\n"},
		{"", "job:\n  env: {A: \"x\\ty\", b: \"null\", \"c d\": \"#\", E: \"\", F: \"a: b\", g: \"é\\u2028\"}\n"},
		{"--timeline-filename /tmp/t --job-dir j --output-filename [o --events-file *e", "ssh: {ssh-port: 22}\n"},
		{"--gossip-join a:1,[::1]:2 --gossip-key-file k --log-level debug", ""},
	} {
		s, err := loadArgs(t, c.args, nil, c.file)
		if err != nil {
			t.Fatal(c.args, err)
		}
		checkSame(t, &s, read)
	}
}

func TestYAMLTextIsReadBack(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		words := rapid.SliceOfN(rapid.OneOf(rapid.String(), rapid.StringMatching(`[a-z0-9.:~=,\[\]{}#&*!|>'"%@ -]*`)), 1, 4).Draw(rt, "words")
		for i, w := range words {
			words[i] = strings.ReplaceAll(w, "\x00", "")
		}
		words = append([]string{"x"}, words...)
		e := configEntry{section: jobSection, name: "command", Value: words, From: "here"}
		c, err := parseConfig("f", configText([]configEntry{e}))
		if err != nil || !slices.Equal(c.command, words) {
			rt.Fatalf("%q became %q, %v", words, c, err)
		}
	})
}

// TestDefaults: a value that is printed as a default is the one that applies, even if the driver
// applies it.
func TestDefaults(t *testing.T) {
	said := Settings{Provenance: Provenance{Origins: map[string]string{}}}
	said.setDefaults()
	half := 30 * time.Second
	want := job.Timeouts{DiscoveryInterval: time.Second, Elastic: 600 * time.Second, Start: half, Join: half, Drain: half, Finish: half,
		Exit: 5 * time.Minute, StallWarning: 5 * time.Second, Stall: 120 * time.Second}
	if said.Timeouts != want {
		t.Errorf("%+v, want %+v", said.Timeouts, want)
	}
	s, err := loadArgs(t, "", nil, "")
	if err != nil || said.DiscoveryTimeout != s.DiscoveryTimeout || said.orphan != DefaultOrphan || said.SlotsPerHost != 0 ||
		said.Blame.Policy != job.BlameSlot || said.Tuning.EncryptData || said.logJSON {
		t.Errorf("%+v, %v", said, err)
	}
}

func TestConfigSaysWhereFrom(t *testing.T) {
	s, err := loadArgs(t, "-np 4", []string{"HVD_MIN_NP=2", "HVD_JOIN_TIMEOUT=9"}, "job:\n  max-np: 8\n  command: [train]\ndiscovery: {hosts: [a:2, b:2]}\n")
	if err != nil {
		t.Fatal(err)
	}
	text := configText(effective(&s, &Settings{}))
	for _, want := range []string{
		`  command: \[?train\]? +# \S+job.yaml:3`, `  np: 4 +# -np`, `  min-np: 2 +# HVD_MIN_NP`, `  max-np: 8 +# \S+job.yaml:2`,
		`  hosts: \["?a:2"?, "?b:2"?\] +# \S+job.yaml:4`, `  join-timeout: 9 +# HVD_JOIN_TIMEOUT`, `  start-timeout: 30s +# default`,
		`  # reset-limit \(no limit\) +# default`, `agent:`,
	} {
		if !regexp.MustCompile(`(?m)^` + want + `$`).MatchString(text) {
			t.Errorf("no line %s in\n%s", want, text)
		}
	}
	var b strings.Builder
	if err := printConfig(&b, effective(&s, &Settings{}), true); err != nil || !strings.Contains(b.String(), `"from": "HVD_MIN_NP"`) {
		t.Error(b.String(), err)
	}
}

func TestConfigShowsNoSecrets(t *testing.T) {
	s, err := loadArgs(t, "", nil, "job:\n  env: {HF_TOKEN: hush1, AWS_SECRET_ACCESS_KEY: hush2, DB: \"postgres://u:hush3@h/x\", OMP: 1}\n"+
		"discovery: {discovery-plugin: x, discovery-config: {password: hush4, token_file: /etc/token}}\n")
	if err != nil {
		t.Fatal(err)
	}
	for _, asJSON := range []bool{false, true} {
		var b strings.Builder
		if err := printConfig(&b, effective(&s, &Settings{}), asJSON); err != nil {
			t.Fatal(err)
		}
		if out := b.String(); strings.Contains(out, "hush") || !strings.Contains(out, "HF_TOKEN") || !strings.Contains(out, "OMP") ||
			!strings.Contains(out, "/etc/token") {
			t.Error(out)
		}
	}
}

// TestFileOfTheDocs: every subcommand accepts the file in docs/running.md.
func TestFileOfTheDocs(t *testing.T) {
	page, err := os.ReadFile("../../../../docs/running.md")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindSubmatch(page)
	if m == nil {
		t.Fatal("no setting was found")
	}
	s, err := loadArgs(t, "", nil, string(m[1]))
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Command) == 0 || len(s.Env) == 0 || s.MinNP == 0 {
		t.Errorf("%+v", s)
	}
	checkSame(t, &s, func(t *testing.T, text string) (Settings, error) { return loadArgs(t, "", nil, text) })
	agents := pflag.NewFlagSet("", pflag.ContinueOnError)
	for i := range AgentTable {
		AddFlag(agents, &AgentTable[i])
	}
	a := Settings{Provenance: Provenance{Origins: map[string]string{}, texts: map[string]string{}}}
	doc, err := parseConfig("docs", string(m[1]))
	if err != nil {
		t.Fatal(err)
	}
	for _, st := range settingsOf(agents) {
		if o, ok := valueOf(doc.values, st); ok {
			if err := st.set(&a, o.text); err != nil {
				t.Error(o.name, err)
			}
		}
	}
	used := map[string]bool{}
	for _, st := range everySetting() {
		if _, ok := valueOf(doc.values, st); ok {
			used[st.section] = true
		}
	}
	if got := slices.Sorted(maps.Keys(used)); len(got) < len(sections()) {
		t.Errorf("it has the sections %v of %v", got, sections())
	}
	if a.Cluster.Enroll == "" || a.Cluster.StateDir == "" {
		t.Error("there is nothing for an agent")
	}
}

// TestHelpBySections: the help lists every flag that is not hidden exactly once.
func TestHelpBySections(t *testing.T) {
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	AddFlags(fs, false)
	help := flagSections(fs)
	at := -1
	for _, name := range sections() {
		if name == "agent" {
			continue
		}
		i := strings.Index(help, "Section "+name+":\n")
		if i <= at {
			t.Errorf("section %s stands at %d, after %d", name, i, at)
		}
		at = i
	}
	fs.VisitAll(func(f *pflag.Flag) {
		if n := len(regexp.MustCompile(`(?m)^  (-., |    )--`+f.Name+` `).FindAllString(help, -1)); n != 1 {
			t.Errorf("--%s stands there %d times", f.Name, n)
		}
	})
}
