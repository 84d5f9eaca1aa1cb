// Hvdrun-discovery-slurm is a discovery plugin: the nodes of Slurm jobs are the hosts. README.md tells its settings.
package main

import "github.com/hvdrun/hvdrun/discovery/plugin"

func main() {
	plugin.Serve(newSource())
}
