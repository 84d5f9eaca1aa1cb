package main

import (
	"bytes"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/hvdrun/hvdrun/plan"
)

// apiServer behaves like Kubernetes' API server for the pods of one namespace: versions, pages of a
// consistent list, watches from any version that is not forgotten yet, bookmarks, tokens.
type apiServer struct {
	*httptest.Server
	t *testing.T

	mu        sync.Mutex
	version   int
	created   int
	pods      []*pod // by name
	history   []frame
	forgotten int                     // watches from versions before this one fail
	lists     map[int][]*pod          // by version; pages are read from these
	watchers  map[chan frame]struct{} // one per open request
	token     string
	requests  []url.Values
	answer    func(w http.ResponseWriter, r *http.Request) bool // answers in place of a, if it returns true
}

// frame is a part of a watch's stream: an event, or a fault.
type frame struct {
	version int
	text    string
	end     bool // the stream ends after the text
	abort   bool // the connection breaks after the text
}

func newServer(t *testing.T) *apiServer {
	t.Helper()
	a := &apiServer{t: t, version: 1000, lists: map[int][]*pod{}, watchers: map[chan frame]struct{}{}, token: "first-secret"}
	a.Server = httptest.NewUnstartedServer(http.HandlerFunc(a.serve))
	a.EnableHTTP2 = true
	a.Config.ErrorLog = log.New(io.Discard, "", 0) // connections are broken on purpose
	a.StartTLS()
	t.Cleanup(func() {
		a.each(frame{end: true})
		a.Close()
	})
	return a
}

func status(w http.ResponseWriter, code int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	fmt.Fprint(w, statusText(code, message))
}

func statusText(code int, message string) string {
	reason := ""
	if code == http.StatusGone {
		reason = string(metav1.StatusReasonExpired)
	}
	return fmt.Sprintf(`{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":%q,"reason":%q,"code":%d}`, message, reason, code)
}

func (a *apiServer) serve(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	a.mu.Lock()
	a.requests = append(a.requests, query)
	token, answer := a.token, a.answer
	a.mu.Unlock()
	switch {
	case answer != nil && answer(w, r):
	case r.Header.Get("Authorization") != "Bearer "+token:
		status(w, http.StatusUnauthorized, "Unauthorized")
	case r.Method != http.MethodGet || r.URL.Path != "/api/v1/namespaces/training/pods":
		status(w, http.StatusForbidden, "pods is forbidden: "+r.URL.Path)
	case query.Has("watch"):
		a.watch(w, r, query)
	default:
		a.list(w, query)
	}
}

func (a *apiServer) list(w http.ResponseWriter, query url.Values) {
	a.mu.Lock()
	defer a.mu.Unlock()
	version, start := a.version, 0
	if token := query.Get("continue"); token != "" {
		if _, err := fmt.Sscanf(token, "%d@%d", &start, &version); err != nil || a.lists[version] == nil {
			status(w, http.StatusGone, "The provided continue parameter is too old")
			return
		}
	} else {
		a.lists[version] = slices.Clone(a.pods)
	}
	items := a.lists[version][start:]
	next := ""
	if limit, err := strconv.Atoi(query.Get("limit")); err == nil && limit < len(items) {
		items = items[:limit]
		next = fmt.Sprintf("%d@%d", start+limit, version)
	}
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"%d","continue":%q},"items":%s}`,
		version, next, mustJSON(items))
}

func mustJSON(v any) []byte {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return text
}

func (a *apiServer) watch(w http.ResponseWriter, r *http.Request, query url.Values) {
	from, err := strconv.Atoi(query.Get("resourceVersion"))
	if err != nil || query.Get("timeoutSeconds") == "" {
		status(w, http.StatusBadRequest, "no version or no timeout")
		return
	}
	frames := make(chan frame, 10000)
	a.mu.Lock()
	if from < a.forgotten {
		frames <- frame{text: `{"type":"ERROR","object":` + statusText(410, "too old resource version") + "}\n", end: true}
	}
	for _, f := range a.history {
		if f.version > from {
			frames <- f
		}
	}
	a.watchers[frames] = struct{}{}
	a.mu.Unlock()
	defer func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.watchers, frames)
	}()
	w.Header().Set("Content-Type", "application/json")
	flush := w.(http.Flusher).Flush
	flush()
	for {
		select {
		case <-r.Context().Done():
			return
		case f := <-frames:
			fmt.Fprint(w, f.text)
			flush()
			if f.abort {
				panic(http.ErrAbortHandler)
			}
			if f.end {
				return
			}
		}
	}
}

// each sends a frame to all current watches.
func (a *apiServer) each(f frame) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for w := range a.watchers {
		w <- f
	}
}

// put creates or changes a pod and sends the event to all watches.
func (a *apiServer) put(p *pod) {
	a.mu.Lock()
	defer a.mu.Unlock()
	kind := "ADDED"
	i, there := slices.BinarySearchFunc(a.pods, p.Name, func(p *pod, name string) int { return strings.Compare(p.Name, name) })
	if there {
		kind = "MODIFIED"
		p.CreationTimestamp = a.pods[i].CreationTimestamp
		a.pods[i] = p
	} else {
		if a.created++; p.CreationTimestamp.IsZero() {
			p.CreationTimestamp = metav1.Date(2026, 1, 1, 0, 0, a.created, 0, time.UTC)
		}
		a.pods = slices.Insert(a.pods, i, p)
	}
	a.changed(kind, p)
}

// remove deletes a pod at once.
func (a *apiServer) remove(name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i, p := range a.pods {
		if p.Name == name {
			a.pods = slices.Delete(slices.Clone(a.pods), i, i+1)
			gone := *p
			a.changed("DELETED", &gone)
			return
		}
	}
	a.t.Errorf("there is no pod %s", name)
}

// changed records a change of a pod and sends it to all watches. The caller holds the lock.
func (a *apiServer) changed(kind string, p *pod) {
	a.version++
	p.ResourceVersion = strconv.Itoa(a.version)
	f := frame{version: a.version, text: fmt.Sprintf("{\"type\":%q,\"object\":%s}\n", kind, mustJSON(p))}
	a.history = append(a.history, f)
	for w := range a.watchers {
		w <- f
	}
}

// bookmark sends all watches a bookmark with a new version.
func (a *apiServer) bookmark() (version string) {
	a.mu.Lock()
	a.version++
	version = strconv.Itoa(a.version)
	a.mu.Unlock()
	a.each(frame{text: `{"type":"BOOKMARK","object":{"kind":"Pod","apiVersion":"v1","metadata":{"resourceVersion":"` + version +
		`","creationTimestamp":null},"spec":{"containers":null},"status":{}}}` + "\n"})
	return version
}

// forget makes the server forget all earlier versions.
func (a *apiServer) forget() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	a.history, a.forgotten, a.lists = nil, a.version, map[int][]*pod{}
}

