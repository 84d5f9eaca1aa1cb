// Command dns is a discovery plugin whose hosts are the addresses of names in the DNS, or the
// targets of their service records. It asks again when the answers' time to live has passed.
package main

import "github.com/hvdrun/hvdrun/discovery/plugin"

func main() { plugin.Serve(&source{}) }
