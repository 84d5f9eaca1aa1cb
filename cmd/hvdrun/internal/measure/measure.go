// Package measure serves the metrics of a driver and of an agent.
package measure

import (
	"context"
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/build"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/internal/agent"
	"github.com/hvdrun/hvdrun/internal/metrics"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/job"
)

// checkMetrics returns an error if the settings of metrics are invalid.
func checkMetrics(s *settings.Settings) error {
	m := s.Metrics
	for _, c := range []struct{ name, value string }{
		{"metrics-token-file", m.TokenFile}, {"metrics-tls-cert", m.Cert}, {"metrics-tls-key", m.Key},
	} {
		if c.value != "" && m.Listen == "" {
			return fmt.Errorf("%s: --metrics-listen is missing", s.Origin(c.name))
		}
	}
	if (m.Cert == "") != (m.Key == "") {
		return errors.New("--metrics-tls-cert and --metrics-tls-key: give both, or none")
	}
	return nil
}

// serveMetrics serves the metrics of a collector until stop is called. If they cannot be served, a
// resumed job runs without them; otherwise serveMetrics returns an error.
func serveMetrics(s *settings.Settings, c prometheus.Collector, resumed bool, log logrus.FieldLogger) (stop func(), err error) {
	server, err := listenMetrics(s, c, log)
	if err != nil && resumed {
		log.WithError(err).Warn("the metrics are not served")
		return func() {}, nil
	}
	if err != nil {
		return nil, err
	}
	log.WithField("url", server.URL()).Info("metrics are served")
	return cli.Background(func(ctx context.Context) {
		if err := server.Serve(ctx); err != nil {
			log.WithError(err).Warn("the metrics are no longer served")
		}
	}), nil
}

func listenMetrics(s *settings.Settings, c prometheus.Collector, log logrus.FieldLogger) (*metrics.Server, error) {
	if err := checkMetrics(s); err != nil {
		return nil, err
	}
	cfg := metrics.Config{Listen: s.Metrics.Listen, Log: log}
	if s.Metrics.TokenFile != "" {
		var err error
		if cfg.Token, err = metrics.ReadToken(s.Metrics.TokenFile); err != nil {
			return nil, fmt.Errorf("%s: %w", s.Origin("metrics-token-file"), err)
		}
	}
	if s.Metrics.Cert != "" {
		pair, err := safefile.KeyPair(s.Metrics.Cert, s.Metrics.Key, safefile.Text, safefile.Text)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.Origin("metrics-tls-cert"), err)
		}
		cfg.Certificate = pair
	}
	server, err := metrics.Listen(cfg, c)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.Origin("metrics-listen"), err)
	}
	return server, nil
}

// Job serves the metrics of a driver until stop is called, if the settings request it. It sets the
// meter in the driver's configuration. event, if not nil, must be called with each event.
func Job(s *settings.Settings, cfg *driver.Config, resumed bool, log logrus.FieldLogger) (event func(job.Event), stop func(), err error) {
	if s.Metrics.Listen == "" {
		return nil, func() {}, checkMetrics(s)
	}
	cfg.Meter = &driver.Meter{}
	collector := metrics.NewDriver(cfg.Meter.Read, build.Version())
	cfg.Meter.Delivered, cfg.Meter.Synced = collector.Delivered, collector.Synced
	stop, err = serveMetrics(s, collector, resumed, log)
	return collector.Event, stop, err
}

// Agent is like Job, for an agent.
func Agent(s *settings.Settings, cfg *agent.Config, log logrus.FieldLogger) (stop func(), err error) {
	if s.Metrics.Listen == "" {
		return func() {}, checkMetrics(s)
	}
	cfg.Meter = &agent.Meter{}
	return serveMetrics(s, &metrics.Agent{Read: cfg.Meter.Read, Version: build.Version()}, false, log)
}
