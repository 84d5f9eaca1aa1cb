package job

import (
	"fmt"
	"strings"
	"testing"
)

// TestReasons: each event that leads to another world becomes one short reason, with the event's
// own words.
func TestReasons(t *testing.T) {
	var r Reasons
	add := func(lines ...string) {
		t.Helper()
		for _, line := range lines {
			e, err := ParseEvent([]byte(`{"time":"2026-01-02T03:04:05Z",` + line + "}"))
			if err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			r.Add(e)
		}
	}
	takes := func(want ...string) {
		t.Helper()
		var got []string
		for _, reason := range r.Take() {
			got = append(got, fmt.Sprintf("%s: %s / %s", reason.Kind, reason.Why, reason.Text))
		}
		if a, b := strings.Join(got, "\n"), strings.Join(want, "\n"); a != b {
			t.Errorf("the reasons are\n%s\nwant\n%s", a, b)
		}
	}
	const (
		b0    = `"host":"b","slot":0,"rank":2,`
		world = `"event":"world_published","slots":[{"host":"a","slot":0},{"host":"b","slot":0}],"cause":`
	)
	add(`"event":"hosts_found","hosts":[{"host":"a","slots":1},{"host":"b","slots":1}]`, world+`"start"`)
	takes()
	dying, failed := `"event":"worker_dying",`+b0+`"signal":9,"what":"is killed"`, `"event":"worker_exited",`+b0+`"signal":9,"cause":"failed"`
	add(dying, dying, failed, `"event":"excluded","host":"b","slot":0,"until":"2026-01-02T03:05:05Z"`,
		`"event":"world_published","cause":"death","slots":[{"host":"a","slot":0},{"host":"c","slot":1}]`)
	takes("failure: rank 2 on b:0 was lost / rank 2 on b:0 is lost: is killed",
		"failure:  / rank 2 on b:0 failed: killed by signal 9",
		"excluded:  / b:0 is excluded for 1m0s",
		"other: c:1 is in its place / ")
	add(`"event":"worker_exited",`+b0+`"cause":"left"`, world+`"growth"`, `"event":"worker_exited",`+b0+`"cause":"left"`, failed)
	takes("other: rank 2 on b:0 left / ", "failure: rank 2 on b:0 failed (killed by signal 9) / rank 2 on b:0 failed: killed by signal 9")
	stalled := `"event":"stalled",` + b0 + `"what":"is silent"`
	add(stalled, `"event":"stall_ended",`+b0+`"seconds":1`, `"event":"worker_exited",`+b0+`"cause":"stopped"`)
	takes()
	add(stalled, dying, failed)
	takes("stall: rank 2 on b:0 was lost / rank 2 on b:0 is lost: is killed",
		"stall: rank 2 on b:0 held up the others / rank 2 on b:0 failed: killed by signal 9")
	add(`"event":"hosts_found","hosts":[{"host":"a","slots":2},{"host":"c","slots":1}]`, `"event":"hosts_updated","change":"mixed"`,
		`"event":"drain_asked","host":"a","slot":null`, `"event":"draining",`+b0+`"pid":1`, `"event":"returned","host":"b","slot":0`,
		`"event":"excluded","host":"a","slot":null,"until":null`, `"event":"scaled","min_np":2,"max_np":null`)
	takes("changed: a is now with 2 slots / ", "grown: c came / ", "shrunk: b went / ", "changed:  / slots were added and removed",
		"drained: a is drained / drain of a", "drained: rank 2 on b:0 was asked to leave / rank 2 on b:0 was asked to leave by its host",
		"grown: b:0 is back / ", "excluded: a is excluded / a is excluded",
		"scaled: workers allowed: 2 or more / workers allowed: 2 or more")
	add(world + `"broken"`)
	takes("other: a connection between workers broke / ")
}

// TestLateExit: the exit of a process that is not in the last world is not a reason for the next
// one.
func TestLateExit(t *testing.T) {
	var r Reasons
	for _, line := range []string{
		`"event":"world_published","cause":"start","slots":[{"host":"a","slot":0,"pid":10},{"host":"a","slot":1,"pid":11}]`,
		`"event":"worker_dying","host":"a","slot":1,"pid":11,"rank":1,"signal":9,"what":"is killed"`,
		`"event":"world_published","cause":"death","slots":[{"host":"a","slot":0,"pid":10}]`,
		"take",
		`"event":"worker_exited","host":"a","slot":1,"pid":11,"rank":1,"signal":9,"cause":"failed"`,
		`"event":"returned","host":"a","slot":1`,
		`"event":"world_published","cause":"growth","slots":[{"host":"a","slot":0,"pid":10},{"host":"a","slot":1,"pid":12}]`,
	} {
		if line == "take" {
			r.Take()
			continue
		}
		e, err := ParseEvent([]byte(`{"time":"2026-01-02T03:04:05Z",` + line + "}"))
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		r.Add(e)
	}
	if all := r.Take(); len(all) != 1 || all[0].Why != "a:1 is back" {
		t.Errorf("the reasons of the growth are %+v", all)
	}
}

// TestReasonsAreBounded: however many events there are, the number of reasons is bounded, and many
// hosts leave room for reasons with a text.
func TestReasonsAreBounded(t *testing.T) {
	var r Reasons
	r.Add(Entry{Name: HostsFound})
	hosts := make([]FoundHost, mostReasons+9)
	for i := range hosts {
		hosts[i] = FoundHost{Host: fmt.Sprint("h", i), Slots: 1}
	}
	r.Add(Entry{Name: HostsFound, Hosts: hosts})
	for i := range 2 * mostReasons {
		r.Add(Entry{Name: DrainAsked, Host: fmt.Sprint("d", i)})
		r.Add(Entry{Name: Stalled, Host: fmt.Sprint("s", i)})
	}
	r.Add(Entry{Name: HostsUpdated, Change: "added"})
	list := r.Take()
	if last := (Reason{Kind: KindGrown, Text: "slots were added"}); len(list) != 2*mostReasons+1 || list[len(list)-1] != last || len(r.stalled) != mostReasons {
		t.Errorf("%d reasons, the last %+v, and %d stalls", len(list), list[len(list)-1], len(r.stalled))
	}
}
