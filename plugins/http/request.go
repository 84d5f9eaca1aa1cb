package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/plan"
)

const (
	maxRedirects = 5
	maxToken     = 64 << 10
)

// token reads the token, which may be renewed at any time. Errors contain only the file's name.
func (c *config) token() (string, error) {
	text, err := safefile.OwnText(c.tokenFile, maxToken)
	token := bytes.TrimSpace(text)
	switch {
	case err != nil:
		return "", err
	case len(token) == 0:
		return "", fmt.Errorf("%s is empty", c.tokenFile)
	case bytes.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }):
		return "", fmt.Errorf("%s does not hold a token", c.tokenFile)
	}
	return string(token), nil
}

// get sends a request and returns the response, whose body the caller must close.
func (c *config) get(ctx context.Context, header http.Header) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url.String(), nil)
	if err != nil {
		return nil, c.fault(ctx, err)
	}
	req.Header = header
	req.Header.Set("User-Agent", "hvdrun-discovery-http")
	if c.tokenFile != "" {
		token, err := c.token()
		if err != nil {
			return nil, fmt.Errorf("http: setting token_file: %w", err)
		}
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := c.client.Do(req)
	if err != nil {
		return nil, c.fault(ctx, err)
	}
	return resp, nil
}

// fault returns an error that names the URL without its query, and the cause of ctx if ctx has
// ended, else err.
func (c *config) fault(ctx context.Context, err error) error {
	var wrapped *url.Error // contains the whole URL, or that of a redirection
	if errors.As(err, &wrapped) {
		err = wrapped.Err
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return fmt.Errorf("http: %s: %w", c.shown, err)
}

// badStatus returns the error of a response with that status. It reads the body, so that the
// connection can be reused, but does not repeat it in the error: it may contain anything.
func (c *config) badStatus(ctx context.Context, resp *http.Response) error {
	io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10))
	text := fmt.Sprintf("status %d (%s)", resp.StatusCode, http.StatusText(resp.StatusCode))
	if resp.StatusCode == http.StatusUnauthorized && c.tokenFile == "" {
		text += "; no token_file is given"
	}
	return c.fault(ctx, errors.New(text))
}

// checkRedirect permits a redirection anywhere, except from https to http. With a token or a client
// certificate it permits only redirections to the same server.
func (c *config) checkRedirect(req *http.Request, via []*http.Request) error {
	from := via[len(via)-1].URL
	switch {
	case len(via) > maxRedirects:
		return fmt.Errorf("the server redirects more than %d times", maxRedirects)
	case from.Scheme == "https" && req.URL.Scheme != "https":
		return fmt.Errorf("redirected from https to %s", origin(req.URL))
	case origin(req.URL) != origin(from) && (c.tokenFile != "" || c.certFile != ""):
		return fmt.Errorf("redirected to %s, which must not see the token or certificate", origin(req.URL))
	}
	return nil
}

// fetch requests the document once. The server may answer that it has not changed.
func (c *config) fetch(ctx context.Context) ([]plan.Host, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, c.timeout, fmt.Errorf("no answer in %v", c.timeout))
	defer cancel()
	header := http.Header{"Accept": {"application/json"}}
	known := c.known.Load()
	if known != nil {
		if known.etag != "" {
			header.Set("If-None-Match", known.etag)
		}
		if known.modified != "" {
			header.Set("If-Modified-Since", known.modified)
		}
	}
	resp, err := c.get(ctx, header)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusNotModified && known != nil:
		return slices.Clone(known.hosts), nil
	case resp.StatusCode != http.StatusOK:
		return nil, c.badStatus(ctx, resp)
	}
	document, err := io.ReadAll(io.LimitReader(resp.Body, maxDocument+1))
	switch {
	case err != nil:
		return nil, c.fault(ctx, err)
	case len(document) > maxDocument:
		return nil, c.fault(ctx, errTooLong)
	}
	hosts, err := decode(document, c.defaultSlots)
	if err != nil {
		return nil, c.fault(ctx, err)
	}
	v := &version{etag: resp.Header.Get("ETag"), modified: resp.Header.Get("Last-Modified")}
	if v.etag == "" && v.modified == "" || strings.Contains(resp.Header.Get("Cache-Control"), "no-store") {
		c.known.Store(nil)
	} else {
		v.hosts = slices.Clone(hosts)
		c.known.Store(v)
	}
	return hosts, nil
}
