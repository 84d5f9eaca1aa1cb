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
func (x *JoinReply) MarshalShared() (own, shared []byte, err error) {
	w := x.GetWorld()
	field, shared := membersOfWorld, w.GetMembers()
	if len(shared) == 0 {
		field, shared = differenceOfWorld, w.GetDifference()
	}
	if len(shared) == 0 {
		return nil, nil, nil
	}
	own, err = proto.Marshal(&World{
		Generation: w.GetGeneration(), Rank: w.GetRank(), SyncRoot: w.GetSyncRoot(), Seq: w.GetSeq(), Size: w.GetSize(),
		DataKey: w.GetDataKey(), Store: w.GetStore(), MembersNumber: w.GetMembersNumber(),
	})
	if err != nil {
		return nil, nil, err
	}
	own = protowire.AppendTag(own, field, protowire.BytesType)
	own = protowire.AppendVarint(own, uint64(len(shared)))
	head := protowire.AppendTag(nil, worldOfJoinReply, protowire.BytesType)
	head = protowire.AppendVarint(head, uint64(len(own)+len(shared)))
	return append(head, own...), shared, nil
}
