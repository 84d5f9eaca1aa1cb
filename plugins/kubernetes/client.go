package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"mime"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

const (
	maxPods     = 1 << 16   // of one list: far above what a namespace holds
	maxPages    = 1 << 14   // of one list; some may be empty
	maxList     = 256 << 20 // bytes of one page
	maxEvent    = 16 << 20  // bytes of one event; the API server keeps objects below 3 MiB
	maxMessage  = 64 << 10  // bytes that are read of a refusal
	maxRetry    = time.Minute
	pingTimeout = 15 * time.Second // a connection that is silent for as long is asked whether it is still there
)

// client asks an API server for pods.
type client struct {
	access *access
	http   *http.Client
	cfg    config
}

func newClient(a *access, cfg config) *client {
	dialer := &net.Dialer{Timeout: 10 * time.Second, KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: pingTimeout, Interval: pingTimeout / 3, Count: 3}}
	return &client{access: a, cfg: cfg, http: &http.Client{
		Transport: &http.Transport{
			Proxy:                 http.ProxyFromEnvironment,
			DialContext:           dialer.DialContext,
			TLSClientConfig:       a.tls,
			TLSHandshakeTimeout:   10 * time.Second,
			ResponseHeaderTimeout: cfg.timeout,
			IdleConnTimeout:       90 * time.Second,
			ForceAttemptHTTP2:     true,
			HTTP2:                 &http.HTTP2Config{SendPingTimeout: pingTimeout, PingTimeout: pingTimeout},
		},
		// Nobody else is told the token.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// errGone reports that the API server does not know any more what happened since then.
var errGone = errors.New("kubernetes: the API server has forgotten what it said before")

// refusal is an answer other than what was asked for.
type refusal struct {
	code    int
	message string
	after   time.Duration // before which it will not be asked again
}

// Error names the status, and what the server says.
func (r *refusal) Error() string {
	return strings.TrimSuffix(fmt.Sprintf("kubernetes: the API server says %d %s: %s", r.code, http.StatusText(r.code), r.message), ": ")
}

// get asks for the pods. A token that is refused is read again, since it may have been replaced.
func (c *client) get(ctx context.Context, query url.Values) (*http.Response, error) {
	if c.cfg.labels != "" {
		query.Set("labelSelector", c.cfg.labels)
	}
	if c.cfg.fields != "" {
		query.Set("fieldSelector", c.cfg.fields)
	}
	u := c.access.server.JoinPath("api/v1/namespaces", c.cfg.namespace, "pods")
	u.RawQuery = query.Encode()
	for last := "\x00"; ; {
		token, err := c.access.token()
		if err != nil {
			return nil, err
		}
		response, err := c.send(ctx, u, token)
		if err != nil {
			return nil, scrub(err, token)
		}
		if response.StatusCode == http.StatusOK {
			return response, nil
		}
		err = scrub(refused(response), token)
		response.Body.Close()
		if response.StatusCode != http.StatusUnauthorized || token == last || token == "" {
			return nil, err
		}
		last = token
	}
}

func (c *client) send(ctx context.Context, u *url.URL, token string) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	request.Header.Set("Accept", "application/json")
	request.Header.Set("User-Agent", "hvdrun-discovery")
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	response, err := c.http.Do(request)
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	return response, nil
}

// refused reads what the server says in place of pods.
func refused(response *http.Response) error {
	if response.StatusCode == http.StatusGone {
		return errGone
	}
	r := &refusal{code: response.StatusCode}
	if seconds, err := strconv.Atoi(response.Header.Get("Retry-After")); err == nil && seconds > 0 {
		r.after = min(time.Duration(seconds)*time.Second, maxRetry)
	}
	text, _ := io.ReadAll(io.LimitReader(response.Body, maxMessage)) // what there is of it
	var status struct {
		Message string `json:"message"`
	}
	if json.Unmarshal(text, &status) != nil || status.Message == "" {
		status.Message = strings.Join(strings.Fields(string(text)), " ")
	}
	r.message = shorten(status.Message)
	return r
}

// scrub makes sure that a message does not repeat the token, whoever wrote it.
func scrub(err error, token string) error {
	if token == "" || !strings.Contains(err.Error(), token) {
		return err
	}
	return errors.New(strings.ReplaceAll(err.Error(), token, "(token)"))
}

// podList is a page of a list.
type podList struct {
	Kind     string `json:"kind"`
	Metadata struct {
		ResourceVersion string `json:"resourceVersion"`
		Continue        string `json:"continue"`
	} `json:"metadata"`
	Items []*pod `json:"items"`
}

// list returns all pods by name, and the version of the list, from which a watch goes on. It reads
// page after page; where the server forgets the list between two of them it begins again, and then
// asks for all at once.
func (c *client) list(ctx context.Context) (pods map[string]*pod, version string, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, c.cfg.timeout, fmt.Errorf("no whole list in %v", c.cfg.timeout))
	defer cancel()
	for _, pageSize := range []int{c.cfg.pageSize, c.cfg.pageSize, 0} {
		if pods, version, err = c.pages(ctx, pageSize); !errors.Is(err, errGone) {
			break
		}
	}
	return pods, version, err
}

