package hosts

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/plan"
)

// TestHolds is a table of operators' commands by time, and of the slots available after each.
func TestHolds(t *testing.T) {
	begin := time.Unix(0, 0)
	forever := Cooldowns{Forever: true}
	for name, test := range map[string]struct {
		cfg   Cooldowns
		steps []string // "second what …", then "slots …", or "ended …" of the last
	}{
		"a slot for a time": {steps: []string{
			"0 hold a:1 until=5", "slots a:0 b:0 b:1", "4 expire", "ended", "next 5", "5 expire", "ended a:1", "slots a:0 a:1 b:0 b:1", "next never",
		}},
		"a host until it is readmitted, and then it is the youngest": {steps: []string{
			"0 hold a", "slots b:0 b:1", "next never", "1000 expire", "ended", "1000 readmit a", "ended a", "slots b:0 b:1 a:0 a:1",
		}},
		"a host for a time": {steps: []string{
			"0 hold a until=7", "slots b:0 b:1", "7 now", "slots b:0 b:1 a:0 a:1", "7 expire", "ended a", "slots b:0 b:1 a:0 a:1",
		}},
		"while it is listed": {steps: []string{
			"0 hold a listed", "0 hold b:1 listed", "slots b:0", "1 list a:2", "slots", "2 list b:2 a:2", "slots b:0 b:1",
		}},
		"whatever is listed": {steps: []string{
			"0 hold a", "1 list b:2", "2 list b:2 a:2", "slots b:0 b:1", "2 readmit a", "slots b:0 b:1 a:0 a:1",
		}},
		"a failure meanwhile outlasts it": {steps: []string{
			"0 hold a:1 until=1", "0 fail a:1", "0 now", "slots a:0 b:0 b:1", "1 expire", "ended a:1",
		}, cfg: Cooldowns{CooldownMin: time.Second, CooldownMax: time.Second}},
		"it outlasts a failure": {steps: []string{
			"0 hold a:1 until=3", "0 fail a:1", "1 expire", "ended", "3 expire", "ended a:1",
		}},
		"readmission ends failures, and all below a host": {steps: []string{
			"0 fail a:1", "0 hold a:0", "slots b:0 b:1", "1 readmit a", "ended a:0 a:1", "slots a:0 a:1 b:0 b:1", "1 readmit a", "ended",
		}, cfg: forever},
		"readmission of a slot": {steps: []string{
			"0 fail a:1", "0 hold a:0", "1 readmit a:0", "ended a:0", "slots a:0 b:0 b:1",
		}, cfg: forever},
		"readmission of a host that failed": {steps: []string{
			"0 fail a", "slots b:0 b:1", "1 readmit a", "ended a", "slots b:0 b:1 a:0 a:1",
		}, cfg: forever},
	} {
		t.Run(name, func(t *testing.T) {
			h := New(test.cfg)
			h.Update(begin, []plan.Host{{Name: "a", Slots: 2}, {Name: "b", Slots: 2}})
			now := begin
			var ended []string
			for _, step := range test.steps {
				words := strings.Fields(step)
				switch words[0] {
				case "slots":
					if got := fmt.Sprint(h.Available(now)); got != fmt.Sprint(words[1:]) {
						t.Errorf("%s: available are %v", step, got)
					}
				case "ended":
					if !slices.Equal(ended, words[1:]) {
						t.Errorf("%s: it was %q", step, ended)
					}
				case "next":
					got := "never"
					if at, ok := h.NextReturn(); ok {
						got = fmt.Sprint(at.Unix())
					}
					if got != words[1] {
						t.Errorf("%s: it is %s", step, got)
					}
				default:
					var second int64
					fmt.Sscan(words[0], &second)
					now = time.Unix(second, 0)
					ended = does(h, now, words[1], words[2:])
				}
			}
		})
	}
}

// does performs one step and returns the exclusions and holds that it ended.
func does(h *Table, now time.Time, what string, args []string) (ended []string) {
	hold := Hold{}
	if len(args) > 0 {
		host, index, of := strings.Cut(args[0], ":")
		if hold.Host = host; of {
			hold.Slot = new(int(index[0] - '0'))
		}
	}
	var gone []Exclusion
	switch what {
	case "list":
		hosts, _ := plan.ParseHosts(strings.Join(args, "\n"), 1)
		h.Update(now, hosts)
	case "hold":
		for _, more := range args[1:] {
			var second int64
			if n, _ := fmt.Sscanf(more, "until=%d", &second); n == 1 {
				hold.Until = time.Unix(second, 0)
			}
			hold.WhileListed = hold.WhileListed || more == "listed"
		}
		h.Hold(hold)
	case "fail":
		if hold.Slot == nil {
			h.ExcludeHost(now, hold.Host)
		} else {
			h.ExcludeSlot(now, plan.SlotID{Host: hold.Host, Index: *hold.Slot})
		}
	case "expire":
		gone = h.Expire(now)
	case "readmit":
		gone = h.Readmit(now, hold.Host, hold.Slot)
	}
	for _, x := range gone {
		if x.Slot == nil {
			ended = append(ended, x.Host)
		} else {
			ended = append(ended, plan.SlotID{Host: x.Host, Index: *x.Slot}.String())
		}
	}
	return ended
}
