#!/bin/bash
# memberlist 0.7: SendReliable of more than 20 MiB returns nil, and the receiver drops the message.
# Guess: it is delivered, as by 0.6, or SendReliable fails.
. "$(dirname "$0")/go.bash"
cat > main.go <<'GO'
package main

import (
	"fmt"
	"io"
	"time"

	"github.com/hashicorp/memberlist"
)

type got struct{ sizes chan int }

func (got) NodeMeta(int) []byte              { return nil }
func (g got) NotifyMsg(b []byte)             { g.sizes <- len(b) }
func (got) GetBroadcasts(int, int) [][]byte  { return nil }
func (got) LocalState(bool) []byte           { return nil }
func (got) MergeRemoteState([]byte, bool)    {}

func node(name string, g got) *memberlist.Memberlist {
	c := memberlist.DefaultLocalConfig()
	c.Name, c.BindAddr, c.BindPort, c.AdvertisePort, c.Delegate, c.LogOutput = name, "127.0.0.1", 0, 0, g, io.Discard
	m, err := memberlist.Create(c)
	if err != nil {
		panic(err)
	}
	return m
}

func main() {
	g := got{make(chan int, 8)}
	a, b := node("a", got{make(chan int, 8)}), node("b", g)
	if _, err := a.Join([]string{fmt.Sprintf("127.0.0.1:%d", b.LocalNode().Port)}); err != nil {
		panic(err)
	}
	for _, size := range []int{1 << 20, 21 << 20} {
		err := a.SendReliable(b.LocalNode(), make([]byte, size))
		arrived := false
		select {
		case n := <-g.sizes:
			arrived = n == size
		case <-time.After(5 * time.Second):
		}
		fmt.Printf("%d MiB: error %v, arrived %v; ", size>>20, err, arrived)
	}
	fmt.Println()
}
GO
for v in v0.6.0 v0.7.0; do
  modules github.com/hashicorp/memberlist@$v
  out+=("$(go run .)") || exit 2; echo "memberlist $v: ${out[-1]}"
done
[ "${out[0]}" = "1 MiB: error <nil>, arrived true; 21 MiB: error <nil>, arrived true; " ] &&
  [ "${out[1]}" = "1 MiB: error <nil>, arrived true; 21 MiB: error <nil>, arrived false; " ]
