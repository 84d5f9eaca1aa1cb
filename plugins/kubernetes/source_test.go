package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/discovery/discoverytest"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

func TestConformance(t *testing.T) {
	with := func(t *testing.T, hosts []plan.Host) discovery.Discoverer {
		a := newServer(t)
		for i, h := range hosts {
			p := newPod(fmt.Sprintf("pod-%d", i*7919%500), h.Name, h.Slots)
			if h.Draining {
				p = terminate(p)
			}
			a.put(p)
		}
		s, _ := newSourceFor(t, a, "page_size", "100")
		return s
	}
	discoverytest.Run(t, with)
	discoverytest.RunDraining(t, with)
	discoverytest.RunFailing(t, func(t *testing.T) discovery.Discoverer {
		a := newServer(t)
		for i := range 3 {
			a.put(newPod(fmt.Sprint("pod-", i), fmt.Sprint("10.0.0.", i), 1))
		}
		s, _ := newSourceFor(t, a, "page_size", "2")
		a.setAnswer(func(w http.ResponseWriter, r *http.Request) bool {
			if r.URL.Query().Get("continue") == "" {
				return false
			}
			status(w, http.StatusInternalServerError, "etcdserver: leader changed")
			return true
		})
		return s
	})
	discoverytest.RunChanging(t, func(t *testing.T) (discovery.Discoverer, func([]plan.Host)) {
		a := newServer(t)
		s, _ := newSourceFor(t, a)
		return s, func(hosts []plan.Host) { setHosts(a, hosts) }
	})
}

// setHosts makes these the hosts, by their addresses, which must be in the order of their creation.
func setHosts(a *apiServer, hosts []plan.Host) {
	wanted := map[string]bool{}
	for _, h := range hosts {
		wanted[h.Name] = true
	}
	a.mu.Lock()
	var gone []string
	for _, p := range a.pods {
		if !wanted[p.Status.PodIP] {
			gone = append(gone, p.Name)
		}
	}
	a.mu.Unlock()
	for _, name := range gone {
		a.remove(name)
	}
	for _, h := range hosts {
		a.put(newPod("pod-"+h.Name, h.Name, h.Slots))
	}
}

// watching is a running Watch.
type watching struct {
	t     *testing.T
	lists chan string
	ended chan error
	stop  context.CancelFunc
}

func startWatch(t *testing.T, s *source) *watching {
	ctx, cancel := context.WithCancel(t.Context())
	w := &watching{t: t, lists: make(chan string, 1000), ended: make(chan error, 1), stop: cancel}
	go func() { w.ended <- s.Watch(ctx, func(hosts []plan.Host) { w.lists <- text(hosts) }) }()
	t.Cleanup(cancel)
	return w
}

// next returns the next list.
func (w *watching) next() string {
	w.t.Helper()
	select {
	case got := <-w.lists:
		return got
	case err := <-w.ended:
		w.t.Fatalf("stopped watching: %v", err)
	case <-sandbox.Expired():
		w.t.Fatal("no list")
	}
	return ""
}

func (w *watching) expect(want string) {
	w.t.Helper()
	if got := w.next(); got != want {
		w.t.Errorf("found %q, want %q", got, want)
	}
}

func (w *watching) end() error {
	w.t.Helper()
	w.stop()
	select {
	case err := <-w.ended:
		return err
	case <-sandbox.Expired():
		w.t.Fatal("still watching")
		return nil
	}
}

// noWaits makes the source skip its pauses, and returns a function that returns them.
func noWaits(s *source) func() []time.Duration {
	var mu sync.Mutex
	var waits []time.Duration
	s.wait = func(ctx context.Context, d time.Duration) error {
		mu.Lock()
		defer mu.Unlock()
		waits = append(waits, d)
		return context.Cause(ctx)
	}
	return func() []time.Duration { mu.Lock(); defer mu.Unlock(); return waits }
}

