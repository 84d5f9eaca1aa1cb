package wire

import (
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec that sharing embeds
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Members are those of a world in the form in which they are sent. A thousand workers are each told of a thousand: what is
// the same for all is encoded once, and all answers share its bytes.
type Members []byte

// EncodeMembers returns what a world says, for World.Share; of its members, where it says nothing else.
func EncodeMembers(w *World) (Members, error) { return proto.Marshal(w) }

// Share gives the world its members. It keeps the bytes, which nobody may change any more, as fields that it does not know:
// whoever reads the message knows them.
func (w *World) Share(members Members) { w.ProtoReflect().SetUnknown([]byte(members)) }

// sharing is the codec of servers: of an answer whose world shares its members it copies only the rest.
type sharing struct{ encoding.CodecV2 }

func newSharing() encoding.CodecV2 { return sharing{encoding.GetCodecV2("proto")} }

const worldOfJoinReply protowire.Number = 1

func (s sharing) Marshal(v any) (mem.BufferSlice, error) {
	reply, _ := v.(*JoinReply)
	w := reply.GetWorld()
	members := w.ProtoReflect().GetUnknown()
	if len(members) == 0 {
		return s.CodecV2.Marshal(v)
	}
	own, err := proto.Marshal(&World{
		Generation: w.GetGeneration(), Rank: w.GetRank(), SyncRoot: w.GetSyncRoot(), Seq: w.GetSeq(),
	})
	if err != nil {
		return nil, err
	}
	head := protowire.AppendTag(nil, worldOfJoinReply, protowire.BytesType)
	head = protowire.AppendVarint(head, uint64(len(own)+len(members)))
	return mem.BufferSlice{mem.SliceBuffer(append(head, own...)), mem.SliceBuffer(members)}, nil
}
