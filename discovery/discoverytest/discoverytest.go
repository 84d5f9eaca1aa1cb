// Package discoverytest tests whether an implementation of discovery.Discoverer keeps the promises
// of the interface.
//
// Run tests every implementation. RunDraining, RunFailing and RunChanging test implementations
// whose source a test can make drain, fail or change.
package discoverytest

import (
	"fmt"
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/discovery/conformance"
	"github.com/hvdrun/hvdrun/plan"
)

// Run tests a Discoverer. newD returns a Discoverer that must find the given hosts, in this order,
// during the test. It is called with several lists, including an empty one. If the Discoverer is a
// discovery.Watcher, Run tests that too, unless its Watch returns discovery.ErrNoWatch.
func Run(t *testing.T, newD func(t *testing.T, hosts []plan.Host) discovery.Discoverer) {
	for _, l := range lists() {
		t.Run(l.name, func(t *testing.T) { run(t, newD, l.hosts) })
	}
}

// RunDraining is like Run, with draining hosts.
func RunDraining(t *testing.T, newD func(t *testing.T, hosts []plan.Host) discovery.Discoverer) {
	run(t, newD, []plan.Host{{Name: "a", Slots: 2}, {Name: "b", Slots: 2, Draining: true}, {Name: "c", Draining: true}})
}

func run(t *testing.T, newD func(t *testing.T, hosts []plan.Host) discovery.Discoverer, hosts []plan.Host) {
	for _, p := range conformance.All() {
		t.Run(p.Name, func(t *testing.T) {
			if err := p.Check(newD(t, slices.Clone(hosts)), hosts); err != nil {
				t.Error(err)
			}
		})
	}
}

// RunFailing tests that a Discoverer returns an error if it cannot find its hosts, or some of them.
// newD returns a Discoverer of such a source.
func RunFailing(t *testing.T, newD func(t *testing.T) discovery.Discoverer) {
	if err := conformance.Fails(newD(t)); err != nil {
		t.Error(err)
	}
}

// RunChanging tests that a Discoverer follows its hosts. newD returns a Discoverer that finds no
// host, and a function that sets the hosts of its source, in this order, before it returns.
func RunChanging(t *testing.T, newD func(t *testing.T) (d discovery.Discoverer, set func([]plan.Host))) {
	d, set := newD(t)
	a, b, c := plan.Host{Name: "a", Slots: 1}, plan.Host{Name: "b", Slots: 2}, plan.Host{Name: "c", Slots: 3}
	more := plan.Host{Name: "b", Slots: 4}
	if err := conformance.Changes(d, set, []plan.Host{b}, []plan.Host{b, c, a}, []plan.Host{more, c, a},
		[]plan.Host{more, a}, nil, []plan.Host{c, a, b}); err != nil {
		t.Error(err)
	}
}

type hostList struct {
	name  string
	hosts []plan.Host
}

func lists() []hostList {
	many := make([]plan.Host, 500)
	for i := range many {
		// Neither sorted by name nor in the order of any hash.
		many[i] = plan.Host{Name: fmt.Sprintf("rack-%d.node_%d.example", i*7919%500, i), Slots: i % 9}
	}
	return []hostList{
		{"no hosts", nil},
		{"one host", []plan.Host{{Name: "localhost", Slots: 4}}},
		{"some hosts", []plan.Host{{Name: "z", Slots: 1}, {Name: "10.0.0.7", Slots: 8}, {Name: "fe80::1%eth0", Slots: 2},
			{Name: "a", Slots: 0}, {Name: "2001:db8::1:4", Slots: 1}}},
		{"many hosts", many},
	}
}
