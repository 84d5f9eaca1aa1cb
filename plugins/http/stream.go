package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"time"

	"github.com/hvdrun/hvdrun/plan"
)

var (
	errEnough = errors.New("the reader has stopped")
	errSilent = errors.New("the stream is silent")
)

// follow opens the stream and calls news with the list of each document until news returns false.
// It returns nil if the stream ends, or is silent for idleTimeout, after at least one document.
func (c *config) follow(ctx context.Context, news func([]plan.Host) bool) error {
	outer := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	patience := time.AfterFunc(c.timeout, func() { cancel(errSilent) })
	defer patience.Stop()
	resp, err := c.get(ctx, http.Header{"Accept": {"text/event-stream, application/x-ndjson"}})
	if err != nil {
		return c.silence(ctx, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return c.badStatus(ctx, resp)
	}
	documents := 0
	kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	alive := func() { // called for every line
		if documents > 0 && c.idleTimeout > 0 {
			patience.Reset(c.idleTimeout)
		} else if documents > 0 {
			patience.Stop()
		}
	}
	err = split(resp.Body, kind == "text/event-stream", alive, func(document []byte) error {
		hosts, err := decode(document, c.defaultSlots)
		if err != nil {
			return err
		}
		documents++
		if !news(hosts) {
			return errEnough
		}
		alive()
		return nil
	})
	switch {
	case errors.Is(err, errEnough):
		return err
	case outer.Err() != nil:
		return fmt.Errorf("http: %w", context.Cause(outer))
	case documents > 0 && (err == nil || errors.Is(context.Cause(ctx), errSilent)):
		return nil
	case err == nil:
		err = errors.New("the stream ended without a document")
	}
	return c.silence(ctx, c.fault(ctx, err))
}

// silence returns an error with the time waited for the first document, if that did not arrive,
// else err.
func (c *config) silence(ctx context.Context, err error) error {
	if errors.Is(context.Cause(ctx), errSilent) {
		return fmt.Errorf("http: %s sent no document in %v", c.shown, c.timeout)
	}
	return err
}

// split calls document with each document of a stream: the data of each event of type message or
// hosts, or else each line. It calls alive for each line, including meaningless ones. It returns
// the first error of document or of reading, and nil at the end.
func split(r io.Reader, events bool, alive func(), document func([]byte) error) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 4<<10), maxDocument+16) // a line of an event begins with the field's name
	var e event
	for lines.Scan() {
		alive()
		line := lines.Bytes()
		if events {
			whole, err := e.take(line)
			if err != nil {
				return err
			}
			if !whole {
				continue
			}
			line = e.data
		}
		if len(line) > maxDocument {
			return errTooLong
		}
		if len(bytes.TrimSpace(line)) > 0 {
			if err := document(line); err != nil {
				return err
			}
		}
		e = event{}
	}
	if errors.Is(lines.Err(), bufio.ErrTooLong) {
		return errTooLong
	}
	return lines.Err()
}

// event assembles a server-sent event from its lines.
type event struct {
	kind string
	data []byte
	any  bool // the event has data
}

// take adds a line, and returns whether the event is complete and has hosts. It resets a complete
// event without hosts.
func (e *event) take(line []byte) (whole bool, err error) {
	if len(line) == 0 {
		if e.any && (e.kind == "" || e.kind == "message" || e.kind == "hosts") {
			return true, nil
		}
		*e = event{}
		return false, nil
	}
	field, value, _ := bytes.Cut(line, []byte(":")) // a line that begins with a colon is a comment
	value = bytes.TrimPrefix(value, []byte(" "))
	switch string(field) {
	case "event":
		e.kind = string(value)
	case "data":
		if e.any {
			e.data = append(e.data, '\n')
		}
		e.data, e.any = append(e.data, value...), true
		if len(e.data) > maxDocument {
			return false, errTooLong
		}
	}
	return false, nil
}
