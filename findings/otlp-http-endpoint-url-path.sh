#!/bin/bash
# otlptracehttp 1.47: with a URL without a path, WithEndpointURL posts to /, but the environment variable to /v1/traces. In
# 1.38 both post to /v1/traces.
# Guess: /v1/traces by both.
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
for v in v1.38.0 v1.47.0; do
  get $v
  out+=("option $(go run . option | cut -d' ' -f1), variable $(go run . | cut -d' ' -f1)"); echo "otlptracehttp $v: posted to, by ${out[-1]}"
done
[ "${out[0]}" = "option /v1/traces, variable /v1/traces" ] && [ "${out[1]}" = "option /, variable /v1/traces" ]
