package jobrun

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/sirupsen/logrus"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/driver"
)

const (
	// mostQueued is the largest number of spans that wait for a collector; further spans are
	// dropped.
	mostQueued = 4096
	// lastSpans is how long the end of a job waits for a collector.
	lastSpans = time.Second
	// grpcPort is the port at which collectors accept OTLP over gRPC. At other ports OTLP is sent
	// over HTTP, unless the environment says otherwise.
	grpcPort = "4317"
)

// traceExport sends traces of resets to a collector. It never waits for the collector, except for
// lastSpans at the end.
type traceExport struct {
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
	job      string
}

// exportTraces sends traces of resets to a collector, if one is named.
func exportTraces(_ context.Context, r *run) (stop func(), err error) {
	export, err := openTraces(r.settings, r.program.Env, r.log)
	if export == nil {
		return nil, err
	}
	r.traces = append(r.traces, export.write)
	return func() {
		if err := export.close(); err != nil {
			r.log.Warnf("the last traces are not exported: %v", err)
		}
	}, nil
}

// openTraces returns the export of traces, or nil if neither --otlp-endpoint nor OpenTelemetry's
// own variables name a collector. It does not connect yet. The variables may be meant only for the
// training program: if hvdrun cannot use them, it logs that and the job runs.
func openTraces(s *settings.Settings, env []string, log logrus.FieldLogger) (*traceExport, error) {
	of := func(names ...string) string {
		for _, name := range names {
			for _, e := range env {
				if value, is := strings.CutPrefix(e, name+"="); is && value != "" {
					return value
				}
			}
		}
		return ""
	}
	target := s.OTLP
	if exporters := of("OTEL_TRACES_EXPORTER"); target == "" && !strings.EqualFold(of("OTEL_SDK_DISABLED"), "true") &&
		(exporters == "" || slices.Contains(strings.Split(exporters, ","), "otlp")) {
		target = of("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
	}
	if target == "" {
		return nil, nil
	}
	// The library's own log has a line for each variable that it cannot read.
	otel.SetLogger(funcr.New(func(_, args string) { log.Debugf("OpenTelemetry: %s", args) }, funcr.Options{Verbosity: 1}))
	var failed atomic.Bool
	fails := func(err error) {
		if failed.Swap(true) {
			log.Debugf("traces are not exported: %v", err)
			return
		}
		log.Warnf("traces are not exported; the job continues: %v", err)
	}
	exporter, err := newExporter(s, target, of("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"))
	switch {
	case err != nil && s.OTLP != "":
		return nil, fmt.Errorf("the traces for %s: %w", target, err)
	case err != nil:
		fails(fmt.Errorf("OTEL_EXPORTER_OTLP_ENDPOINT=%s: %w", target, err))
		return nil, nil
	}
	otel.SetErrorHandler(otel.ErrorHandlerFunc(fails))
	about, err := resource.New(context.Background(), resource.WithAttributes(
		attribute.String("service.name", "hvdrun"), attribute.String("service.instance.id", s.RunID)),
		resource.WithTelemetrySDK(), resource.WithFromEnv())
	if err != nil {
		log.Debugf("OpenTelemetry's variables: %v", err)
	}
	provider := sdktrace.NewTracerProvider(sdktrace.WithResource(about),
		sdktrace.WithBatcher(exporter, sdktrace.WithMaxQueueSize(mostQueued), sdktrace.WithBatchTimeout(time.Second)))
	return &traceExport{provider: provider, tracer: provider.Tracer("github.com/hvdrun/hvdrun"), job: s.RunID}, nil
}

// newExporter returns the exporter that sends to the collector. OpenTelemetry's variables set
// headers, certificates, compression, timeouts, and the format over HTTP. A target without a
// scheme, which only the variables may have, is a gRPC server.
func newExporter(s *settings.Settings, target, protocol string) (sdktrace.SpanExporter, error) {
	if s.OTLP == "" && !strings.Contains(target, "://") {
		host, port, err := net.SplitHostPort(target)
		if err != nil || host == "" || port == "" || protocol != "" && protocol != "grpc" {
			return nil, errors.New("it is not http://HOST:PORT")
		}
		return otlptracegrpc.New(context.Background(), otlptracegrpc.WithEndpoint(target))
	}
	u, err := url.Parse(target)
	if err != nil {
		return nil, err
	}
	if u.Host == "" {
		return nil, errors.New("it is not http://HOST:PORT")
	}
	switch {
	case protocol == "grpc", !strings.HasPrefix(protocol, "http/") && u.Port() == grpcPort:
		var options []otlptracegrpc.Option
		if s.OTLP != "" {
			options = append(options, otlptracegrpc.WithEndpointURL(target))
		}
		return otlptracegrpc.New(context.Background(), options...)
	case protocol != "" && protocol != "http/protobuf" && protocol != "http/json" && s.OTLP == "":
		return nil, fmt.Errorf("the protocol %q is not grpc, http/protobuf or http/json", protocol)
	}
	var options []otlptracehttp.Option
	if s.OTLP != "" {
		if u.Path == "" || u.Path == "/" {
			u.Path = "/v1/traces"
		}
		options = append(options, otlptracehttp.WithEndpointURL(u.String()))
	}
	return otlptracehttp.New(context.Background(), options...)
}

// write queues a trace.
func (e *traceExport) write(t driver.Trace) {
	var root context.Context
	for i, s := range t.Spans {
		attributes := []attribute.KeyValue{attribute.String("hvdrun.role", s.Role)}
		if s.Host != "" {
			attributes = append(attributes, attribute.String("host.name", s.Host), attribute.Int("hvdrun.slot", s.Slot))
		}
		if s.Rank >= 0 {
			attributes = append(attributes, attribute.Int("hvdrun.rank", s.Rank))
		}
		ctx, options := root, []trace.SpanStartOption{trace.WithTimestamp(s.Start)}
		if i == 0 {
			ctx, options = context.Background(), append(options, trace.WithNewRoot())
			attributes = append(attributes, attribute.String("hvdrun.job", e.job), attribute.String("hvdrun.cause", t.Cause),
				attribute.Int64("hvdrun.generation", int64(t.Generation)))
		}
		ctx, span := e.tracer.Start(ctx, s.Name, append(options, trace.WithAttributes(attributes...))...)
		if i == 0 {
			root = ctx
		}
		if s.Error != "" {
			span.SetStatus(codes.Error, s.Error)
		}
		span.End(trace.WithTimestamp(s.End))
	}
}

// close sends the queued traces. It blocks for at most lastSpans.
func (e *traceExport) close() error {
	ctx, cancel := context.WithTimeoutCause(context.Background(), lastSpans, errors.New("the collector does not answer"))
	defer cancel()
	return e.provider.Shutdown(ctx)
}