func TestWatchFollowsPods(t *testing.T) {
	a := newServer(t)
	one, two := newPod("b-0", "10.0.0.1", 2), newPod("a-0", "10.0.0.2", 4)
	a.put(one)
	s, logged := newSourceFor(t, a, "label_selector", "app=train,tier in (gpu)", "field_selector", "spec.nodeName=x")
	w := startWatch(t, s)
	w.expect("10.0.0.1:2")
	unready := newPod("a-0", "10.0.0.2", 4)
	unready.setReady(false)
	a.put(unready) // does not change the list
	a.put(two)
	w.expect("10.0.0.1:2 10.0.0.2:4")
	a.bookmark()
	a.put(terminate(one))
	w.expect("10.0.0.1:2/draining 10.0.0.2:4")
	a.remove("b-0")
	w.expect("10.0.0.2:4")
	if err := w.end(); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	for _, q := range a.asked() {
		if q.Get("labelSelector") != "app=train,tier in (gpu)" || q.Get("fieldSelector") != "spec.nodeName=x" {
			t.Errorf("asked %v", q)
		}
	}
	if text := logged.String(); text != "" {
		t.Errorf("logged %s", text)
	}
}

// TestWatchGoesOn: a watch continues after each of the ways in which it can break.
func TestWatchGoesOn(t *testing.T) {
	a := newServer(t)
	a.put(newPod("a", "10.0.0.1", 1))
	s, _ := newSourceFor(t, a)
	noWaits(s)
	w := startWatch(t, s)
	w.expect("10.0.0.1:1")
	asks := func() int { return len(a.asked()) }
	// grow adds a pod and waits until it is found, so that the watch has made progress.
	pods := 1
	want := "10.0.0.1:1"
	grow := func() {
		t.Helper()
		pods++
		a.put(newPod(fmt.Sprint("p", pods), fmt.Sprint("10.0.0.", pods), 1))
		want += fmt.Sprintf(" 10.0.0.%d:1", pods)
		w.expect(want)
	}
	grow()
	for what, f := range map[string]frame{
		"a clean end":              {end: true},
		"a dropped connection":     {abort: true},
		"half an event":            {text: `{"type":"ADDED","object":{"metadata":{"na`, end: true},
		"half an event and a drop": {text: `{"type":"DELETED","object":{"metadata":{"na`, abort: true},
		"no JSON":                  {text: "<html>", end: true},
	} {
		before := asks()
		a.each(f)
		grow()
		after := a.asked()[before:]
		if len(after) != 1 || !after[0].Has("watch") {
			t.Errorf("after %s it asked %v", what, after)
		}
	}
	version := a.bookmark()
	grow()
	before := asks()
	a.forget() // the next watch is from a forgotten version
	a.mu.Lock()
	a.remove1("p2")
	a.mu.Unlock()
	a.each(frame{abort: true})
	want = strings.Replace(want, " 10.0.0.2:1", "", 1)
	w.expect(want)
	after := a.asked()[before:]
	if len(after) < 2 || !after[0].Has("watch") || after[0].Get("resourceVersion") <= version || after[1].Has("watch") {
		t.Errorf("asked %v", after)
	}
	grow()
	if err := w.end(); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// remove1 deletes a pod without an event. The caller holds the lock.
func (a *apiServer) remove1(name string) {
	for i, p := range a.pods {
		if p.Name == name {
			a.pods = append(a.pods[:i:i], a.pods[i+1:]...)
			return
		}
	}
}

func TestABookmarkIsGoneOnFrom(t *testing.T) {
	a := newServer(t)
	a.put(newPod("a", "10.0.0.1", 1))
	s, _ := newSourceFor(t, a)
	noWaits(s)
	w := startWatch(t, s)
	w.expect("10.0.0.1:1")
	a.put(newPod("b", "10.0.0.2", 1)) // shows that the watch is open
	w.expect("10.0.0.1:1 10.0.0.2:1")
	version := a.bookmark()
	before := len(a.asked())
	a.each(frame{end: true})
	a.put(newPod("c", "10.0.0.3", 1))
	w.expect("10.0.0.1:1 10.0.0.2:1 10.0.0.3:1")
	if after := a.asked()[before:]; len(after) != 1 || after[0].Get("resourceVersion") != version {
		t.Errorf("asked %v, want a watch from %s", after, version)
	}
}

// TestASlowStream: an event may arrive byte by byte, and half an event does not delay the end of
// the watch.
func TestASlowStream(t *testing.T) {
	a := newServer(t)
	a.put(newPod("a", "10.0.0.1", 1))
	s, _ := newSourceFor(t, a)
	noWaits(s)
	w := startWatch(t, s)
	w.expect("10.0.0.1:1")
	a.put(newPod("b", "10.0.0.2", 1)) // shows that the watch is open
	w.expect("10.0.0.1:1 10.0.0.2:1")
	p := newPod("c", "10.0.0.3", 1)
	p.ResourceVersion = "1"
	p.CreationTimestamp = metav1.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)
	event := fmt.Sprintf("{\"type\":\"ADDED\",\"object\":%s}\n", mustJSON(p))
	for i := range event {
		a.each(frame{text: event[i : i+1]})
	}
	w.expect("10.0.0.1:1 10.0.0.2:1 10.0.0.3:1")
	a.each(frame{text: event[:len(event)/2]})
	if err := w.end(); !errors.Is(err, context.Canceled) { // at once, although the event is incomplete
		t.Error(err)
	}
}

