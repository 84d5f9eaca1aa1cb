package wire

import (
	"fmt"
	"testing"

	"google.golang.org/protobuf/proto"
)

// A world that shares its members with others arrives as one that does not.
func TestSharedMembersArrive(t *testing.T) {
	whole := &World{Generation: 7, Rank: 300, SyncRoot: 2, Seq: 9}
	var common World
	for i := range 500 {
		common.Hosts = append(common.Hosts, fmt.Sprint("host", i))
		common.Counts = append(common.Counts, 1)
		common.Indices = append(common.Indices, uint32(i))
	}
	members, err := EncodeMembers(&common)
	if err != nil {
		t.Fatal(err)
	}
	proto.Merge(whole, &common)
	shared := &World{Generation: 7, Rank: 300, SyncRoot: 2, Seq: 9}
	shared.Share(members)
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
		if name == "shared" && (len(data) != 2 || &data[1].ReadOnlyData()[0] != &members[0]) {
			t.Errorf("the members have been copied")
		}
	}
}
