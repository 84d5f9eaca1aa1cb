package main

import (
	"fmt"
	"slices"
	"strings"
)

// health says what the state of a node means for the workers of a job on it.
type health uint8

const (
	useless health = iota + 1 // not a host
	leaving                   // a host that is draining
	useful
)

// node is one line of scontrol show node -o.
type node struct {
	name, hostname, addr string
	health               health
}

// parseNodes parses the lines of nodes, by name. Fields that users and administrators may write,
// such as Reason, come after all fields that it reads, and so cannot be mistaken for them.
func parseNodes(text string) (map[string]node, error) {
	nodes := map[string]node{}
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		name, _ := field(line, "NodeName")
		state, _ := field(line, "State")
		n := node{name: name}
		n.addr, _ = field(line, "NodeAddr")
		n.hostname, _ = field(line, "NodeHostName")
		var err error
		if n.health, err = judge(state); err != nil {
			return nil, fmt.Errorf("slurm: node %q: %w", shorten(name), err)
		}
		nodes[name] = n
	}
	return nodes, nil
}

var (
	// A node with one of these flags cannot run a worker.
	uselessFlags = []string{"NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "REBOOT_ISSUED", "DRAINED"}
	// A node with one of these flags continues to run its jobs, but starts no new ones.
	leavingFlags = []string{"DRAIN", "DRAINING", "FAIL", "FAILING", "POWER_DOWN"}
	// Older versions of Slurm write flags as one character after the state.
	shortFlags = map[byte]string{'*': "NOT_RESPONDING", '~': "POWERED_DOWN", '#': "POWERING_UP", '%': "POWERING_DOWN",
		'!': "POWER_DOWN", '@': "REBOOT_REQUESTED", '^': "REBOOT_ISSUED", '$': "MAINTENANCE", '+': "", '-': "PLANNED"}
)

// judge parses a state such as MIXED+DRAIN+NOT_RESPONDING: one base state, and flags.
//
// It ignores the flag COMPLETING: some job on the node is ending, but on a shared node that may be
// another job. The state of the job itself says whether this one is ending.
func judge(state string) (health, error) {
	text := state
	var flags []string
	for text != "" && shortFlags[text[len(text)-1]] != "" {
		flags = append(flags, shortFlags[text[len(text)-1]])
		text = text[:len(text)-1]
	}
	words := strings.Split(text, "+")
	flags = append(flags, words[1:]...)
	has := func(some []string) bool {
		return slices.ContainsFunc(flags, func(f string) bool { return slices.Contains(some, f) })
	}
	switch base := words[0]; base {
	case "DOWN", "ERROR", "FUTURE", "FAIL", "DRAINED", "POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "REBOOT":
		return useless, nil
	case "DRAINING", "FAILING":
		if has(uselessFlags) {
			return useless, nil
		}
		return leaving, nil
	case "ALLOCATED", "MIXED", "COMPLETING", "IDLE", "PLANNED", "RESERVED", "MAINT", "BLOCKED":
		switch {
		case has(uselessFlags):
			return useless, nil
		case has(leavingFlags) && base == "IDLE": // nobody works there any more: DRAINED
			return useless, nil
		case has(leavingFlags):
			return leaving, nil
		}
		return useful, nil
	case "UNKNOWN":
		// The controller has just started and does not know the node's state.
		return 0, fmt.Errorf("its state is not known yet")
	}
	return 0, fmt.Errorf("the state %q is not known", shorten(state))
}