func TestManyChangesAreFewLists(t *testing.T) {
	a := newServer(t)
	s, _ := newSourceFor(t, a)
	noWaits(s)
	w := startWatch(t, s)
	w.expect("")
	a.put(newPod("first", "10.1.0.0", 1))
	w.expect("10.1.0.0:1")
	var burst strings.Builder
	for i := range 200 {
		p := newPod(fmt.Sprint("p", i), fmt.Sprint("10.0.0.", i), 1)
		p.ResourceVersion = "2000"
		fmt.Fprintf(&burst, "{\"type\":\"ADDED\",\"object\":%s}\n", mustJSON(p))
	}
	a.each(frame{text: burst.String()})
	lists := 1
	for strings.Count(w.next(), ":") != 201 {
		lists++
	}
	if lists > 100 {
		t.Errorf("200 pods that came at once were told in %d lists", lists)
	}
}

func TestTokensAreReplaced(t *testing.T) {
	a := newServer(t)
	a.put(newPod("a", "10.0.0.1", 1))
	s, logged := newSourceFor(t, a)
	w := startWatch(t, s)
	w.expect("10.0.0.1:1")
	a.put(newPod("b", "10.0.0.2", 1))
	w.expect("10.0.0.1:1 10.0.0.2:1") // shows that the watch is open
	a.mu.Lock()
	a.token = "second-secret"
	a.mu.Unlock()
	if hosts, err := s.Discover(t.Context()); err == nil || !strings.Contains(err.Error(), "401") {
		t.Errorf("with a token that is not valid any more: %v, %v", hosts, err)
	}
	writeFile(t, filepath.Join(s.dir, "token"), "second-secret")
	if hosts, err := s.Discover(t.Context()); err != nil || text(hosts) != "10.0.0.1:1 10.0.0.2:1" {
		t.Errorf("%v, %v", hosts, err)
	}
	a.each(frame{end: true}) // the watch continues with the new token
	a.put(newPod("c", "10.0.0.3", 1))
	w.expect("10.0.0.1:1 10.0.0.2:1 10.0.0.3:1")
	if strings.Contains(logged.String(), "secret") {
		t.Errorf("logged %s", logged)
	}
}

