package control

import "github.com/hvdrun/hvdrun/stacks"

// Stacks describes where a worker of the current world is. Its JSON names are stable.
type Stacks struct {
	Rank int    `json:"rank"`
	Host string `json:"host"`
	Slot int    `json:"slot"`
	PID  int    `json:"pid"`
	// Where holds the innermost frames of the user's code, or what the process does in the kernel.
	Where string `json:"where"`
	stacks.Worker
}
