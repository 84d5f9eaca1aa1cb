package main

import (
	"os"
	"strings"
	"testing"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/discovery/plugin"
	"github.com/hvdrun/hvdrun/plan"
)

// asPlugin makes this program the plugin, so that the plugin need not be linked again.
const asPlugin = "run-as-the-plugin"

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == asPlugin {
		main()
		return
	}
	os.Exit(m.Run())
}

// TestAsAProcess runs the plugin as hvdrun does.
func TestAsAProcess(t *testing.T) {
	a := newServer(t)
	a.put(newPod("a", "10.0.0.1", 1))
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	logged := &journal{}
	log := logrus.New()
	log.Out = logged
	start := func(settings map[string]string) *plugin.Plugin {
		p := plugin.New(plugin.Config{Path: self, Args: []string{asPlugin}, Settings: settings, Log: log})
		t.Cleanup(func() {
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		})
		return p
	}
	config := writeKubeconfig(t, a.URL, caData(a), "token: "+a.token)
	p := start(map[string]string{"kubeconfig": config, "context": "here"})
	if hosts, err := p.Discover(t.Context()); err != nil || text(hosts) != "10.0.0.1:1" {
		t.Fatalf("%v, %v", hosts, err)
	}
	lists, ended := make(chan []plan.Host, 100), make(chan error, 1)
	go func() { ended <- p.Watch(t.Context(), func(hosts []plan.Host) { lists <- hosts }) }()
	for i, want := range []string{"10.0.0.1:1", "10.0.0.1:1 10.0.0.2:1/draining"} {
		if i > 0 {
			a.put(terminate(newPod("b", "10.0.0.2", 1)))
		}
		select {
		case got := <-lists:
			if text(got) != want {
				t.Errorf("found %s, want %s", text(got), want)
			}
		case err := <-ended:
			t.Fatal(err)
		}
	}
	_, err = start(map[string]string{"colour": "red"}).Discover(t.Context())
	if err == nil || !strings.Contains(err.Error(), `unknown setting "colour"; the settings are: cluster_domain, container`) {
		t.Error(err)
	}
	if strings.Contains(logged.String(), "secret") {
		t.Errorf("logged %s", logged)
	}
}