func (c *client) pages(ctx context.Context, pageSize int) (pods map[string]*pod, version string, err error) {
	pods = map[string]*pod{}
	query := url.Values{}
	if pageSize > 0 {
		query.Set("limit", strconv.Itoa(pageSize))
	}
	for range maxPages {
		page, err := c.page(ctx, query)
		if err != nil {
			return nil, "", err
		}
		for _, p := range page.Items {
			if p == nil || p.Metadata.Name == "" {
				return nil, "", errors.New("kubernetes: a list with a pod of no name")
			}
			pods[p.Metadata.Name] = p
		}
		if len(pods) > maxPods {
			return nil, "", fmt.Errorf("kubernetes: more than %d pods: set label_selector", maxPods)
		}
		if page.Metadata.Continue == "" {
			return pods, page.Metadata.ResourceVersion, nil
		}
		query.Set("continue", page.Metadata.Continue)
	}
	return nil, "", fmt.Errorf("kubernetes: a list of more than %d pages", maxPages)
}

// page reads one page whole. Anything but a list of pods is an error: an empty object, as something
// between here and the server might send, is not an empty list.
func (c *client) page(ctx context.Context, query url.Values) (*podList, error) {
	response, err := c.get(ctx, query)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if err := checkJSON(response); err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(response.Body, maxList+1))
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, fmt.Errorf("kubernetes: list: %w", context.Cause(ctx))
	case err != nil:
		return nil, fmt.Errorf("kubernetes: half a list: %w", err)
	case len(text) > maxList:
		return nil, fmt.Errorf("kubernetes: a page of more than %d bytes", maxList)
	}
	page := &podList{}
	if err := json.Unmarshal(text, page); err != nil {
		return nil, fmt.Errorf("kubernetes: list: %w", err)
	}
	if page.Kind != "PodList" || page.Metadata.ResourceVersion == "" {
		return nil, fmt.Errorf("kubernetes: no list of pods, but kind %q", shorten(page.Kind))
	}
	return page, nil
}

func checkJSON(response *http.Response) error {
	kind, _, err := mime.ParseMediaType(response.Header.Get("Content-Type"))
	if err != nil || kind != "application/json" {
		return fmt.Errorf("kubernetes: the answer is not JSON, but %q", shorten(response.Header.Get("Content-Type")))
	}
	return nil
}

// event is one of a watch.
type event struct {
	Type   string          `json:"type"`
	Object json.RawMessage `json:"object"`
}

// watch reads events from a version on, and calls apply with each (a pod is nil where it says only
// the version) until the stream ends, which it does from time to time. more tells that another
// event is there already. A stream that ends between two events ends without an error.
func (c *client) watch(ctx context.Context, version string, apply func(kind string, p *pod, version string, more bool) error) error {
	// Servers must not all be asked again at the same time.
	length := c.cfg.watchTimeout - time.Duration(rand.Int64N(int64(c.cfg.watchTimeout)/4+1))
	limit := length + c.cfg.timeout
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("watch did not end in %v", limit))
	defer cancel()
	response, err := c.get(ctx, url.Values{
		"watch": {"1"}, "allowWatchBookmarks": {"true"}, "resourceVersion": {version},
		"timeoutSeconds": {strconv.Itoa(max(1, int(length/time.Second)))},
	})
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if err := checkJSON(response); err != nil {
		return err
	}
	body := &rationed{r: response.Body}
	decoder := json.NewDecoder(body)
	for {
		body.left = maxEvent
		var e event
		switch err := decoder.Decode(&e); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil && ctx.Err() != nil:
			return fmt.Errorf("kubernetes: watch: %w", context.Cause(ctx))
		case err != nil:
			return fmt.Errorf("kubernetes: watch: %w", err)
		}
		p, err := e.read()
		if err != nil {
			return err
		}
		at := p.Metadata.ResourceVersion
		if e.Type == "BOOKMARK" {
			p = nil
		}
		if err := apply(e.Type, p, at, buffered(decoder)); err != nil {
			return err
		}
	}
}

// buffered returns whether more than white space has been read beyond the last event.
func buffered(decoder *json.Decoder) bool {
	rest, err := io.ReadAll(decoder.Buffered())
	return err == nil && len(strings.TrimSpace(string(rest))) > 0
}

// read returns the pod of the event; that of a bookmark has nothing but a version.
func (e *event) read() (*pod, error) {
	switch e.Type {
	case "ADDED", "MODIFIED", "DELETED", "BOOKMARK":
		p := &pod{}
		if err := json.Unmarshal(e.Object, p); err != nil {
			return nil, fmt.Errorf("kubernetes: watch: %w", err)
		}
		if p.Metadata.ResourceVersion == "" || p.Metadata.Name == "" && e.Type != "BOOKMARK" {
			return nil, fmt.Errorf("kubernetes: watch: %s of no name or version", e.Type)
		}
		return p, nil
	case "ERROR":
		var status struct {
			Code    int    `json:"code"`
			Message string `json:"message"`
			Reason  string `json:"reason"`
		}
		if err := json.Unmarshal(e.Object, &status); err != nil {
			return nil, fmt.Errorf("kubernetes: watch: %w", err)
		}
		if status.Code == http.StatusGone {
			return nil, errGone
		}
		return nil, &refusal{code: status.Code, message: shorten(cmp.Or(status.Message, status.Reason))}
	}
	return nil, fmt.Errorf("kubernetes: watch: no such event is known: %q", shorten(e.Type))
}

// rationed reads no more than what is left.
type rationed struct {
	r    io.Reader
	left int
}

// Read fails where nothing is left.
func (r *rationed) Read(p []byte) (int, error) {
	if r.left <= 0 {
		return 0, fmt.Errorf("an event of more than %d bytes", maxEvent)
	}
	n, err := r.r.Read(p[:min(len(p), r.left)])
	r.left -= n
	return n, err
}
