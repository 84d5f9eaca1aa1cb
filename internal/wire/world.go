package wire

import (
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec that sharing embeds
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// sharing is the codec of servers. Each of a thousand workers receives the thousand members of a
// world, so their encoding is shared by the answers instead of copied: its bytes must not change.
type sharing struct{ encoding.CodecV2 }

func newSharing() encoding.CodecV2 { return sharing{encoding.GetCodecV2("proto")} }

const (
	worldOfJoinReply protowire.Number = 1
	membersOfWorld   protowire.Number = 6
)

func (s sharing) Marshal(v any) (mem.BufferSlice, error) {
	reply, _ := v.(*JoinReply)
	w := reply.GetWorld()
	members := w.GetMembers()
	if len(members) == 0 {
		return s.CodecV2.Marshal(v)
	}
	own, err := proto.Marshal(&World{
		Generation: w.GetGeneration(), Rank: w.GetRank(), SyncRoot: w.GetSyncRoot(), Seq: w.GetSeq(), Size: w.GetSize(),
		DataKey: w.GetDataKey(), Store: w.GetStore(),
	})
	if err != nil {
		return nil, err
	}
	own = protowire.AppendTag(own, membersOfWorld, protowire.BytesType)
	own = protowire.AppendVarint(own, uint64(len(members)))
	head := protowire.AppendTag(nil, worldOfJoinReply, protowire.BytesType)
	head = protowire.AppendVarint(head, uint64(len(own)+len(members)))
	return mem.BufferSlice{mem.SliceBuffer(append(head, own...)), mem.SliceBuffer(members)}, nil
}
