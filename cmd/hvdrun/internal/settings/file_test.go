package settings

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

// TestSections: a key can be in its section or at the top, and a file can contain settings for
// other commands.
func TestSections(t *testing.T) {
	s, err := loadArgs(t, "--max-np 9", []string{"HVD_DRAIN_TIMEOUT=5"}, `
min_np: 2
job:
  np: 4
  max-np: 8
  command: [./train, --epochs, 3, ""]
  env: &env {OMP_NUM_THREADS: 1, EMPTY: ""}
  dir: runs
discovery:
  discovery-plugin: ./racks
  discovery-config: {room: 2, name: a=b}
  slots: 3
timeouts: {drain-timeout: 7, join-timeout: 8}
ssh:
agent:
  key-file: key
  join: [a:1, b:1]
launch-port: 7947
`)
	if err != nil {
		t.Fatal(err)
	}
	if s.Np != 4 || s.MinNP != 2 || s.MaxNP != 9 || s.SlotsPerHost != 3 || s.PluginSettings["name"] != "a=b" {
		t.Errorf("%+v", s)
	}
	if s.Timeouts.Drain != 5*time.Second || s.Timeouts.Join != 8*time.Second || s.Cluster.KeyFile != "" || s.Given("launch-port") {
		t.Errorf("%+v, %+v", s.Timeouts, s.Cluster)
	}
	if !slices.Equal(s.Command, []string{"./train", "--epochs", "3", ""}) || !filepath.IsAbs(s.Dir) || filepath.Base(s.Dir) != "runs" {
		t.Errorf("%q in %s", s.Command, s.Dir)
	}
	env := s.WorkerEnv([]string{"A=1", "OMP_NUM_THREADS=8", "EMPTY2=x"})
	if want := []string{"A=1", "EMPTY2=x", "OMP_NUM_THREADS=1", "EMPTY="}; !slices.Equal(env, want) {
		t.Errorf("workers have %q, want %q", env, want)
	}
}

func TestFilesThatAreRefused(t *testing.T) {
	for _, c := range []struct{ file, message string }{
		{"ssh:\n  np: 2\n", `job.yaml:2: np: it belongs in the section job`},
		{"ssh:\n  name: a\n", `job.yaml:2: name: it belongs in the section job or agent`},
		{"job: {name: a}\nagent:\n  name: b\n  name: c\n", `job.yaml:4: name: set already (`},
		{"name: " + strings.Repeat("x", maxName+1) + "\n", `job.yaml:1: name: "x`},
		{"job:\n  key-file: k\n", `job.yaml:2: key-file: it belongs in the section agent`},
		{"command: [a]\n", `job.yaml:1: command: it belongs in the section job`},
		{"ssh:\n  dir: a\n", `job.yaml:2: dir: it belongs in the section job`},
		{"np: 2\njob:\n  np: 3\n", `job.yaml:3: np: set already (`},
		{"job: {np: 2}\nssh: {}\njob: {}\n", `job.yaml:3: job: set already (`},
		{"ssh: 22\n", `job.yaml:1: ssh: a section; want lines of "key: value" in it`},
		{"job:\n  job: {}\n", `job.yaml:2: job: set already`},
		{"discovery:\n  ssh: {}\n", `job.yaml:2: ssh: unknown key`},
		{"discover: {hosts: a}\n", `job.yaml:1: discover: unknown key; did you mean discovery?`},
		{"timeouts:\n  zebra: 1\n", `job.yaml:2: zebra: unknown key`},
		{"job:\n  comand: [a]\n", `job.yaml:2: comand: unknown key; did you mean command?`},
		{"job:\n  command: ./train --epochs 3\n", `job.yaml:2: command: want a list of words`},
		{"job:\n  command: []\n", `job.yaml:2: command: there is no command`},
		{"job:\n  command: [a, [b]]\n", `job.yaml:2: command: want one value in each place`},
		{"job:\n  command: [\"a\\0\"]\n", `job.yaml:2: command: a byte 0 cannot`},
		{"job:\n  env: [A]\n", `job.yaml:2: env: want lines of "NAME: value"`},
		{"job:\n  env:\n    A: 1\n    A: 2\n", `job.yaml:2: env: line 4: A is set in line 3 already`},
		{"job:\n  env:\n    A:\n", `job.yaml:2: env: line 3: want one value for A`},
		{"job:\n  env: {A=B: 1}\n", `job.yaml:2: env: line 2: "A=B" is not a name`},
		{"job:\n  dir:\n", `job.yaml:2: dir: want the name of a folder`},
		{"np: [2]\n", `job.yaml:1: np: want one value`},
		{"hosts: [a, ~]\n", `job.yaml:1: hosts: want one value in each place of the list (line 1)`},
		{"discovery-plugin: x\ndiscovery-config: {a: \"b\\nc\"}\n", `job.yaml:2: discovery-config: want values of one line`},
		{"? [a]\n: b\n", `job.yaml:1: a key must be one word`},
		{"np: 2\n---\nnp: 3\n", `a second document begins`},
		{"np: 2\n  min-np: 3\n", `job.yaml:2: not YAML: mapping values are not allowed`},
		{"a: &a [*a]\n", `job.yaml:1: a: unknown key`},
		{"np: 2\nmin-np: 3\n", `job.yaml:2: min-np is 3, and `},
		{"np: 4\n\nmax-np: 3\n", `job.yaml:3: max-np is 3: they must be min-np ≤ np ≤ max-np`},
		{"min-np: 4\nmax-np: 3\n", `job.yaml:1: min-np is 4, and `},
		{"hosts: a\ndiscovery:\n  host-discovery-script: x\n", `job.yaml:3: host-discovery-script: each names the hosts`},
		{"discovery-config: {a: b}\n", `job.yaml:1: discovery-config: it needs --discovery-plugin`},
		{"stall-warning: 9\nstall-timeout: 8\n", `job.yaml:1: stall-warning is 9s, more than the 8s of `},
		{"gossip-join: a:1\n", `job.yaml:1: gossip-join: --gossip-key-file is missing`},
	} {
		if _, err := loadArgs(t, "", nil, c.file); err == nil || !strings.Contains(err.Error(), c.message) {
			t.Errorf("%q: %v; want %s", c.file, err, c.message)
		}
	}
	if _, err := loadArgs(t, "", nil, "#"+strings.Repeat(" ", maxConfig)); err == nil || !strings.Contains(err.Error(), "has more than") {
		t.Error(err)
	}
}

