package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/internal/gpu"
	"github.com/hvdrun/hvdrun/launch"
)

// slotDevices are the devices of this machine's slots, by index, and the failures reported for
// them.
type slotDevices struct {
	devices []gpu.Device
	health  gpu.Health
}

// bind makes only the device of its slot visible to the worker. It returns an error if the device
// has failed.
func (d *slotDevices) bind(s *launch.Spec) error {
	if e, bad := d.health.Bad(d.index(s.Slot.Index)); bad {
		return &launch.StartError{Command: s.Command[0], Err: fmt.Errorf("the slot's device has failed: %v", e)}
	}
	s.Env = append(slices.Clip(s.Env), gpu.VisibleEnv(d.devices, s.Slot.Index)...)
	return nil
}

// index returns the index of the slot's device: if there are more slots than devices, slots share
// them.
func (d *slotDevices) index(slot int) int { return slot % len(d.devices) }

// watch calls failed when a device of a slot fails, until ctx ends.
func (d *slotDevices) watch(ctx context.Context, log logrus.FieldLogger, failed func(device int),
	events func(context.Context, func(gpu.Event)) error) error {
	return events(ctx, func(e gpu.Event) {
		// The user may have hidden some devices, so the numbers here may differ.
		i := slices.IndexFunc(d.devices, func(o gpu.Device) bool {
			return o.GPU == e.Device.GPU && (o.UUID == e.Device.UUID || o.UUID == "" || e.Device.UUID == "")
		})
		if i < 0 {
			return
		}
		e.Device.Index = i
		if d.health.Note(e) {
			log.Errorf("%v; its slot is no longer used", e)
			failed(i)
		} else {
			log.Warn(e)
		}
	})
}

// boundLauncher starts workers that are bound to the devices of their slots.
type boundLauncher struct {
	launch.Launcher
	gpus *slotDevices
}

// Run implements launch.Launcher.
func (l boundLauncher) Run(ctx context.Context, s *launch.Spec, started func(pid int)) error {
	if err := l.gpus.bind(s); err != nil {
		return err
	}
	return l.Launcher.Run(ctx, s, started)
}

// agentDevices returns the launcher of an agent's workers, and a function that reports slots whose
// devices have failed until its context ends. The function is nil if slots do not correspond to
// devices, that is if workers are not bound to devices and the number of slots was set, or if the
// devices are unknown.
func agentDevices(s *settings.Settings, log logrus.FieldLogger, slots int) (launch.Launcher,
	func(context.Context, func([]int)) error, error) {
	devices, err := hostsource.LocalDevices()
	switch {
	case err != nil && s.BindGPUs:
		return nil, nil, fmt.Errorf("%s: %w", s.Origin("bind-gpus"), err)
	case err != nil, s.SlotsPerHost > 0 && !s.BindGPUs:
		if err != nil && !errors.Is(err, gpu.ErrNoGPU) {
			log.WithError(err).Warn("GPUs are not watched")
		}
		return launch.Local{}, nil, nil
	}
	d := &slotDevices{devices: devices}
	health := func(ctx context.Context, bad func([]int)) error {
		return d.watch(ctx, log, func(int) { bad(d.badSlots(slots)) }, gpu.Watch)
	}
	if !s.BindGPUs {
		return launch.Local{}, health, nil
	}
	return boundLauncher{launch.Local{}, d}, health, nil
}

// badSlots returns the slots below slots whose devices have failed.
func (d *slotDevices) badSlots(slots int) (bad []int) {
	for slot := range slots {
		if _, failed := d.health.Bad(d.index(slot)); failed {
			bad = append(bad, slot)
		}
	}
	return bad
}
