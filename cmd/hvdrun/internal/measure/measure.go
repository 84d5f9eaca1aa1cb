// Package measure serves the metrics of a driver and of an agent.
package measure

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/build"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/internal/agent"
	"github.com/hvdrun/hvdrun/internal/metrics"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/job"
)

// checkMetrics returns what is wrong with the settings of metrics.
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

// serveMetrics serves the metrics of a collector, if the settings say so, until the returned
// function is called. A driver that takes a job over goes on without what cannot be served.
func serveMetrics(s *settings.Settings, c prometheus.Collector, resumed bool, log logrus.FieldLogger) (stop func(), err error) {
	none := func() {}
	if s.Metrics.Listen == "" {
		return none, checkMetrics(s)
	}
	server, err := listenMetrics(s, c, log)
	if err != nil && resumed {
		log.WithError(err).Warn("the metrics are not served")
		return none, nil
	}
	if err != nil {
		return nil, err
	}
	log.WithField("url", server.URL()).Info("metrics are served")
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := server.Serve(ctx); err != nil {
			log.WithError(err).Warn("the metrics are no longer served")
		}
	})
	return func() {
		cancel()
		serving.Wait()
	}, nil
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
		pair, err := readPair(s.Metrics.Cert, s.Metrics.Key)
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

// maxPEM bounds the size of a file with a certificate or a key, in bytes.
const maxPEM = 1 << 20

// readPair reads a certificate and its key.
func readPair(cert, key string) (*tls.Certificate, error) {
	var texts [2][]byte
	for i, path := range []string{cert, key} {
		f, err := safefile.Read(path)
		if err != nil {
			return nil, err
		}
		texts[i], err = io.ReadAll(io.LimitReader(f, maxPEM))
		if err = errors.Join(err, f.Close()); err != nil {
			return nil, err
		}
	}
	pair, err := tls.X509KeyPair(texts[0], texts[1])
	return &pair, err
}

// Measured is a driver that is measured.
type Measured struct {
	Meter *driver.Meter   // of its configuration; nil: it is not measured
	Event func(job.Event) // is to be called with each event; nil: none is needed
	Stop  func()          // ends the serving of the metrics
}

// Job has a driver measured, and its metrics served until Stop is called, if the settings say so.
func Job(s *settings.Settings, resumed bool, log logrus.FieldLogger) (m Measured, err error) {
	if s.Metrics.Listen == "" {
		return Measured{Stop: func() {}}, checkMetrics(s)
	}
	meter := &driver.Meter{}
	collector := metrics.NewDriver(meter.Read, build.Version())
	meter.Delivered, meter.Synced = collector.Delivered, collector.Synced
	stop, err := serveMetrics(s, collector, resumed, log)
	return Measured{Meter: meter, Event: collector.Event, Stop: stop}, err
}

// Agent is Job for an agent.
func Agent(s *settings.Settings, cfg *agent.Config, log logrus.FieldLogger) (stop func(), err error) {
	if s.Metrics.Listen == "" {
		return func() {}, checkMetrics(s)
	}
	cfg.Meter = &agent.Meter{}
	read := func() (metrics.AgentMeasures, bool) {
		m, runs := cfg.Meter.Read()
		return metrics.AgentMeasures(m), runs
	}
	return serveMetrics(s, &metrics.Agent{Read: read, Version: build.Version()}, false, log)
}
