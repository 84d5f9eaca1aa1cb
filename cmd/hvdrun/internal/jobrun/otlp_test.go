package jobrun

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/sirupsen/logrus/hooks/test"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/driver"
)

// received is a collector that keeps the requests it gets.
type received struct{ got chan *export }

// export is a request of an exporter, with the names of ProtoJSON.
type export struct {
	ResourceSpans []struct {
		Resource   json.RawMessage
		ScopeSpans []struct{ Spans []span }
	}
}

type span struct {
	TraceID, SpanID, ParentSpanID, Name string
	StartTimeUnixNano, EndTimeUnixNano  int64 `json:",string"`
	Attributes                          json.RawMessage
	Status                              struct{ Code string }
}

// newRequest returns a message of the type that the exporters send and have registered.
func newRequest() (proto.Message, error) {
	kind, err := protoregistry.GlobalTypes.FindMessageByName("opentelemetry.proto.collector.trace.v1.ExportTraceServiceRequest")
	if err != nil {
		return nil, err
	}
	return kind.New().Interface(), nil
}

func (r *received) keep(m proto.Message) error {
	text, err := protojson.Marshal(m)
	if err != nil {
		return err
	}
	e := &export{}
	if err := json.Unmarshal(text, e); err != nil {
		return err
	}
	r.got <- e
	return nil
}

// call answers a gRPC call.
func (r *received) call(_ any, stream grpc.ServerStream) error {
	if method, _ := grpc.MethodFromServerStream(stream); method != "/opentelemetry.proto.collector.trace.v1.TraceService/Export" {
		return status.Error(codes.Unimplemented, method)
	}
	m, err := newRequest()
	if err == nil {
		err = stream.RecvMsg(m)
	}
	if err == nil {
		err = r.keep(m)
	}
	return errors.Join(err, stream.SendMsg(&emptypb.Empty{})) // has the encoding of an empty response
}

func (r *received) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	var body io.Reader = req.Body
	if req.Header.Get("Content-Encoding") == "gzip" {
		var err error
		if body, err = gzip.NewReader(body); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
	}
	text, err := io.ReadAll(body)
	m, unknown := newRequest()
	if err != nil || unknown != nil || req.URL.Path != "/v1/traces" || proto.Unmarshal(text, m) != nil || r.keep(m) != nil {
		http.Error(w, req.URL.Path, http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
}

func spansOf(e *export) (all []span, resource string) {
	for _, r := range e.ResourceSpans {
		resource += string(r.Resource)
		for _, s := range r.ScopeSpans {
			all = append(all, s.Spans...)
		}
	}
	return all, resource
}

func someTrace() driver.Trace {
	at := time.Unix(1_700_000_000, 123456789)
	return driver.Trace{Generation: 7, Cause: "b:1 exit status 137", Spans: []driver.Span{
		{Name: "reset", Role: "driver", Rank: -1, Start: at, End: at.Add(time.Second)},
		{Name: "death seen", Role: "driver", Host: "b", Slot: 1, Rank: -1, Start: at, End: at, Error: "exit status 137"},
		{Name: "sync", Role: "worker", Host: "a", Rank: 0, Start: at.Add(300 * time.Millisecond), End: at.Add(400 * time.Millisecond)},
	}}
}

// TestTracesAreExported: a collector gets a reset as one trace over either protocol, whether the
// flag or the variables name the collector.
func TestTracesAreExported(t *testing.T) {
	r := &received{got: make(chan *export, 16)}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.UnknownServiceHandler(r.call))
	go func() { _ = server.Serve(ln) }()
	defer server.Stop()
	web := httptest.NewServer(r)
	defer web.Close()
	for name, test := range map[string]struct {
		flag string
		env  []string
	}{
		"flag, http":      {flag: web.URL},
		"flag, grpc":      {flag: "http://" + ln.Addr().String(), env: []string{"OTEL_EXPORTER_OTLP_PROTOCOL=grpc"}},
		"variables, http": {env: []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + web.URL}},
		"variables, grpc": {env: []string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=http://" + ln.Addr().String(), "OTEL_EXPORTER_OTLP_PROTOCOL=grpc"}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, e := range test.env { // the exporters read it too
				name, value, _ := strings.Cut(e, "=")
				t.Setenv(name, value)
			}
			s := &settings.Settings{}
			s.RunID = "job7"
			if test.flag != "" {
				if err := settings.SetOTLP(s, test.flag); err != nil {
					t.Fatal(err)
				}
			}
			e, err := openTraces(s, test.env, logrus.New())
			if err != nil || e == nil {
				t.Fatal(e, err)
			}
			e.write(someTrace())
			if err := e.close(); err != nil {
				t.Fatal(err)
			}
			spans, resource := spansOf(<-r.got)
			if len(spans) != 3 || !strings.Contains(resource, "hvdrun") || !strings.Contains(resource, "job7") {
				t.Fatalf("%v of %s", spans, resource)
			}
			var root span
			for _, s := range spans {
				if s.ParentSpanID == "" {
					root = s
				}
			}
			if root.Name != "reset" || root.EndTimeUnixNano-root.StartTimeUnixNano != int64(time.Second) ||
				!strings.Contains(string(root.Attributes), "b:1 exit status 137") {
				t.Errorf("%v", root)
			}
			for _, s := range spans {
				if s.TraceID != root.TraceID || s.SpanID != root.SpanID && s.ParentSpanID != root.SpanID {
					t.Errorf("%v is not part of the trace", s)
				}
				if is := s.Status.Code == "STATUS_CODE_ERROR"; is != (s.Name == "death seen") {
					t.Errorf("%v", s)
				}
			}
		})
	}
}

