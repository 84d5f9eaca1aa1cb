// Package settings reads the settings of a discovery plugin (--discovery-config). A Configure that
// uses it refuses unknown keys, so that a misspelt key is an error.
//
//	s := settings.Read("file", values)
//	path := s.Required("path")
//	slots := s.Int("default_slots", 1, 0, plan.MaxSlots)
//	if err := s.Err(); err != nil {
//		return err
//	}
package settings

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Reader reads the settings of one plugin. Each method reads one setting, which makes its key
// known, and records faults for Err. A Reader is for one goroutine.
type Reader struct {
	plugin string
	values map[string]string
	known  []string
	faults []error
}

// Read returns a Reader of these values, which it does not change. Errors begin with the name of
// the plugin.
func Read(plugin string, values map[string]string) *Reader {
	return &Reader{plugin: plugin, values: values}
}

// Err returns all faults: values that are not valid, and keys that no method has read, with a list
// of the known keys. It must be called last.
func (r *Reader) Err() error {
	faults := slices.Clone(r.faults)
	for _, key := range slices.Sorted(maps.Keys(r.values)) {
		if !slices.Contains(r.known, key) {
			known := slices.Sorted(slices.Values(r.known))
			faults = append(faults, fmt.Errorf("%s: unknown setting %q; the settings are: %s",
				r.plugin, key, strings.Join(known, ", ")))
		}
	}
	return errors.Join(faults...)
}

// Fault records a fault of the setting key, for values that only the plugin can check. The text
// must not repeat secrets.
func (r *Reader) Fault(key, format string, args ...any) {
	r.faults = append(r.faults, fmt.Errorf("%s: setting %s: %w", r.plugin, key, fmt.Errorf(format, args...)))
}

// Given reports whether the setting is given, even if it is empty.
func (r *Reader) Given(key string) bool {
	_, given := r.lookup(key)
	return given
}

func (r *Reader) lookup(key string) (value string, given bool) {
	if !slices.Contains(r.known, key) {
		r.known = append(r.known, key)
	}
	value, given = r.values[key]
	return value, given
}

// Text reads a text. The default replaces an empty or missing one.
func (r *Reader) Text(key, byDefault string) string {
	if value, _ := r.lookup(key); value != "" {
		return value
	}
	return byDefault
}

// Required reads a text that must be given.
func (r *Reader) Required(key string) string {
	value := r.Text(key, "")
	if value == "" {
		r.Fault(key, "must be given")
	}
	return value
}

// List reads texts separated by commas, and trims white space around them. An empty text is a
// fault. If the setting is not given, the list is nil.
func (r *Reader) List(key string) (items []string) {
	value := r.Text(key, "")
	if value == "" {
		return nil
	}
	for item := range strings.SplitSeq(value, ",") {
		item = strings.TrimSpace(item)
		if item == "" {
			r.Fault(key, "an empty item in %q", value)
			return nil
		}
		items = append(items, item)
	}
	return items
}

// OneOf reads one of the given words, the first of which is the default.
func (r *Reader) OneOf(key string, words ...string) string {
	value := r.Text(key, words[0])
	if !slices.Contains(words, value) {
		r.Fault(key, "%q is not one of: %s", value, strings.Join(words, ", "))
		return words[0]
	}
	return value
}

// Bool reads true or false.
func (r *Reader) Bool(key string, byDefault bool) bool {
	switch value := r.Text(key, ""); value {
	case "":
		return byDefault
	case "true":
		return true
	case "false":
		return false
	default:
		r.Fault(key, "%q is neither true nor false", value)
		return byDefault
	}
}

// Int reads a whole number within bounds.
func (r *Reader) Int(key string, byDefault, least, most int) int {
	value := r.Text(key, "")
	if value == "" {
		return byDefault
	}
	n, err := strconv.Atoi(value)
	if err != nil || n < least || n > most {
		r.Fault(key, "%q is not a whole number from %d to %d", value, least, most)
		return byDefault
	}
	return n
}

// Duration reads a time within bounds, written as 1m30s, or as a bare number of seconds.
func (r *Reader) Duration(key string, byDefault, least, most time.Duration) time.Duration {
	value := r.Text(key, "")
	if value == "" {
		return byDefault
	}
	text := value
	if _, err := strconv.ParseFloat(value, 64); err == nil {
		text += "s"
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < least || d > most {
		r.Fault(key, "%q is not a duration from %v to %v, as 30s or 500ms", value, least, most)
		return byDefault
	}
	return d
}
