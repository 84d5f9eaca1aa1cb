package settings

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/pflag"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// loadArgs reads settings from a command line without a command, an environment, and the text of a
// file ("": none).
func loadArgs(t *testing.T, args string, env []string, file string) (Settings, error) {
	t.Helper()
	words, err := Normalize(strings.Fields(args), nil, testMeant)
	if err != nil {
		return Settings{}, err
	}
	if file != "" {
		path := filepath.Join(t.TempDir(), "job.yaml")
		if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
		words = append(words, "--config-file="+path)
	}
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	AddFlags(fs, false)
	if err := fs.Parse(words); err != nil {
		t.Fatal(err)
	}
	return Load(fs, env)
}

// TestWorkerCounts is Horovod's CLI-01.
func TestWorkerCounts(t *testing.T) {
	s, err := loadArgs(t, "-np 4 --min-np 2 --max-np 8", nil, "")
	if err != nil || s.Np != 4 || s.MinNP != 2 || s.MaxNP != 8 {
		t.Error(s.Np, s.MinNP, s.MaxNP, err)
	}
}

// TestElasticFlags is Horovod's CLI-02.
func TestElasticFlags(t *testing.T) {
	s, err := loadArgs(t, "--num-proc 4 --min-num-proc 2 --max-num-proc 8 --slots-per-host 1 --elastic-timeout 60 "+
		"--reset-limit 10 --blacklist-cooldown-range 120 600", nil, "")
	if err != nil {
		t.Fatal(err)
	}
	got := fmt.Sprint(s.Np, s.MinNP, s.MaxNP, s.SlotsPerHost, s.Timeouts.Elastic, *s.Blame.ResetLimit, s.Blame.CooldownMin, s.Blame.CooldownMax)
	if want := "4 2 8 1 1m0s 10 2m0s 10m0s"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// TestFlagBeforeVariableBeforeFileBeforeDefault is Horovod's CLI-03 with settings of hvdrun: the
// place of --config-file among the flags does not matter.
func TestFlagBeforeVariableBeforeFileBeforeDefault(t *testing.T) {
	const file = "min_np: 2\nstart-timeout: 32\njoin-timeout: 10\nelastic-timeout: 1500ms\n"
	s, err := loadArgs(t, "--start-timeout 256", []string{"HVD_JOIN_TIMEOUT=20s", "HVD_START_TIMEOUT=7", "HVD_MAX_NP="}, file)
	if err != nil {
		t.Fatal(err)
	}
	if s.Timeouts.Start != 256*time.Second || s.Timeouts.Join != 20*time.Second || s.Timeouts.Elastic != 1500*time.Millisecond || s.MinNP != 2 {
		t.Errorf("%+v, %d", s.Timeouts, s.MinNP)
	}
	if s.DiscoveryTimeout != 30*time.Second || s.Timeouts.Drain != 0 || s.Given("max-np") || s.Given("drain-timeout") {
		t.Errorf("defaults: %+v", s)
	}
	for name, want := range map[string]string{"start-timeout": "--start-timeout", "join-timeout": "HVD_JOIN_TIMEOUT", "max-np": "--max-np"} {
		if got := s.Origin(name); got != want {
			t.Errorf("%s comes from %s, want %s", name, got, want)
		}
	}
	if got := s.Origin("min-np"); !strings.HasSuffix(got, "job.yaml:1: min_np") {
		t.Errorf("min-np comes from %s", got)
	}
}

// TestEverySettingCanStandInTheFile is Horovod's CLI-06 with settings of hvdrun.
func TestEverySettingCanStandInTheFile(t *testing.T) {
	s, err := loadArgs(t, "", nil, `# a job
np: 4
min-np: 2
max_np: 8
hosts: [localhost:2, 127.0.0.1:2]
slots-per-host: auto
discovery-interval: 0.5
discovery-timeout: 5
discovery-removal-after: 3
failure-policy: host
blacklist-cooldown-range: [1, 600]
reset-limit: 0
elastic-timeout: 60
start-timeout: 61
join-timeout: 62
drain-timeout: 63
finish-timeout: 64
exit-timeout: 65
network-interfaces: [lo, eth0]
encrypt-data: yes
output-filename: out
prefix-output-with-timestamp: true
events-file: events
log-level: DEBUG
log-format: json
verbose: off
`)
	if err != nil {
		t.Fatal(err)
	}
	zero := 0
	if *s.Blame.ResetLimit != zero {
		t.Error("reset limit", *s.Blame.ResetLimit)
	}
	s.Blame.ResetLimit = nil
	s.Origins, s.texts, s.ConfigText = nil, nil, ""
	sec := time.Second
	want := Settings{
		Np: 4, MinNP: 2, MaxNP: 8,
		sourceSettings: sourceSettings{Hosts: "localhost:2,127.0.0.1:2", DiscoveryTimeout: 5 * sec, RemovalAfter: 3},
		Timeouts:       job.Timeouts{DiscoveryInterval: sec / 2, Elastic: 60 * sec, Start: 61 * sec, Join: 62 * sec, Drain: 63 * sec, Finish: 64 * sec, Exit: 65 * sec},
		Blame:          job.Blame{Policy: job.BlameHost, CooldownMin: sec, CooldownMax: 600 * sec},
		Tuning:         plan.Tuning{NetworkInterfaces: []string{"lo", "eth0"}, EncryptData: true},
		OutputSettings: OutputSettings{OutputDir: "out", Timestamps: true, LogLevel: logrus.DebugLevel, logJSON: true, EventsFile: "events"},
	}
	if got, want := fmt.Sprintf("%+v", s), fmt.Sprintf("%+v", want); got != want {
		t.Errorf("\n%s, want\n%s", got, want)
	}
}

func TestValuesThatAreRefused(t *testing.T) {
	for _, c := range []struct {
		args, env, file string
		message         string
	}{
		{args: "-np x", message: `-np: "x" is not a whole number`},
		{args: "-np 0", message: `-np: "0" is less than 1`},
		{args: "-np 1.5", message: `-np: "1.5" is not a whole number`},
		{args: "-np 99999999999999999999", message: `is too large`},
		{args: "--num-proc=", message: `-np: "" is not a whole number`},
		{args: "--reset-limit -1", message: `--reset-limit: "-1" is less than 0`},
		{args: "--slots none", message: `--slots-per-host: "none" is not a whole number`},
		{args: "--start-timeout soon", message: `--start-timeout: "soon" is not a duration (30s, 500ms, or a number of seconds)`},
		{args: "--start-timeout 0", message: `--start-timeout: "0" is not more than 0`},
		{args: "--start-timeout -3s", message: `--start-timeout: "-3s" is not more than 0`},
		{args: "--start-timeout NaN", message: `"NaN" is not a duration`},
		{args: "--start-timeout 1e300", message: `"1e300" is too long`},
		{args: "--blacklist-cooldown-range 5", message: `--blacklist-cooldown-range: "5" is not two durations MIN MAX`},
		{args: "--blacklist-cooldown-range 5 x", message: `"5" is not two`},
		{args: "--blacklist-cooldown-range 5,x", message: `"x" is not a duration`},
		{args: "--blacklist-cooldown-range 20 10", message: `the minimum, 20s, exceeds the maximum, 10s`},
		{args: "--failure-policy node", message: `--failure-policy: "node" is not one of slot, host`},
		{args: "--log-level loud", message: `--log-level: "loud" is not one of trace, debug`},
		{args: "--verbose=maybe", message: `--verbose: "maybe" is neither true nor false`},
		{args: "--network-interfaces a,,b", message: `--network-interfaces: "a,,b" has an empty name`},
		{args: "--hostfile=", message: `--hostfile: the value is empty`},
		{args: "--config-file no-such-file", message: `--config-file: open no-such-file`},
		{env: "HVD_MIN_NP=two", message: `HVD_MIN_NP: "two" is not a whole number`},
		{env: "HVD_NP=2 HVD_NUM_PROC=3", message: `HVD_NP=2 and HVD_NUM_PROC=3 contradict each other`},
		{file: "np: 4\nmin-np: two\n", message: `job.yaml:2: min-np: "two" is not a whole number`},
		{file: "np: 4\n\nmin-npp: 2\n", message: `job.yaml:3: min-npp: unknown key; did you mean min-np?`},
		{file: "zebra: 2\n", message: `job.yaml:1: zebra: unknown key`},
		{file: "cache_capacity: 2\n", message: `job.yaml:1: cache_capacity: hvdrun does not have this key of horovodrun: `},
		{file: "config-file: x\n", message: `job.yaml:1: config-file: a file cannot name another`},
		{file: "np: 2\nnum-proc: 2\n", message: `job.yaml:2: num-proc: set already`},
		{file: "np:\n", message: `job.yaml:1: np: there is no value`},
		{file: "np: {a: b}\n", message: `job.yaml:1: np: want one value`},
		{file: "hosts: [{a: 2}]\n", message: `job.yaml:1: hosts: want one value`},
		{file: "- np\n", message: `job.yaml:1: want lines of "key: value"`},
		{file: "np: [\n", message: `job.yaml:1: not YAML: did not find`},
	} {
		_, err := loadArgs(t, c.args, strings.Fields(c.env), c.file)
		if err == nil || !strings.Contains(err.Error(), c.message) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func TestDurations(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"30": 30 * time.Second, "0.25": 250 * time.Millisecond, "500ms": 500 * time.Millisecond, "1h2m": 62 * time.Minute,
	} {
		if got, err := ParseDuration(text); err != nil || got != want {
			t.Errorf("%s: %v, %v", text, got, err)
		}
	}
}

func TestEmptyFile(t *testing.T) {
	if s, err := loadArgs(t, "", nil, "# nothing yet\n"); err != nil || len(s.Origins) != 1 {
		t.Error(s.Origins, err)
	}
}

func TestFileByVariable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "job.yaml")
	if err := os.WriteFile(path, []byte("np: &n 010\nmin-np: *n\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if s, err := loadArgs(t, "", []string{"HVD_CONFIG_FILE=" + path}, ""); err != nil || s.Np != 10 || s.MinNP != 10 {
		t.Error(s.Np, s.MinNP, err)
	}
}

func TestRepeatedInterfacesAreJoined(t *testing.T) {
	s, err := loadArgs(t, "--network-interface lo --network-interfaces eth0,eth1 -np 2 -np 3", nil, "")
	if err != nil || !slices.Equal(s.Tuning.NetworkInterfaces, []string{"lo", "eth0", "eth1"}) || s.Np != 3 {
		t.Error(s.Tuning.NetworkInterfaces, s.Np, err)
	}
}

// TestInsideAWorker: some variables of a worker's environment have the names of flags. hvdrun in a
// worker must not take them for a user's settings.
func TestInsideAWorker(t *testing.T) {
	env := plan.Worker{RunID: "r", Incarnation: "i", LauncherAddr: "127.0.0.1:1", Credentials: "c", Size: 1,
		StallWarning: 4, Tuning: plan.Tuning{
			EncryptData: true, NetworkInterfaces: []string{"lo"}, Connections: 2, FusionThreshold: 2, CycleTime: 3,
			VerifyState: 5, HealState: true, CommitReplicas: 6,
		}}.Environ()
	s, err := loadArgs(t, "", append(env, "HVD_MIN_NP=3"), "")
	if err != nil || !reflect.DeepEqual(s.Tuning, plan.Tuning{}) || s.Timeouts.StallWarning != 0 || s.MinNP != 3 {
		t.Errorf("%+v, %v", s, err)
	}
	s, err = loadArgs(t, "", []string{"HVD_ENCRYPT_DATA=1", "HVD_NETWORK_INTERFACES=lo"}, "")
	if err != nil || !s.Tuning.EncryptData || !slices.Equal(s.Tuning.NetworkInterfaces, []string{"lo"}) {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestTuning(t *testing.T) {
	s, err := loadArgs(t, "--connections 4 --fusion-threshold-mb 16 --cycle-time-ms=0.5 --stall-warning 10 --stall-timeout 1m --verify-state 7 --heal-state --commit-replicas 2", nil, "")
	if err != nil || s.Tuning.Connections != 4 || s.Tuning.CommitReplicas != 2 || s.Tuning.VerifyState != 7 || !s.Tuning.HealState || s.Tuning.FusionThreshold != 16 || s.Tuning.CycleTime != 500*time.Microsecond || s.Timeouts.StallWarning != 10*time.Second || s.Timeouts.Stall != time.Minute {
		t.Errorf("%+v, %v", s, err)
	}
	s, err = loadArgs(t, "--fusion-threshold-mb 0 --cycle-time-ms 0 --stall-warning 0 --stall-timeout 0s --verify-state 0", nil, "")
	if err != nil || s.Tuning.VerifyState >= 0 || s.Tuning.FusionThreshold >= 0 || s.Tuning.CycleTime >= 0 || s.Timeouts.StallWarning >= 0 || s.Timeouts.Stall >= 0 {
		t.Errorf("%+v, %v", s, err)
	}
	for _, args := range []string{"--connections 0", "--connections 17", "--fusion-threshold-mb -1", "--fusion-threshold-mb 2000000", "--cycle-time-ms 1ms",
		"--cycle-time-ms NaN", "--stall-warning x", "--stall-timeout -1", "--verify-state -1", "--verify-state 3000000000"} {
		if _, err := loadArgs(t, args, nil, ""); err == nil {
			t.Errorf("%s is taken", args)
		}
	}
}

func TestLogLevels(t *testing.T) {
	for args, want := range map[string]logrus.Level{
		"": logrus.InfoLevel, "--verbose": logrus.DebugLevel, "--quiet": logrus.WarnLevel, "--quiet --verbose": logrus.DebugLevel,
		"--log-level trace --verbose": logrus.TraceLevel, "--log-level info --quiet": logrus.InfoLevel,
		"--log-level Warn": logrus.WarnLevel, "--log-level fatal": logrus.FatalLevel,
	} {
		if s, err := loadArgs(t, args, nil, ""); err != nil || s.LogLevel != want {
			t.Errorf("%q: %v, %v; want %v", args, s.LogLevel, err, want)
		}
	}
}

// TestMistypedVariables: a variable that nearly has a setting's name is reported; those of hvdrun
// itself and of a worker are not.
func TestMistypedVariables(t *testing.T) {
	env := []string{"HVD_MIN_N=3", "HVD_JOIN=x", "HVD_KEY_FILE=x", "HVD_ENROLL=x", "HVD_ONLY_SOCKETS=1",
		"HVD_SLOT=1", "HVD_TASKS=x", "HVD_SESSION=x", "HVD_RUN_ID=x", "HVD_SLOTS=2", "HVD_COLLECTIVE_ALGORITHM=ring", "HVD_CUDA_BACKEND=ipc",
		"HVD_NCCL_LIBRARY=x", "HVD_AGENT_TIMEOUT=5", "HVD_AGENT_PROGRAM=x", "HVD_PLUGIN_COOKIE=x", "HVD_LAUNCH_PORT=1", "HVD_STARTTIMEOUT=1", "MIN_NP=1"}
	want := []string{"HVD_MIN_N is not a setting; did you mean HVD_MIN_NP?",
		"HVD_STARTTIMEOUT is not a setting; did you mean HVD_START_TIMEOUT?"}
	if got := mistyped(env); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if got := mistyped(append(env, plan.EnvLauncherAddr+"=a:1")); got != nil {
		t.Errorf("in a worker: %q", got)
	}
}

// TestServiceOfKubernetes: the variables that Kubernetes creates for a Service named hvd-ssh are
// not settings; a port that a user has set in such a variable is.
func TestServiceOfKubernetes(t *testing.T) {
	service := []string{"HVD_SSH_SERVICE_HOST=10.0.0.1", "HVD_SSH_SERVICE_PORT=22", "HVD_SSH_PORT=tcp://10.0.0.1:22",
		"HVD_SSH_PORT_22_TCP=tcp://10.0.0.1:22", "HVD_SSH_PORT_22_TCP_PROTO=tcp", "HVD_SSH_PORT_22_TCP_PORT=22", "HVD_SSH_PORT_22_TCP_ADDR=10.0.0.1"}
	for _, c := range []struct {
		env []string
		set bool
		bad bool
	}{
		{service, false, false},
		{append(service[:2:2], "HVD_SSH_PORT=2222"), true, false},
		{[]string{"HVD_SSH_PORT=tcp://10.0.0.1:22"}, false, true},
	} {
		s, err := loadArgs(t, "-np 1", c.env, "")
		if (err != nil) != c.bad || err == nil && s.Given("ssh-port") != c.set {
			t.Errorf("%q: %v", c.env, err)
		}
		if got := mistyped(c.env); got != nil {
			t.Errorf("%q", got)
		}
	}
}
