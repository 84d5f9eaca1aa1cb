package gpu

import (
	"errors"
	"fmt"
	"slices"
	"testing"
)

var some = []Device{
	{Index: 0, UUID: "GPU-aa11", GPU: 0},
	{Index: 1, UUID: "MIG-bb22", GPU: 1, MIG: &Instance{1, 0}},
	{Index: 2, GPU: 2, Fault: "GPU is lost"},
	{Index: 3, UUID: "GPU-cc33", GPU: 3},
}

func TestVisibleEnv(t *testing.T) {
	for slot, want := range []string{"GPU-aa11", "MIG-bb22", "2", "GPU-cc33", "GPU-aa11", "MIG-bb22"} {
		if got := VisibleEnv(some, slot); !slices.Equal(got, []string{"CUDA_VISIBLE_DEVICES=" + want}) {
			t.Errorf("slot %d: %v, want %s", slot, got, want)
		}
	}
	if got := append(VisibleEnv(nil, 0), VisibleEnv(some, -1)...); got != nil {
		t.Errorf("got %v", got)
	}
}

func TestVisible(t *testing.T) {
	for value, want := range map[string]string{
		"0,1,2,3":           "[0:GPU-aa11 1:MIG-bb22 2: 3:GPU-cc33]",
		"3, 0":              "[0:GPU-cc33 1:GPU-aa11]",
		"GPU-cc,MIG-bb22,0": "[0:GPU-cc33 1:MIG-bb22 2:GPU-aa11]",
		"":                  "[]",
		"-1":                "[]",
		"NoDevFiles":        "[]",
		"0,7,3":             "[0:GPU-aa11]",
		"0,0":               "[0:GPU-aa11]",
		"0,,3":              "[0:GPU-aa11]",
	} {
		var got []string
		for _, d := range Visible(some, value) {
			got = append(got, fmt.Sprintf("%d:%s", d.Index, d.UUID))
		}
		if fmt.Sprint(got) != want {
			t.Errorf("%q: %v, want %s", value, got, want)
		}
	}
	if some[3].Index != 3 {
		t.Error("Visible has numbered what it was given")
	}
}

func TestHealth(t *testing.T) {
	h := &Health{}
	if _, bad := h.Bad(0); bad || len(h.Slots()) != 0 {
		t.Error("bad from the beginning")
	}
	for _, c := range []struct {
		e    Event
		news bool
	}{
		{Event{Device: some[3], Kind: XID, XID: 79, Critical: true}, true},
		{Event{Device: some[3], Kind: Lost, Critical: true}, false},
		{Event{Device: some[0], Kind: XID, XID: 31}, false},
		{Event{Device: some[1], Kind: ECC2, Critical: true}, true},
	} {
		if got := h.Note(c.e); got != c.news {
			t.Errorf("%v: news %v", c.e, got)
		}
	}
	if e, bad := h.Bad(3); !bad || e.XID != 79 || !slices.Equal(h.Slots(), []int{1, 3}) {
		t.Errorf("slot 3: %v, %v; bad: %v", e, bad, h.Slots())
	}
}

func TestWords(t *testing.T) {
	for want, e := range map[string]Event{
		"GPU 3 (GPU-cc33): XID 79, the GPU has fallen off the bus":    {Device: some[3], Kind: XID, XID: 79},
		"MIG 1/0 of GPU 1 (MIG-bb22): XID 13, graphics engine except": {Device: some[1], Kind: XID, XID: 13},
		"GPU 2: XID 1234":                   {Device: some[2], Kind: XID, XID: 1234},
		"GPU 2: does not answer any more":   {Device: some[2], Kind: Lost},
		"GPU 2: memory error of two bits":   {Device: some[2], Kind: ECC2},
		"GPU 0 (GPU-aa11): XID 43, a progr": {Device: some[0], Kind: XID, XID: 43},
	} {
		if got := e.String(); got[:min(len(got), len(want))] != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestThisMachine: whether this machine has GPUs or not, Inventory returns devices or ErrNoGPU.
func TestThisMachine(t *testing.T) {
	devices, err := Inventory()
	if err != nil && !errors.Is(err, ErrNoGPU) || err == nil && len(devices) == 0 {
		t.Errorf("%v, %v", devices, err)
	}
	for i, d := range devices {
		if d.Index != i || d.UUID == "" && d.Fault == "" {
			t.Errorf("device %d is %+v", i, d)
		}
	}
	if err == nil {
		return
	}
	if err := Watch(t.Context(), func(e Event) { t.Error(e) }); !errors.Is(err, ErrNoGPU) {
		t.Errorf("watching: %v", err)
	}
}
