package torchrun

import "fmt"

// node is the data that an agent sends the others before a round.
type node struct {
	Role string `json:"role"`
	// Workers is the number of its workers.
	Workers int `json:"local_world_size"`
}

// ranks are the ranks of an agent's first worker, and the sizes. Worker i has these ranks plus i.
type ranks struct {
	Base, World         int
	RoleBase, RoleWorld int
}

// assign returns the ranks of each node's workers, among all workers and among the workers of the
// same role. The nodes, and the results, are in the order of the nodes' ranks.
func assign(nodes []node) []ranks {
	ranks := make([]ranks, len(nodes))
	world, roles := 0, make(map[string]int)
	for i, n := range nodes {
		ranks[i].Base, ranks[i].RoleBase = world, roles[n.Role]
		world += n.Workers
		roles[n.Role] += n.Workers
	}
	for i, n := range nodes {
		ranks[i].World, ranks[i].RoleWorld = world, roles[n.Role]
	}
	return ranks
}

// check returns an error if no agent would send n.
func (n node) check() error {
	if n.Workers < 1 || n.Workers > maxWorkers || len(n.Role) > maxName {
		return fmt.Errorf("torchrun: a node reports %d workers of the role %.100q", n.Workers, n.Role)
	}
	return nil
}

const (
	maxWorkers = 1 << 16
	maxName    = 255
)
