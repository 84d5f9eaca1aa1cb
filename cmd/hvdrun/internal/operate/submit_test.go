package operate

import (
	"slices"
	"strings"
	"testing"
)

// TestCommandIsPassedOn: the command reaches its worker as it was typed. Kubernetes replaces
// $(NAME) where it knows the variable, and $$ by $ (the Container's args in its API).
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

// expanded is what Kubernetes makes of an argument in a container with the variable HOME.
func expanded(arg string) string {
	return strings.NewReplacer("$$", "$", "$(HOME)", "/root").Replace(arg)
}
