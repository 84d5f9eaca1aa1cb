package hosts

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/plan"
)

// TestStateAndBack: a restored state equals the saved one, also through JSON. The test lists the
// types with all their fields, so that a new field must be saved.
func TestStateAndBack(t *testing.T) {
	for _, c := range []struct {
		of     any
		fields []string
	}{
		{Table{}, []string{"cfg", "listed", "slots", "hosts", "holds", "changes", "next"}}, // the last two are created again
		{penalty{}, []string{"Out", "Until", "Doublings", "enders"}},
		{enders{}, []string{"Names", "Apart", "At"}},
		{Hold{}, []string{"Host", "Slot", "Until", "WhileListed"}},
		{plan.Host{}, []string{"Name", "Slots", "Draining"}},
	} {
		var fields []string
		for f := range reflect.TypeOf(c.of).Fields() {
			fields = append(fields, f.Name)
		}
		if !slices.Equal(fields, c.fields) {
			t.Errorf("%T has the fields %v: save them in State", c.of, fields)
		}
	}
	cfg := cooldown(1, 60)
	h := New(cfg)
	h.Update(at(0), hostList("a:2,b:2,c:1,d:3"))
	h.ExcludeSlot(at(1), id("a", 0))
	h.ExcludeSlot(at(1), id("b", 0))
	h.ExcludeSlot(at(2), id("b", 1))
	h.ExcludeHost(at(3), "c")
	h.EndedBy(at(4), id("d", 1), []string{"f", "g"})
	h.Hold(Hold{Host: "d", Slot: new(2), Until: at(90).UTC()})
	h.Hold(Hold{Host: "e", WhileListed: true})
	b, err := json.Marshal(h.State())
	if err != nil {
		t.Fatal(err)
	}
	var s State
	if err := json.Unmarshal(b, &s); err != nil {
		t.Fatal(err)
	}
	back, err := Restore(cfg, s)
	if err != nil {
		t.Fatal(err)
	}
	if back.cfg != h.cfg || !slices.Equal(back.listed, h.listed) || back.Changes() == 0 ||
		!maps.EqualFunc(back.slots, h.slots, samePenalty) || !maps.EqualFunc(back.hosts, h.hosts, samePenalty) ||
		!reflect.DeepEqual(back.holds, h.holds) {
		t.Errorf("restored\n%+v\nof\n%+v", back.State(), h.State())
	}
	for _, bad := range []State{
		{Listed: list{{Name: "a", Slots: -1}}}, {Records: []Record{{Host: "a", penalty: penalty{Doublings: -1}}}}, {Records: []Record{{Host: "a", Slot: new(-1)}}},
	} {
		if _, err := Restore(cfg, bad); err == nil {
			t.Errorf("%+v passes", bad)
		}
	}
}

func samePenalty(a, b *penalty) bool {
	return a.Out == b.Out && a.Until.Equal(b.Until) && a.Doublings == b.Doublings &&
		slices.Equal(a.Names, b.Names) && a.Apart == b.Apart && a.At.Equal(b.At)
}
