#!/bin/bash
# otlptracehttp 1.47 sends JSON if OTEL_EXPORTER_OTLP_PROTOCOL=http/json is set; it has no option for that. 1.38 ignores the variable.
# Guess: the exporter of a program decides, and supports only protobuf.
. "$(dirname "$0")/go.bash"
cat > main.go <<'GO'
package main

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"

	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	sdk "go.opentelemetry.io/otel/sdk/trace"
)

func main() {
	var seen string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seen = r.URL.Path + " " + r.Header.Get("Content-Type")
	}))
	defer s.Close()
	os.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", s.URL)
	var options []otlptracehttp.Option
	if len(os.Args) > 1 {
		options = append(options, otlptracehttp.WithEndpointURL(s.URL))
	}
	e, err := otlptracehttp.New(context.Background(), options...)
	if err != nil {
		panic(err)
	}
	p := sdk.NewTracerProvider(sdk.WithSyncer(e))
	_, span := p.Tracer("x").Start(context.Background(), "x")
	span.End()
	fmt.Println(seen)
}
GO
get() { modules go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp@$1 go.opentelemetry.io/otel/sdk@$1; }
export OTEL_EXPORTER_OTLP_PROTOCOL=http/json
for v in v1.38.0 v1.47.0; do
  get $v
  out+=("$(go run . | cut -d' ' -f2)"); echo "otlptracehttp $v: ${out[-1]}"
done
[ "${out[0]}" = application/x-protobuf ] && [ "${out[1]}" = application/json ]
