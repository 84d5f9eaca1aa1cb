package e2e

import (
	"fmt"
	"testing"

	"github.com/hvdrun/hvdrun/test/steplog"
)

// TestLocalStateOutlivesItsWorker: the state of a single worker outlives it, as a copy if the
// worker is killed and by a handover if it leaves. The state waits for a new worker.
func TestLocalStateOutlivesItsWorker(t *testing.T) {
	for name, test := range map[string]struct {
		flags   []string
		hosts   []Stage
		trainer []string
		worlds  []steplog.World
	}{
		"killed": {
			[]string{"--commit-replicas", "1"},
			[]Stage{{Hosts: on(hostA, 2, hostB, 2)}, {Step: 8, Hosts: on(hostA, 2, hostB, 2, hostC, 1)}},
			[]string{"-exit", "127.0.0.1:1@step=5:kill", "-hold", "8"},
			[]steplog.World{
				{From: 1, To: 5, Generation: 1, Size: 4, Zero: "localhost:0"},
				{From: 6, To: 8, Generation: 2, Size: 3, Zero: "localhost:0"},
				{From: 9, To: 12, Generation: 3, Size: 4, Zero: "localhost:0"},
			},
		},
		"left": {
			nil,
			[]Stage{{Hosts: on(hostA, 2, hostB, 2)}, {Step: 4, Hosts: on(hostA, 1)}, {Step: 8, Hosts: on(hostA, 1, hostC, 3)}},
			[]string{"-hold", "4,8"},
			[]steplog.World{
				{From: 1, To: 4, Generation: 1, Size: 4, Zero: "localhost:0"},
				{From: 5, To: 8, Generation: 2, Size: 1, Zero: "localhost:0"},
				{From: 9, To: 12, Generation: 3, Size: 4, Zero: "localhost:0"},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			res := run(t, Job{
				Flags:   flags(append(test.flags, "-np", "4", "--min-np", "1")...),
				Stages:  test.hosts,
				Trainer: append(test.trainer, "-local", "-steps", "12"),
			}, test.worlds)
			for place := range 4 {
				says(t, res, fmt.Sprintf("own=%d step=12", place))
			}
		})
	}
}
