package queue

import (
	"fmt"
	"slices"
	"strings"
)

// Unit is one whole unit of a resource, because amounts are in thousandths.
const Unit = 1000

// Amount is an amount of a resource.
type Amount struct {
	Name  string
	Milli int64
}

// Demand lists the amounts that a task uses of its worker's resources while it runs, by name. A
// Demand is immutable.
type Demand []Amount

// MakeDemand returns a demand with the given amounts, sorted by name, without zeros.
func MakeDemand(of map[string]int64) Demand {
	var d Demand
	for name, n := range of {
		if n > 0 {
			d = append(d, Amount{name, n})
		}
	}
	slices.SortFunc(d, func(a, b Amount) int { return strings.Compare(a.Name, b.Name) })
	return d
}

// CPU is the resource of processors. Each task needs it unless its options say otherwise, and a
// function lends it while it waits for other tasks.
const CPU = "cpu"

// String returns the demand in the syntax for users: cpu=1,gpu=0.5.
func (d Demand) String() string {
	var all []string
	for _, a := range d {
		all = append(all, a.Name+"="+strings.TrimSuffix(strings.TrimRight(fmt.Sprintf("%d.%03d", a.Milli/Unit, a.Milli%Unit), "0"), "."))
	}
	return strings.Join(all, ",")
}

// Fits reports whether the free amounts suffice for the demand.
func (d Demand) Fits(free map[string]int64) bool {
	return !slices.ContainsFunc(d, func(a Amount) bool { return free[a.Name] < a.Milli })
}

// take subtracts the demand from the amounts the given number of times. A negative number of times
// adds it.
func (d Demand) take(from map[string]int64, times int64) {
	for _, a := range d {
		from[a.Name] -= a.Milli * times
	}
}

// room returns how many tasks with the demand can run at once on the offered amounts.
func (d Demand) room(offers map[string]int64) int {
	room := int64(1 << 20)
	for _, a := range d {
		room = min(room, offers[a.Name]/a.Milli)
	}
	return int(room)
}
