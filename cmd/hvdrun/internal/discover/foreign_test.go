package discover

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/clitest"
	"github.com/hvdrun/hvdrun/plan"
)

// TestForeignNames: names that hosts give themselves, and texts of sources of hosts, are printed
// escaped.
func TestForeignNames(t *testing.T) {
	for what, c := range map[string]struct {
		lines int
		print func(p *cli.Program) error
	}{
		"discover": {3, func(p *cli.Program) error {
			return printHosts(p, understood{Hosts: []understoodHost{{Host: clitest.Foreign}}}, false)
		}},
		"discover --watch": {0, func(p *cli.Program) error {
			w := &watchPrinter{out: p.Stdout, now: time.Now}
			w.failed(errors.New(clitest.Foreign), time.Second)
			w.found([]plan.Host{{Name: clitest.Foreign, Slots: 1}})
			return nil
		}},
		"discover --verify": {0, func(p *cli.Program) error {
			(&verifier{ctx: t.Context(), out: p.Stdout}).check("x", func() error { return errors.New(clitest.Foreign) })
			return nil
		}},
		"check": {0, func(p *cli.Program) error {
			return printChecked(p, []*checked{{Host: clitest.Foreign, Problems: []string{clitest.Foreign}}, {Host: "b", ok: true, Version: clitest.Foreign}})
		}},
	} {
		var out bytes.Buffer
		if err := c.print(&cli.Program{Stdout: &out, Stderr: &out}); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		clitest.Tame(t, what, out.String(), c.lines)
	}
}

// failingSource is a source whose error text is foreign, like that of a plugin.
type failingSource struct{}

func (failingSource) Discover(context.Context) ([]plan.Host, error) {
	return nil, errors.New(clitest.Foreign)
}

// TestForeignFailure: the error text of a source is printed escaped.
func TestForeignFailure(t *testing.T) {
	var out bytes.Buffer
	v := &verifier{ctx: t.Context(), out: &out, source: failingSource{}}
	v.first()
	clitest.Tame(t, "verify", out.String(), 0)
}
