package main

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

// shuffled returns the pods in a random order, as lists and stores have them.
func shuffled(pods ...*pod) []*pod {
	rand.Shuffle(len(pods), func(i, j int) { pods[i], pods[j] = pods[j], pods[i] })
	return pods
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
	pods, err := podsOf(page)
	if err != nil {
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
		hosts, faults, err := defaults(t, pairs...).hostsOf(pods)
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
			delete(p.Annotations, slotsAnnotation)
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
		{"no slots", change(func(p *pod) { p.Annotations[slotsAnnotation] = "0" }), "10.0.0.1:0"},
		{"the default", change(func(p *pod) { p.Annotations = nil }), "10.0.0.1:1"},
		{"GPUs as a text", change(limit(`"8"`)), "10.0.0.1:8"},
		{"GPUs as a number", change(limit(`8`)), "10.0.0.1:8"},
		{"GPUs that are no number", change(limit(`"8k"`)), "10.0.0.1:0"},
		{"negative slots", change(func(p *pod) { p.Annotations[slotsAnnotation] = "-1" }), "10.0.0.1:0"},
	} {
		hosts, faults, err := defaults(t).hostsOf(shuffled(c.pod))
		if got := text(hosts); err != nil || got != c.want {
			t.Errorf("%s: %q, %v; want %q", c.what, got, err, c.want)
		}
		if wrong := strings.Contains(c.what, "no number") || strings.Contains(c.what, "negative"); wrong != (len(faults) == 1) {
			t.Errorf("%s: faults %v", c.what, faults)
		}
	}
	one := terminate(newPod("a", "10.0.0.1", 2))
	hosts, _, err := defaults(t, "container", "main").hostsOf(shuffled(func() *pod { ended("main")(one); return one }()))
	if err != nil || len(hosts) > 0 {
		t.Errorf("its container main has ended: %v, %v", hosts, err)
	}
}

func TestOrderAndNames(t *testing.T) {
	at := func(p *pod, second int) *pod {
		p.CreationTimestamp = metav1.Unix(int64(second), 0)
		return p
	}
	z, y, x := at(newPod("z", "10.0.0.1", 1), 1), at(newPod("y", "10.0.0.2", 1), 2), at(newPod("x", "10.0.0.3", 1), 2)
	if hosts, _, err := defaults(t, "host", "name").hostsOf(shuffled(x, y, z)); err != nil || text(hosts) != "z:1 x:1 y:1" {
		t.Errorf("%v, %v", hosts, err)
	}
	// Pods on the network of their node: the successor of a terminating pod is not draining.
	young := at(newPod("young", "10.0.0.1", 3), 9)
	for range 20 {
		if hosts, _, err := defaults(t).hostsOf(shuffled(terminate(z), young)); err != nil || text(hosts) != "10.0.0.1:3" {
			t.Fatalf("%v, %v", hosts, err)
		}
		if hosts, _, err := defaults(t).hostsOf(shuffled(z, terminate(young))); err != nil || text(hosts) != "10.0.0.1:1" {
			t.Fatalf("%v, %v", hosts, err)
		}
		if hosts, _, err := defaults(t).hostsOf(shuffled(z, young)); err == nil || hosts != nil || !strings.Contains(err.Error(), "z and young") {
			t.Fatalf("%v, %v", hosts, err)
		}
	}
}

// offline returns a client whose server answers with this body, with the default limits.
func offline(t testing.TB, body []byte) *client { return within(t, body, maxList, maxEvent) }

func within(t testing.TB, body []byte, list, event int64) *client {
	cfg, err := readConfig(nil)
	if err != nil {
		t.Fatal(err)
	}
	cfg.namespace = "training"
	c, err := newClient(&access{server: baseConfig("http://127.0.0.1")}, cfg)
	if err != nil {
		t.Fatal(err)
	}
	c.http.Transport = guard{roundTrip(func(*http.Request) (*http.Response, error) {
		r := httptest.NewRecorder()
		r.Header().Set("Content-Type", "application/json")
		r.Write(body)
		return r.Result(), nil
	}), list, event}
	return c
}

// TestLimits: answers are read up to a limit.
func TestLimits(t *testing.T) {
	const size = 100 << 10
	one := `{"type":"ADDED","object":{"kind":"Pod","apiVersion":"v1","metadata":{"name":"a","resourceVersion":"1",` +
		`"labels":{"long":"` + strings.Repeat("x", size) + `"}}}}` + "\n"
	hear := func(limit int64) (events int, err error) {
		s := newSource()
		s.client = within(t, []byte(strings.Repeat(one, 10)), 0, limit)
		f := &feed{source: s, stop: func(error) {}}
		w, err := f.watch(t.Context(), metav1.ListOptions{ResourceVersion: "1"})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Stop()
		for range w.ResultChan() {
			events++
		}
		return events, f.broken
	}
	if n, err := hear(size + size/2); n != 10 || err != nil {
		t.Errorf("%d events, %v", n, err)
	}
	if n, err := hear(size / 2); n != 0 || err == nil || !strings.Contains(err.Error(), "an event is longer than") {
		t.Errorf("%d events, %v", n, err)
	}
	list := `{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":[]}`
	if _, err := within(t, []byte(list), int64(len(list)), 0).list(t.Context()); err != nil {
		t.Error(err)
	}
	_, err := within(t, []byte(list), int64(len(list)-1), 0).list(t.Context())
	if err == nil || !strings.Contains(err.Error(), "a page of the list is longer than") {
		t.Error(err)
	}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func FuzzList(f *testing.F) {
	text, err := os.ReadFile("testdata/pods.json")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":[{"metadata":{"name":"a"}}]}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		c := offline(t, body)
		list, err := c.list(context.Background())
		if err != nil {
			if !strings.HasPrefix(err.Error(), "kubernetes: ") || list != nil {
				t.Errorf("%v, %v", list, err)
			}
			return
		}
		if m, err := meta.ListAccessor(list); err != nil || m.GetResourceVersion() == "" {
			t.Errorf("a list of no version: %v", err)
		}
		pods, err := podsOf(list)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := c.cfg.hostsOf(pods); err != nil && !strings.HasPrefix(err.Error(), "kubernetes: the pods") {
			t.Error(err)
		}
	})
}

func FuzzWatch(f *testing.F) {
	f.Add([]byte(`{"type":"ADDED","object":{"kind":"Pod","apiVersion":"v1","metadata":{"name":"a","resourceVersion":"1"}}}` + "\n" +
		`{"type":"BOOKMARK","object":{"kind":"Pod","apiVersion":"v1","metadata":{"resourceVersion":"2"}}}`))
	f.Add([]byte(`{"type":"ERROR","object":` + statusText(410, "too old") + `}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		s := newSource()
		s.client = offline(t, body)
		f := &feed{source: s, stop: func(error) {}}
		w, err := f.watch(t.Context(), metav1.ListOptions{ResourceVersion: "1"})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Stop()
		for e := range w.ResultChan() {
			p, is := e.Object.(*pod)
			if !is || p.ResourceVersion == "" || (p.Name == "") && e.Type != watch.Bookmark {
				t.Errorf("%s of %v", e.Type, e.Object)
			}
		}
		if f.broken != nil && !strings.HasPrefix(f.broken.Error(), "kubernetes: ") {
			t.Error(f.broken)
		}
	})
}
