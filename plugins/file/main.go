// Command file is a discovery plugin whose hosts stand in a file, or in the files of a directory,
// which it watches.
package main

import "github.com/hvdrun/hvdrun/discovery/plugin"

func main() { plugin.Serve(&source{}) }