// TestATokenReplacedMeanwhile: the server refuses a token that is replaced during the request,
// which is then repeated.
func TestATokenReplacedMeanwhile(t *testing.T) {
	a := newServer(t)
	a.put(newPod("a", "10.0.0.1", 1))
	s, _ := newSourceFor(t, a)
	a.setAnswer(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("Authorization") != "Bearer first-secret" {
			return false
		}
		writeFile(t, filepath.Join(s.dir, "token"), "second-secret")
		a.mu.Lock()
		defer a.mu.Unlock()
		a.token = "second-secret"
		status(w, http.StatusUnauthorized, "Unauthorized")
		return true
	})
	if hosts, err := s.Discover(t.Context()); err != nil || text(hosts) != "10.0.0.1:1" {
		t.Errorf("%v, %v", hosts, err)
	}
}

func TestTheTokenIsNeverTold(t *testing.T) {
	a := newServer(t)
	s, logged := newSourceFor(t, a)
	noWaits(s)
	elsewhere := false
	other := newServer(t)
	other.setAnswer(func(http.ResponseWriter, *http.Request) bool { elsewhere = true; return false })
	for what, answer := range map[string]func(w http.ResponseWriter, r *http.Request) bool{
		"a server that repeats it": func(w http.ResponseWriter, r *http.Request) bool {
			status(w, http.StatusForbidden, "forbidden: "+r.Header.Get("Authorization"))
			return true
		},
		"a server that repeats it in a text": func(w http.ResponseWriter, r *http.Request) bool {
			http.Error(w, "what is "+r.Header.Get("Authorization")+"?", http.StatusBadGateway)
			return true
		},
		"a redirect": func(w http.ResponseWriter, r *http.Request) bool {
			http.Redirect(w, r, other.URL+"/?"+r.Header.Get("Authorization"), http.StatusTemporaryRedirect)
			return true
		},
	} {
		a.setAnswer(answer)
		_, err := s.Discover(t.Context())
		watchErr := s.Watch(t.Context(), func([]plan.Host) {})
		if err == nil || watchErr == nil || strings.Contains(fmt.Sprint(err, watchErr, logged), "secret") {
			t.Errorf("%s: %v, %v, logged %s", what, err, watchErr, logged)
		}
	}
	if elsewhere {
		t.Error("a redirect was followed")
	}
	writeFile(t, filepath.Join(s.dir, "token"), "a secret\nof two lines")
	if _, err := s.Discover(t.Context()); err == nil || strings.Contains(err.Error(), "secret") {
		t.Error(err)
	}
}

// TestListsAreWhole: an answer that is not a list, or an incomplete one, is an error.
func TestListsAreWhole(t *testing.T) {
	a := newServer(t)
	for i := range 10 {
		a.put(newPod(fmt.Sprint("p", i), fmt.Sprint("10.0.0.", i), 1))
	}
	s, _ := newSourceFor(t, a, "timeout", "300ms")
	hang := make(chan struct{})
	t.Cleanup(func() { close(hang) })
	json := func(text string) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, text)
			return true
		}
	}
	half := `{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":[{"metadata":{"name":"p1"`
	for what, answer := range map[string]func(w http.ResponseWriter, r *http.Request) bool{
		"nothing":              json(""),
		"an empty object":      json("{}"),
		"a list of no kind":    json(`{"apiVersion":"v1","items":[],"metadata":{"resourceVersion":"1"}}`),
		"a list of services":   json(`{"kind":"ServiceList","apiVersion":"v1","items":[],"metadata":{"resourceVersion":"1"}}`),
		"no version":           json(`{"kind":"PodList","apiVersion":"v1","items":[],"metadata":{}}`),
		"a pod without a name": json(`{"kind":"PodList","apiVersion":"v1","items":[{}],"metadata":{"resourceVersion":"1"}}`),
		"a pod that is null":   json(`{"kind":"PodList","apiVersion":"v1","items":[null],"metadata":{"resourceVersion":"1"}}`),
		"half a list":          json(half),
		"pages without end":    json(`{"kind":"PodList","apiVersion":"v1","items":[],"metadata":{"resourceVersion":"1","continue":"x"}}`),
		"half a list and a drop": func(w http.ResponseWriter, r *http.Request) bool {
			json(half)(w, r)
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		},
		"half a list and silence": func(w http.ResponseWriter, r *http.Request) bool {
			json(half)(w, r)
			w.(http.Flusher).Flush()
			select {
			case <-hang:
			case <-r.Context().Done():
			}
			return true
		},
		"a page for people": func(w http.ResponseWriter, r *http.Request) bool {
			fmt.Fprint(w, "<html>log in first</html>")
			return true
		},
		"a server that is starting": func(w http.ResponseWriter, r *http.Request) bool {
			http.Error(w, "starting", http.StatusServiceUnavailable)
			return true
		},
	} {
		a.setAnswer(answer)
		if hosts, err := s.Discover(t.Context()); err == nil || hosts != nil {
			t.Errorf("%s: %v, %v", what, hosts, err)
		}
	}
	a.setAnswer(nil)
	if hosts, err := s.Discover(t.Context()); err != nil || len(hosts) != 10 {
		t.Errorf("%v, %v", hosts, err)
	}
}

