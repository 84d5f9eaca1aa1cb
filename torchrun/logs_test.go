package torchrun

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// fullFile is a file on a full disk.
type fullFile struct{ path string }

func (f fullFile) Write([]byte) (int, error) {
	return 0, &os.PathError{Op: "write", Path: f.path, Err: syscall.ENOSPC}
}
func (fullFile) Close() error { return nil }

// TestFullDisk: if a log file cannot be written, one message names it and the remedy, and the
// console still gets the output.
func TestFullDisk(t *testing.T) {
	log, said, console := discard(), new(bytes.Buffer), new(bytes.Buffer)
	log.SetOutput(said)
	l, err := Logs{Dir: t.TempDir(), Tee: Streams{All: 3}, Stdout: console, Stderr: console}.open("run", "", log)
	if err != nil {
		t.Fatal(err)
	}
	l.begin("default", 1, 0)
	p, err := l.paths(0, 0)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(p.dir, "stdout.log")
	full := &logFile{WriteCloser: fullFile{path}, log: log}
	to := l.line(0, 0, true, true)
	for range 3 {
		if _, err := io.MultiWriter(full, to).Write([]byte("hello\n")); err != nil {
			t.Error(err)
		}
	}
	if err := errors.Join(to.Close(), l.close()); err != nil {
		t.Error(err)
	}
	if got := console.String(); strings.Count(got, "hello") != 3 {
		t.Errorf("the console got %q", got)
	}
	if got := said.String(); strings.Count(got, "no longer kept (--log-dir): write "+path+": no space left on device: free space there, or name another place") != 1 {
		t.Errorf("logged %q", got)
	}
}
