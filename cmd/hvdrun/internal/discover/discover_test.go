package discover

import (
	"bytes"
	"testing"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
)

// TestUsedSlots: hosts with agents show which runs use their slots; a table without such a host has
// no columns for them.
func TestUsedSlots(t *testing.T) {
	local := understoodHost{Host: "localhost", Slots: 2, Local: true}
	for _, c := range []struct {
		hosts []understoodHost
		want  string
	}{
		{[]understoodHost{local}, `HOST       SLOTS  LOCAL
localhost  2      yes
hosts: 1, slots: 2
`},
		{[]understoodHost{
			local,
			{Host: "a", Slots: 4, Agent: true, Used: map[string]uint32{"r2": 1, "r1": 2}},
			{Host: "b", Slots: 1, Agent: true, Used: map[string]uint32{}, Draining: true},
			{Host: "c", Slots: 1, Agent: true},
		}, `HOST       SLOTS  LOCAL  USED  RUN
localhost  2      yes    -     -
a          4      agent  3     r1:2,r2:1
b          1      agent  0     -  draining
c          1      agent  -     -
hosts: 4, slots: 8
`},
	} {
		found := understood{Hosts: c.hosts}
		for _, h := range c.hosts {
			found.Slots += h.Slots
		}
		var out bytes.Buffer
		if err := printHosts(&cli.Program{Stdout: &out}, found, false); err != nil || out.String() != c.want {
			t.Errorf("%v; the table is\n%s", err, out.String())
		}
	}
}
