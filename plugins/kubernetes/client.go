package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/pager"
	"k8s.io/klog/v2"
)

const (
	maxPods     = 1 << 16   // of one list: far more than a namespace has
	maxPages    = 1 << 14   // of one list; some may be empty
	maxList     = 256 << 20 // bytes of one page
	maxEvent    = 16 << 20  // bytes of one event; the API server keeps objects below 3 MiB
	maxMessage  = 64 << 10  // bytes read of a refusal
	maxRetry    = time.Minute
	pingTimeout = 15 * time.Second // silence after which a connection is pinged
)

var (
	version1 = schema.GroupVersion{Version: "v1"}
	// kinds are the kinds that an API server may answer with: our own pods, Status, and events of a
	// watch.
	kinds = func() *runtime.Scheme {
		s := runtime.NewScheme()
		s.AddKnownTypeWithName(version1.WithKind("Pod"), &pod{})
		s.AddKnownTypeWithName(version1.WithKind("PodList"), &podList{})
		metav1.AddToGroupVersion(s, version1)
		return s
	}()
	queries = runtime.NewParameterCodec(kinds)
)

// client requests pods from an API server.
type client struct {
	cfg       config
	transport *http.Transport
	http      *http.Client // with that transport, and those that set and renew the token
	rest      rest.Interface
}

// baseConfig returns the settings that do not depend on the credentials. source retries, not
// client-go.
func baseConfig(server string) rest.Config {
	return rest.Config{
		Host:    server,
		APIPath: "/api",
		ContentConfig: rest.ContentConfig{
			GroupVersion:         &version1,
			NegotiatedSerializer: serializer.NewCodecFactory(kinds).WithoutConversion(),
			ContentType:          runtime.ContentTypeJSON,
		},
		UserAgent:      "hvdrun-discovery",
		QPS:            -1,
		WarningHandler: rest.NoWarnings{},
		WrapTransport:  func(next http.RoundTripper) http.RoundTripper { return guard{next, maxList, maxEvent} },
	}
}

func newClient(a *access, cfg config) (*client, error) {
	tls, err := rest.TLSConfigFor(&a.server)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: certificates: %w", err)
	}
	dialer := &net.Dialer{Timeout: 10 * time.Second, KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: pingTimeout, Interval: pingTimeout / 3, Count: 3}}
	// The transport of client-go waits for an answer without a limit, and is never closed.
	transport := &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           dialer.DialContext,
		TLSClientConfig:       tls,
		TLSHandshakeTimeout:   10 * time.Second,
		ResponseHeaderTimeout: cfg.timeout,
		IdleConnTimeout:       90 * time.Second,
		ForceAttemptHTTP2:     true,
		HTTP2:                 &http.HTTP2Config{SendPingTimeout: pingTimeout, PingTimeout: pingTimeout},
	}
	through, err := rest.HTTPWrappersForConfig(&a.server, transport)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	c := &client{cfg: cfg, transport: transport, http: &http.Client{
		Transport: through,
		// No other server may receive the token.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	if c.rest, err = rest.RESTClientForConfigAndClient(&a.server, c.http); err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	return c, nil
}

// guard bounds what is read of an answer, which client-go does not do, and removes the token from a
// refusal that repeats it.
type guard struct {
	next              http.RoundTripper
	maxList, maxEvent int64
}

// RoundTrip does not change the request.
func (g guard) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := g.next.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	if response.StatusCode == http.StatusOK {
		if r.URL.Query().Has("watch") {
			response.Body = &lines{ReadCloser: response.Body, most: g.maxEvent}
		} else {
			response.Body = http.MaxBytesReader(nil, response.Body, g.maxList)
		}
		return response, nil
	}
	text, _ := io.ReadAll(io.LimitReader(response.Body, maxMessage)) // a part of it suffices
	response.Body.Close()
	if _, token, _ := strings.Cut(r.Header.Get("Authorization"), " "); token != "" {
		text = bytes.ReplaceAll(text, []byte(token), []byte("(token)"))
	}
	response.Body = io.NopCloser(bytes.NewReader(text))
	return response, nil
}

// lines reads a stream of events, each of which the API server writes as a line.
type lines struct {
	io.ReadCloser
	most, length int64
}

// Read returns an error within a line that is too long.
func (l *lines) Read(p []byte) (int, error) {
	n, err := l.ReadCloser.Read(p)
	if end := bytes.LastIndexByte(p[:n], '\n'); end >= 0 {
		l.length = int64(n - end - 1)
	} else {
		l.length += int64(n)
	}
	if l.length > l.most {
		return n, fmt.Errorf("an event is longer than %d bytes", l.most)
	}
	return n, err
}

// again repeats a request that was refused, since its token may have been replaced meanwhile.
type again struct{ next http.RoundTripper }

func askAgain(next http.RoundTripper) http.RoundTripper { return again{next} }

// RoundTrip repeats requests without a body, or with a body that can be read again.
func (a again) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := a.next.RoundTrip(r)
	if err != nil || response.StatusCode != http.StatusUnauthorized || r.Body != nil && r.GetBody == nil {
		return response, err
	}
	if r.Body != nil {
		body, err := r.GetBody()
		if err != nil {
			return response, nil // return the first answer
		}
		r = r.Clone(r.Context())
		r.Body = body
	}
	response.Body.Close()
	return a.next.RoundTrip(r)
}

