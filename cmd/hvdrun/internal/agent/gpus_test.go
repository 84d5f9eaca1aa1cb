package agent

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/internal/gpu"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
)

// twoDevices returns two devices of a machine, the second one first.
func twoDevices() *slotDevices {
	return &slotDevices{devices: []gpu.Device{{Index: 0, GPU: 1, UUID: "GPU-b"}, {Index: 1, GPU: 0, UUID: "GPU-a"}}}
}

func fails(number int, uuid string, critical bool) gpu.Event {
	return gpu.Event{Device: gpu.Device{Index: number, GPU: number, UUID: uuid}, Kind: gpu.XID, XID: 79, Critical: critical}
}

// spec returns the specification of a command in a slot of this machine.
func spec(slot int, stdout io.Writer, command ...string) *launch.Spec {
	return &launch.Spec{Incarnation: rand.Text(), Slot: plan.SlotID{Host: "localhost", Index: slot}, Command: command,
		Env: []string{"PATH=/usr/bin:/bin", "CUDA_VISIBLE_DEVICES=all"}, Stdout: stdout, Stderr: io.Discard}
}

func TestWorkersSeeTheirDevice(t *testing.T) {
	bound := boundLauncher{launch.Local{}, twoDevices()}
	for slot, want := range []string{"GPU-b\n", "GPU-a\n", "GPU-b\n"} {
		var out bytes.Buffer
		err := bound.Run(t.Context(), spec(slot, &out, "printenv", "CUDA_VISIBLE_DEVICES"), func(int) {})
		if err != nil || out.String() != want {
			t.Errorf("slot %d: %q, %v", slot, &out, err)
		}
	}
}

// TestDeviceFails: a failure of a device is reported once, and no worker is started in its slots
// any more.
func TestDeviceFails(t *testing.T) {
	log, hook := logtest.NewNullLogger()
	devices := twoDevices()
	l := boundLauncher{launch.Local{}, devices}
	var failed []int
	err := devices.watch(t.Context(), log, func(device int) { failed = append(failed, device) },
		func(_ context.Context, found func(gpu.Event)) error {
			found(fails(0, "GPU-a", false)) // nothing
			found(fails(7, "GPU-h", true))  // hidden
			found(fails(1, "GPU-b", true))
			found(fails(1, "", true)) // the same again
			return errDone
		})
	if !errors.Is(err, errDone) || !slices.Equal(failed, []int{0}) || !slices.Equal(devices.badSlots(3), []int{0, 2}) {
		t.Errorf("%v; devices that failed: %v, slots: %v", err, failed, devices.badSlots(3))
	}
	for _, slot := range []int{0, 2} {
		var refused *launch.StartError
		err := l.Run(t.Context(), spec(slot, io.Discard, "true"), func(int) { t.Error("started") })
		if !errors.As(err, &refused) || !strings.Contains(err.Error(), "XID 79, the GPU has fallen off the bus") {
			t.Errorf("slot %d: %v", slot, err)
		}
	}
	if err := l.Run(t.Context(), spec(3, io.Discard, "true"), func(int) {}); err != nil {
		t.Errorf("a slot of the good device: %v", err)
	}
	if first := hook.AllEntries()[0]; !strings.Contains(first.Message, "GPU 0 (GPU-a): XID 79") {
		t.Errorf("logged %q", first.Message)
	}
}

var errDone = errors.New("done")
