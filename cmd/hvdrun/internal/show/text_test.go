package show

import "testing"

func TestUsed(t *testing.T) {
	for _, c := range []struct {
		used        map[string]uint32
		slots, runs string
	}{
		{nil, "0", "-"},
		{map[string]uint32{"b": 3}, "3", "b"},
		{map[string]uint32{"b": 3, "a": 1}, "4", "a:1,b:3"},
	} {
		if slots, runs := Used(c.used); slots != c.slots || runs != c.runs {
			t.Errorf("%v: %s, %s", c.used, slots, runs)
		}
	}
}
