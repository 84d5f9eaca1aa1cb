package main

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"
)

// podMap keys pods by their names.
func podMap(pods ...*pod) map[string]*pod {
	m := map[string]*pod{}
	for _, p := range pods {
		m[p.Metadata.Name] = p
	}
	return m
}

func defaults(t *testing.T, pairs ...string) *config {
	t.Helper()
	values := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		values[pairs[i]] = pairs[i+1]
	}
	c, err := readConfig(values)
	if err != nil {
		t.Fatal(err)
	}
	return &c
}

// TestRealPods reads a list as kubectl get --raw prints it.
func TestRealPods(t *testing.T) {
	raw, err := os.ReadFile("testdata/pods.json")
	if err != nil {
		t.Fatal(err)
	}
	page := &podList{}
	if err := json.Unmarshal(raw, page); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ settings, want string }{
		{"", "10.42.0.17:8 10.42.1.9:3 10.42.2.4:2/draining"},
		{"host=name", "train-0:8 train-1:3 train-2:2/draining"},
		{"host=fqdn", "train-0.train.training.svc.cluster.local:8 train-1.train.training.svc.cluster.local:3 " +
			"train-2.train.training.svc.cluster.local:2/draining"},
		{"container=sidecar", "10.42.0.17:1 10.42.1.9:3 10.42.2.4:1/draining"},
		{"resource=example.com/npu default_slots=5", "10.42.0.17:5 10.42.1.9:3 10.42.2.4:5/draining"},
	} {
		var pairs []string
		for s := range strings.FieldsSeq(c.settings) {
			key, value, _ := strings.Cut(s, "=")
			pairs = append(pairs, key, value)
		}
		hosts, faults, err := defaults(t, pairs...).hostsOf(podMap(page.Items...))
		if err != nil || len(faults) > 0 || text(hosts) != c.want {
			t.Errorf("%s: %s, %v, %v; want %s", c.settings, text(hosts), faults, err, c.want)
		}
	}
}

