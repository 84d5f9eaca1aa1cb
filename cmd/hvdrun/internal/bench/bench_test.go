package bench

import (
	"fmt"
	"testing"

	"github.com/hvdrun/hvdrun/plan"
)

// TestBenchHosts: the ranks are on the expected hosts, in the expected numbers.
func TestBenchHosts(t *testing.T) {
	hosts := []plan.Host{{Name: "a", Slots: 2}, {Name: "b"}, {Name: "c", Slots: 4, Draining: true}, {Name: "d", Slots: 3}}
	for _, c := range []struct {
		np   int
		want string
	}{
		{0, "[{a 2 false} {d 3 false}] 5"},
		{1, "[{a 1 false}] 1"},
		{2, "[{a 2 false}] 2"},
		{4, "[{a 2 false} {d 2 false}] 4"},
		{9, "[{a 2 false} {d 3 false}] 5"},
	} {
		used, ranks := benchHosts(hosts, c.np)
		got := "["
		for i, h := range used {
			if i > 0 {
				got += " "
			}
			got += fmt.Sprintf("{%s %d %v}", h.Name, h.Slots, h.Draining)
		}
		if got = fmt.Sprintf("%s] %d", got, ranks); got != c.want {
			t.Errorf("%d: %s, want %s", c.np, got, c.want)
		}
	}
	if hosts[0].Slots != 2 || hosts[3].Slots != 3 {
		t.Errorf("the list has changed: %v", hosts)
	}
}

// TestUnprefixed: the prefixes of a job's output are removed, so that it is the same as that of the
// command alone.
func TestUnprefixed(t *testing.T) {
	var u unprefixed
	for _, line := range []string{"[0]<stdout>:4\t10\t1\t2\t3\n", "[12]<stderr>:terminate called\n", "what(): <stdout>\n"} {
		if n, err := u.Write([]byte(line)); n != len(line) || err != nil {
			t.Errorf("%q: %d, %v", line, n, err)
		}
	}
	if want := "4\t10\t1\t2\t3\nterminate called\nwhat(): <stdout>\n"; u.text.String() != want {
		t.Errorf("%q, want %q", u.text.String(), want)
	}
}
