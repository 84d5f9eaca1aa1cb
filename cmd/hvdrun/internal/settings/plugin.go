package settings

import (
	"fmt"
	"strings"
)

// setPluginSettings parses key=value, one per line. The text after the first = is the value,
// unchanged.
func setPluginSettings(s *Settings, text string) error {
	s.PluginSettings = map[string]string{}
	for line := range strings.SplitSeq(text, "\n") {
		if strings.TrimSpace(line) == "" {
			continue
		}
		key, value, found := strings.Cut(line, "=")
		key = strings.TrimSpace(key)
		if !found || key == "" {
			return fmt.Errorf("%q is not of the form key=value", line)
		}
		if _, twice := s.PluginSettings[key]; twice {
			return fmt.Errorf("%s is given twice", key)
		}
		s.PluginSettings[key] = value
	}
	return nil
}