func TestPages(t *testing.T) {
	a := newServer(t)
	for i := range 25 {
		a.put(newPod(fmt.Sprint("p", i), fmt.Sprint("10.0.0.", i), 1))
	}
	s, _ := newSourceFor(t, a, "page_size", "10")
	if hosts, err := s.Discover(t.Context()); err != nil || len(hosts) != 25 || len(a.asked()) != 3 {
		t.Errorf("%d hosts, %v, %d pages", len(hosts), err, len(a.asked()))
	}
	// A list that is forgotten between its pages is read again, all at once.
	forgets := 0
	a.setAnswer(func(_ http.ResponseWriter, r *http.Request) bool {
		if r.URL.Query().Get("continue") != "" {
			forgets++
			a.forget()
		}
		return false
	})
	if hosts, err := s.Discover(t.Context()); err != nil || len(hosts) != 25 || forgets != 1 {
		t.Errorf("%d hosts, %v, forgotten %d times", len(hosts), err, forgets)
	}
	if last := a.asked()[len(a.asked())-1]; last.Has("limit") {
		t.Errorf("asked %v", last)
	}
}

func TestBackoff(t *testing.T) {
	a := newServer(t)
	s, _ := newSourceFor(t, a)
	waits := noWaits(s)
	a.setAnswer(func(w http.ResponseWriter, _ *http.Request) bool {
		status(w, http.StatusServiceUnavailable, "apiserver not ready")
		return true
	})
	for range 14 {
		if err := s.Watch(t.Context(), func([]plan.Host) {}); err == nil || !strings.Contains(err.Error(), "503") {
			t.Fatal(err)
		}
	}
	if len(waits()) != 13 { // without a wait before the first attempt
		t.Errorf("waited %v", waits())
	}
	for i, d := range waits() {
		most := watchBackoff.After(i + 1)
		if d < most/2 || d > most {
			t.Errorf("wait %d: %v, want %v to %v", i+1, d, most/2, most)
		}
	}
	// Once the server answers and the watch has received something, the failures are forgotten.
	a.setAnswer(nil)
	w := startWatch(t, s)
	w.expect("")
	a.put(newPod("a", "10.0.0.1", 1))
	w.expect("10.0.0.1:1")
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failures != 0 {
		t.Errorf("%d failures", s.failures)
	}
}