// TestCollectorIsAway: nothing waits for a collector that does not answer, except the end, for a
// moment; spans that do not fit the queue are dropped.
func TestCollectorIsAway(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0") // it accepts, and is silent
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	s := &settings.Settings{}
	if err := settings.SetOTLP(s, "http://"+ln.Addr().String()); err != nil {
		t.Fatal(err)
	}
	log := logrus.New()
	log.SetOutput(io.Discard)
	e, err := openTraces(s, nil, log)
	if err != nil {
		t.Fatal(err)
	}
	for range 10_000 {
		e.write(someTrace())
	}
	if err := e.close(); err == nil {
		t.Error("30,000 spans have reached nobody, and that is no error")
	}
}

// TestTracesAreOff: without a collector's name nothing is sent, and an invalid name is refused.
func TestTracesAreOff(t *testing.T) {
	for _, env := range [][]string{nil, {"OTEL_EXPORTER_OTLP_ENDPOINT=http://a:1", "OTEL_SDK_DISABLED=true"},
		{"OTEL_EXPORTER_OTLP_ENDPOINT=http://a:1", "OTEL_TRACES_EXPORTER=none"},
		{"OTEL_EXPORTER_OTLP_ENDPOINT=http://a:1", "OTEL_TRACES_EXPORTER=console"}, {"OTEL_EXPORTER_OTLP_ENDPOINT=http://a:1", "OTEL_TRACES_EXPORTER=zipkin"}} {
		if e, err := openTraces(&settings.Settings{}, env, logrus.New()); e != nil || err != nil {
			t.Errorf("%v: %v, %v", env, e, err)
		}
	}
	for _, text := range []string{"", "localhost:4318", "ftp://a", "http://", "http://user:secret@a:1"} {
		if settings.SetOTLP(&settings.Settings{}, text) == nil {
			t.Errorf("%q is taken", text)
		}
	}
}

// TestVariablesOfTheProgram: OpenTelemetry's variables can be meant for the training program alone,
// so they never end a job. If hvdrun exports nothing because of them, one line reports it.
func TestVariablesOfTheProgram(t *testing.T) {
	for _, c := range []struct {
		env   string
		takes bool
	}{
		{"OTEL_EXPORTER_OTLP_ENDPOINT=127.0.0.1:4317", true},
		{"OTEL_EXPORTER_OTLP_ENDPOINT=localhost:4317", true},
		{"OTEL_EXPORTER_OTLP_ENDPOINT=http://a:1 OTEL_EXPORTER_OTLP_PROTOCOL=http/json", true},
		{"OTEL_EXPORTER_OTLP_ENDPOINT=http://a:1 OTEL_TRACES_EXPORTER=console,otlp", true},
		{"OTEL_EXPORTER_OTLP_ENDPOINT=http://a:1 OTEL_EXPORTER_OTLP_TIMEOUT=5s", true},
		{"OTEL_EXPORTER_OTLP_ENDPOINT=http://a:1 OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http", false},
		{"OTEL_EXPORTER_OTLP_ENDPOINT=localhost:4318 OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf", false},
		{"OTEL_EXPORTER_OTLP_ENDPOINT=collector", false},
		{"OTEL_EXPORTER_OTLP_ENDPOINT=http://", false},
		{"OTEL_EXPORTER_OTLP_ENDPOINT=http://a%zz", false},
	} {
		t.Run(c.env, func(t *testing.T) {
			for _, e := range strings.Fields(c.env) {
				name, value, _ := strings.Cut(e, "=")
				t.Setenv(name, value)
			}
			log, hook := test.NewNullLogger()
			e, err := openTraces(&settings.Settings{}, strings.Fields(c.env), log)
			if err != nil || (e != nil) != c.takes {
				t.Fatalf("%v, %v", e, err)
			}
			// OpenTelemetry also reports errors of exporters of earlier tests here.
			warnings := slices.DeleteFunc(hook.AllEntries(), func(e *logrus.Entry) bool {
				return !strings.Contains(e.Message, "OTEL_EXPORTER_OTLP_ENDPOINT=")
			})
			if c.takes && len(warnings) != 0 || !c.takes && len(warnings) != 1 {
				t.Errorf("%d lines: %v", len(warnings), warnings)
			}
			if e != nil {
				_ = e.close() // nothing is queued
			}
		})
	}
}

// TestProtocolOfTheProgram: an unknown protocol in a variable does not affect the value of
// --otlp-endpoint.
func TestProtocolOfTheProgram(t *testing.T) {
	s := &settings.Settings{}
	if err := settings.SetOTLP(s, "http://a:1"); err != nil {
		t.Fatal(err)
	}
	e, err := openTraces(s, []string{"OTEL_EXPORTER_OTLP_PROTOCOL=pigeon"}, logrus.New())
	if e == nil || err != nil {
		t.Fatal(e, err)
	}
	_ = e.close()
}
