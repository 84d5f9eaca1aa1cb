// Command dns is a discovery plugin whose hosts are the addresses, or the targets of the service
// records, of names in the DNS. It asks again when the answers' time to live has passed.
package main

import "github.com/hvdrun/hvdrun/discovery/plugin"

func main() { plugin.Serve(&source{}) }
