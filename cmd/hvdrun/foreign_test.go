package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/clitest"
	"github.com/hvdrun/hvdrun/internal/cluster"
)

// TestForeignHosts: a host of a cluster cannot have a name with control characters, and a state
// file that contains one is printed escaped.
func TestForeignHosts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cluster")
	dir, err := cluster.Init(path, cluster.Grant{Expires: time.Now().Add(time.Hour)}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	err = dir.Update(func(s *cluster.State) error {
		s.Issued(clitest.Foreign, time.Now().Add(time.Hour), time.Now())
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if status := run([]string{"cluster", "hosts", path}, os.Stdin, &out, &out, nil); status != 0 {
		t.Fatalf("exits with %d: %s", status, &out)
	}
	clitest.Tame(t, "cluster hosts", out.String(), 2)
}

// TestForeignErrors: the error text of a source of hosts is printed escaped and completely.
func TestForeignErrors(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"fails": "#!/bin/sh\ncat " + dir + "/words >&2\nexit 3\n",
		"lists": "#!/bin/sh\ncat " + dir + "/words\n",
		"words": clitest.Foreign,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, script := range []string{"fails", "lists"} {
		var out, errs bytes.Buffer
		args := []string{"discover", "--host-discovery-script", filepath.Join(dir, script)}
		if status := run(args, os.Stdin, &out, &errs, os.Environ()); status != 6 || out.Len() > 0 {
			t.Errorf("%s: exits with %d: %s", script, status, &out)
		}
		clitest.Tame(t, script, errs.String(), 0)
	}
}
