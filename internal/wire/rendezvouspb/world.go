// Package rendezvouspb has the messages between a worker and the driver.
package rendezvouspb

import (
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

const (
	worldOfJoinReply  protowire.Number = 1
	membersOfWorld    protowire.Number = 6
	differenceOfWorld protowire.Number = 10
)

// MarshalShared makes the encoding of the members, or of their difference, that which all answers
// share, see wire.Sharer.
func (x *World) MarshalShared() (own, shared []byte, err error) {
	rest := &World{
		Generation: x.GetGeneration(), Rank: x.GetRank(), SyncRoot: x.GetSyncRoot(), Seq: x.GetSeq(), Size: x.GetSize(),
		DataKey: x.GetDataKey(), Store: x.GetStore(), MembersNumber: x.GetMembersNumber(),
	}
	field, shared := membersOfWorld, x.GetMembers()
	if len(shared) > 0 {
		rest.Difference = x.GetDifference()
	} else {
		field, shared = differenceOfWorld, x.GetDifference()
	}
	if len(shared) == 0 {
		return nil, nil, nil
	}
	if own, err = proto.Marshal(rest); err != nil {
		return nil, nil, err
	}
	own = protowire.AppendTag(own, field, protowire.BytesType)
	return protowire.AppendVarint(own, uint64(len(shared))), shared, nil
}

// MarshalShared is that of the world, if that is all.
func (x *JoinReply) MarshalShared() (own, shared []byte, err error) {
	if x.GetLast() || x.GetWiden() {
		return nil, nil, nil
	}
	world, shared, err := x.GetWorld().MarshalShared()
	if err != nil || len(shared) == 0 {
		return nil, nil, err
	}
	own = protowire.AppendTag(nil, worldOfJoinReply, protowire.BytesType)
	own = protowire.AppendVarint(own, uint64(len(world)+len(shared)))
	return append(own, world...), shared, nil
}
