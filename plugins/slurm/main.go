// Command slurm is a discovery plugin whose hosts are the nodes of Slurm jobs. It runs scontrol.
package main

import "github.com/hvdrun/hvdrun/discovery/plugin"

func main() {
	plugin.Serve(newSource())
}
