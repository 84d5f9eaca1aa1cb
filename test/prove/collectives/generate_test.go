package main

import (
	"encoding/json"
	"reflect"
	"slices"
	"testing"
)

// TestGenerate: the seed determines a program, which is within bounds, valid, and unchanged by
// JSON; the first few thousand programs cover all features.
func TestGenerate(t *testing.T) {
	seen := map[string]bool{}
	for seed := range uint64(2000) {
		p := generate(seed)
		if seed < 200 {
			q := new(program)
			text, err := json.Marshal(p)
			if err != nil || json.Unmarshal(text, q) != nil || q.String() != p.String() {
				t.Fatalf("seed %d is another program after JSON: %s", seed, text)
			}
			if !reflect.DeepEqual(p, generate(seed)) || q.tidy().String() != p.String() {
				t.Fatalf("seed %d has two programs", seed)
			}
		}
		bytes := 0
		for i := range p.Steps {
			s := &p.Steps[i]
			bytes += s.bytes() * len(p.members(s.Group))
			seen[s.Do], seen[s.mode()], seen[s.Type], seen[s.Op], seen[s.sizeClass()] = true, true, true, true, true
			if s.Wrong != nil {
				seen[s.Do+": "+s.Wrong.How] = true
			}
		}
		if bytes > mostBytes+mostBytes/4 || p.ranks() > 32 || len(p.Hosts) > 4 {
			t.Fatalf("seed %d is too large: %d bytes, hosts %v", seed, bytes, p.Hosts)
		}
		seen[p.transport()] = true
		for _, d := range p.Disturbed {
			seen[d.Kind] = true
		}
	}
	want := slices.Concat(operations, types, []string{"sum", "average", "min", "max", "product", "adasum", "shared memory",
		"shared memory and TCP", "shared memory and TLS", "TCP", "TLS", "in a subset", "in the background", "blocking", "refused on one",
		"refused on all", late, stop, abort, cancel, "0: 0 B", "1: to 64 B", "2: to 64 KiB", "3: to 1 MiB", "4: to 16 MiB", "5: to 64 MiB", "6: to 256 MiB"})
	for _, ways := range []map[string][]string{waysWrong, waysInvalid} {
		for do, all := range ways {
			for _, how := range all {
				want = append(want, do+": "+how)
			}
		}
	}
	for _, what := range want {
		if !seen[what] {
			t.Errorf("no program has %q", what)
		}
	}
}

// TestJudgeAborts: if a rank ends the groups, the others can fail because of that, but for no other
// reason.
func TestJudgeAborts(t *testing.T) {
	for _, c := range []struct {
		kind, class, want string
	}{
		{late, classAborted, classAborted}, {abort, classAborted, ""}, {cancel, classAborted, ""}, {abort, classWrong, classWrong},
		{abort, classOther, classOther}, {abort, "", ""},
	} {
		p := &program{Hosts: []int{2}, Steps: []step{{Do: barrier, Times: 1}}, Disturbed: []disturbance{{Kind: c.kind}}}
		r := &crew{program: p, ranks: []*member{{verdict: &verdict{Class: classAborted}}, {verdict: &verdict{Class: c.class}}}}
		if r.judge(); r.outcome.Class != c.want {
			t.Errorf("%s, a rank's error %q: judged %q", c.kind, c.class, r.outcome.Class)
		}
	}
}
