// Package plan defines the basic values of hvdrun: hosts, slots, worlds, and the assignment of
// ranks to slots.
//
// It imports no other package of the project, starts no goroutine and reads no clock. Every other
// package may import it.
package plan

import (
	"net"
	"strconv"
	"strings"
)

// Host is a machine, with its name from discovery and its number of slots. Two names of the same
// machine are two hosts. A host without slots is known but takes no workers.
type Host struct {
	Name  string
	Slots int
	// Draining: the host is still there, but its workers have to leave at the next step boundary
	// and none is started.
	Draining bool
}

// String returns "name:slots", with the name in brackets if it contains a colon.
func (h Host) String() string { return joinColon(h.Name, h.Slots) }

// SlotID identifies a slot, room for one worker, by host and index. The index is the same in all
// generations, whatever rank the slot has, and selects the device of its worker.
type SlotID struct {
	Host  string
	Index int
}

// String returns "host:index", with the host in brackets if it contains a colon.
func (id SlotID) String() string { return joinColon(id.Host, id.Index) }

// Slot is a slot with its ranks in a world.
//
// LocalRank counts the world's slots on the same host; LocalSize is their number. CrossRank counts
// the hosts that have a slot with the same LocalRank; CrossSize is their number.
type Slot struct {
	SlotID
	Rank, LocalRank, LocalSize, CrossRank, CrossSize int
}

// World is the ordered slots of a generation: Slots[r].Rank == r. The zero World, of generation 0
// and without slots, precedes the first.
type World struct {
	Generation uint64
	Slots      []Slot
}

// Size returns the number of ranks.
func (w World) Size() int { return len(w.Slots) }

// Change is the difference between two sets of slots, as a set of bits; 0: no difference.
type Change uint8

// The bits of a Change.
const (
	Added Change = 1 << iota
	Removed
)

// String returns "none", "added", "removed" or "mixed".
func (c Change) String() string {
	switch c & (Added | Removed) {
	case Added:
		return "added"
	case Removed:
		return "removed"
	case Added | Removed:
		return "mixed"
	}
	return "none"
}

func joinColon(name string, n int) string {
	if strings.Contains(name, ":") {
		return net.JoinHostPort(name, strconv.Itoa(n))
	}
	return name + ":" + strconv.Itoa(n)
}
