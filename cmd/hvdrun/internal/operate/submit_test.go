package operate

import (
	"slices"
	"strings"
	"testing"
)

// TestCommandIsPassedOn: the command reaches its worker as it was typed, although Kubernetes
// replaces $(NAME) if it knows the variable, and $$ by $ (args of Container in its API).
func TestCommandIsPassedOn(t *testing.T) {
	for _, word := range []string{"plain", "$", "$$", "kill $$", "$(HOME)", "$$(HOME)", "$$$", "$HOME ${HOME}", "a$"} {
		s := submission{Image: "image", MinNP: 1, Slots: 1, GPUResource: "nvidia.com/gpu", User: 1, Grace: 90}
		if err := s.complete([]string{"sh", "-c", word}); err != nil {
			t.Fatal(err)
		}
		i := slices.Index(s.DriverArgs, "--")
		if got := expanded(s.DriverArgs[i+3]); got != word {
			t.Errorf("%q arrives as %q", word, got)
		}
	}
}

// expanded returns what Kubernetes makes of an argument in a container with the variable HOME.
func expanded(arg string) string {
	return strings.NewReplacer("$$", "$", "$(HOME)", "/root").Replace(arg)
}
