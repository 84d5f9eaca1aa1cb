package plugin_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/hvdrun/hvdrun/discovery/plugin"
	"github.com/hvdrun/hvdrun/plan"
)

// racks is the source of a plugin with one setting: --discovery-config room=2.
type racks struct{ room string }

func (r *racks) Configure(settings map[string]string) error {
	if err := plugin.CheckSettings(settings, "room"); err != nil {
		return err
	}
	r.room = settings["room"]
	return nil
}

func (r *racks) Discover(context.Context) ([]plan.Host, error) {
	return []plan.Host{{Name: "machine-in-" + r.room, Slots: 8}}, nil
}

// The main function of a plugin calls Serve, which returns when hvdrun has ended the plugin.
func ExampleServe() {
	plugin.Serve(&racks{})
}

func ExampleCheckSettings() {
	fmt.Println((&racks{}).Configure(map[string]string{"room": "2"}))
	var wrong *plugin.SettingError
	fmt.Println(errors.As((&racks{}).Configure(map[string]string{"rooms": "2"}), &wrong), wrong.Key)
	// Output:
	// <nil>
	// true rooms
}
