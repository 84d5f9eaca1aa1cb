package settings

import (
	"github.com/hvdrun/hvdrun/internal/metrics"
)

// metricsSettings are the settings of the metrics of a job or an agent for Prometheus.
type metricsSettings struct {
	Listen    string // address and port; empty: metrics are not served
	TokenFile string
	Cert, Key string // files of the server's certificate and key
}

func setMetricsListen(s *Settings, text string) (err error) {
	s.Metrics.Listen, err = metrics.ParseListen(text)
	return err
}