func TestBackoffAsTheServerAsks(t *testing.T) {
	for _, c := range []struct {
		after string
		want  time.Duration
	}{{"7", 7 * time.Second}, {"86400", maxRetry}} {
		a := newServer(t)
		s, _ := newSourceFor(t, a)
		waits := noWaits(s)
		a.setAnswer(func(w http.ResponseWriter, r *http.Request) bool {
			if !r.URL.Query().Has("watch") {
				return false
			}
			w.Header().Set("Retry-After", c.after)
			http.Error(w, "slowly", http.StatusTooManyRequests) // in plain text, like a server under pressure
			return true
		})
		if err := s.Watch(t.Context(), func([]plan.Host) {}); err == nil || !strings.Contains(err.Error(), "429") {
			t.Error(err)
		}
		if len(waits()) != maxDrops || waits()[0] != c.want {
			t.Errorf("waited %v, want %v", waits(), c.want)
		}
	}
}

func TestWatchesThatCannotBe(t *testing.T) {
	for what, c := range map[string]struct {
		answer func(w http.ResponseWriter)
		says   string
		waits  int
	}{
		"not allowed": {func(w http.ResponseWriter) { status(w, http.StatusForbidden, `cannot watch resource "pods"`) }, "cannot watch", 0},
		"ended at once": {func(w http.ResponseWriter) { w.Header().Set("Content-Type", "application/json") },
			"ends watches at once", maxDrops},
		"an event that is not known": {func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"type":"DANCED","object":{}}`)
		}, "DANCED", maxDrops},
		"an error": {func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"type":"ERROR","object":`+statusText(500, "etcd has no leader")+`}`)
		}, "etcd has no leader", maxDrops},
		"forgotten every time": {func(w http.ResponseWriter) { status(w, http.StatusGone, "too old") }, "no longer has the events", maxDrops},
	} {
		a := newServer(t)
		s, _ := newSourceFor(t, a)
		waits := noWaits(s)
		a.setAnswer(func(w http.ResponseWriter, r *http.Request) bool {
			if !r.URL.Query().Has("watch") {
				return false
			}
			c.answer(w)
			return true
		})
		if err := s.Watch(t.Context(), func([]plan.Host) {}); err == nil || !strings.Contains(err.Error(), c.says) || len(waits()) != c.waits {
			t.Errorf("%s: %v after %d waits", what, err, len(waits()))
		}
	}
}

// TestWatchesThatAreNotAnswered: client-go returns an empty watch if a connection is closed or
// silent; the source counts it as unanswered.
func TestWatchesThatAreNotAnswered(t *testing.T) {
	for _, broken := range []error{io.EOF, os.ErrDeadlineExceeded} {
		a := newServer(t)
		s, _ := newSourceFor(t, a)
		waits := noWaits(s)
		next := s.client.http.Transport
		s.client.http.Transport = roundTrip(func(r *http.Request) (*http.Response, error) {
			if r.URL.Query().Has("watch") {
				return nil, broken
			}
			return next.RoundTrip(r)
		})
		err := s.Watch(t.Context(), func([]plan.Host) {})
		if !errors.Is(err, errUnanswered) || len(waits()) != maxDrops || len(a.asked()) != 1 {
			t.Errorf("%v: %v after %d waits, %d lists", broken, err, len(waits()), len(a.asked()))
		}
	}
}

func TestFaultyPodsAreLoggedOnce(t *testing.T) {
	a := newServer(t)
	bad := newPod("bad", "10.0.0.2", 1)
	bad.Annotations[slotsAnnotation] = "many"
	a.put(newPod("good", "10.0.0.1", 2))
	a.put(bad)
	s, logged := newSourceFor(t, a)
	for range 3 {
		if hosts, err := s.Discover(t.Context()); err != nil || text(hosts) != "10.0.0.1:2 10.0.0.2:0" {
			t.Errorf("%v, %v", hosts, err)
		}
	}
	if n := strings.Count(logged.String(), "many"); n != 1 {
		t.Errorf("logged %d times: %s", n, logged)
	}
}

func TestNotConfigured(t *testing.T) {
	s := newSource()
	if _, err := s.Discover(t.Context()); !errors.Is(err, errNotConfigured) {
		t.Error(err)
	}
	if err := s.Watch(t.Context(), nil); !errors.Is(err, errNotConfigured) {
		t.Error(err)
	}
}
