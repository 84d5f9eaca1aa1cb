package house

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/internal/line"
)

// TestTrust: for each message that a worker can send, testdata/trust.txt names the effect of a
// false one, and a test.
func TestTrust(t *testing.T) {
	rows := readTable(t, "trust.txt")
	for name, row := range rows {
		cells := strings.Split(row, " | ")
		if len(cells) != 3 || slices.Contains(cells, "") {
			t.Errorf("%s: %d columns follow; write the conclusion, the effect and the tests", name, len(cells))
		} else if checkShown(t, cells[2]) == 0 {
			t.Errorf("%s: no test is named", name)
		}
	}
	sent := fromWorkers()
	for _, name := range sent {
		if rows[name] == "" {
			t.Errorf("testdata/trust.txt does not tell what happens if %s is a lie", name)
		}
	}
	for name := range rows {
		if !slices.Contains(sent, name) && !strings.HasPrefix(name, "peer: ") {
			t.Errorf("testdata/trust.txt tells of %s, which no worker sends", name)
		}
	}
}

// fromWorkers returns what workers send: the lines of the worker protocol, with their JSON fields,
// and the reports.
func fromWorkers() (names []string) {
	seen := map[string]bool{}
	var fields func(of string, t reflect.Type)
	fields = func(of string, t reflect.Type) {
		for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
			t = t.Elem()
		}
		if t.Kind() != reflect.Struct {
			return
		}
		for i := range t.NumField() {
			f := t.Field(i)
			field, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if field == "" {
				field = f.Name
			}
			if name := of + "." + field; !seen[name] {
				seen[name] = true
				names = append(names, name)
				fields(field, f.Type)
			}
		}
	}
	for do, v := range map[string]any{
		"hello": line.Hello{}, "join": line.Joining{}, "report": line.ReportLine{}, "pulse": line.Beat{}, "heard": line.Heard{},
		"stacks": line.StacksLine{}, "look": struct{}{}, "ping": struct{}{}, "beat": struct{}{}, "figures": struct{}{},
	} {
		names = append(names, do)
		fields(do, reflect.TypeOf(v))
	}
	for r := line.Done; r <= line.NotWritten; r++ {
		if word := r.String(); !strings.HasPrefix(word, "report ") {
			names = append(names, "report "+strings.ReplaceAll(word, " ", "_"))
		}
	}
	return append(names, "report failed", "report backend")
}
