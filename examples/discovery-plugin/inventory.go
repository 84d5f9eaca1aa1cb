package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/discovery/plugin"
	"github.com/hvdrun/hvdrun/plan"
)

// machine is an entry of the inventory, a JSON list.
type machine struct {
	Name  string `json:"name"`
	GPUs  int    `json:"gpus"`
	State string `json:"state"` // "up", "leaving" or "down"
}

// inventory discovers the machines in the file that are up or leaving.
type inventory struct {
	path  string
	every time.Duration // interval of reading the file
}

// Configure receives the settings of --discovery-config. hvdrun calls it before the other methods.
func (v *inventory) Configure(settings map[string]string) error {
	if err := plugin.CheckSettings(settings, "inventory", "every"); err != nil {
		return err
	}
	if v.path = settings["inventory"]; v.path == "" {
		return &plugin.SettingError{Key: "inventory", Err: errors.New("missing; it is the path of a JSON file")}
	}
	v.every = 200 * time.Millisecond
	if text := settings["every"]; text != "" {
		every, err := time.ParseDuration(text)
		if err != nil || every <= 0 {
			return &plugin.SettingError{Key: "every", Err: fmt.Errorf("%q is not a duration", text)}
		}
		v.every = every
	}
	return nil
}

// Discover returns the complete list or an error. A partial list would stop the workers on the
// missing hosts.
func (v *inventory) Discover(ctx context.Context) ([]plan.Host, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	text, err := os.ReadFile(v.path)
	if err != nil {
		return nil, err
	}
	var machines []machine
	if err := json.Unmarshal(text, &machines); err != nil {
		return nil, fmt.Errorf("%s: %w", v.path, err)
	}
	hosts := make([]plan.Host, 0, len(machines)) // in the order of the file, so that the order is the same in every call
	for _, m := range machines {
		switch m.State {
		case "up", "leaving":
			hosts = append(hosts, plan.Host{Name: m.Name, Slots: m.GPUs, Draining: m.State == "leaving"})
		case "down":
		default:
			return nil, fmt.Errorf("%s: machine %q is in the unknown state %q", v.path, m.Name, m.State)
		}
	}
	return hosts, nil
}

// Watch is optional. It reports changes at once instead of at hvdrun's next poll.
func (v *inventory) Watch(ctx context.Context, found func([]plan.Host)) error {
	look := time.NewTicker(v.every)
	defer look.Stop()
	var last []plan.Host
	for first := true; ; first = false {
		hosts, err := v.Discover(ctx)
		if err != nil {
			return err // hvdrun keeps the last list, logs the error and watches again
		}
		if first || !slices.Equal(hosts, last) {
			last = slices.Clone(hosts)
			found(hosts)
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
