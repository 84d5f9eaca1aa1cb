package settings

import (
	"fmt"
	"net/url"
)

// SetOTLP sets the URL of a collector. It returns an error if the URL is invalid.
func SetOTLP(s *Settings, text string) error {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil {
		return fmt.Errorf("%q is not a URL of a collector, such as http://localhost:4318", text)
	}
	s.OTLP = text
	return nil
}
