package queue

import (
	"fmt"
	"slices"
	"strings"
)

// Unit is one whole of a resource: amounts are in thousandths.
const Unit = 1000

// Amount is so much of a resource.
type Amount struct {
	Name  string
	Milli int64
}

// Demand is what a task takes of its worker while it runs, by name. It is not changed.
type Demand []Amount

// MakeDemand returns a demand in the order of its names, without zeros.
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

func (d Demand) key() string { return d.String() }

// CPU is the resource of processors, which each task needs unless it says otherwise, and which a
// function lends while it waits for other tasks.
const CPU = "cpu"

// String returns the demand as people write it: cpu=1,gpu=0.5.
func (d Demand) String() string {
	var all []string
	for _, a := range d {
		all = append(all, a.Name+"="+strings.TrimSuffix(strings.TrimRight(fmt.Sprintf("%d.%03d", a.Milli/Unit, a.Milli%Unit), "0"), "."))
	}
	return strings.Join(all, ",")
}

// fits returns whether the amounts hold the demand so many times.
func (d Demand) fits(free map[string]int64, times int64) bool {
	for _, a := range d {
		if free[a.Name] < a.Milli*times {
			return false
		}
	}
	return true
}

// take removes the demand from the amounts; a negative number of times gives it back.
func (d Demand) take(from map[string]int64, times int64) {
	for _, a := range d {
		from[a.Name] -= a.Milli * times
	}
}

// room returns how many tasks with the demand the amounts hold at once.
func (d Demand) room(offers map[string]int64) int {
	room := int64(1 << 20)
	for _, a := range d {
		room = min(room, offers[a.Name]/a.Milli)
	}
	return int(room)
}
