#!/bin/bash
# logrus 1.10 writes a []byte field as text; 1.9 wrote a list of numbers.
# Guess: [104 105].
. "$(dirname "$0")/go.bash"
cat > main.go <<'GO'
package main

import (
	"os"

	"github.com/sirupsen/logrus"
)

func main() {
	log := logrus.New()
	log.SetOutput(os.Stdout)
	log.SetFormatter(&logrus.TextFormatter{DisableTimestamp: true, DisableColors: true})
	log.WithField("b", []byte("hi")).Info("x")
}
GO
for v in v1.9.3 v1.10.2; do
  modules github.com/sirupsen/logrus@$v
  out+=("$(go run .)") || exit 2; echo "logrus $v: ${out[-1]}"
done
case "${out[0]}" in *'b="[104 105]"'*) ;; *) exit 1;; esac
case "${out[1]}" in *b=hi*) ;; *) exit 1;; esac
