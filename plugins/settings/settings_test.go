package settings

import (
	"slices"
	"strings"
	"testing"
	"time"
)

func TestReads(t *testing.T) {
	r := Read("p", map[string]string{"text": "a", "list": "a, b", "word": "y", "bool": "true", "int": "7", "d": "1m", "s": "0.5", "empty": ""})
	for _, c := range []struct {
		name string
		ok   bool
	}{
		{"text", r.Required("text") == "a" && r.Text("none", "x") == "x" && r.Text("empty", "x") == "x"},
		{"given", r.Given("empty") && !r.Given("none")},
		{"list", slices.Equal(r.List("list"), []string{"a", "b"}) && r.List("none") == nil},
		{"word", r.OneOf("word", "x", "y") == "y" && r.OneOf("none", "x", "y") == "x"},
		{"bool", r.Bool("bool", false) && r.Bool("none", true) && !r.Bool("none", false)},
		{"int", r.Int("int", 1, 0, 9) == 7 && r.Int("none", 1, 0, 9) == 1},
		{"duration", r.Duration("d", 0, 0, time.Hour) == time.Minute && r.Duration("s", 0, 0, time.Hour) == 500*time.Millisecond &&
			r.Duration("none", time.Second, 0, 0) == time.Second},
	} {
		if !c.ok {
			t.Error(c.name)
		}
	}
	if err := r.Err(); err != nil {
		t.Error(err)
	}
}

func TestFaults(t *testing.T) {
	for _, c := range []struct {
		value string
		read  func(r *Reader)
		want  string
	}{
		{"", func(r *Reader) { r.Required("k") }, `p: setting k: must be given`},
		{"a,,b", func(r *Reader) { r.List("k") }, `p: setting k: an empty item in "a,,b"`},
		{"z", func(r *Reader) { r.OneOf("k", "x", "y") }, `p: setting k: "z" is not one of: x, y`},
		{"1", func(r *Reader) { r.Bool("k", false) }, `p: setting k: "1" is neither true nor false`},
		{"1.5", func(r *Reader) { r.Int("k", 0, 0, 9) }, `p: setting k: "1.5" is not a whole number from 0 to 9`},
		{"10", func(r *Reader) { r.Int("k", 0, 0, 9) }, `p: setting k: "10" is not a whole number from 0 to 9`},
		{"soon", func(r *Reader) { r.Duration("k", 0, 0, time.Minute) }, `p: setting k: "soon" is not a duration from 0s to 1m0s, as 30s or 500ms`},
		{"2m", func(r *Reader) { r.Duration("k", 0, 0, time.Minute) }, `p: setting k: "2m" is not a duration`},
		{"1e300", func(r *Reader) { r.Duration("k", 0, 0, time.Minute) }, `p: setting k: "1e300" is not a duration`},
		{"a", func(r *Reader) { r.Text("other", ""); r.Text("one", "") }, `p: unknown setting "k"; the settings are: one, other`},
	} {
		r := Read("p", map[string]string{"k": c.value})
		c.read(r)
		if err := r.Err(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v, want %s", c.value, err, c.want)
		}
	}
}

// TestAllFaults: one error names all faults.
func TestAllFaults(t *testing.T) {
	r := Read("p", map[string]string{"a": "x", "c": "", "b": ""})
	r.Int("a", 0, 0, 1)
	r.Required("d")
	err := r.Err()
	if err == nil || strings.Count(err.Error(), "p: ") != 4 {
		t.Errorf("%v: want four faults", err)
	}
}
