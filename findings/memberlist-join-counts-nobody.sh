#!/bin/bash
# memberlist 0.7.0: Join returns 1 and no error for the node's own address, so a node with itself in its list of seeds has "joined" although
# no other seed has answered. After Leave, Join also returns 1 and no error, but neither side ever lists the other.
# Guess: 0 or an error; a node that left is a member again.
. "$(dirname "$0")/go.bash"
cat > main.go <<'GO'
package main

import (
	"fmt"
	"io"
	"time"

	"github.com/hashicorp/memberlist"
)

func member(name string) (*memberlist.Memberlist, string) {
	c := memberlist.DefaultLocalConfig()
	c.Name, c.BindAddr, c.BindPort, c.AdvertisePort, c.LogOutput = name, "127.0.0.1", 0, 0, io.Discard
	m, err := memberlist.Create(c)
	if err != nil {
		panic(err)
	}
	return m, fmt.Sprintf("127.0.0.1:%d", m.LocalNode().Port)
}

func main() {
	a, addr := member("a")
	joins := func(what string, m *memberlist.Memberlist) {
		n, err := m.Join([]string{addr})
		time.Sleep(3 * time.Second)
		fmt.Printf("%s: %d, %v, %d of %d; ", what, n, err, m.NumMembers(), a.NumMembers())
	}
	joins("a itself", a)
	b, _ := member("b")
	joins("b", b)
	if err := b.Leave(5 * time.Second); err != nil {
		panic(err)
	}
	joins("b after Leave", b)
	if err := b.Shutdown(); err != nil {
		panic(err)
	}
	again, _ := member("b")
	joins("b made anew", again)
}
GO
modules github.com/hashicorp/memberlist@v0.7.0
go build -o run . || exit 2
out=$(./run 2>/dev/null); echo "memberlist v0.7.0, what Join of a's address returns, and the members that the caller and a list: $out"
[ "$out" = "a itself: 1, <nil>, 1 of 1; b: 1, <nil>, 2 of 2; b after Leave: 1, <nil>, 1 of 1; b made anew: 1, <nil>, 2 of 2; " ]
