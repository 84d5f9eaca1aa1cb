package settings

import (
	"maps"
	"strings"
	"testing"
)

// TestPluginSettings: the settings of a plugin come from flags, a variable or the file, and can
// have any keys and values.
func TestPluginSettings(t *testing.T) {
	want := map[string]string{"hosts": "a:1,b:2", "selector": "app=train", "none": ""}
	const variable = "HVD_DISCOVERY_CONFIG=hosts=a:1,b:2\nselector=app=train\nnone=\n"
	for _, c := range []struct {
		args, variable, file string
	}{
		{args: "--discovery-config hosts=a:1,b:2 --discovery-config selector=app=train --discovery-config=none="},
		{variable: variable},
		{file: "discovery_config:\n  hosts: a:1,b:2\n  selector: app=train\n  none: ''\n"},
		{file: "discovery-config:\n- hosts=a:1,b:2\n- selector=app=train\n- none=\n"},
	} {
		s, err := loadArgs(t, "-np 1 --discovery-plugin x "+c.args, []string{c.variable}, c.file)
		if err != nil || !maps.Equal(s.PluginSettings, want) {
			t.Errorf("%+v: %q, %v", c, s.PluginSettings, err)
		}
	}
	for _, c := range []struct{ args, file, want string }{
		{"--discovery-config a", "", `--discovery-config: "a" is not of the form key=value`},
		{"--discovery-config =a", "", `--discovery-config: "=a" is not of the form key=value`},
		{"--discovery-config a=1 --discovery-config a=1", "", "--discovery-config: a is given twice"},
		{"", "discovery-config: {a: [1]}", "want one value for a"},
		{"", "hosts: {a: 1}", "want one value, or a list of them"},
	} {
		_, err := loadArgs(t, "-np 1 "+c.args, nil, c.file)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}
