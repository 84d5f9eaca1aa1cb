package collective

import (
	"encoding/binary"
	"fmt"

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
	actions
)

var actionNames = [actions]string{"", "AllReduce", "Broadcast", "AllGather", "ReduceScatter", "AllToAll", "Barrier",
	"BroadcastBytes", "Subset", "Connect", "AllReduceAsync", "AllGatherInto", "AllToAllInto", "ReduceTree"}

// descriptor says what a rank has called, so that ranks that call different things notice.
type descriptor struct {
	action    action
	dtype     kernel.Type
	reduce    Op
	algorithm Algorithm // of an AllReduce, where one is forced; with refusedCall, of any operation, where its arguments are refused
	root      int32     // of broadcasts; the number of parts of an AllToAll, of ranks of a Subset; options of an AllReduceAsync; digest of a ReduceTree's nodes and length
	count     uint64    // elements; where lengths may differ, those of this sender to this receiver; digest of a Subset's list
}

// refusedCall is set in the algorithm of a call whose arguments a rank refuses.
const refusedCall = 1 << 7

// matches reports whether two ranks may call a and b together.
func (a descriptor) matches(b descriptor) bool {
	switch a.action {
	case allGatherAction, allToAllAction, broadcastBytesAction, reduceTreeAction:
		b.count = a.count
	}
	return a == b
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
	case reduceScatterAction:
		return fmt.Sprintf("%s of %d %v (%v)", name, a.count, a.dtype, a.reduce)
	case broadcastAction:
		return fmt.Sprintf("%s of %d %v from rank %d", name, a.count, a.dtype, a.root)
	case allGatherIntoAction, allToAllIntoAction:
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

func (a descriptor) append(b []byte) []byte {
	b = append(b, byte(a.action), byte(a.dtype), byte(a.reduce), byte(a.algorithm))
	b = binary.NativeEndian.AppendUint32(b, uint32(a.root))
	return binary.NativeEndian.AppendUint64(b, a.count)
}

const descriptorSize = 16

func parseDescriptor(b []byte) descriptor {
	return descriptor{action(b[0]), kernel.Type(b[1]), Op(b[2]), Algorithm(b[3]),
		int32(binary.NativeEndian.Uint32(b[4:])), binary.NativeEndian.Uint64(b[8:])}
}
