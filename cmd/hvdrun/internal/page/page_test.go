package page

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/internal/dashboard"
)

// TestReadPage: the file of a page is refused unless it has two tokens that are secrets.
func TestReadPage(t *testing.T) {
	good := dashboard.NewTokens()
	d := &jobdir.Dir{Path: t.TempDir()}
	for _, c := range []struct {
		tokens dashboard.Tokens
		valid  bool
	}{
		{good, true},
		{dashboard.Tokens{}, false},
		{dashboard.Tokens{Read: good.Read, Write: "short"}, false},
		{dashboard.Tokens{Read: good.Read, Write: good.Read}, false},
	} {
		text, err := json.Marshal(pageFile{URL: "https://localhost:1", Addr: "127.0.0.1:1", Tokens: c.tokens})
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(d.PagePath(), text, 0o600); err != nil {
			t.Fatal(err)
		}
		if f, err := readPage(d); (err == nil) != c.valid || c.valid && f.Tokens != c.tokens {
			t.Errorf("%+v: %+v, %v", c.tokens, f, err)
		}
	}
}