// FuzzConfig: any file is either refused, with its name and a line, or `hvdrun config` prints a
// file with the same meaning.
func FuzzConfig(f *testing.F) {
	f.Add("np: 4\njob:\n  min-np: 2\n  command: [./train, --epochs, \"3\"]\n  env: {A: b}\n")
	f.Add("discovery:\n  discovery-config: {a: \"\\x7f: b\"}\n  discovery-plugin: x\nverbose: on\n")
	f.Add("a: &a [*a]\n<<: {np: 2}\n---\n? [b]\n")
	f.Add("network-interfaces: [\"a:b\", ä, '\"']\ncycle-time-ms: 0x1p-3\nstart-timeout: !!str 010\n")
	path := filepath.Join(f.TempDir(), "job.yaml")
	read := func(t *testing.T, text string) (Settings, error) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		fs := pflag.NewFlagSet("", pflag.ContinueOnError)
		AddFlags(fs, false)
		return Load(fs, []string{"HVD_CONFIG_FILE=" + path})
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := read(t, text)
		if err != nil {
			if !strings.Contains(err.Error(), path) {
				t.Errorf("which file is wrong? %v", err)
			}
			return
		}
		checkSame(t, &s, read)
	})
}

// TestFileOfAResumedJob: a resumed job keeps the file with which it began, even if that has changed
// or is gone.
func TestFileOfAResumedJob(t *testing.T) {
	s, command, err := OfArgs([]string{"--config-file=no-such-file", "--max-np=9", "--", "train", "--np=4"}, nil, "job: {np: 3, env: {A: b}}\n")
	if err != nil || !slices.Equal(command, []string{"train", "--np=4"}) || s.Np != 3 || s.MaxNP != 9 || !slices.Equal(s.Env, []string{"A=b"}) {
		t.Errorf("%+v, %v", s, err)
	}
}

// TestNamesOfSections: a key that both a job and an agent have applies to the one in whose section
// it is, and to both if it is at the top.
func TestNamesOfSections(t *testing.T) {
	for _, c := range []struct{ file, job, agent string }{
		{"job: {name: nightly}\nagent: {name: node1}\n", "nightly", "node1"},
		{"agent: {name: node1}\n", "", "node1"},
		{"job: {name: nightly}\n", "nightly", ""},
		{"name: x\nagent: {name: node1}\n", "x", "node1"},
		{"name: x\n", "x", "x"},
	} {
		s, err := loadArgs(t, "", nil, c.file)
		if err != nil {
			t.Fatal(err)
		}
		fs := pflag.NewFlagSet("", pflag.ContinueOnError)
		for i := range AgentTable {
			AddFlag(fs, &AgentTable[i])
		}
		AddFlag(fs, SettingNamed(configFile))
		path := filepath.Join(t.TempDir(), "file.yaml")
		if err := os.WriteFile(path, []byte(c.file), 0o600); err != nil {
			t.Fatal(err)
		}
		a, err := Load(fs, []string{"HVD_CONFIG_FILE=" + path})
		if err != nil {
			t.Fatal(err)
		}
		if s.Name != c.job || a.Cluster.Name != c.agent {
			t.Errorf("%q: the job's name is %q, the agent's %q", c.file, s.Name, a.Cluster.Name)
		}
	}
}
