// Command discovery-plugin is an example of a discovery plugin in Go:
//
//	go build -o inventory .
//	echo '[{"name": "localhost", "gpus": 2, "state": "up"}]' > machines.json
//
//	hvdrun discover --discovery-plugin ./inventory --discovery-config inventory=machines.json
//	hvdrun -np 2 --min-np 1 --discovery-plugin ./inventory --discovery-config inventory=machines.json -- ./train
//
// It reads a list of machines, a JSON file (inventory), every 200 ms (every), and pushes every
// change. The state of a machine may also be leaving or down.
//
// The plugin is a module of its own, as it would be outside of this repository; only the replace in
// go.mod, which takes hvdrun from this clone, is special. inventory.go has Discover and the
// optional methods Configure and Watch, inventory_test.go runs hvdrun's tests of the contract of a
// source.
package main

import "github.com/hvdrun/hvdrun/discovery/plugin"

func main() {
	plugin.Serve(&inventory{})
}
