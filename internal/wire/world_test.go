package wire

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/wire/rendezvouspb"
)

// A world with shared members is encoded like one without.
func TestSharedMembersArrive(t *testing.T) {
	members := []byte("somebody")
	world := &rendezvouspb.World{Generation: 7, Rank: 300, SyncRoot: 2, Seq: 9, Size: 500, Members: members, DataKey: []byte("key"), Store: 3, MembersNumber: 5, Difference: []byte("change")}
	fields := world.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		if !world.ProtoReflect().Has(fields.Get(i)) {
			t.Errorf("the test leaves %s out", fields.Get(i).Name())
		}
	}
	change := &rendezvouspb.World{Generation: 8, Difference: []byte("change")}
	codec := newSharing()
	for name, sent := range map[string]*rendezvouspb.JoinReply{
		"shared":    {Outcome: &rendezvouspb.JoinReply_World{World: world}},
		"change":    {Outcome: &rendezvouspb.JoinReply_World{World: change}},
		"last":      {Outcome: &rendezvouspb.JoinReply_World{World: world}, Last: true},
		"lonely":    {Outcome: &rendezvouspb.JoinReply_World{World: &rendezvouspb.World{Generation: 7}}},
		"dismissal": {Outcome: &rendezvouspb.JoinReply_Dismissal{Dismissal: 2}},
		"nothing":   {},
	} {
		data, err := codec.Marshal(sent)
		if err != nil {
			t.Fatal(err)
		}
		var got rendezvouspb.JoinReply
		if err := codec.Unmarshal(data, &got); err != nil || !proto.Equal(&got, sent) {
			t.Errorf("%s: %v, %v", name, &got, err)
		}
		if name == "shared" && (len(data) != 2 || &data[1].ReadOnlyData()[0] != &members[0]) {
			t.Errorf("the members have been copied")
		}
	}
	data, err := codec.Marshal(world)
	if err != nil {
		t.Fatal(err)
	}
	var got rendezvouspb.World
	if err := codec.Unmarshal(data, &got); err != nil || !proto.Equal(&got, world) || len(data) != 2 {
		t.Errorf("%v, %v", &got, err)
	}
}
