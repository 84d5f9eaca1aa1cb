package identity

import (
	"bytes"
	"errors"
	"testing"
)

// TestAuthorityIsKept: a decoded authority equals the original: each accepts credentials of the
// other.
func TestAuthorityIsKept(t *testing.T) {
	a := newAuthority(t, "run with blanks/and ünicode")
	text, err := a.Encode()
	if err != nil {
		t.Fatal(err)
	}
	b, err := DecodeAuthority(text)
	if err != nil {
		t.Fatal(err)
	}
	driver, worker := issue(t, b, Subject{Role: Driver}), issue(t, a, Subject{Role: Worker, Host: "a", Incarnation: "1"})
	if _, _, sErr, cErr := handshake(t, driver.ServerTLS(Worker), worker.ClientTLS(Subject{Role: Driver})); errors.Join(sErr, cErr) != nil {
		t.Errorf("server %v, client %v", sErr, cErr)
	}
	if !bytes.Equal(a.jobKey[:], b.jobKey[:]) {
		t.Error("the job's key is another")
	}
	if _, err := clusterOf(t, clusterKey, "blue").Encode(); err == nil {
		t.Error("a cluster's authority was written down")
	}
	for i := range len(text) {
		if _, err := DecodeAuthority(text[:i]); err == nil {
			t.Errorf("the first %d letters of %d pass", i, len(text))
		}
	}
}

// FuzzDecodeAuthority: every text that decodes is encoded again identically.
func FuzzDecodeAuthority(f *testing.F) {
	a, err := NewAuthority("run")
	if err != nil {
		f.Fatal(err)
	}
	text, err := a.Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add("AQAA")
	f.Fuzz(func(t *testing.T, text string) {
		a, err := DecodeAuthority(text)
		if err != nil {
			return
		}
		if again, err := a.Encode(); err != nil || again != text {
			t.Errorf("%q was read, %q written, %v", text, again, err)
		}
	})
}
