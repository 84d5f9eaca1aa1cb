// Command file is a discovery plugin that reads the hosts from a file, or from the files of a
// directory, and watches for changes.
package main

import "github.com/hvdrun/hvdrun/discovery/plugin"

func main() { plugin.Serve(&source{}) }
