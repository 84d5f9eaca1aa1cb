// Command discovery-plugin is an example of a discovery plugin as another team would write one: a
// Go module of its own that knows where the machines of that team are listed.
package main

import "github.com/hvdrun/hvdrun/discovery/plugin"

func main() {
	plugin.Serve(&inventory{})
}
