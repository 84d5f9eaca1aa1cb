package launch

import (
	"os"
	"strings"
	"testing"
	"time"
)

// TestLastWordsAreReadAfterTheBound: output is read even if the time to wait for it is over before
// the first read, as with a slow reader, and the other end stays open.
func TestLastWordsAreReadAfterTheBound(t *testing.T) {
	var out strings.Builder
	p, err := newPipes(nil, &out, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.closeChild()
	holder := os.NewFile(p.child[1], "child's end")
	p.child = []uintptr{p.child[0], p.child[2]}
	defer holder.Close()
	if _, err := holder.WriteString("last words"); err != nil {
		t.Fatal(err)
	}
	for _, c := range p.copiers {
		if err := c.from.SetReadDeadline(time.Unix(1, 0)); err != nil {
			t.Fatal(err)
		}
	}
	p.start()
	<-p.done
	if out.String() != "last words" {
		t.Fatalf("got %q", out.String())
	}
}
