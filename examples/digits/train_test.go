package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/examples/digits/dataset"
	"github.com/hvdrun/hvdrun/examples/digits/network"
)

// TestTrainAlone runs the complete training in a world of one.
func TestTrainAlone(t *testing.T) {
	set, heldOut, err := dataset.Load()
	if err != nil {
		t.Fatal(err)
	}
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	o := options{epochs: 10, micro: 2, batch: 8, hidden: 24, rate: 0.02, seed: 1}

	w, err := elastic.Init(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	m := network.New(o.hidden, uint64(o.seed))
	if err := train(t.Context(), w, m, set, o, newDisplay(out, o.epochs, set.Len())); err != nil {
		t.Fatal(err)
	}
	if got := m.Accuracy(heldOut); got < 0.93 {
		t.Errorf("held-out accuracy %.4f, want at least 0.93", got)
	}
	text, err := os.ReadFile(out.Name())
	if err != nil {
		t.Fatal(err)
	}
	if lines := strings.Split(strings.TrimSpace(string(text)), "\n"); len(lines) != o.epochs ||
		!strings.HasPrefix(lines[0], "epoch 1  loss ") || !strings.Contains(lines[9], "epoch 10  loss 0.") {
		t.Errorf("printed:\n%s", text)
	}
}
