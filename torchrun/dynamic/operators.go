package dynamic

import (
	"cmp"
	"slices"
	"time"
)

// action is what a node does next, as an operator decides.
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
	errorClosed  // give up: the run is closed
	errorTimeout // give up: the operation has taken too long
	errorDismiss // give up without an error: the run was closed while the node was spare
	finish       // the operation is done
	leaveForGood // like removeFromParticipants, and from the memory of the last round
)

// view is what an operator decides by. It is not changed.
type view struct {
	node     NodeDesc
	state    *State
	settings *Settings
	now      time.Time // of the clock by which heartbeats and deadlines of the record are set
	// clock is this process's, by which deadline is set: the end of the operation.
	clock, deadline time.Time
}

func (v view) participates() bool { _, is := v.state.Participants[v.node]; return is }

// due: the node has to send a heartbeat.
func (v view) due() bool {
	beat, is := v.state.LastHeartbeats[v.node]
	return is && !beat.After(v.now.Add(-v.settings.KeepAliveInterval))
}

func (v view) late() bool { return v.clock.After(v.deadline) }

// operator decides the next action. It has no state and changes nothing.
type operator func(view) action

// keepAliveOp ends once the node's heartbeat is fresh.
func keepAliveOp(v view) action {
	switch {
	case !v.due():
		return finish
	case v.late():
		return errorTimeout
	}
	return keepAlive
}

// closeOp ends once the run is closed.
func closeOp(v view) action {
	switch {
	case v.state.Closed:
		return finish
	case v.late():
		return errorTimeout
	}
	return markClosed
}

// failOp ends once the round has failed, or the node is in none: it was taken for dead.
func failOp(v view) action {
	switch {
	case !v.participates() || !v.state.Complete || v.state.Failed:
		return finish
	case v.late():
		return errorTimeout
	}
	return markFailed
}

// exitOp ends once the node does not participate.
func exitOp(v view) action {
	switch {
	case !v.participates():
		return finish
	case v.late():
		return errorTimeout
	}
	return removeFromParticipants
}

// leaveOp ends once nothing of the node is in the record: the others need not wait for it.
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

// dropOp ends once the node is not in the round.
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

// joinOp ends once the node participates in a complete round.
func joinOp(v view) action {
	s, count, most := v.state, len(v.state.Participants), v.settings.MaxNodes
	redundant, waiting, participates := s.RedundancyList[v.node], s.WaitList[v.node], v.participates()
	switch {
	case s.Closed && redundant:
		return errorDismiss
	case s.Closed:
		return errorClosed
	case redundant && count == most: // the node's timeout does not count here
		return v.rest()
	case redundant: // the timeout starts again
		return removeFromRedundancyList
	case s.Complete && participates && s.broken(): // another node is gone already
		return removeFromParticipants
	case s.Complete && participates:
		return finish
	case v.late() && !v.clock.After(v.deadline.Add(rollback)) && participates:
		return removeFromParticipants
	case v.late() && !v.clock.After(v.deadline.Add(rollback)) && waiting:
		return removeFromWaitList
	case v.late():
		return errorTimeout
	case s.Complete && count < most && !waiting: // the others start a new round
		return addToWaitList
	case s.Complete && count >= most && !waiting: // the round goes on
		return addToRedundancyList
	case !s.Complete && participates && count >= v.settings.MinNodes && count <= most && v.lastCallOver():
		return markComplete
	case !s.Complete && !participates:
		return addToParticipants
	}
	return v.rest()
}

// rest sends a heartbeat if one is due, and otherwise waits.
func (v view) rest() action {
	if v.due() {
		return keepAlive
	}
	return syncState
}

// lastCallOver: nobody is waited for any longer. It is over early when all nodes of the last round
// are back that are not known to be gone.
func (v view) lastCallOver() bool {
	s := v.state
	if s.Deadline.IsZero() {
		return false
	}
	if s.Deadline.Before(v.now) {
		return true
	}
	if v.settings.WholeLastCall || len(s.LastRanks) == 0 || len(s.WaitList) > 0 { // they come at once
		return false
	}
	for n := range s.LastRanks {
		if _, back := s.Participants[n]; !back {
			return false
		}
	}
	return true
}

// apply changes a state by an action of a node at a time of the record's clock. info is what the
// node tells the others.
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
		s.complete(set)
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
		s.complete(set)
	}
}

// complete fixes the participants and gives them ranks: nodes of the last round first, in the order
// that they had, then the others by name; or all by name.
func (s *State) complete(set *Settings) {
	s.Complete, s.Deadline = true, time.Time{}
	nodes := sorted(s.Participants)
	if !set.SortedRanks {
		keepOrder(nodes, s.LastRanks)
	}
	clear(s.LastRanks)
	for rank, n := range nodes {
		s.Participants[n], s.LastRanks[n] = rank, rank
	}
}

// broken reports whether a rank of a complete round is missing: its node has left, or was lost,
// before others have seen that the round is complete. A last rank that is missing is not noticed.
// The nodes that saw it take it for lost and leave the round.
func (s *State) broken() bool {
	for _, rank := range s.Participants {
		if rank >= len(s.Participants) {
			return true
		}
	}
	return false
}

// keepOrder moves nodes with ranks to the front, in the order of these.
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