// errGone says that the API server no longer has the events since the requested version.
var errGone = errors.New("kubernetes: the API server no longer has the events since the last one")

// refusal is an error that the API server has answered.
type refusal struct {
	code    int
	message string
	after   time.Duration // how long to wait before the next request
}

// Error contains the status and the server's message.
func (r *refusal) Error() string {
	return strings.TrimSuffix(fmt.Sprintf("kubernetes: the API server says %d %s: %s", r.code, http.StatusText(r.code), r.message), ": ")
}

// fault translates an error of client-go into errGone, a *refusal, or another error. Nil stays nil.
func fault(ctx context.Context, err error) error {
	var status apierrors.APIStatus
	var long *http.MaxBytesError
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("kubernetes: %w", context.Cause(ctx))
	case apierrors.IsResourceExpired(err) || apierrors.IsGone(err):
		return errGone
	case errors.As(err, &status):
		s := status.Status()
		r := &refusal{code: int(s.Code), message: shorten(s.Message)}
		if s.Details != nil {
			r.after = min(time.Duration(s.Details.RetryAfterSeconds)*time.Second, maxRetry)
		}
		return r
	case errors.As(err, &long):
		return fmt.Errorf("kubernetes: a page of the list is longer than %d bytes", long.Limit)
	}
	return fmt.Errorf("kubernetes: %w", err)
}

// quiet keeps client-go from writing errors to stderr that it also returns.
func quiet(ctx context.Context) context.Context { return klog.NewContext(ctx, logr.Discard()) }

func (c *client) get(options metav1.ListOptions) *rest.Request {
	options.LabelSelector, options.FieldSelector = c.cfg.labels, c.cfg.fields
	return c.rest.Get().Namespace(c.cfg.namespace).Resource("pods").VersionedParams(&options, queries).MaxRetries(0)
}

// list returns all pods, as a list with a version from which a watch can continue. It reads the
// list in pages. If the server forgets the list between two of them, it requests everything at
// once.
func (c *client) list(ctx context.Context) (runtime.Object, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, c.cfg.timeout, fmt.Errorf("the list was not complete in %v", c.cfg.timeout))
	defer cancel()
	pages, pods := 0, 0
	p := pager.New(func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
		if options.Continue == "" {
			pages, pods = 0, 0
		}
		page, err := c.page(ctx, options)
		if err != nil {
			return nil, err
		}
		pages, pods = pages+1, pods+len(page.Items)
		switch {
		case pods > maxPods:
			return nil, errTooMany
		case pages > maxPages:
			return nil, fmt.Errorf("the list has more than %d pages", maxPages)
		}
		return page, nil
	})
	p.PageSize = c.cfg.pageSize
	list, _, err := p.ListWithAlloc(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fault(ctx, err)
	}
	return list, nil
}

var errTooMany = fmt.Errorf("more than %d pods: set label_selector", maxPods)

// page reads one page completely. It returns an error for anything but a list of pods: an empty
// object, which a proxy might send, is not an empty list.
func (c *client) page(ctx context.Context, options metav1.ListOptions) (*podList, error) {
	answer, err := c.get(options).Do(quiet(ctx)).Get()
	if err != nil {
		return nil, err
	}
	page, is := answer.(*podList)
	if !is || page.ResourceVersion == "" {
		return nil, fmt.Errorf("the answer is a %T, not a list of pods that has a version", answer)
	}
	for i := range page.Items {
		if page.Items[i].Name == "" {
			return nil, errors.New("the list has a pod without a name")
		}
		page.Items[i].ManagedFields = nil // they are the largest part
	}
	return page, nil
}

// podsOf returns the pods of a list.
func podsOf(list runtime.Object) (pods []*pod, err error) {
	err = meta.EachListItem(list, func(o runtime.Object) error {
		pods = append(pods, o.(*pod))
		return nil
	})
	return pods, err
}

// watch returns the events of pods from a version on. The stream ends from time to time.
func (c *client) watch(ctx context.Context, version string) (*stream, error) {
	// Random, so that the watches of many clients do not end at the same time.
	length := c.cfg.watchTimeout - time.Duration(rand.Int64N(int64(c.cfg.watchTimeout)/4+1))
	seconds := int64(max(1, length/time.Second))
	w, err := c.get(metav1.ListOptions{
		Watch: true, AllowWatchBookmarks: true, ResourceVersion: version, TimeoutSeconds: &seconds,
	}).Watch(quiet(ctx))
	if err != nil {
		return nil, fault(ctx, err)
	}
	if _, is := w.(*watch.StreamWatcher); !is { // a watch without events, returned instead of an error
		return nil, errUnanswered
	}
	return &stream{Interface: w, limit: time.AfterFunc(length+c.cfg.timeout, w.Stop)}, nil
}

var errUnanswered = errors.New("kubernetes: the API server does not answer a watch, or closes the connection")

// stream is a watch that ends itself if the server should have ended it long ago.
type stream struct {
	watch.Interface
	limit *time.Timer
}

// Stop ends the stream, and blocks until its reader has ended.
func (s *stream) Stop() {
	s.limit.Stop()
	s.Interface.Stop()
	for range s.ResultChan() { // a filter would wait forever for somebody to take its last event
	}
}
