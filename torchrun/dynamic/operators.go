package dynamic

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// action is what a node does next, according to an operator.
type action int

const (
	keepAlive action = iota + 1
	addToParticipants
	addToWaitList
	addToRedundancyList
	removeFromParticipants
	removeFromWaitList
	removeFromRedundancyList
	markComplete
	markClosed
	markFailed
	syncState    // look again later
	errorClosed  // fail: the run is closed
	errorTimeout // fail: the operation has taken too long
	errorDismiss // stop without an error: the run was closed while the node was spare
	finish       // the operation is complete
	leaveForGood // remove everything about the node, including its rank in the last round
)

// view is the basis of an operator's decision. It is immutable.
type view struct {
	node     NodeDesc
	state    *State
	settings *Settings
	now      time.Time // by the clock of the record's heartbeats and deadlines
	// clock is the time of this process's clock, and deadline the end of the operation by the same
	// clock.
	clock, deadline time.Time
}

func (v view) participates() bool { _, is := v.state.Participants[v.node]; return is }

// due reports whether the node has to send a heartbeat.
func (v view) due() bool {
	beat, is := v.state.LastHeartbeats[v.node]
	return is && !beat.After(v.now.Add(-v.settings.KeepAliveInterval))
}

func (v view) late() bool { return v.clock.After(v.deadline) }

// operator decides the next action. It has no state and changes nothing.
type operator func(view) action

// keepAliveOp finishes once the node's heartbeat is fresh.
func keepAliveOp(v view) action {
	switch {
	case !v.due():
		return finish
	case v.late():
		return errorTimeout
	}
	return keepAlive
}

// closeOp finishes once the run is closed.
func closeOp(v view) action {
	switch {
	case v.state.Closed:
		return finish
	case v.late():
		return errorTimeout
	}
	return markClosed
}

// failOp finishes once the round has failed, or the node is in no round because it was considered
// dead.
func failOp(v view) action {
	switch {
	case !v.participates() || !v.state.Complete || v.state.Failed:
		return finish
	case v.late():
		return errorTimeout
	}
	return markFailed
}

// exitOp finishes once the node is not a participant.
func exitOp(v view) action {
	switch {
	case !v.participates():
		return finish
	case v.late():
		return errorTimeout
	}
	return removeFromParticipants
}

// leaveOp finishes once the record contains nothing about the node, so that the others need not
// wait for it.
func leaveOp(v view) action {
	_, last := v.state.LastRanks[v.node]
	_, beats := v.state.LastHeartbeats[v.node]
	switch {
	case !v.participates() && !last && !beats:
		return finish
	case v.late():
		return errorTimeout
	}
	return leaveForGood
}

// dropOp returns an operator that finishes once the node is not in the given round.
func dropOp(round int) operator {
	return func(v view) action {
		switch {
		case v.state.Round != round || !v.state.Complete || !v.participates():
			return finish
		case v.late():
			return errorTimeout
		}
		return leaveForGood
	}
}

// joinOp finishes once the node is a participant of a complete round.
func joinOp(v view) action {
	s, count, most := v.state, len(v.state.Participants), v.settings.MaxNodes
	redundant, waiting, participates := s.RedundancyList[v.node], s.WaitList[v.node], v.participates()
	switch {
	case s.Closed && redundant:
		return errorDismiss
	case s.Closed:
		return errorClosed
	case redundant && count == most: // the node's timeout does not apply here
		return v.rest()
	case redundant: // the timeout starts again
		return removeFromRedundancyList
	case s.Complete && participates && s.broken(): // another node is already gone
		return removeFromParticipants
	case s.Complete && participates:
		return finish
	case v.late() && !v.clock.After(v.deadline.Add(rollback)) && participates:
		return removeFromParticipants
	case v.late() && !v.clock.After(v.deadline.Add(rollback)) && waiting:
		return removeFromWaitList
	case v.late():
		return errorTimeout
	case s.Complete && count < most && !waiting: // the other nodes will start a new round
		return addToWaitList
	case s.Complete && count >= most && !waiting: // the round continues
		return addToRedundancyList
	case !s.Complete && participates && count >= v.settings.MinNodes && count <= most && v.lastCallOver():
		return markComplete
	case !s.Complete && !participates:
		return addToParticipants
	}
	return v.rest()
}

// missing returns what the node waits for, for the log; empty: only the end of the last call.
func (v view) missing() string {
	s, set := v.state, v.settings
	count := len(s.Participants)
	switch {
	case s.RedundancyList[v.node]:
		return fmt.Sprintf("all %d nodes of the job are there; this node takes the place of one that leaves", count)
	case s.WaitList[v.node]:
		return "the other nodes have a round, and end it to let this node in"
	case s.Complete || count >= set.MinNodes:
		return ""
	}
	return fmt.Sprintf("%d of at least %d nodes have joined: %s", count, set.MinNodes, addrs(s.Participants))
}

