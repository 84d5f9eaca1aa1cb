// Package operation describes the calls of ranks: the actions, ops, algorithms and compressions of
// package collective, as used in frames and errors. It also selects the cheapest algorithm and
// combines elements. It is pure.
package operation

import (
	"fmt"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Action is the operation of the API that a rank has called.
type Action uint8

// The actions, and how many there are.
const (
	AllReduce Action = iota + 1
	Broadcast
	AllGather
	ReduceScatter
	AllToAll
	Barrier
	BroadcastBytes
	Subset
	Share // connects shared memory while a group is made
	AllReduceAsync
	AllGatherInto
	AllToAllInto
	ReduceTree
	BroadcastAsync
	AllGatherIntoAsync
	ReduceScatterIntoAsync
	Send
	Recv // Send on the receiver; it is never sent to other ranks
	Actions
)

var actionNames = [Actions]string{"", "AllReduce", "Broadcast", "AllGather", "ReduceScatter", "AllToAll", "Barrier",
	"BroadcastBytes", "Subset", "Connect", "AllReduceAsync", "AllGatherInto", "AllToAllInto", "ReduceTree",
	"BroadcastAsync", "AllGatherIntoAsync", "ReduceScatterIntoAsync", "Send", "Recv"}

// String returns the name of the action.
func (a Action) String() string {
	if a < Actions {
		return actionNames[a]
	}
	return fmt.Sprintf("operation %d", uint8(a))
}

// Wrap returns err, about the arguments or the context of a call of the action, as the error of the
// call.
func (a Action) Wrap(err error) error { return fmt.Errorf("collective: %s: %w", a, err) }

// Descriptor identifies what a rank has called, so that ranks notice different calls.
type Descriptor struct {
	Action    Action
	Type      kernel.Type
	Op        Op
	Algorithm Algorithm // of an AllReduce, where one is forced; with Refused, of any operation, where its arguments are refused
	Root      int32     // of broadcasts; the number of parts of an AllToAll, of ranks of a Subset; options of an AllReduceAsync; digest of a ReduceTree's nodes and length, of the counts of a ReduceScatter that has any
	Count     uint64    // elements; where lengths may differ, those of this sender to this receiver; digest of a Subset's list
}

// Refused is a bit in the Algorithm of a call whose arguments a rank refuses.
const Refused = 1 << 7

// ElsewhereBit is set in the Root of an AllReduceAsync whose vector is outside host memory.
const ElsewhereBit = 1 << 24

// CountsDiffer reports whether ranks may call the operation with different counts.
func (d Descriptor) CountsDiffer() bool {
	switch d.Action {
	case AllGather, AllToAll, BroadcastBytes, ReduceTree:
		return true
	}
	return false
}

// String returns the call as printed in errors.
func (d Descriptor) String() string {
	if d.Algorithm&Refused != 0 {
		d.Algorithm &^= Refused
		return d.String() + ", refused there"
	}
	name := d.Action.String()
	switch d.Action {
	case AllReduce:
		text := fmt.Sprintf("%s of %d %v (%v)", name, d.Count, d.Type, d.Op)
		if d.Algorithm != Auto {
			text += fmt.Sprintf(" by %v", d.Algorithm)
		}
		return text
	case ReduceTree:
		return fmt.Sprintf("%s of %v (%v, digest %08x)", name, d.Type, d.Op, uint32(d.Root))
	case ReduceScatter, ReduceScatterIntoAsync:
		text := fmt.Sprintf("%s of %d %v (%v)", name, d.Count, d.Type, d.Op)
		if d.Root != 0 {
			text += fmt.Sprintf(", counts %08x", uint32(d.Root))
		}
		return text
	case Broadcast, BroadcastAsync:
		return fmt.Sprintf("%s of %d %v from rank %d", name, d.Count, d.Type, d.Root)
	case AllGatherInto, AllToAllInto, AllGatherIntoAsync, Send, Recv:
		return fmt.Sprintf("%s of %d %v", name, d.Count, d.Type)
	case AllGather:
		return fmt.Sprintf("%s of %v", name, d.Type)
	case AllToAll:
		return fmt.Sprintf("%s of %d parts of %v", name, d.Root, d.Type)
	case BroadcastBytes:
		return fmt.Sprintf("%s from rank %d", name, d.Root)
	case AllReduceAsync:
		text := fmt.Sprintf("%s of %d %v (%v", name, d.Count, d.Type, d.Op)
		if c := Compression(d.Root & 0xff); c != NotCompressed {
			text += fmt.Sprintf(", %v on the wire", c)
		}
		if scales := d.Root >> 8 & 0xffff; scales != 0 {
			text += fmt.Sprintf(", scales %x", scales)
		}
		if d.Root&ElsewhereBit != 0 {
			text += ", not in memory"
		}
		return text + ")"
	case Subset:
		return fmt.Sprintf("%s of %d ranks (list %016x)", name, d.Root, d.Count)
	}
	return name
}

// Call returns the descriptor in the form used in frames.
func (d Descriptor) Call() frame.Call {
	return frame.Call{What: uint64(d.Action) | uint64(d.Type)<<8 | uint64(d.Op)<<16 | uint64(d.Algorithm)<<24 | uint64(uint32(d.Root))<<32,
		Count: d.Count}
}

// Called is the inverse of [Descriptor.Call].
func Called(c frame.Call) Descriptor {
	return Descriptor{Action: Action(c.What), Type: kernel.Type(c.What >> 8), Op: Op(c.What >> 16), Algorithm: Algorithm(c.What >> 24),
		Root: int32(c.What >> 32), Count: c.Count}
}

// Known reports whether the operation exists.
func (d Descriptor) Known() bool { return d.Action > 0 && d.Action < Actions && d.Type < kernel.Types }

// Bytes returns the size of this rank's tensor in bytes; 0 if it is not known beforehand.
func (d Descriptor) Bytes() int {
	if d.Action == Subset {
		return 0
	}
	return int(d.Count) * d.Type.Size()
}

// Judged returns the call as sent to the other ranks. A call that this rank refuses (invalid is not
// nil) matches no valid call, and no call that another rank refuses with a different descriptor.
func (d Descriptor) Judged(invalid error) Descriptor {
	if invalid != nil {
		d.Algorithm |= Refused
	}
	return d
}
