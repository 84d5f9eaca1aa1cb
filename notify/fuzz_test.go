package notify

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/wire/notifypb"
	"github.com/hvdrun/hvdrun/plan"
)

// FuzzHostsUpdated: for any request, the number of the latest update and the generation of the loss
// never decrease.
func FuzzHostsUpdated(f *testing.F) {
	for _, req := range []*notifypb.HostsUpdatedRequest{
		{Seq: 5, Change: uint32(plan.Added), Generation: 3},
		{Seq: 4, Change: 4},
		{LostGeneration: 3, LostRanks: []uint32{1, 2}},
	} {
		b, err := proto.Marshal(req)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		s := NewService(nil)
		s.hear(Update{Seq: 4, Generation: 2})
		s.hearLoss(Loss{Generation: 2, Ranks: []int{0}})
		var req notifypb.HostsUpdatedRequest
		if proto.Unmarshal(b, &req) != nil {
			return
		}
		_, err := handler{s: s}.HostsUpdated(t.Context(), &req)
		u := s.Latest()
		loss, _ := s.Loss()
		if u.Seq < 4 || u.Change&^(plan.Added|plan.Removed) != 0 || loss.Generation < 2 || loss.Generation == 2 && len(loss.Ranks) == 0 {
			t.Errorf("%+v, %+v", u, loss)
		}
		if err != nil && (u.Seq != 4 || loss.Generation != 2) {
			t.Errorf("refused (%v), but heard: %+v, %+v", err, u, loss)
		}
		for _, r := range loss.Ranks {
			if r < 0 {
				t.Errorf("rank %d is lost", r)
			}
		}
	})
}
