package driver

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sirupsen/logrus"
)

func openOutputs(t *testing.T, path string) *outputs {
	t.Helper()
	log := logrus.New()
	log.SetOutput(io.Discard)
	o := &outputs{}
	if err := o.open(Config{Journal: path, RunID: "run", Log: log}); err != nil {
		t.Fatal(err)
	}
	return o
}

// TestOutputs: the next driver knows the notes, also after compaction, except those of workers that
// have ended.
func TestOutputs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	o := openOutputs(t, path)
	held := []byte(strings.Repeat("h", 1000))
	for i := range uint64(3000) {
		o.note(outputNote{Worker: "a", Bytes: i, Out: held})
		o.note(outputNote{Worker: "b", Bytes: 2 * i, Err: []byte{0xff, 0}})
		o.note(outputNote{Worker: "c", Bytes: i})
	}
	o.note(outputNote{Worker: "c", Ended: true})
	held[0] = 'x'
	check := func(o *outputs) {
		t.Helper()
		if n := o.of("a"); n.Bytes != 2999 || string(n.Out) != strings.Repeat("h", 1000) || n.Err != nil {
			t.Errorf("%+v", n)
		}
		if n := o.of("b"); n.Bytes != 5998 || string(n.Err) != "\xff\x00" {
			t.Errorf("%+v", n)
		}
		if n := o.of("c"); n.Bytes != 0 || len(o.at) != 2 {
			t.Errorf("%+v of %d", n, len(o.at))
		}
	}
	check(o)
	if fi, err := os.Stat(path + ".output"); err != nil || fi.Size() > 2*outputsSize || fi.Mode() != 0o600 {
		t.Errorf("%v, %v", fi, err)
	}
	o.close(false)
	o.note(outputNote{Worker: "a"}) // too late
	o = openOutputs(t, path)
	check(o)
	o.close(true)
	if _, err := os.Stat(path + ".output"); !os.IsNotExist(err) {
		t.Errorf("the file is still there: %v", err)
	}
	if err := os.WriteFile(path+".output", []byte("garbage"), 0o600); err != nil {
		t.Fatal(err)
	}
	o = openOutputs(t, path)
	if len(o.at) != 0 || o.k == nil {
		t.Errorf("after garbage: %+v", o.at)
	}
	o.close(true)
	(&outputs{}).note(outputNote{Worker: "a"}) // keeps nothing
}
