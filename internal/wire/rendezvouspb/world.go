// Package rendezvouspb has the messages between a worker and the driver.
package rendezvouspb

import (
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

const (
	worldOfJoinReply protowire.Number = 1
	membersOfWorld   protowire.Number = 6
)

// MarshalShared makes the encoding of the members that which all answers share, see wire.Sharer.
func (x *JoinReply) MarshalShared() (own, shared []byte, err error) {
	w := x.GetWorld()
	members := w.GetMembers()
	if len(members) == 0 {
		return nil, nil, nil
	}
	own, err = proto.Marshal(&World{
		Generation: w.GetGeneration(), Rank: w.GetRank(), SyncRoot: w.GetSyncRoot(), Seq: w.GetSeq(), Size: w.GetSize(),
		DataKey: w.GetDataKey(), Store: w.GetStore(), MembersNumber: w.GetMembersNumber(), Difference: w.GetDifference(),
	})
	if err != nil {
		return nil, nil, err
	}
	own = protowire.AppendTag(own, membersOfWorld, protowire.BytesType)
	own = protowire.AppendVarint(own, uint64(len(members)))
	head := protowire.AppendTag(nil, worldOfJoinReply, protowire.BytesType)
	head = protowire.AppendVarint(head, uint64(len(own)+len(members)))
	return append(head, own...), members, nil
}
