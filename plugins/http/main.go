// Command http is a discovery plugin whose hosts stand in a JSON document that a web server gives,
// again and again or as a stream.
package main

import "github.com/hvdrun/hvdrun/discovery/plugin"

func main() { plugin.Serve(&source{}) }
