#!/bin/bash
# memberlist 0.7 gives its metrics to hashicorp/go-metrics alone: a sink of armon/go-metrics, which 0.5 and older
# versions use, stays empty without an error.
# Guess: armon's sink has memberlist's gossip counters.
. "$(dirname "$0")/go.bash"
cat > main.go <<'GO'
package main

import (
	"fmt"
	"io"
	"time"

	armon "github.com/armon/go-metrics"
	hashi "github.com/hashicorp/go-metrics"
	"github.com/hashicorp/memberlist"
)

func main() {
	old, new := armon.NewInmemSink(time.Hour, time.Hour), hashi.NewInmemSink(time.Hour, time.Hour)
	if _, err := armon.NewGlobal(armon.DefaultConfig("x"), old); err != nil {
		panic(err)
	}
	if _, err := hashi.NewGlobal(hashi.DefaultConfig("x"), new); err != nil {
		panic(err)
	}
	var members []*memberlist.Memberlist
	for _, name := range []string{"a", "b"} {
		c := memberlist.DefaultLocalConfig()
		c.Name, c.BindAddr, c.BindPort, c.AdvertisePort, c.LogOutput = name, "127.0.0.1", 0, 0, io.Discard
		m, err := memberlist.Create(c)
		if err != nil {
			panic(err)
		}
		members = append(members, m)
	}
	if _, err := members[0].Join([]string{fmt.Sprintf("127.0.0.1:%d", members[1].LocalNode().Port)}); err != nil {
		panic(err)
	}
	time.Sleep(2 * time.Second)
	count := func(names map[string]struct{}) int { return len(names) }
	a, h := map[string]struct{}{}, map[string]struct{}{}
	for _, d := range old.Data() {
		for k := range d.Counters {
			if len(k) > 12 && k[2:12] == "memberlist" { a[k] = struct{}{} }
		}
	}
	for _, d := range new.Data() {
		for k := range d.Counters {
			if len(k) > 12 && k[2:12] == "memberlist" { h[k] = struct{}{} }
		}
	}
	fmt.Printf("armon %v, hashicorp %v (%d and %d counters)\n", count(a) > 0, count(h) > 0, count(a), count(h))
}
GO
for v in v0.5.3 v0.7.0; do
  modules github.com/hashicorp/memberlist@$v github.com/armon/go-metrics@v0.4.1
  out+=("$(go run .)") || exit 2; echo "memberlist $v: counters in the sink of ${out[-1]}"
done
case "${out[0]}" in "armon true, hashicorp false"*) ;; *) exit 1;; esac
case "${out[1]}" in "armon false, hashicorp true"*) ;; *) exit 1;; esac
