package proc

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestExplainStart: if the kernel refuses to start a file, its first line explains the error.
func TestExplainStart(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		mode os.FileMode
		want string
	}{
		"CRLF":           {"#!/bin/sh\r\necho\r\n", 0o700, "end in CR LF"},
		"no interpreter": {"#! /no/such/perl -w\nx\n", 0o700, "its interpreter /no/such/perl is missing"},
		"no first line":  {"echo hi\n", 0o700, "no first line such as #!/bin/sh"},
		"another ELF":    {"\x7fELF\x02\x01\x01" + strings.Repeat("\x00", 100), 0o700, "for another processor"},
		"empty":          {"", 0o700, "no first line such as #!/bin/sh"},
		"a plain file":   {"#!/bin/sh\n", 0o600, "make it executable by chmod +x "},
	} {
		path := filepath.Join(t.TempDir(), "program")
		if err := os.WriteFile(path, []byte(c.text), c.mode); err != nil {
			t.Fatal(err)
		}
		cause := exec.Command(path).Run()
		err := ExplainStart(cause, path)
		if err == nil || !strings.Contains(err.Error(), c.want) || !errors.Is(err, cause) {
			t.Errorf("%s: %v; want %q", name, err, c.want)
		}
		if child, err := Start(exec.Command(path)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s, started: %v, %v; want %q", name, child, err, c.want)
		}
	}
	if child, err := Start(exec.Command("/bin/sh", "-c", strings.Repeat("#", 1<<20))); !errors.Is(err, syscall.E2BIG) || !strings.Contains(err.Error(), "unset the largest variables") {
		t.Errorf("too many bytes: %v, %v", child, err)
	}
	if err := ExplainStart(syscall.ENOENT, "/no/such/program"); err != syscall.ENOENT {
		t.Errorf("a program that is not there: %v", err)
	}
	if err := ExplainStart(nil, "/bin/sh"); err != nil {
		t.Errorf("no error: %v", err)
	}
}

// TestExplainListen: the error of a port that is in use names the process that has it.
func TestExplainListen(t *testing.T) {
	first, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	for addr, want := range map[string]string{
		first.Addr().String(): fmt.Sprintf("address already in use by process %d (%s): choose another port", os.Getpid(), Program(os.Getpid())),
		"192.0.2.1:0":         "this machine has no such address; `ip addr` lists its addresses",
	} {
		_, cause := net.Listen("tcp", addr)
		if err := ExplainListen(fmt.Errorf("page: %w", cause)); cause == nil || !errors.Is(err, cause) || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%s: %v, want %q at the end", addr, err, want)
		}
	}
	if err := ExplainListen(nil); err != nil {
		t.Error(err)
	}
}

func TestExplainCommand(t *testing.T) {
	crlf := filepath.Join(t.TempDir(), "crlf.sh")
	if err := os.WriteFile(crlf, []byte("#!/bin/bash\r\necho localhost:1\r\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	if why := ExplainCommand(crlf + " --all"); !strings.Contains(why, `its interpreter "/bin/bash\r" is missing`) {
		t.Errorf("CRLF: %q", why)
	}
	plain := filepath.Join(t.TempDir(), "plain.sh")
	if err := os.WriteFile(plain, []byte("#!/bin/sh\necho localhost:1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if why := ExplainCommand(plain + " --all"); !strings.HasSuffix(why, "make it executable by chmod +x "+plain) {
		t.Errorf("a plain file: %q", why)
	}
	for _, command := range []string{"", "cat hosts", "/bin/sh -c x", "/no/such/program"} {
		if why := ExplainCommand(command); why != "" {
			t.Errorf("%q: %q", command, why)
		}
	}
}
