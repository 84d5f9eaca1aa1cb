package timeline

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// FuzzMerge: whatever the file of a rank contains, the trace is one JSON array with as many events
// as Merge reports.
func FuzzMerge(f *testing.F) {
	f.Add([]byte("[\n{\"ph\":\"X\",\"ts\":1700000000000000.125,\"dur\":3.5,\"name\":\"all-reduce\",\"pid\":0,\"tid\":1},\n{\"ph\":\"M\",\"na"))
	f.Add([]byte("{\"ph\":1,\"ts\":-4503599627370496.999}\n{\"ph\":1,\"ts\":4503599627370495.999}\n]\n"))
	f.Add([]byte("{\"ph\":\"\\ud800\",\"ts\":\"1\"}"))
	path := filepath.Join(f.TempDir(), "trace.rank.0.json")
	f.Fuzz(func(t *testing.T, content []byte) {
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		merged, err := Merge(&out, []string{path, path})
		if err != nil {
			return
		}
		var events []map[string]any
		if err := json.Unmarshal(out.Bytes(), &events); err != nil || len(events) != merged.Events {
			t.Errorf("%d events of %d said, %v: %s", len(events), merged.Events, err, out.Bytes())
		}
	})
}
