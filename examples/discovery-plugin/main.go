// Command discovery-plugin is an example of a discovery plugin outside of hvdrun's repository: a Go
// module of its own that reads a list of machines.
package main

import "github.com/hvdrun/hvdrun/discovery/plugin"

func main() {
	plugin.Serve(&inventory{})
}
