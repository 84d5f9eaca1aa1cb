package wire

import (
	"fmt"
	"testing"

	"google.golang.org/protobuf/proto"
)

// A world that shares its peers with others arrives as one that does not.
func TestSharedPeersArrive(t *testing.T) {
	whole := &World{Generation: 7, Rank: 300, SyncRoot: 2, Seq: 9}
	for i := range 500 {
		whole.Peers = append(whole.Peers, &Peer{
			Host: fmt.Sprintf("host%d", i/8), Index: uint32(i % 8), LocalRank: uint32(i % 8), LocalSize: 8,
			DataAddresses: []string{fmt.Sprintf("10.0.0.%d:%d", i/8, 1000+i)},
		})
	}
	peers, err := EncodePeers(whole.Peers)
	if err != nil {
		t.Fatal(err)
	}
	shared := &World{Generation: 7, Rank: 300, SyncRoot: 2, Seq: 9}
	shared.Share(peers)
	codec := newSharing()
	for name, c := range map[string]struct{ sent, want *JoinReply }{
		"shared":    {&JoinReply{Outcome: &JoinReply_World{World: shared}}, &JoinReply{Outcome: &JoinReply_World{World: whole}}},
		"whole":     {&JoinReply{Outcome: &JoinReply_World{World: whole}}, &JoinReply{Outcome: &JoinReply_World{World: whole}}},
		"dismissal": {&JoinReply{Outcome: &JoinReply_Dismissal{Dismissal: 2}}, &JoinReply{Outcome: &JoinReply_Dismissal{Dismissal: 2}}},
		"nothing":   {&JoinReply{}, &JoinReply{}},
	} {
		data, err := codec.Marshal(c.sent)
		if err != nil {
			t.Fatal(err)
		}
		var got JoinReply
		if err := codec.Unmarshal(data, &got); err != nil || !proto.Equal(&got, c.want) {
			t.Errorf("%s: %v, %v", name, &got, err)
		}
		if name == "shared" && (len(data) != 2 || &data[1].ReadOnlyData()[0] != &peers[0]) {
			t.Errorf("the peers have been copied")
		}
	}
}
