package shm

import (
	"errors"
	"fmt"
	"unsafe"
)

const (
	// maxMembers is the largest number of members of a segment.
	maxMembers = 512

	magic    = 0x6876647368610002 // includes the version of the layout
	page     = 4096
	hugePage = 2 << 20
	line     = 64
	cells    = 4  // number of cells of a member, used in turn
	payload  = 40 // bytes of data in a cell
	slots    = 2  // number of in slots, and of out slots, of a member, used in turn

	maxBank = 64 << 10  // largest bank, in bytes
	maxSlot = 4 << 20   // largest in slot or out slot, in bytes
	maxIn   = 512 << 20 // largest sum of the in slots of one turn, in bytes
)

// cell is one cache line: a member that sees seq also sees the rest.
type cell struct {
	data [payload]byte
	desc Desc
	seq  uint64
}

// header is the first page of a segment. Everything but abort and first is written before another
// process maps the segment.
type header struct {
	magic   uint64
	members uint64
	bank    uint64 // bytes of a bank
	in      uint64 // bytes of an in slot
	out     uint64 // bytes of an out slot
	nonce   [16]byte
	_       [128]byte
	abort   uint32
	first   uint32 // the number of the member that died first, from 1; 0 if none has died
	_       [120]byte
}

// control is what a member publishes to the others, except data.
type control struct {
	cells    [cells]spacedCell
	given    counter // number of rounds for which this member's in slot is filled
	reduced  counter // number of rounds for which it has reduced its part, or filled its out slot
	sleepers uint32  // number of members that sleep until a word of this one changes; written by them
	_        [124]byte
	relaxed  uint32 // whether the member can make the others' stores visible before it sleeps
	core     uint32 // core on which the member last ran, from 1; 0 if it is unknown
	_        [120]byte
	cores    cpuSet     // cores on which the member may run
	region   regionName // where the others find the member's arena
	robust   robustHead
	_        [104]byte
	wires    [maxMembers]wire // by watching member
}

// spacedCell and counter occupy two cache lines each, since processors fetch lines in pairs.
type spacedCell struct {
	cell
	_ [line]byte
}

type counter struct {
	word uint64
	_    [120]byte
}

// layout is the layout of a segment.
type layout struct {
	members       int
	bank, in, out int
}

// newLayout returns the layout for a number of members.
func newLayout(members int) layout {
	l := layout{members: members, bank: 16 << 10, out: 256 << 10}
	for l.out > line && (l.out*members > maxSlot || l.out*members*members > maxIn) {
		l.out /= 2
	}
	l.in = l.out * members
	return l
}

func (l layout) check() error {
	switch {
	case l.members < 1 || l.members > maxMembers:
		return fmt.Errorf("shm: the segment has %d members, and 1 to %d are allowed", l.members, maxMembers)
	case l.bank < max(line, 8*l.members) || l.bank > maxBank || l.bank%line != 0,
		l.out < line || l.out > maxSlot || l.out%line != 0,
		l.in < l.out*l.members || l.in > maxSlot || l.in%line != 0:
		return errors.New("shm: the sizes in the segment's header are not valid")
	}
	return nil
}

func pages(n int) int { return (n + page - 1) &^ (page - 1) }

// area returns the size of one member's area, in bytes.
func (l layout) area() int {
	return pages(int(unsafe.Sizeof(control{}))) + 2*pages(l.bank) + slots*(pages(l.in)+pages(l.out))
}

func (l layout) size() int { return page + l.members*l.area() }

// area is the memory of one member, by use.
type area struct {
	*control
	banks   [2][]byte
	in, out [slots][]byte
}

func (l layout) areaOf(memory []byte, index int) area {
	at := page + index*l.area()
	take := func(n int) []byte {
		b := memory[at : at+n : at+n]
		at += pages(n)
		return b
	}
	a := area{control: (*control)(unsafe.Pointer(unsafe.SliceData(take(int(unsafe.Sizeof(control{}))))))}
	for i := range a.banks {
		a.banks[i] = take(l.bank)
	}
	for i := range slots {
		a.in[i] = take(l.in)
		a.out[i] = take(l.out)
	}
	return a
}
