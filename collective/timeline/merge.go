package timeline

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

// appendString appends s as a string of JSON.
func appendString(b []byte, s string) []byte {
	text, _ := json.Marshal(s) // a string can always be marshalled
	return append(b, text...)
}

// maxLine bounds the length of an event, in bytes.
const maxLine = 1 << 20

// Files returns the existing files of all ranks and of the driver for a Filename, sorted.
func Files(filename string) ([]string, error) {
	stem := filepath.Base(strings.TrimSuffix(filename, ".json")) + ".rank."
	dir := filepath.Dir(filename)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var found []string
	driver, driverOld := DriverPath(filename)
	for _, e := range entries {
		if e.Name() == filepath.Base(driver) || e.Name() == filepath.Base(driverOld) {
			found = append(found, filepath.Join(dir, e.Name()))
		}
		rest, ok := strings.CutPrefix(e.Name(), stem)
		number, ok2 := strings.CutSuffix(rest, ".json")
		number = strings.TrimSuffix(number, ".old")
		if _, err := strconv.ParseUint(number, 10, 32); ok && ok2 && err == nil {
			found = append(found, filepath.Join(dir, e.Name()))
		}
	}
	slices.Sort(found)
	return found, nil
}

// Merged is the result of Merge.
type Merged struct {
	Events int
	// Torn is the number of incomplete lines: the last lines of processes that were killed.
	Torn int
}

// Merge writes the events of the files as one trace, whose time begins at 0. Events of the same
// rank are shown as one process. It reads each file twice, and returns the first error of reading
// or writing.
func Merge(w io.Writer, files []string) (m Merged, err error) {
	first := int64(math.MaxInt64)
	for _, path := range files {
		err := each(path, func(e event) error {
			if at, ok := e.nanos(); ok {
				first = min(first, at)
			}
			return nil
		}, nil)
		if err != nil {
			return m, err
		}
	}
	out := bufio.NewWriter(w)
	out.WriteByte('[')
	for _, path := range files {
		err := each(path, func(e event) error {
			if at, ok := e.nanos(); ok {
				e["ts"] = appendMicros(nil, at-first)
			}
			line, err := json.Marshal(e)
			if err != nil {
				return err
			}
			if m.Events > 0 {
				out.WriteByte(',')
			}
			m.Events++
			out.WriteByte('\n')
			_, err = out.Write(line)
			return err
		}, &m.Torn)
		if err != nil {
			return m, err
		}
	}
	out.WriteString("\n]\n")
	return m, out.Flush()
}

// event is an event of a trace, with its values as they were written.
type event map[string]json.RawMessage

// nanos returns the time of the event, in nanoseconds. It parses the decimal text, since a float64
// of microseconds since 1970 would lose the nanoseconds.
func (e event) nanos() (int64, bool) {
	whole, rest, _ := bytes.Cut(e["ts"], []byte{'.'})
	micros, err := strconv.ParseInt(string(whole), 10, 53)
	if err != nil {
		return 0, false
	}
	fraction, err := strconv.ParseUint((string(rest) + "000")[:3], 10, 10)
	if err != nil {
		return 0, false
	}
	return micros*1000 + int64(fraction), true
}

// each calls visit for each event of a file. If torn is not nil, it adds the number of incomplete
// lines to *torn.
func each(path string, visit func(event) error, torn *int) error {
	file, err := safefile.Read(path)
	if err != nil {
		return err
	}
	defer file.Close()
	lines := bufio.NewReaderSize(file, maxLine)
	for {
		line, err := lines.ReadSlice('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("%s: %w", path, err)
		}
		text := bytes.TrimSuffix(bytes.TrimSpace(line), []byte{','})
		var e event
		switch {
		case len(text) == 0 || len(text) == 1 && (text[0] == '[' || text[0] == ']'):
		case json.Unmarshal(text, &e) != nil || e["ph"] == nil:
			if torn != nil {
				*torn++
			}
		default:
			if err := visit(e); err != nil {
				return err
			}
		}
		if err != nil {
			return nil
		}
	}
}
