#!/bin/bash
# client_golang 1.25: if a collector panics, promhttp answers with status 500, and the body contains the panic and its stack, with
# paths of source files.
# Guess: the panic ends the connection or the program, as in other handlers of net/http.
. "$(dirname "$0")/go.bash"
cat > main.go <<'GO'
package main

import (
	"fmt"
	"net/http/httptest"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

type bad struct{}

func (bad) Describe(c chan<- *prometheus.Desc) { c <- prometheus.NewDesc("x", "x", nil, nil) }
func (bad) Collect(chan<- prometheus.Metric)   { panic("the secret of the collector") }

func main() {
	r := prometheus.NewRegistry()
	r.MustRegister(bad{})
	w := httptest.NewRecorder()
	promhttp.HandlerFor(r, promhttp.HandlerOpts{}).ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	body := w.Body.String()
	fmt.Printf("status %d, panic in the body %v, stack in the body %v\n", w.Code, strings.Contains(body, "the secret of the collector"), strings.Contains(body, "main.go:"))
}
GO
modules github.com/prometheus/client_golang@v1.25.0
out=$(go run . 2>&1); echo "client_golang v1.25.0: $out" | head -5
[ "$out" = "status 500, panic in the body true, stack in the body true" ]
