package wire

import (
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec that sharing embeds
	"google.golang.org/grpc/mem"
)

// sharing is the codec of servers. Each of a thousand workers receives the thousand members of a
// world, so their encoding is shared by the answers instead of copied: its bytes must not change.
type sharing struct{ encoding.CodecV2 }

func newSharing() encoding.CodecV2 { return sharing{encoding.GetCodecV2("proto")} }

// Sharer is a message of which other answers have a part. MarshalShared returns its encoding in two
// parts, of which the second is shared; nil where there is no such part.
type Sharer interface {
	MarshalShared() (own, shared []byte, err error)
}

func (s sharing) Marshal(v any) (mem.BufferSlice, error) {
	sharer, is := v.(Sharer)
	if !is {
		return s.CodecV2.Marshal(v)
	}
	own, shared, err := sharer.MarshalShared()
	if err != nil || len(shared) == 0 {
		if err != nil {
			return nil, err
		}
		return s.CodecV2.Marshal(v)
	}
	return mem.BufferSlice{mem.SliceBuffer(own), mem.SliceBuffer(shared)}, nil
}
