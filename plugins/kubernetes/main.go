// Command kubernetes is a discovery plugin whose hosts are pods. It asks the API server by plain
// HTTPS: list, then watch.
package main

import "github.com/hvdrun/hvdrun/discovery/plugin"

func main() { plugin.Serve(newSource()) }
