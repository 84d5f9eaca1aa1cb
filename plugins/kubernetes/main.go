// Command kubernetes is a discovery plugin whose hosts are pods. It follows them as controllers of
// Kubernetes do, by a reflector of client-go: list, then watch.
package main

import "github.com/hvdrun/hvdrun/discovery/plugin"

func main() { plugin.Serve(newSource()) }
