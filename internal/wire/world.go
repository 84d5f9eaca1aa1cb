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

// MarshalShared returns the encoding of a Sharer in two parts, and nothing for other messages.
func MarshalShared(m any) (own, shared []byte, err error) {
	if s, is := m.(Sharer); is {
		return s.MarshalShared()
	}
	return nil, nil, nil
}

func (s sharing) Marshal(v any) (mem.BufferSlice, error) {
	own, shared, err := MarshalShared(v)
	switch {
	case err != nil:
		return nil, err
	case len(shared) == 0:
		return s.CodecV2.Marshal(v)
	}
	return mem.BufferSlice{mem.SliceBuffer(own), mem.SliceBuffer(shared)}, nil
}
