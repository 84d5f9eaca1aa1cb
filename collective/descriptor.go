package collective

import (
	"fmt"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// action is the operation of the API that a rank has called.
type action uint8

const (
	allReduceAction action = iota + 1
	broadcastAction
	allGatherAction
	reduceScatterAction
	allToAllAction
	barrierAction
	broadcastBytesAction
	subsetAction
	shareAction // of memory, while a group is made
	allReduceAsyncAction
	allGatherIntoAction
	allToAllIntoAction
	reduceTreeAction
	broadcastAsyncAction
	allGatherIntoAsyncAction
	reduceScatterIntoAsyncAction
	sendAction
	recvAction // sendAction as the receiver knows it; ranks do not tell each other of it
	actions
)

var actionNames = [actions]string{"", "AllReduce", "Broadcast", "AllGather", "ReduceScatter", "AllToAll", "Barrier",
	"BroadcastBytes", "Subset", "Connect", "AllReduceAsync", "AllGatherInto", "AllToAllInto", "ReduceTree",
	"BroadcastAsync", "AllGatherIntoAsync", "ReduceScatterIntoAsync", "Send", "Recv"}

// descriptor says what a rank has called, so that ranks that call different things notice.
type descriptor struct {
	action    action
	dtype     kernel.Type
	reduce    Op
	algorithm Algorithm // of an AllReduce, where one is forced; with refusedCall, of any operation, where its arguments are refused
	root      int32     // of broadcasts; the number of parts of an AllToAll, of ranks of a Subset; options of an AllReduceAsync; digest of a ReduceTree's nodes and length, of the counts of a ReduceScatter that has any
	count     uint64    // elements; where lengths may differ, those of this sender to this receiver; digest of a Subset's list
}

// refusedCall is set in the algorithm of a call whose arguments a rank refuses.
const refusedCall = 1 << 7

// countsDiffer reports whether ranks may call it together with different counts.
func (a descriptor) countsDiffer() bool {
	switch a.action {
	case allGatherAction, allToAllAction, broadcastBytesAction, reduceTreeAction:
		return true
	}
	return false
}

// String is the call as errors print it.
func (a descriptor) String() string {
	if a.algorithm&refusedCall != 0 {
		a.algorithm &^= refusedCall
		return a.String() + ", refused there"
	}
	name := fmt.Sprintf("operation %d", a.action)
	if a.action < actions {
		name = actionNames[a.action]
	}
	switch a.action {
	case allReduceAction:
		text := fmt.Sprintf("%s of %d %v (%v)", name, a.count, a.dtype, a.reduce)
		if a.algorithm != Auto {
			text += fmt.Sprintf(" by %v", a.algorithm)
		}
		return text
	case reduceTreeAction:
		return fmt.Sprintf("%s of %v (%v, digest %08x)", name, a.dtype, a.reduce, uint32(a.root))
	case reduceScatterAction, reduceScatterIntoAsyncAction:
		text := fmt.Sprintf("%s of %d %v (%v)", name, a.count, a.dtype, a.reduce)
		if a.root != 0 {
			text += fmt.Sprintf(", counts %08x", uint32(a.root))
		}
		return text
	case broadcastAction, broadcastAsyncAction:
		return fmt.Sprintf("%s of %d %v from rank %d", name, a.count, a.dtype, a.root)
	case allGatherIntoAction, allToAllIntoAction, allGatherIntoAsyncAction, sendAction, recvAction:
		return fmt.Sprintf("%s of %d %v", name, a.count, a.dtype)
	case allGatherAction:
		return fmt.Sprintf("%s of %v", name, a.dtype)
	case allToAllAction:
		return fmt.Sprintf("%s of %d parts of %v", name, a.root, a.dtype)
	case broadcastBytesAction:
		return fmt.Sprintf("%s from rank %d", name, a.root)
	case allReduceAsyncAction:
		text := fmt.Sprintf("%s of %d %v (%v", name, a.count, a.dtype, a.reduce)
		if c := Compression(a.root & 0xff); c != CompressNone {
			text += fmt.Sprintf(", %v on the wire", c)
		}
		if scales := a.root >> 8 & 0xffff; scales != 0 {
			text += fmt.Sprintf(", scales %x", scales)
		}
		if a.root&elsewhereBit != 0 {
			text += ", not in memory"
		}
		return text + ")"
	case subsetAction:
		return fmt.Sprintf("%s of %d ranks (list %016x)", name, a.root, a.count)
	}
	return name
}

// call is the descriptor as frames have it.
func (a descriptor) call() frame.Call {
	return frame.Call{What: uint64(a.action) | uint64(a.dtype)<<8 | uint64(a.reduce)<<16 | uint64(a.algorithm)<<24 | uint64(uint32(a.root))<<32,
		Count: a.count}
}

// called is the inverse of call.
func called(c frame.Call) descriptor {
	return descriptor{action: action(c.What), dtype: kernel.Type(c.What >> 8), reduce: Op(c.What >> 16), algorithm: Algorithm(c.What >> 24),
		root: int32(c.What >> 32), count: c.Count}
}

// known reports whether there is such an operation.
func (a descriptor) known() bool { return a.action > 0 && a.action < actions && a.dtype < kernel.Types }
