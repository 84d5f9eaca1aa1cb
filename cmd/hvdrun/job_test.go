package main

import (
	"io"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// A blank in place of a comma makes a host the command, which is told.
func TestHostsWithBlanks(t *testing.T) {
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	addFlags(fs, false)
	if err := fs.Parse([]string{"--np=1", "--hosts=127.0.0.1:1"}); err != nil {
		t.Fatal(err)
	}
	s, err := load(fs, nil)
	if err != nil {
		t.Fatal(err)
	}
	p := &program{stderr: io.Discard}
	if err := p.runJob(t.Context(), &s, []string{"127.0.0.3:1", "python3"}, nil); err == nil || !strings.Contains(err.Error(), "separated by commas") {
		t.Errorf("%v", err)
	}
}
