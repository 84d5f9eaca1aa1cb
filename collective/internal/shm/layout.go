package shm

import (
	"errors"
	"fmt"
	"unsafe"
)

const (
	// maxMembers is the most that a segment can have.
	maxMembers = 512

	magic    = 0x6876647368610002 // with the version of this layout
	page     = 4096
	hugePage = 2 << 20
	line     = 64
	cells    = 4  // of a member, used in turn
	payload  = 40 // bytes of data in a cell
	slots    = 2  // in and out slots of a member, used in turn

	maxBank = 64 << 10  // most bytes that are exchanged at once
	maxSlot = 4 << 20   // most bytes of an in slot or an out slot
	maxIn   = 512 << 20 // most bytes of all in slots of one turn
)

// cell is one line: a member that sees seq sees all the rest with it.
type cell struct {
	data [payload]byte
	desc Desc
	seq  uint64
}

// header is the first page of a segment. All but abort and first is written before another process
// maps it.
type header struct {
	magic   uint64
	members uint64
	bank    uint64 // bytes of a bank
	in      uint64 // bytes of an in slot
	out     uint64 // bytes of an out slot
	nonce   [16]byte
	_       [128]byte
	abort   uint32
	first   uint32 // the member that died first, from 1; 0: none has died
	_       [120]byte
}

// control is what a member tells the others, apart from data.
type control struct {
	cells    [cells]spacedCell
	given    counter // rounds of which this member's in slot is filled
	reduced  counter // rounds of which it has reduced its part, or filled its out slot
	sleepers uint32  // how many members sleep until a word of this one changes; they write it
	_        [124]byte
	relaxed  uint32 // whether the member can make the others' stores seen before it sleeps
	core     uint32 // on which the member was seen last, from 1; 0: not yet
	_        [120]byte
	cores    cpuSet // that the member may run on
	region   regionName
	robust   robustHead
	_        [104]byte
	wires    [maxMembers]wire // by watching member
}

// spacedCell and counter take two lines each, since processors fetch lines in pairs.
type spacedCell struct {
	cell
	_ [line]byte
}

type counter struct {
	word uint64
	_    [120]byte
}

// layout is where things are in a segment.
type layout struct {
	members       int
	bank, in, out int
}

// newLayout chooses the sizes.
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
		return fmt.Errorf("shm: %d members, not 1 to %d", l.members, maxMembers)
	case l.bank < max(line, 8*l.members) || l.bank > maxBank || l.bank%line != 0,
		l.out < line || l.out > maxSlot || l.out%line != 0,
		l.in < l.out*l.members || l.in > maxSlot || l.in%line != 0:
		return errors.New("shm: the sizes in the segment's header make no sense")
	}
	return nil
}

func pages(n int) int { return (n + page - 1) &^ (page - 1) }

// area is the size of one member's part.
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
