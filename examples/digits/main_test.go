package main

import (
	"os"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/test/sandbox"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m, nil)) }

func TestBar(t *testing.T) {
	if got, want := barOf(50, 200, 2, 0.25), "epoch 2  loss 0.2500  "+strings.Repeat("█", 10)+strings.Repeat("░", 30)+"  50 of 200 images"; got != want {
		t.Errorf("%q, not %q", got, want)
	}
}
