package plugins_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/miekg/dns"
	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/discovery/discoverytest"
	"github.com/hvdrun/hvdrun/discovery/plugin"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m, nil)) }

// build builds a plugin and returns its path.
func build(t *testing.T, name string) string {
	t.Helper()
	dir := t.TempDir()
	if err := sandbox.Build(dir, "github.com/hvdrun/hvdrun/plugins/"+name); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, name)
}

func start(t *testing.T, path string, settings map[string]string) *plugin.Plugin {
	t.Helper()
	log := logrus.New()
	log.SetOutput(io.Discard)
	p := plugin.New(plugin.Config{Path: path, Settings: settings, Log: log})
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// refuses checks that the plugin refuses an unknown setting.
func refuses(t *testing.T, path, known string) {
	t.Helper()
	_, err := start(t, path, map[string]string{"colour": "red"}).Discover(t.Context())
	for _, want := range []string{`unknown setting "colour"`, known} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %s", err, want)
		}
	}
}

func toText(hosts []plan.Host) string {
	var items []string
	for _, h := range hosts {
		items = append(items, fmt.Sprintf("%v %v", h, h.Draining))
	}
	return strings.Join(items, ", ")
}

func finds(t *testing.T, p *plugin.Plugin, want string) {
	t.Helper()
	hosts, err := p.Discover(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got := toText(hosts); got != want {
		t.Errorf("found %q, want %q", got, want)
	}
}

func TestFile(t *testing.T) {
	path := build(t, "file")
	refuses(t, path, "default_slots, path, pattern")
	write := func(t *testing.T, hosts []plan.Host) string {
		name := filepath.Join(t.TempDir(), "hosts")
		var text strings.Builder
		for _, h := range hosts {
			fmt.Fprintln(&text, h)
		}
		if err := os.WriteFile(name, []byte(text.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return name
	}
	discoverytest.Run(t, func(t *testing.T, hosts []plan.Host) discovery.Discoverer {
		return start(t, path, map[string]string{"path": write(t, hosts)})
	})

	name := write(t, []plan.Host{{Name: "a", Slots: 1}})
	p := start(t, path, map[string]string{"path": name, "rescan": "0"})
	lists, ended := make(chan string, 10), make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { ended <- p.Watch(ctx, func(hosts []plan.Host) { lists <- toText(hosts) }) }()
	defer func() { cancel(); <-ended }()
	for i, want := range []string{"a:1 false", "b:2 false"} {
		if i > 0 {
			if err := os.Rename(write(t, []plan.Host{{Name: "b", Slots: 2}}), name); err != nil {
				t.Fatal(err)
			}
		}
		select {
		case got := <-lists:
			if got != want {
				t.Errorf("found %q, want %q", got, want)
			}
		case <-sandbox.Expired():
			t.Fatalf("no list; want %q", want)
		}
	}
}

func TestDNS(t *testing.T) {
	path := build(t, "dns")
	refuses(t, path, "allow_empty, host, max_ttl")
	started, served := make(chan struct{}), make(chan error, 1)
	srv := &dns.Server{Net: "udp", Addr: "127.0.0.1:0", NotifyStartedFunc: func() { close(started) }}
	srv.Handler = dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		rr, err := dns.NewRR("_hvd._tcp.example. 60 SRV 1 4 1 a.example.")
		if err != nil {
			t.Error(err)
		}
		m.Answer = []dns.RR{rr}
		w.WriteMsg(m)
	})
	go func() { served <- srv.ListenAndServe() }()
	select {
	case <-started:
	case err := <-served:
		t.Fatal(err)
	}
	defer func() { srv.Shutdown(); <-served }()
	finds(t, start(t, path, map[string]string{
		"names": "_hvd._tcp.example", "servers": srv.PacketConn.LocalAddr().String(), "slots_from": "weight",
	}), "a.example:4 false")
}

func TestHTTP(t *testing.T) {
	path := build(t, "http")
	refuses(t, path, "ca_file, cert_file, default_slots")
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, `{"hosts":[{"name":"a","slots":2},{"name":"b","draining":true}]}`)
	}))
	defer srv.Close()
	finds(t, start(t, path, map[string]string{"url": srv.URL}), "a:2 false, b:1 true")
}
