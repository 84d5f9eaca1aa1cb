package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/discovery/discoverytest"
	"github.com/hvdrun/hvdrun/plan"
)

func newInventory(t *testing.T, text string) *inventory {
	path := filepath.Join(t.TempDir(), "inventory.json")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	v := &inventory{}
	if err := v.Configure(map[string]string{"inventory": path, "every": "1ms"}); err != nil {
		t.Fatal(err)
	}
	return v
}

// TestPromises runs hvdrun's tests of the contract of a source of hosts.
func TestPromises(t *testing.T) {
	discoverytest.Run(t, func(t *testing.T, hosts []plan.Host) discovery.Discoverer {
		machines := []machine{{"broken", 8, "down"}}
		for _, h := range hosts {
			m := machine{h.Name, h.Slots, "up"}
			if h.Draining {
				m.State = "leaving"
			}
			machines = append(machines, m)
		}
		text, err := json.Marshal(machines)
		if err != nil {
			t.Fatal(err)
		}
		return newInventory(t, string(text))
	})
}

func TestStates(t *testing.T) {
	v := newInventory(t, `[{"name":"a","gpus":2,"state":"up"},{"name":"b","state":"down"},{"name":"c","gpus":1,"state":"leaving"}]`)
	got, err := v.Discover(t.Context())
	if want := []plan.Host{{Name: "a", Slots: 2}, {Name: "c", Slots: 1, Draining: true}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	for _, text := range []string{`[{"name":"a","state":"asleep"}]`, `[{"name":`, ``} {
		if got, err := newInventory(t, text).Discover(t.Context()); err == nil {
			t.Errorf("%q: found %v", text, got)
		}
	}
}

func TestConfigure(t *testing.T) {
	for want, settings := range map[string]map[string]string{
		`setting "inventory": missing`:        {},
		`setting "every": "x" is no`:          {"inventory": "f", "every": "x"},
		`setting "inventry": not known; know`: {"inventory": "f", "inventry": "f"},
	} {
		if err := new(inventory).Configure(settings); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
