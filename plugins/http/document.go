package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/hvdrun/hvdrun/plan"
)

// maxDocument bounds a document, in bytes.
const maxDocument = 1 << 20

var errTooLong = fmt.Errorf("the document is longer than %d bytes", maxDocument)

// decode decodes a document in the form that the README describes: {"hosts": […]}, or the list
// alone. It ignores unknown fields; the known ones must be valid. Errors repeat no more of the
// document than the names of hosts.
func decode(document []byte, defaultSlots int) ([]plan.Host, error) {
	list := bytes.TrimSpace(document)
	if kindOf(list) == "an object" {
		var fields map[string]json.RawMessage
		if err := unmarshal(list, &fields); err != nil {
			return nil, err
		}
		given := false
		if list, given = fields["hosts"]; !given {
			return nil, errors.New(`the document has no field "hosts"`)
		}
	}
	if kind := kindOf(list); kind != "a list" {
		return nil, fmt.Errorf("the hosts must be a list, not %s", kind)
	}
	var items []json.RawMessage
	if err := unmarshal(list, &items); err != nil {
		return nil, err
	}
	hosts := make([]plan.Host, len(items))
	for i, item := range items {
		var err error
		if hosts[i], err = decodeHost(item, defaultSlots); err != nil {
			return nil, fmt.Errorf("hosts[%d]: %w", i, err)
		}
	}
	return hosts, plan.CheckHosts(hosts)
}

func decodeHost(item json.RawMessage, defaultSlots int) (plan.Host, error) {
	h := plan.Host{Slots: defaultSlots}
	if kind := kindOf(item); kind != "an object" {
		return h, fmt.Errorf("a host must be an object, not %s", kind)
	}
	var fields map[string]json.RawMessage
	if err := unmarshal(item, &fields); err != nil {
		return h, err
	}
	name, given := fields["name"]
	if kind := kindOf(name); !given || kind != "a text" {
		return h, fmt.Errorf("name must be a text, not %s", kind)
	}
	if err := unmarshal(name, &h.Name); err != nil {
		return h, err
	}
	if slots, given := fields["slots"]; given {
		n, err := strconv.Atoi(string(slots))
		if err != nil || n < 0 || n > plan.MaxSlots {
			return h, fmt.Errorf("slots must be a whole number from 0 to %d", plan.MaxSlots)
		}
		h.Slots = n
	}
	if draining, given := fields["draining"]; given {
		if kind := kindOf(draining); kind != "a truth value" {
			return h, fmt.Errorf("draining must be true or false, not %s", kind)
		}
		h.Draining = string(draining) == "true"
	}
	return h, nil
}

// unmarshal is like json.Unmarshal, with errors that give the position.
func unmarshal(text []byte, into any) error {
	err := json.Unmarshal(text, into)
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) {
		return fmt.Errorf("not JSON, at byte %d: %w", syntax.Offset, err)
	}
	return err
}

// kindOf returns the kind of a JSON value, judged by its first character.
func kindOf(value []byte) string {
	if len(value) == 0 {
		return "nothing"
	}
	switch c := value[0]; {
	case c == '{':
		return "an object"
	case c == '[':
		return "a list"
	case c == '"':
		return "a text"
	case c == 't', c == 'f':
		return "a truth value"
	case c == 'n':
		return "null"
	case c == '-', '0' <= c && c <= '9':
		return "a number"
	}
	return "something else than JSON"
}
