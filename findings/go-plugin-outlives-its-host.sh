#!/bin/bash
# go-plugin 1.8.0: the plugin of a host that is killed, over net/rpc, does not end, although its connection and its pipes are
# closed. Guess: plugin.Serve returns when its only client is gone.
. "$(dirname "$0")/go.bash"
cat > main.go <<'GO'
package main

import (
	"fmt"
	"net/rpc"
	"os"
	"os/exec"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
)

type empty struct{}

func (empty) Server(*plugin.MuxBroker) (any, error)              { return &empty{}, nil }
func (empty) Client(*plugin.MuxBroker, *rpc.Client) (any, error) { return &empty{}, nil }

func main() {
	handshake := plugin.HandshakeConfig{ProtocolVersion: 1, MagicCookieKey: "FINDING", MagicCookieValue: "finding"}
	kinds := map[string]plugin.Plugin{"empty": empty{}}
	if os.Args[1] == "plugin" {
		plugin.Serve(&plugin.ServeConfig{HandshakeConfig: handshake, Plugins: kinds})
		return
	}
	c := plugin.NewClient(&plugin.ClientConfig{HandshakeConfig: handshake, Plugins: kinds, Cmd: exec.Command(os.Args[0], "plugin"), Logger: hclog.NewNullLogger()})
	protocol, err := c.Client()
	if err != nil {
		panic(err)
	}
	if _, err := protocol.Dispense("empty"); err != nil {
		panic(err)
	}
	fmt.Println(c.ReattachConfig().Pid)
	if os.Args[1] == "ends" {
		c.Kill()
		return
	}
	time.Sleep(time.Minute)
}
GO
modules github.com/hashicorp/go-plugin@v1.8.0
go build -o run . || exit 2
for what in ends killed; do
  ./run $what > said & host=$!
  until [ -s said ] || ! kill -0 $host 2>/dev/null; do sleep 0.2; done
  read -r plugin < said || exit 2
  [ $what = ends ] || kill -9 $host
  wait $host 2>/dev/null; sleep 20; left=no
  grep -qs '^State:.[^Z]' /proc/$plugin/status && { left=yes; kill -9 $plugin; }
  echo "go-plugin v1.8.0, a host that $([ $what = ends ] && echo calls Kill || echo is killed): 20 s later the plugin is there: $left"
  rm said
done | tee out
grep -q 'calls Kill: .* no$' out && grep -q 'is killed: .* yes$' out
