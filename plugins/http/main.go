// Command http is a discovery plugin that reads the hosts from a JSON document of a web server, by
// polling or as a stream.
package main

import "github.com/hvdrun/hvdrun/discovery/plugin"

func main() { plugin.Serve(&source{}) }
