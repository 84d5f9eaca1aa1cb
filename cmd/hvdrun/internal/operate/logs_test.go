package operate

import (
	"bytes"
	"testing"
)

// TestLinesThat: lines are selected by their beginning, however the writes are divided.
func TestLinesThat(t *testing.T) {
	const text = "[1]<stdout>:a\n[11]<stdout>:b\n\n[1\n[1]<stderr>:[2]<stdout>:c\nlog\n[1]<stdout>:no end"
	for begin, want := range map[string]string{
		"":     text,
		"[1]<": "[1]<stdout>:a\n[1]<stderr>:[2]<stdout>:c\n[1]<stdout>:no end",
		"[2]<": "",
	} {
		for cut := range len(text) {
			var out bytes.Buffer
			l := &linesThat{to: &out, begin: []byte(begin)}
			for _, part := range []string{text[:cut], text[cut : cut+1], text[cut+1:]} {
				if n, err := l.Write([]byte(part)); n != len(part) || err != nil {
					t.Fatalf("%d of %d bytes, %v", n, len(part), err)
				}
			}
			if out.String() != want {
				t.Fatalf("lines that begin %q, cut at %d: %q, want %q", begin, cut, out.String(), want)
			}
		}
	}
}
