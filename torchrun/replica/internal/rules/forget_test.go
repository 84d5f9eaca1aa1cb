package rules

import "testing"

// TestChangesAreForgotten: a leader drops the changes that all live members have, and a member that
// lacks dropped changes gets the whole copy.
func TestChangesAreForgotten(t *testing.T) {
	b := NewBallot(1, "a", []string{"a", "b", "c", "d"})
	b.Dead["d"] = true
	tenure := b.Begin("a")
	voters := map[string]*Voter{"b": {}, "c": {}}
	catchUp := func(member string) (whole bool) {
		q, upTo := tenure.Next(member)
		if !tenure.Answered(member, upTo, voters[member].Answer(*q)) || voters[member].Copy.Count != tenure.Copy.Count {
			t.Fatalf("%s has %d of %d changes", member, voters[member].Copy.Count, tenure.Copy.Count)
		}
		return q.Whole != nil
	}
	write := func() { tenure.Do(Change{File: "record", Value: []byte{1}}) }
	for range 10 * manyChanges {
		write()
		catchUp("b")
		if tenure.Copy.Count%(manyChanges/2) == 1 {
			if whole := catchUp("c"); whole != (tenure.Copy.Count == 1) {
				t.Fatalf("c gets the whole copy after %d changes: %v", tenure.Copy.Count, whole)
			}
		}
		if len(tenure.changes) > 2*manyChanges {
			t.Fatalf("after %d changes, %d are kept", tenure.Copy.Count, len(tenure.changes))
		}
	}
	tenure.Unreached("c", Evidence{})
	for range 2 * manyChanges {
		write()
		catchUp("b")
	}
	if len(tenure.changes) > manyChanges || !catchUp("c") {
		t.Errorf("%d changes are kept for a member that needs the whole copy", len(tenure.changes))
	}
	alone := NewBallot(1, "a", []string{"a"}).Begin("a")
	for range 3 * manyChanges {
		alone.Do(Change{File: "record"})
	}
	if len(alone.changes) > manyChanges {
		t.Errorf("a leader that is alone keeps %d changes", len(alone.changes))
	}
}
