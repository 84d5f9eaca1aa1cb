package main

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// flawed is the Python example with a flaw.
const flawed = `#!/usr/bin/python3
import os, sys, time
sys.path.insert(0, %q)
import discovery_plugin, inventory

class Flawed(inventory.Inventory):
    def discover(self):
        %s
        return super().discover()
%s
discovery_plugin.serve(Flawed())
`

// TestSourcesTogether: a script and a plugin together make one list: the script's hosts come first,
// and a host is draining if one of them says so.
func TestSourcesTogether(t *testing.T) {
	t.Setenv("PYTHONDONTWRITEBYTECODE", "1")
	machines := filepath.Join(t.TempDir(), "machines.json")
	list := `[{"name": "x", "gpus": 4, "state": "up"}, {"name": "b", "gpus": 7, "state": "leaving"}]`
	if err := os.WriteFile(machines, []byte(list), 0o600); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	p := &cli.Program{Stdout: &out, Stderr: &strings.Builder{}, Env: os.Environ()}
	args := []string{"discover", "--json", "--discovery-plugin", "../../examples/discovery-plugin-python/inventory.py",
		"--discovery-config", "inventory=" + machines, "--host-discovery-script", "echo a:1; echo b:2"}
	if err := execute(t.Context(), p, args); err != nil {
		t.Fatal(err)
	}
	want := `{"hosts":[{"host":"a","slots":1,"local":false},{"host":"b","slots":2,"local":false,"draining":true},` +
		`{"host":"x","slots":4,"local":false}],"slots":7}` + "\n"
	if out.String() != want {
		t.Errorf("got %swant %s", &out, want)
	}
	err := execute(t.Context(), p, append(args, "-H", "a:1"))
	if err == nil || cli.Status(err) != 2 || !strings.Contains(err.Error(), "each names the hosts") {
		t.Errorf("with fixed hosts: %v", err)
	}
}

// TestVerifyPlugin: --verify reports what is wrong with a plugin in another language, or that
// nothing is.
func TestVerifyPlugin(t *testing.T) {
	example, err := filepath.Abs("../../examples/discovery-plugin-python")
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("PYTHONDONTWRITEBYTECODE", "1")
	for _, c := range []struct{ name, discover, other, want string }{
		{name: "good"},
		{"talkative", "os.write(1, b'hello\\n')", "",
			`(?m)^FAILED  prints nothing to stdout but the handshake: \d+ lines, the first of them "hello"; `},
		{"forgetful", "self.asked = getattr(self, 'asked', 0) + 1\n        if self.asked == 3: return []", "",
			`(?m)^FAILED  finds the whole list, in the same order every time: call 2: found 0 hosts, want 2: a:1 is missing`},
		{"once only", "pass", "    def configure(self, settings):\n" +
			"        super().configure(settings)\n        open(self.path + '.lock', 'x').close()",
			`(?m)^FAILED  is there again, with the same list, after kill -9: discovery/plugin: `},
		{"immortal", "pass", "os._exit = lambda *_: time.sleep(600)",
			`(?m)^FAILED  ends when its context ends, and leaves nothing running: it did not end with SIGTERM and had to be killed`},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			path, machines := filepath.Join(dir, "flawed.py"), filepath.Join(dir, "machines.json")
			text := fmt.Sprintf(flawed, example, cmp.Or(c.discover, "pass"), c.other)
			if err := sandbox.WriteProgram(path, []byte(text)); err != nil {
				t.Fatal(err)
			}
			list := `[{"name": "a", "gpus": 1, "state": "up"}, {"name": "b", "gpus": 2, "state": "leaving"}]`
			if err := os.WriteFile(machines, []byte(list), 0o600); err != nil {
				t.Fatal(err)
			}
			var out strings.Builder
			p := &cli.Program{Stdout: &out, Stderr: &strings.Builder{}, Env: os.Environ()}
			err := execute(t.Context(), p, []string{"discover", "--verify", "--discovery-plugin", path,
				"--discovery-config", "inventory=" + machines, "--log-level", "fatal"})
			if c.want == "" {
				if err != nil || strings.Contains(out.String(), "FAILED") || strings.Count(out.String(), "\nOK ") < 10 {
					t.Errorf("%v\n%s", err, &out)
				}
				return
			}
			if cli.Status(err) != 1 || !regexp.MustCompile(c.want).MatchString(out.String()) {
				t.Errorf("status %d (%v), want a line %s in\n%s", cli.Status(err), err, c.want, &out)
			}
		})
	}
}
