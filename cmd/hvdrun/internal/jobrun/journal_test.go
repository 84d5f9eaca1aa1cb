package jobrun

import (
	"testing"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/internal/agent/client"
)

// files is a claim that keeps files in memory.
type files struct {
	Claim
	put map[string]string
}

func (f files) Put(name string, value []byte) { f.put[name] = string(value) }
func (f files) Sync() error                   { return nil }

// TestCopiedAgents: the copied list of agents does not grow with each agent that is started again.
func TestCopiedAgents(t *testing.T) {
	f := files{put: map[string]string{}}
	c := &Claimed{Claim: f}
	if err := c.putAgents(client.KnownAgent{Host: "a", PID: 1}, client.KnownAgent{Host: "b", PID: 2}); err != nil {
		t.Fatal(err)
	}
	if err := c.begun(client.KnownAgent{Host: "a", Addr: "a:1", PID: 3}); err != nil {
		t.Fatal(err)
	}
	const want = `{"Host":"b","Addr":"","PID":2,"Local":false}
{"Host":"a","Addr":"a:1","PID":3,"Local":false}
`
	if got := f.put[jobdir.CopiedAgents]; got != want {
		t.Errorf("the copy is\n%s\nwant\n%s", got, want)
	}
}
