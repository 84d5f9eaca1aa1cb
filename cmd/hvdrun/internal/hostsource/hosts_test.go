package hostsource

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// parsed reads settings from a command line without a command.
func parsed(t *testing.T, args string) (settings.Settings, error) {
	t.Helper()
	words, err := settings.Normalize(strings.Fields(args), nil, func(string) string { return "" })
	if err != nil {
		return settings.Settings{}, err
	}
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	settings.AddFlags(fs, false)
	if err := fs.Parse(words); err != nil {
		t.Fatal(err)
	}
	return settings.Load(fs, nil)
}

// TestSize: the size of the worlds that follows from a command line: NP, Min, Max, Elastic.
func TestSize(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"-np 4", "{4 0 0 0 0 false false false}"},
		{"-H localhost:2,127.0.0.1:3", "{5 0 0 0 0 false false false}"},
		{"-H localhost:2,127.0.0.1:3 -np 4", "{4 0 0 0 0 false false false}"},
		{"-np 4 --min-np 2", "{4 2 0 0 0 true false false}"},
		{"-np 4 --max-np 8", "{4 0 8 0 0 true false false}"},
		{"-np 4 --host-discovery-script x", "{4 0 0 0 0 true false false}"},
		{"-np 4 --min-np 2 --max-np 8 --host-discovery-script x", "{4 2 8 0 0 true false false}"},
		{"-np 4 --discovery-plugin x", "{4 0 0 0 0 true false false}"},
		{"-H localhost:4 --min-np 1 --max-np 2", "{2 1 2 0 0 true false false}"},
		{"-H localhost:4 --min-np 2 --spares 1", "{3 2 0 1 0 true false false}"},
		{"-H localhost:4 -np 2 --min-np 2 --spares 2", "{2 2 0 2 0 true false false}"},
		{"-H localhost:4 -np 2 --spares 1", "--spares is 1, and the job is not elastic: give --min-np too"},
		{"-np 4 --spares -1", "--spares: "},
		{"-H localhost --slots 3", "{3 0 0 0 0 false false false}"},

		{"-H localhost:2 --min-np 3", "--min-np is 3, more than the 2 slots of --hosts"},
		{"-np 3 -H localhost:2", "driver: not enough slots in time: 3 are needed (-np), and the hosts given have 2"},
		{"-H localhost:0", "driver: not enough slots in time: 1 are needed (-np), and the hosts given have 0"},
		{"", fmt.Sprintf("{%d 0 0 0 0 false false false}", max(1, Gpus()))},
		{"--min-np 300", "{300 300 0 0 0 true false false}"},
		{"--slots 3", "{3 0 0 0 0 false false false}"},
		{"--slots 3 --max-np 2", "{2 0 2 0 0 true false false}"},
		{"--host-discovery-script x --min-np 2", "-np is missing"},
		{"-np 4 --min-np 5", "--min-np is 5, and -np is 4: they must be min-np ≤ np ≤ max-np"},
		{"-np 4 --min-np 5 --host-discovery-script x", "--min-np is 5, and -np is 4: they must be min-np ≤ np ≤ max-np"},
		{"-np 4 --max-np 3", "-np is 4, and --max-np is 3: they must be min-np ≤ np ≤ max-np"},
		{"-H localhost:2 --hostfile f", "--hosts and --hostfile: each names the hosts; give only one of them"},
		{"-H localhost:2 --host-discovery-script x", "--hosts and --host-discovery-script: each"},
		{"-H localhost:2 --discovery-plugin x", "--hosts and --discovery-plugin: each"},
		{"-np 2 --discovery-config a=b", "--discovery-config: it needs --discovery-plugin"},
		{"-H localhost:x", "--hosts: plan: item 1"},
		{"--hostfile no-such-file", "--hostfile: open no-such-file"},
	} {
		s, err := parsed(t, c.args)
		var fixed []plan.Host
		if err == nil {
			fixed, err = Fixed(&s)
		}
		got := ""
		if err == nil {
			var size job.Size
			size, err = Size(&s, fixed)
			got = fmt.Sprint(size)
		}
		if err != nil {
			got = err.Error()
		}
		if got != c.want && (err == nil || !strings.HasPrefix(got, c.want)) {
			t.Errorf("%q: %s; want %s", c.args, got, c.want)
		}
		if status := cli.Status(err); errors.Is(err, job.ErrNotEnoughSlots) && status != 3 {
			t.Errorf("%q: status %d", c.args, status)
		}
	}
}

// TestTaken: the value that is used for -np is logged with its origin.
func TestTaken(t *testing.T) {
	here := "1 is taken, as this machine has no GPU"
	if n := Gpus(); n > 0 {
		here = fmt.Sprintf("%d is taken, the GPUs of this machine", n)
	}
	for _, c := range []struct{ args, want string }{
		{"-np 4", ""},
		{"-np 4 -H localhost:4", ""},
		{"", here},
		{"-H localhost:2,127.0.0.1:3", "using 5, from --hosts"},
		{"--min-np 300", "using 300, from --min-np"},
		{"--slots 3 --min-np 1", "using 3, from --slots-per-host"},
	} {
		s, err := parsed(t, c.args)
		if err != nil {
			t.Fatal(err)
		}
		fixed, err := Fixed(&s)
		if err != nil {
			t.Fatal(err)
		}
		size, err := Size(&s, fixed)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.TrimPrefix(Taken(&s, size.NP), "-np is not given: "); got != c.want {
			t.Errorf("%q: %s; want %s", c.args, got, c.want)
		}
	}
}

// TestHostfile is Horovod's HF-01.
func TestHostfile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hosts")
	for _, c := range []struct{ text, want string }{
		{"172.31.32.7 slots=8\n172.31.33.9 slots=8\n", "[172.31.32.7:8 172.31.33.9:8]"},
		{"\n# ours\na:1\r\nb\n", "[a:1 b:5]"},
		{"a\nb\na\nb\n", "[a:10 b:10]"},
		{"a slots=x\n", "--hostfile: " + path + ": plan: line 1"},
		{"# none\n", "--hostfile: " + path + " names no host"},
	} {
		if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := parsed(t, "--slots 5 -hostfile "+path)
		if err != nil {
			t.Fatal(err)
		}
		hosts, err := Fixed(&s)
		got := fmt.Sprint(hosts)
		if err != nil {
			got = err.Error()
		}
		if !strings.HasPrefix(got, c.want) {
			t.Errorf("%q: %s; want %s", c.text, got, c.want)
		}
	}
}

// TestFileOfTheDocsIsPossible: the settings of the file in docs/running.md are valid for a job.
func TestFileOfTheDocsIsPossible(t *testing.T) {
	page, err := os.ReadFile("../../../../docs/running.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(page), "```yaml\n")
	text, _, _ = strings.Cut(text, "```")
	path := filepath.Join(t.TempDir(), "job.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := parsed(t, "--config-file="+path)
	if err == nil {
		err = Possible(&s)
	}
	if err != nil || text == "" {
		t.Error(err)
	}
}
