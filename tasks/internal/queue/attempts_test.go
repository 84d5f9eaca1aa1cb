package queue

import (
	"math/rand/v2"
	"testing"
)

// TestAttempts: which attempts count, and after which ones another attempt follows.
func TestAttempts(t *testing.T) {
	of := limits{retries: 2, deaths: 3, lacked: 2}
	again := of
	again.again = true
	type end struct {
		how     ending
		another bool
		why     Failure
	}
	for name, c := range map[string]struct {
		of   limits
		ends []end
	}{
		"an attempt that was taken back counts for nothing": {of, []end{{takenBack, true, None}, {takenBack, true, None}, {takenBack, true, None}, {takenBack, true, None}}},
		"lost workers, until they are the task's fault":     {of, []end{{workerLost, true, Lost}, {workerLost, true, Lost}, {workerLost, false, Poison}}},
		"lost workers, until the retries are spent":         {limits{retries: 1, deaths: 3}, []end{{workerLost, true, Lost}, {workerLost, false, Lost}}},
		"a function that fails":                             {of, []end{{functionFailed, false, None}}},
		"a function that may fail":                          {again, []end{{functionFailed, true, None}, {functionFailed, true, None}, {functionFailed, false, None}}},
		"failures and losses spend the same retries":        {again, []end{{functionFailed, true, None}, {workerLost, true, Lost}, {functionFailed, false, None}}},
		"arguments that are nowhere, which spend no retry":  {of, []end{{inputGone, true, None}, {inputGone, true, None}, {inputGone, false, Gone}}},
		"an attempt that is complete":                       {again, []end{{completed, false, None}}},
	} {
		var a attempts
		for i, e := range c.ends {
			if another, why := a.ended(e.how, c.of); another != e.another || why != e.why {
				t.Errorf("%s: attempt %d: %v, %d; want %v, %d", name, i, another, why, e.another, e.why)
			}
		}
	}
}

// TestAttemptsEnd: no task has more attempts than its limits allow, however the attempts end;
// attempts that are taken back do not count.
func TestAttemptsEnd(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 1000 {
		of := limits{retries: r.IntN(5), again: r.IntN(2) == 0, deaths: 1 + r.IntN(4), lacked: r.IntN(4)}
		var a attempts
		counted := 0
		for another := true; another; {
			how := ending(r.IntN(int(inputGone) + 1))
			if another, _ = a.ended(how, of); how != takenBack {
				counted++
			}
		}
		if most := 1 + of.retries + of.lacked; counted > most || int(a.deaths) > of.deaths || int(a.tries) > of.retries {
			t.Fatalf("%d attempts, %+v, of %+v", counted, a, of)
		}
	}
}
