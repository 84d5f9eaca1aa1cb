// Command kubernetes is a discovery plugin whose hosts are pods. Like controllers of Kubernetes, it
// follows them with a reflector of client-go: list, then watch.
package main

import "github.com/hvdrun/hvdrun/discovery/plugin"

func main() { plugin.Serve(newSource()) }
