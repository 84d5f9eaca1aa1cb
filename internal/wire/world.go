package wire

import (
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec that sharing embeds
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Peers are those of a world in the form in which they are sent. A thousand workers are each told of a thousand: what is
// the same for all is encoded once, and all answers share its bytes.
type Peers []byte

// EncodePeers returns the peers for World.Share.
func EncodePeers(peers []*Peer) (Peers, error) { return proto.Marshal(&World{Peers: peers}) }

// Share gives the world its peers. It keeps the bytes, which nobody may change any more, as fields that it does not know:
// whoever reads the message knows them.
func (w *World) Share(peers Peers) { w.ProtoReflect().SetUnknown([]byte(peers)) }

// sharing is the codec of servers: of an answer whose world shares its peers it copies only the rest.
type sharing struct{ encoding.CodecV2 }

func newSharing() encoding.CodecV2 { return sharing{encoding.GetCodecV2("proto")} }

const worldOfJoinReply protowire.Number = 1

func (s sharing) Marshal(v any) (mem.BufferSlice, error) {
	reply, _ := v.(*JoinReply)
	w := reply.GetWorld()
	peers := w.ProtoReflect().GetUnknown()
	if len(peers) == 0 {
		return s.CodecV2.Marshal(v)
	}
	own, err := proto.Marshal(&World{
		Generation: w.GetGeneration(), Rank: w.GetRank(), SyncRoot: w.GetSyncRoot(), Seq: w.GetSeq(), Peers: w.GetPeers(),
	})
	if err != nil {
		return nil, err
	}
	head := protowire.AppendTag(nil, worldOfJoinReply, protowire.BytesType)
	head = protowire.AppendVarint(head, uint64(len(own)+len(peers)))
	return mem.BufferSlice{mem.SliceBuffer(append(head, own...)), mem.SliceBuffer(peers)}, nil
}
