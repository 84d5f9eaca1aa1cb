package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/internal/agent"
	"github.com/hvdrun/hvdrun/internal/metrics"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

// metricsSettings say where Prometheus finds the metrics of a job or an agent.
type metricsSettings struct {
	listen    string // address and port; empty: nowhere
	tokenFile string
	cert, key string // files of the server's certificate and key
}

func setMetricsListen(s *settings, text string) (err error) {
	s.metrics.listen, err = metrics.ParseListen(text)
	return err
}

func metricsText(field func(*metricsSettings) *string) func(*settings, string) error {
	return text(func(s *settings) *string { return field(&s.metrics) })
}

// checkMetrics returns what is wrong with the settings of metrics.
func (s *settings) checkMetrics() error {
	m := s.metrics
	for _, c := range []struct{ name, value string }{
		{"metrics-token-file", m.tokenFile}, {"metrics-tls-cert", m.cert}, {"metrics-tls-key", m.key},
	} {
		if c.value != "" && m.listen == "" {
			return fmt.Errorf("%s: --metrics-listen is missing", s.origin(c.name))
		}
	}
	if (m.cert == "") != (m.key == "") {
		return errors.New("--metrics-tls-cert and --metrics-tls-key: give both, or none")
	}
	return nil
}

// serveMetrics serves the metrics of a collector, if the settings say so, until the returned
// function is called. A driver that takes a job over goes on without what cannot be served.
func (s *settings) serveMetrics(c prometheus.Collector, resumed bool, log logrus.FieldLogger) (stop func(), err error) {
	none := func() {}
	if s.metrics.listen == "" {
		return none, s.checkMetrics()
	}
	server, err := s.listenMetrics(c)
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

func (s *settings) listenMetrics(c prometheus.Collector) (*metrics.Server, error) {
	if err := s.checkMetrics(); err != nil {
		return nil, err
	}
	cfg := metrics.Config{Listen: s.metrics.listen}
	if s.metrics.tokenFile != "" {
		var err error
		if cfg.Token, err = metrics.ReadToken(s.metrics.tokenFile); err != nil {
			return nil, fmt.Errorf("%s: %w", s.origin("metrics-token-file"), err)
		}
	}
	if s.metrics.cert != "" {
		pair, err := readPair(s.metrics.cert, s.metrics.key)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.origin("metrics-tls-cert"), err)
		}
		cfg.Certificate = pair
	}
	server, err := metrics.Listen(cfg, c)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.origin("metrics-listen"), err)
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

// measureJob has the driver measured, and its metrics served until the returned function is called.
func (s *settings) measureJob(cfg *driver.Config, resumed bool, log logrus.FieldLogger) (stop func(), err error) {
	if s.metrics.listen == "" {
		return func() {}, s.checkMetrics()
	}
	meter := &driver.Meter{}
	collector := metrics.NewDriver(meter.Read, version())
	meter.Delivered, meter.Synced = collector.Delivered, collector.Synced
	stop, err = s.serveMetrics(collector, resumed, log)
	if err != nil {
		return nil, err
	}
	cfg.Meter = meter
	events := cfg.Events
	cfg.Events = func(e job.Event) {
		collector.Event(e)
		events(e)
	}
	return stop, nil
}

// measureAgent is measureJob for an agent.
func (s *settings) measureAgent(cfg *agent.Config, log logrus.FieldLogger) (stop func(), err error) {
	if s.metrics.listen == "" {
		return func() {}, s.checkMetrics()
	}
	cfg.Meter = &agent.Meter{}
	read := func() (metrics.AgentMeasures, bool) {
		m, runs := cfg.Meter.Read()
		return metrics.AgentMeasures(m), runs
	}
	return s.serveMetrics(&metrics.Agent{Read: read, Version: version()}, false, log)
}
