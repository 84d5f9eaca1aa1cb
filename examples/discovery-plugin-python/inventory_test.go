//go:generate protoc -I ../../internal/wire --python_out=. discovery.proto

// The tests start the plugin as hvdrun does; they need /usr/bin/python3 with the packages that
// inventory.py names.
package inventory_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/discovery/discoverytest"
	"github.com/hvdrun/hvdrun/discovery/plugin"
	"github.com/hvdrun/hvdrun/plan"
)

// inventory is the path of the file that the plugin reads.
type inventory string

// write replaces the file atomically.
func (f inventory) write(t *testing.T, text string) {
	t.Helper()
	next := string(f) + ".new"
	if err := os.WriteFile(next, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(next, string(f)); err != nil {
		t.Fatal(err)
	}
}

func (f inventory) list(t *testing.T, hosts []plan.Host) {
	t.Helper()
	machines := []map[string]any{{"name": "broken", "gpus": 8, "state": "down"}}
	for _, h := range hosts {
		state := "up"
		if h.Draining {
			state = "leaving"
		}
		machines = append(machines, map[string]any{"name": h.Name, "gpus": h.Slots, "state": state})
	}
	text, err := json.Marshal(machines)
	if err != nil {
		t.Fatal(err)
	}
	f.write(t, string(text))
}

// start returns the plugin and its file, which lists no machine yet.
func start(t *testing.T) (*plugin.Plugin, inventory) {
	t.Helper()
	f := inventory(filepath.Join(t.TempDir(), "machines.json"))
	f.list(t, nil)
	return open(t, map[string]string{"inventory": string(f), "every": "0.001"}), f
}

func open(t *testing.T, settings map[string]string) *plugin.Plugin {
	t.Helper()
	log, _ := logtest.NewNullLogger()
	p := plugin.New(plugin.Config{
		Path: "./inventory.py", Settings: settings, StartTimeout: time.Minute, CallTimeout: time.Minute, Log: log,
		Env:   []string{"PYTHONDONTWRITEBYTECODE=1"},
		Stray: func(line string) { t.Errorf("the plugin printed %q to its stdout", line) },
	})
	t.Cleanup(func() { p.Close() })
	return p
}

func TestPromises(t *testing.T) {
	p, f := start(t)
	newD := func(t *testing.T, hosts []plan.Host) discovery.Discoverer {
		f.list(t, hosts)
		return p
	}
	discoverytest.Run(t, newD)
	discoverytest.RunDraining(t, newD)
}

func TestChanges(t *testing.T) {
	discoverytest.RunChanging(t, func(t *testing.T) (discovery.Discoverer, func([]plan.Host)) {
		p, f := start(t)
		return p, func(hosts []plan.Host) { f.list(t, hosts) }
	})
}

func TestFailures(t *testing.T) {
	for _, text := range []string{`[{"name": "a", "gpus": 1, "state": "up"}, {"name": "b", "gpus": 1, "state": "asleep"}]`, `[{"name":`, ``} {
		discoverytest.RunFailing(t, func(t *testing.T) discovery.Discoverer {
			p, f := start(t)
			f.write(t, text)
			return p
		})
	}
	for want, settings := range map[string]map[string]string{
		"inventory is missing":        {},
		"'inventry' is not a setting": {"inventory": "f", "inventry": "f"},
		"could not convert string to": {"inventory": "f", "every": "x"},
	} {
		if _, err := open(t, settings).Discover(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// A killed plugin is restarted, and a closed one ends.
func TestProcess(t *testing.T) {
	p, f := start(t)
	want := []plan.Host{{Name: "a", Slots: 2}}
	f.list(t, want)
	if _, err := p.Discover(t.Context()); err != nil {
		t.Fatal(err)
	}
	pid := p.PID()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	got, err := p.Discover(t.Context()) // can reach the dead process
	for range 5 {
		if err == nil {
			break
		}
		got, err = p.Discover(t.Context())
	}
	if err != nil || !slices.Equal(got, want) || p.PID() == pid {
		t.Errorf("found %v, %v by %d after %d was killed", got, err, p.PID(), pid)
	}
	pid = p.PID()
	p.Close()
	if err := syscall.Kill(-pid, 0); err != syscall.ESRCH {
		t.Errorf("its process group is still there: %v", err)
	}
}
