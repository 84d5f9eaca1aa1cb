package discovery_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/plan"
)

// rack is a source of hosts: one method is enough.
type rack struct{ machines int }

func (r rack) Discover(context.Context) ([]plan.Host, error) {
	var hosts []plan.Host
	for i := range r.machines {
		hosts = append(hosts, plan.Host{Name: fmt.Sprintf("machine%d", i), Slots: 8})
	}
	return hosts, nil
}

func ExampleDiscoverer() {
	hosts, err := rack{machines: 2}.Discover(context.Background())
	fmt.Println(hosts, err)
	// Output: [machine0:8 machine1:8] <nil>
}

func ExampleScript() {
	script := discovery.Script{Command: "echo node1:8; echo node2", DefaultSlots: 1}
	hosts, err := script.Discover(context.Background())
	fmt.Println(hosts, err)
	// Output: [node1:8 node2:1] <nil>
}

// A Poll asks a source repeatedly, and passes on each list that differs from the last.
func ExamplePoll() {
	ctx, cancel := context.WithCancelCause(context.Background())
	poll := discovery.Poll{Source: rack{machines: 1}}
	err := poll.Run(ctx, func(hosts []plan.Host) {
		fmt.Println(hosts)
		cancel(errors.New("seen enough"))
	})
	fmt.Println(err)
	// Output:
	// [machine0:8]
	// seen enough
}

// Merge makes one list of several sources: the first source that names a host determines its slots.
func ExampleMerge() {
	all := discovery.Merge(
		discovery.Named{Name: "script", Source: discovery.Fixed{{Name: "a", Slots: 2}}},
		discovery.Named{Name: "plugin", Source: discovery.Fixed{{Name: "b", Slots: 1}, {Name: "a", Slots: 9}}},
	)
	hosts, err := all.Discover(context.Background())
	fmt.Println(hosts, err)
	// Output: [a:2 b:1] <nil>
}
