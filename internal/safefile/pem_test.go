package safefile

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestPEM: errors name the file that cannot be used, also one that is larger than any file of
// certificates, of which no part is believed.
func TestPEM(t *testing.T) {
	dir := t.TempDir()
	path := func(name string, text []byte) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	text, huge, missing := path("text", []byte("no PEM")), path("huge", make([]byte, mostPEM+1)), filepath.Join(dir, "missing")
	for _, c := range []struct{ cert, key, want string }{
		{missing, text, missing},
		{text, missing, missing},
		{huge, text, huge + " has more than 4194304 bytes"},
		{text, huge, huge + " has more than 4194304 bytes"},
		{text, text, text + " and " + text + ": tls: "},
	} {
		if _, err := KeyPair(c.cert, c.key, OwnText, SecretText); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s, %s: %v, want %q in it", c.cert, c.key, err, c.want)
		}
	}
	for file, want := range map[string]string{missing: missing, text: text + " has no certificate in PEM", huge: huge + " has more than"} {
		if _, err := CertPool(file, Text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q in it", file, err, want)
		}
	}
}
