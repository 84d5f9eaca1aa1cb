#!/bin/bash
# logrus 1.10: Log at level panic does not panic any more; Panic still does.
# Guess: as in 1.9, Log(PanicLevel, …) logs and panics.
. "$(dirname "$0")/go.bash"
cat > main.go <<'GO'
package main

import (
	"fmt"
	"io"

	"github.com/sirupsen/logrus"
)

func panics(f func()) (is bool) {
	defer func() { is = recover() != nil }()
	f()
	return false
}

func main() {
	logrus.SetOutput(io.Discard)
	fmt.Println("Log(PanicLevel) panics:", panics(func() { logrus.StandardLogger().Log(logrus.PanicLevel, "x") }), "Panic panics:", panics(func() { logrus.Panic("x") }))
}
GO
for v in v1.9.3 v1.10.2; do
  modules github.com/sirupsen/logrus@$v
  out+=("$(go run .)") || exit 2; echo "logrus $v: ${out[-1]}"
done
[ "${out[0]}" = "Log(PanicLevel) panics: true Panic panics: true" ] && [ "${out[1]}" = "Log(PanicLevel) panics: false Panic panics: true" ]