func TestWhichPodsAreHosts(t *testing.T) {
	change := func(f func(p *pod)) *pod {
		p := newPod("a", "10.0.0.1", 2)
		f(p)
		return p
	}
	ended := func(names ...string) func(p *pod) {
		return func(p *pod) {
			statuses := `[{"name":"main","state":{"running":{}}},{"name":"sidecar","state":{"running":{}}}]`
			for _, name := range names {
				statuses = strings.Replace(statuses, name+`","state":{"running`, name+`","state":{"terminated`, 1)
			}
			if err := json.Unmarshal([]byte(statuses), &p.Status.ContainerStatuses); err != nil {
				t.Fatal(err)
			}
		}
	}
	limit := func(text string) func(p *pod) {
		return func(p *pod) {
			delete(p.Metadata.Annotations, slotsAnnotation)
			if err := json.Unmarshal([]byte(`[{"name":"main","resources":{"limits":{"nvidia.com/gpu":`+text+`}}}]`), &p.Spec.Containers); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, c := range []struct {
		what string
		pod  *pod
		want string
	}{
		{"ready", change(func(*pod) {}), "10.0.0.1:2"},
		{"not ready", change(func(p *pod) { p.setReady(false) }), ""},
		{"of no condition", change(func(p *pod) { p.Status.Conditions = nil }), ""},
		{"pending", change(func(p *pod) { p.Status.Phase = "Pending" }), ""},
		{"failed", change(func(p *pod) { p.Status.Phase = "Failed" }), ""},
		{"of no address", change(func(p *pod) { p.Status.PodIP = "" }), ""},
		{"terminating", terminate(change(func(*pod) {})), "10.0.0.1:2/draining"},
		{"terminating and not ready any more", terminate(change(func(p *pod) { p.setReady(false) })), "10.0.0.1:2/draining"},
		{"terminating, its container ended", terminate(change(ended("main", "sidecar"))), ""},
		{"terminating, one container ended", terminate(change(ended("sidecar"))), "10.0.0.1:2/draining"},
		{"terminating and failed", terminate(change(func(p *pod) { p.Status.Phase = "Failed" })), ""},
		{"no slots", change(func(p *pod) { p.Metadata.Annotations[slotsAnnotation] = "0" }), "10.0.0.1:0"},
		{"the default", change(func(p *pod) { p.Metadata.Annotations = nil }), "10.0.0.1:1"},
		{"GPUs as a text", change(limit(`"8"`)), "10.0.0.1:8"},
		{"GPUs as a number", change(limit(`8`)), "10.0.0.1:8"},
		{"GPUs that are none", change(limit(`"8k"`)), "10.0.0.1:0"},
		{"negative slots", change(func(p *pod) { p.Metadata.Annotations[slotsAnnotation] = "-1" }), "10.0.0.1:0"},
	} {
		hosts, faults, err := defaults(t).hostsOf(podMap(c.pod))
		if got := text(hosts); err != nil || got != c.want {
			t.Errorf("%s: %q, %v; want %q", c.what, got, err, c.want)
		}
		if wrong := strings.Contains(c.what, "none") || strings.Contains(c.what, "negative"); wrong != (len(faults) == 1) {
			t.Errorf("%s: faults %v", c.what, faults)
		}
	}
	one := terminate(newPod("a", "10.0.0.1", 2))
	hosts, _, err := defaults(t, "container", "main").hostsOf(podMap(func() *pod { ended("main")(one); return one }()))
	if err != nil || len(hosts) > 0 {
		t.Errorf("its container main has ended: %v, %v", hosts, err)
	}
}

func TestOrderAndNames(t *testing.T) {
	at := func(p *pod, second int) *pod {
		p.Metadata.CreationTimestamp = time.Unix(int64(second), 0)
		return p
	}
	z, y, x := at(newPod("z", "10.0.0.1", 1), 1), at(newPod("y", "10.0.0.2", 1), 2), at(newPod("x", "10.0.0.3", 1), 2)
	if hosts, _, err := defaults(t, "host", "name").hostsOf(podMap(x, y, z)); err != nil || text(hosts) != "z:1 x:1 y:1" {
		t.Errorf("%v, %v", hosts, err)
	}
	// Pods on the network of their node: the successor of one that is terminating is not draining.
	young := at(newPod("young", "10.0.0.1", 3), 9)
	for range 20 { // maps have no order
		if hosts, _, err := defaults(t).hostsOf(podMap(terminate(z), young)); err != nil || text(hosts) != "10.0.0.1:3" {
			t.Fatalf("%v, %v", hosts, err)
		}
		if hosts, _, err := defaults(t).hostsOf(podMap(z, terminate(young))); err != nil || text(hosts) != "10.0.0.1:1" {
			t.Fatalf("%v, %v", hosts, err)
		}
		if hosts, _, err := defaults(t).hostsOf(podMap(z, young)); err == nil || hosts != nil || !strings.Contains(err.Error(), "z and young") {
			t.Fatalf("%v, %v", hosts, err)
		}
	}
}

// offline is a client whose server says this.
func offline(t testing.TB, body []byte) *client {
	c, err := readConfig(nil)
	if err != nil {
		t.Fatal(err)
	}
	c.namespace = "training"
	server, _ := url.Parse("http://127.0.0.1")
	return &client{cfg: c, access: &access{server: server, token: noToken}, http: &http.Client{Transport: roundTrip(
		func(*http.Request) (*http.Response, error) {
			r := httptest.NewRecorder()
			r.Header().Set("Content-Type", "application/json")
			r.Write(body)
			return r.Result(), nil
		})}}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func FuzzList(f *testing.F) {
	text, err := os.ReadFile("testdata/pods.json")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"kind":"PodList","metadata":{"resourceVersion":"1"},"items":[{"metadata":{"name":"a"}}]}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		c := offline(t, body)
		pods, version, err := c.list(context.Background())
		if (err == nil) != (version != "") {
			t.Errorf("version %q, %v", version, err)
		}
		if _, _, err := c.cfg.hostsOf(pods); err != nil && !strings.HasPrefix(err.Error(), "kubernetes: the pods") {
			t.Error(err)
		}
	})
}

func FuzzWatch(f *testing.F) {
	f.Add([]byte(`{"type":"ADDED","object":{"metadata":{"name":"a","resourceVersion":"1"}}}` + "\n" +
		`{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"2"}}}`))
	f.Add([]byte(`{"type":"ERROR","object":` + statusText(410, "too old") + `}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		err := offline(t, body).watch(context.Background(), "1", func(kind string, p *pod, version string, _ bool) error {
			if version == "" || (p == nil) != (kind == "BOOKMARK") || p != nil && p.Metadata.Name == "" {
				t.Errorf("%s of version %q, %v", kind, version, p)
			}
			return nil
		})
		if err != nil && !strings.HasPrefix(err.Error(), "kubernetes: ") {
			t.Error(err)
		}
	})
}