// setAnswer sets the function that answers requests first.
func (a *apiServer) setAnswer(answer func(w http.ResponseWriter, r *http.Request) bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.answer = answer
}

// asked returns the queries of all requests so far.
func (a *apiServer) asked() []url.Values {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.requests)
}

// newPod returns a pod that is Ready.
func newPod(name, ip string, slots int) *pod {
	p := &pod{TypeMeta: metav1.TypeMeta{Kind: "Pod", APIVersion: "v1"}}
	p.Name, p.Namespace, p.UID = name, "training", types.UID("uid-"+name)
	p.Annotations = map[string]string{slotsAnnotation: strconv.Itoa(slots)}
	p.Status.Phase, p.Status.PodIP = "Running", ip
	p.setReady(true)
	return p
}

func (p *pod) setReady(ready bool) {
	text := "False"
	if ready {
		text = "True"
	}
	p.Status.Conditions = append(p.Status.Conditions[:0:0], struct {
		Type   string `json:"type"`
		Status string `json:"status"`
	}{"Ready", text})
}

// terminate returns the pod as it is after its deletion was requested.
func terminate(p *pod) *pod {
	q := *p
	at := metav1.Date(2026, 2, 1, 0, 0, 0, 0, time.UTC)
	q.DeletionTimestamp = &at
	return &q
}

// mount writes the files of a pod with a service account, and returns their folder and the pod's
// environment.
func (a *apiServer) mount() (dir string, lookup func(string) (string, bool)) {
	a.t.Helper()
	dir = a.t.TempDir()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Certificate().Raw})
	for name, text := range map[string]string{"ca.crt": string(ca), "token": a.token + "\n", "namespace": "training"} {
		writeFile(a.t, filepath.Join(dir, name), text)
	}
	host, port, err := net.SplitHostPort(a.Listener.Addr().String())
	if err != nil {
		a.t.Fatal(err)
	}
	return dir, env("KUBERNETES_SERVICE_HOST", host, "KUBERNETES_SERVICE_PORT", port)
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func env(pairs ...string) func(string) (string, bool) {
	return func(name string) (string, bool) {
		for i := 0; i < len(pairs); i += 2 {
			if pairs[i] == name {
				return pairs[i+1], true
			}
		}
		return "", false
	}
}

// journal is a log that a test reads.
type journal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.String()
}

// newSourceFor returns a source that runs in a pod of this server's cluster, and its log.
func newSourceFor(t *testing.T, a *apiServer, pairs ...string) (*source, *journal) {
	t.Helper()
	s := newSource()
	s.dir, s.lookup = a.mount()
	logged := &journal{}
	logger := logrus.New()
	logger.Out, logger.Level = logged, logrus.DebugLevel
	s.log = logger
	values := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		values[pairs[i]] = pairs[i+1]
	}
	if err := s.Configure(values); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.client.transport.CloseIdleConnections)
	return s, logged
}

// text formats a list as n1:2 n2:2/draining.
func text(hosts []plan.Host) string {
	var words []string
	for _, h := range hosts {
		word := h.String()
		if h.Draining {
			word += "/draining"
		}
		words = append(words, word)
	}
	return strings.Join(words, " ")
}
