package timeline

import (
	"bytes"
	"encoding/json"
	"fmt"
	"path/filepath"
	"sort"
	"testing"
	"time"
)

// TestDriver: the merged trace has the driver's events and the parts of resets as a process, even
// if another driver of the run continues the file.
func TestDriver(t *testing.T) {
	name := filepath.Join(t.TempDir(), "trace")
	begun := time.Now()
	for i := range 2 {
		d, err := OpenDriver(Config{Filename: name, RunID: "run"})
		if err != nil {
			t.Fatal(err)
		}
		at := begun.Add(time.Duration(i) * time.Second)
		d.Mark(at, "reset", []byte(`{"count":1,"where":"a \"b\""}`))
		d.Mark(at, "no object", []byte(`7`))
		d.Slice("driver", "reset", at, at.Add(500*time.Millisecond), 2)
		d.Slice("a:0", "join", at, at.Add(200*time.Millisecond), 2)
		d.Slice("a:0", "connect", at.Add(100*time.Millisecond), at.Add(300*time.Millisecond), 2) // overlaps
		d.Slice("a:0", "sync", at.Add(300*time.Millisecond), at.Add(301*time.Millisecond), 2)
		d.Slice("a:0", "ends before it begins", at, at.Add(-1), 2)
		d.Close()
		d.Close()
		d.Mark(at, "late", nil)
	}
	(*Driver)(nil).Mark(begun, "x", nil)
	(*Driver)(nil).Slice("x", "x", begun, begun, 0)
	(*Driver)(nil).Close()
	together(t, 2, record(t, name, begun))
	files, err := Files(name)
	if err != nil || len(files) != 3 || filepath.Base(files[0]) != "trace.driver.json" {
		t.Fatal(files, err)
	}
	var out bytes.Buffer
	if _, err := Merge(&out, files); err != nil {
		t.Fatal(err)
	}
	if err := checkTrace(out.Bytes()); err != nil {
		t.Errorf("%v\n%s", err, &out)
	}
	var events []map[string]any
	if err := json.Unmarshal(out.Bytes(), &events); err != nil {
		t.Fatal(err)
	}
	if n := count(events, "connect"); n != 2 || count(events, "no object") != 2 || count(events, "late") != 0 || count(events, "process_name") != 3 {
		t.Errorf("%s", &out)
	}
}

// checkTrace checks a merged trace as strictly as Perfetto's importer of the JSON format and
// chrome://tracing: the fields of each kind of event and their types; each name of a process or row
// is set once; and the slices of a row are nested or follow one another.
func checkTrace(text []byte) error {
	var events []map[string]any
	if err := json.Unmarshal(text, &events); err != nil {
		return err
	}
	kinds := map[string]map[string]string{
		"M": {"name": "string", "ph": "string", "pid": "int", "tid": "int?", "args": "object"},
		"i": {"name": "string", "ph": "string", "s": "string", "ts": "time", "pid": "int", "tid": "int", "args": "object"},
		"X": {"name": "string", "cat": "string", "ph": "string", "ts": "time", "dur": "time", "pid": "int", "tid": "int", "args": "object"},
	}
	type slice struct{ from, to int64 }
	rows, named := map[[2]int][]slice{}, map[string]bool{}
	for i, e := range events {
		kind, _ := e["ph"].(string)
		fields := kinds[kind]
		if fields == nil {
			return fmt.Errorf("event %d is of kind %q", i, kind)
		}
		for field := range e {
			if fields[field] == "" {
				return fmt.Errorf("event %d of kind %s has a field %q", i, kind, field)
			}
		}
		for field, is := range fields {
			value, there := e[field]
			number, isNumber := value.(float64)
			ok := false
			switch is {
			case "string":
				text, isText := value.(string)
				ok = isText && text != ""
			case "int", "int?":
				ok = isNumber && number == float64(int32(number)) && number >= 0 || is == "int?" && !there
			case "time":
				ok = isNumber && number >= 0
			case "object":
				_, ok = value.(map[string]any)
			}
			if !ok {
				return fmt.Errorf("event %d of kind %s: %s is %v", i, kind, field, value)
			}
		}
		pid, _ := e["pid"].(float64)
		tid, _ := e["tid"].(float64)
		args, _ := e["args"].(map[string]any)
		switch kind {
		case "M":
			name, _ := args["name"].(string)
			if e["name"] != "process_name" && e["name"] != "thread_name" || name == "" {
				return fmt.Errorf("event %d names nothing: %v", i, e)
			}
			named[fmt.Sprint(e["name"], int(pid), int(tid))] = true
		case "i":
			if s := e["s"]; s != "g" && s != "p" && s != "t" {
				return fmt.Errorf("event %d has the scope %v", i, s)
			}
		case "X":
			from := int64(e["ts"].(float64)*1000 + 0.5)
			row := [2]int{int(pid), int(tid)}
			rows[row] = append(rows[row], slice{from, from + int64(e["dur"].(float64)*1000+0.5)})
		}
	}
	for row, slices := range rows {
		if !named[fmt.Sprint("process_name", row[0], 0)] {
			return fmt.Errorf("process %d has no name", row[0])
		}
		if row[1] != 0 && !named[fmt.Sprint("thread_name", row[0], row[1])] {
			return fmt.Errorf("row %v has no name", row)
		}
		sort.Slice(slices, func(i, j int) bool {
			if slices[i].from != slices[j].from {
				return slices[i].from < slices[j].from
			}
			return slices[i].to > slices[j].to
		})
		var open []slice
		for _, s := range slices {
			for len(open) > 0 && open[len(open)-1].to <= s.from {
				open = open[:len(open)-1]
			}
			if len(open) > 0 && s.to > open[len(open)-1].to {
				return fmt.Errorf("row %v: %v overlaps %v", row, s, open[len(open)-1])
			}
			open = append(open, s)
		}
	}
	return nil
}
