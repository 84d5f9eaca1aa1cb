// Package plan is the vocabulary of hvdrun: who runs where, as pure values.
//
// It knows hosts, slots, worlds and how ranks are given to slots. It imports no other package of
// the project, starts nothing and reads no clock; every other package may import it.
package plan

import (
	"errors"
	"net"
	"strconv"
	"strings"
)

// Host is a machine by the name that discovery gave it, and how many workers it has room for. Two
// names of one machine are two hosts. A host of no slots is known but takes no worker now.
type Host struct {
	Name  string
	Slots int
	// Draining: the host is still there, but its workers shall leave at the next step boundary, and
	// none is started.
	Draining bool
}

// String returns "name:slots", with the name in brackets where it holds a colon itself.
func (h Host) String() string { return joinColon(h.Name, h.Slots) }

// SlotID names room for one worker: the slot's index on its host. It stays the same over all
// generations, whatever rank the slot gets, and names the device that its worker uses.
type SlotID struct {
	Host  string
	Index int
}

// String returns "host:index", with the host in brackets where it holds a colon itself.
func (id SlotID) String() string { return joinColon(id.Host, id.Index) }

// Slot is a slot with its place in a world.
//
// LocalRank counts the world's slots of the same host, LocalSize is their number. CrossRank counts
// the hosts that have a slot of the same LocalRank, CrossSize is their number.
type Slot struct {
	SlotID
	Rank, LocalRank, LocalSize, CrossRank, CrossSize int
}

// World is the ordered slots of one generation: Slots[r].Rank == r. The zero World is the one
// before the first, of generation 0 and without slots.
type World struct {
	Generation uint64
	Slots      []Slot
}

// Size is the number of ranks.
func (w World) Size() int { return len(w.Slots) }

// Change says what differs between two sets of slots: a set of bits, none of them set where nothing
// does.
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

// ErrNotEnoughSlots is returned by Assign where fewer slots are given than a world needs.
var ErrNotEnoughSlots = errors.New("plan: not enough slots")

func joinColon(name string, n int) string {
	if strings.Contains(name, ":") {
		return net.JoinHostPort(name, strconv.Itoa(n))
	}
	return name + ":" + strconv.Itoa(n)
}
