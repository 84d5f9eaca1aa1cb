package wake_test

import (
	"testing"

	"github.com/hvdrun/hvdrun/internal/wake"
)

func TestFlag(t *testing.T) {
	isSet := func(f wake.Flag) bool {
		select {
		case <-f:
			return true
		default:
			return false
		}
	}
	f := wake.New()
	if isSet(f) {
		t.Error("a new flag is set")
	}
	for range 3 {
		f.Set()
	}
	if !isSet(f) || isSet(f) {
		t.Error("three calls of Set are not one value")
	}
	var none wake.Flag
	if none.Set(); isSet(none) {
		t.Error("a nil flag is set")
	}
}
