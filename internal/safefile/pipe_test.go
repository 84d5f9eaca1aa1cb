package safefile

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestNamedPipes: opening a named pipe fails if no process opens its other end in time; otherwise
// it is read and written like any pipe.
func TestNamedPipes(t *testing.T) {
	patience := peerPatience
	defer func() { peerPatience = patience }()
	path := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	write := func(path string) (*os.File, error) { return Append(path, os.O_WRONLY, Private) }

	peerPatience = time.Nanosecond
	for missing, open := range map[string]func(string) (*os.File, error){"writer": ReadStream, "reader": write} {
		f, err := open(path)
		if err == nil {
			f.Close()
			t.Fatalf("a pipe without a %s was opened", missing)
		}
		for _, words := range []string{path, "no process has the named pipe open as its " + missing} {
			if !strings.Contains(err.Error(), words) {
				t.Errorf("without a %s: %v", missing, err)
			}
		}
	}

	peerPatience = time.Hour
	sent := make(chan error, 1)
	go func() {
		f, err := write(path)
		if err == nil {
			_, err = f.WriteString("text")
			f.Close()
		}
		sent <- err
	}()
	text, err := SecretText(path, 9)
	if string(text) != "text" || err != nil {
		t.Errorf("%q, %v", text, err)
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
}

// TestInheritedNamedPipe: what the writer of an inherited named pipe has left can be read even
// after the writer has gone.
func TestInheritedNamedPipe(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	inherited, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := inherited.WriteString("text"); err != nil {
		t.Fatal(err)
	}
	reader, err := os.OpenFile(path, os.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	inherited.Close()
	f, err := ReadStream(fdPath(reader.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if text, err := io.ReadAll(f); string(text) != "text" || err != nil {
		t.Errorf("%q, %v", text, err)
	}
}
