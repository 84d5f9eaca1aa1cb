package plan_test

import (
	"errors"
	"fmt"

	"github.com/hvdrun/hvdrun/plan"
)

// A discovery script prints one host per line, with or without slots.
func ExampleParseHosts() {
	hosts, err := plan.ParseHosts("node1:8\nnode2 slots=4 # new\nnode3\n", 2)
	fmt.Println(hosts, err)

	_, err = plan.ParseHosts("node1:many\n", 2)
	var wrong *plan.ParseError
	fmt.Println(errors.As(err, &wrong))
	// Output:
	// [node1:8 node2:4 node3:2] <nil>
	// true
}

func ExampleChange() {
	fmt.Println(plan.Added, plan.Removed, plan.Added|plan.Removed)
	// Output: added removed mixed
}