// mostAddrs is the largest number of nodes that the result of missing names.
const mostAddrs = 8

// addrs returns the addresses of the nodes, for the log.
func addrs(nodes map[NodeDesc]int) string {
	var all []string
	for _, n := range sorted(nodes) {
		all = append(all, n.Addr)
	}
	if more := len(all) - mostAddrs; more > 0 {
		all = append(all[:mostAddrs], fmt.Sprintf("and %d more", more))
	}
	return strings.Join(all, ", ")
}

// rest sends a heartbeat if one is due, and otherwise waits.
func (v view) rest() action {
	if v.due() {
		return keepAlive
	}
	return syncState
}

// lastCallOver reports whether the round waits for no more nodes. The last call ends early when all
// nodes of the last round are back, except those that are known to be gone.
func (v view) lastCallOver() bool {
	s := v.state
	if s.Deadline.IsZero() {
		return false
	}
	if s.Deadline.Before(v.now) {
		return true
	}
	if len(s.LastRanks) == 0 || len(s.WaitList) > 0 { // the nodes come at about the same time
		return false
	}
	for n := range s.LastRanks {
		if _, back := s.Participants[n]; !back {
			return false
		}
	}
	return true
}

// apply applies an action of a node to the state. now is the time of the record's clock, and info
// the data that the node shares with the others.
func (s *State) apply(a action, node NodeDesc, info string, now time.Time, set *Settings) {
	switch a {
	case keepAlive:
		s.LastHeartbeats[node] = now
	case addToParticipants:
		s.addParticipant(node, info, now, set)
	case addToWaitList:
		delete(s.RedundancyList, node)
		s.WaitList[node] = true
		s.LastHeartbeats[node] = now
	case addToRedundancyList:
		s.RedundancyList[node] = true
		s.LastHeartbeats[node] = now
	case removeFromParticipants:
		delete(s.Participants, node)
		delete(s.Infos, node)
		delete(s.LastHeartbeats, node)
		s.epilogue(set)
	case leaveForGood:
		_, was := s.Participants[node]
		delete(s.Participants, node)
		delete(s.Infos, node)
		delete(s.LastHeartbeats, node)
		delete(s.WaitList, node)
		delete(s.RedundancyList, node)
		delete(s.LastRanks, node)
		if was {
			s.epilogue(set)
		}
	case removeFromWaitList:
		delete(s.WaitList, node)
		delete(s.LastHeartbeats, node)
	case removeFromRedundancyList:
		delete(s.RedundancyList, node)
		delete(s.LastHeartbeats, node)
	case markComplete:
		s.complete()
	case markClosed:
		s.Closed = true
	case markFailed:
		s.Failed = true
	}
}

func (s *State) addParticipant(node NodeDesc, info string, now time.Time, set *Settings) {
	delete(s.WaitList, node)
	s.Participants[node] = 0
	s.LastHeartbeats[node] = now
	if info != "" {
		s.Infos[node] = info
	}
	if len(s.Participants) == set.MinNodes {
		s.Deadline = now.Add(set.LastCall)
	}
	if len(s.Participants) == set.MaxNodes {
		s.complete()
	}
}

// complete fixes the participants and assigns their ranks: first to nodes of the last round, in the
// order of their ranks in it, then to the others by name.
func (s *State) complete() {
	s.Complete, s.Deadline = true, time.Time{}
	nodes := sorted(s.Participants)
	keepOrder(nodes, s.LastRanks)
	clear(s.LastRanks)
	for rank, n := range nodes {
		s.Participants[n], s.LastRanks[n] = rank, rank
	}
}

// broken reports whether a rank of a complete round is missing, because its node has left or was
// lost before others have seen that the round is complete. It cannot detect that the last rank is
// missing; the nodes that saw that member consider it lost, and leave the round.
func (s *State) broken() bool {
	for _, rank := range s.Participants {
		if rank >= len(s.Participants) {
			return true
		}
	}
	return false
}

// keepOrder moves the nodes that have ranks to the front, in the order of their ranks.
func keepOrder(nodes []NodeDesc, ranks map[NodeDesc]int) {
	slices.SortStableFunc(nodes, func(a, b NodeDesc) int {
		ra, hasA := ranks[a]
		rb, hasB := ranks[b]
		switch {
		case hasA && hasB:
			return cmp.Compare(ra, rb)
		case hasA:
			return -1
		case hasB:
			return 1
		}
		return 0
	})
}
