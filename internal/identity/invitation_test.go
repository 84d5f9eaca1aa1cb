package identity

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestInvitation(t *testing.T) {
	a, err := NewAuthority("run")
	if err != nil {
		t.Fatal(err)
	}
	client, err := a.Issue(Subject{Role: Client})
	if err != nil {
		t.Fatal(err)
	}
	worker, err := a.Issue(Subject{Role: Worker})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "invitation")
	good := Invitation{Addresses: []string{"[::1]:7", "h:8"}, Credentials: client.Encode()}
	if err := WriteInvitation(path, good); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the file: %v, %v", fi.Mode(), err)
	}
	addresses, creds, err := ReadInvitation(path)
	if err != nil || strings.Join(addresses, " ") != "[::1]:7 h:8" || creds.Subject() != client.Subject() {
		t.Errorf("%v, %v, %v", addresses, creds, err)
	}
	for want, bad := range map[string]Invitation{
		"0 addresses":               {Credentials: client.Encode()},
		"missing port":              {Addresses: []string{"h"}, Credentials: client.Encode()},
		"those of a worker":         {Addresses: []string{"h:1"}, Credentials: worker.Encode()},
		"credentials are malformed": {Addresses: []string{"h:1"}, Credentials: "x"},
		"65 addresses":              {Addresses: make([]string, 65), Credentials: client.Encode()},
	} {
		if err := WriteInvitation(path, bad); err != nil {
			t.Fatal(err)
		}
		if _, _, err := ReadInvitation(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	if err := WriteInvitation(path, good); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, _, err := ReadInvitation(path); err == nil {
		t.Error("a file that others may read is taken")
	}
	if _, _, err := ReadInvitation(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("a file that is not there is taken")
	}
}
