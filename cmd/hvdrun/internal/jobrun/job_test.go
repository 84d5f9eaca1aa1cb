package jobrun

import (
	"io"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
)

// TestHostsWithBlanks: a blank instead of a comma turns a host into the command, which the error
// says.
func TestHostsWithBlanks(t *testing.T) {
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	settings.AddFlags(fs, false)
	if err := fs.Parse([]string{"--np=1", "--hosts=127.0.0.1:1"}); err != nil {
		t.Fatal(err)
	}
	s, err := settings.Load(fs, nil)
	if err != nil {
		t.Fatal(err)
	}
	p := &cli.Program{Stderr: io.Discard}
	if err := Run(t.Context(), p, &s, []string{"127.0.0.3:1", "python3"}, nil); err == nil || !strings.Contains(err.Error(), "separated by commas") {
		t.Errorf("%v", err)
	}
}
