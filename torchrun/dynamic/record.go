package dynamic

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	recordVersion = 2
	maxAddr       = 255
	// maxInfo is the largest size of the data that a node shares with the others, in bytes.
	maxInfo = 512
)

// errCorrupt means that the value in the store is not a record of this package.
var errCorrupt = errors.New("dynamic: the record in the store is not valid")

// NodeDesc identifies a node. One process may have several nodes.
type NodeDesc struct {
	Addr    string
	PID     int
	LocalID int
}

// String returns the address, process id and number, as addr_pid_localid.
func (n NodeDesc) String() string {
	return n.Addr + "_" + strconv.Itoa(n.PID) + "_" + strconv.Itoa(n.LocalID)
}

// Compare orders nodes by address, process and number.
func (n NodeDesc) Compare(o NodeDesc) int {
	return cmp.Or(strings.Compare(n.Addr, o.Addr), cmp.Compare(n.PID, o.PID), cmp.Compare(n.LocalID, o.LocalID))
}

// State is the record that the nodes of a run share. The zero value with the maps of newState is
// the record of a run that nobody has joined.
type State struct {
	// Round increases by 1 each time a completed round has lost its last participant.
	Round int
	// Complete means that the participants of the round are fixed.
	Complete bool
	// Deadline is when the last call ends; zero: it has not begun.
	Deadline time.Time
	// Closed means that no node can join.
	Closed bool
	// Participants are the nodes of the round with their ranks, which are 0 until it is complete.
	Participants map[NodeDesc]int
	// WaitList are nodes that came when the round was complete and had room; they make the others
	// start another round. RedundancyList are nodes that came when the round was full; they do not.
	WaitList, RedundancyList map[NodeDesc]bool
	// LastHeartbeats has an entry for every node of the three sets.
	LastHeartbeats map[NodeDesc]time.Time
	// LastRanks are the ranks in the last complete round, of nodes that may come back.
	LastRanks map[NodeDesc]int
	// Infos are the data that participants share with each other.
	Infos map[NodeDesc]string
	// Failed means that workers of the round have failed, on any of its nodes.
	Failed bool
	// Restarts counts the rounds that have failed. It does not change during a round: all nodes of
	// a complete round see the same number.
	Restarts int
}

// newState returns an empty state.
func newState() *State {
	return &State{
		Participants: map[NodeDesc]int{}, WaitList: map[NodeDesc]bool{}, RedundancyList: map[NodeDesc]bool{},
		LastHeartbeats: map[NodeDesc]time.Time{}, LastRanks: map[NodeDesc]int{}, Infos: map[NodeDesc]string{},
	}
}

// The flags of a node in an encoded record.
const (
	isParticipant = 1 << iota
	isWaiting
	isRedundant
	hasHeartbeat
	hasLastRank
	hasInfo
)

// The flags of an encoded record.
const (
	isComplete = 1 << iota
	isClosed
	hasDeadline
	hasFailed
)

// nodes returns all nodes of the record, sorted.
func (s *State) nodes() []NodeDesc {
	all := map[NodeDesc]bool{}
	for n := range s.Participants {
		all[n] = true
	}
	for _, set := range []map[NodeDesc]bool{s.WaitList, s.RedundancyList} {
		for n := range set {
			all[n] = true
		}
	}
	for n := range s.LastHeartbeats {
		all[n] = true
	}
	for n := range s.LastRanks {
		all[n] = true
	}
	return sorted(all)
}

func sorted[V any](set map[NodeDesc]V) []NodeDesc {
	nodes := make([]NodeDesc, 0, len(set))
	for n := range set {
		nodes = append(nodes, n)
	}
	slices.SortFunc(nodes, NodeDesc.Compare)
	return nodes
}

// Encode returns the encoded record: about 40 bytes for each node with a short name. Equal states
// have equal encodings.
func (s *State) Encode() []byte {
	b := []byte{recordVersion}
	var flags byte
	if s.Complete {
		flags |= isComplete
	}
	if s.Closed {
		flags |= isClosed
	}
	if !s.Deadline.IsZero() {
		flags |= hasDeadline
	}
	if s.Failed {
		flags |= hasFailed
	}
	b = append(b, flags)
	b = binary.AppendUvarint(b, uint64(s.Round))
	b = binary.AppendUvarint(b, uint64(s.Restarts))
	if !s.Deadline.IsZero() {
		b = binary.AppendVarint(b, s.Deadline.UnixNano())
	}
	nodes := s.nodes()
	b = binary.AppendUvarint(b, uint64(len(nodes)))
	for _, n := range nodes {
		b = s.appendNode(b, n)
	}
	return b
}

func (s *State) appendNode(b []byte, n NodeDesc) []byte {
	rank, participant := s.Participants[n]
	beat, beats := s.LastHeartbeats[n]
	last, lasts := s.LastRanks[n]
	info, infos := s.Infos[n]
	var flags byte
	for flag, is := range map[byte]bool{
		isParticipant: participant, isWaiting: s.WaitList[n], isRedundant: s.RedundancyList[n],
		hasHeartbeat: beats, hasLastRank: lasts, hasInfo: infos,
	} {
		if is {
			flags |= flag
		}
	}
	b = append(b, flags)
	b = appendText(b, n.Addr)
	b = binary.AppendUvarint(b, uint64(n.PID))
	b = binary.AppendUvarint(b, uint64(n.LocalID))
	if participant {
		b = binary.AppendUvarint(b, uint64(rank))
	}
	if beats {
		b = binary.AppendVarint(b, beat.UnixNano())
	}
	if lasts {
		b = binary.AppendUvarint(b, uint64(last))
	}
	if infos {
		b = appendText(b, info)
	}
	return b
}

func appendText(b []byte, text string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(text))), text...)
}

// Decode decodes a record, or returns errCorrupt. An empty b is an empty state.
func Decode(b []byte) (*State, error) {
	s := newState()
	if len(b) == 0 {
		return s, nil
	}
	r := &recordReader{Reader: bytes.NewReader(b)}
	if version := r.byte(); version != recordVersion {
		return nil, fmt.Errorf("%w: it has version %d; this program knows version %d", errCorrupt, version, recordVersion)
	}
	flags := r.byte()
	s.Complete, s.Closed, s.Failed = flags&isComplete != 0, flags&isClosed != 0, flags&hasFailed != 0
	s.Round, s.Restarts = r.number(), r.number()
	if flags&hasDeadline != 0 {
		s.Deadline = r.time()
	}
	count := r.number()
	for i := 0; i < count && !r.bad; i++ {
		r.node(s)
	}
	if r.bad || r.Len() > 0 {
		return nil, errCorrupt
	}
	return s, nil
}

type recordReader struct {
	*bytes.Reader
	bad bool
}

func (r *recordReader) byte() byte {
	b, err := r.ReadByte()
	r.bad = r.bad || err != nil
	return b
}

// number returns the next number, which must not exceed any valid rank, process id or count.
func (r *recordReader) number() int {
	n, err := binary.ReadUvarint(r)
	if err != nil || n > 1<<31 {
		r.bad = true
		return 0
	}
	return int(n)
}

func (r *recordReader) time() time.Time {
	n, err := binary.ReadVarint(r)
	r.bad = r.bad || err != nil
	return time.Unix(0, n).UTC()
}

func (r *recordReader) text(most int) string {
	n := r.number()
	if n > most || n > r.Len() {
		r.bad = true
		return ""
	}
	b := make([]byte, n)
	_, _ = r.Read(b) // all bytes are present
	return string(b)
}

func (r *recordReader) node(s *State) {
	flags := r.byte()
	n := NodeDesc{Addr: r.text(maxAddr), PID: r.number(), LocalID: r.number()}
	if flags&isParticipant != 0 {
		s.Participants[n] = r.number()
	}
	if flags&isWaiting != 0 {
		s.WaitList[n] = true
	}
	if flags&isRedundant != 0 {
		s.RedundancyList[n] = true
	}
	if flags&hasHeartbeat != 0 {
		s.LastHeartbeats[n] = r.time()
	}
	if flags&hasLastRank != 0 {
		s.LastRanks[n] = r.number()
	}
	if flags&hasInfo != 0 {
		s.Infos[n] = r.text(maxInfo)
	}
}

// sanitize removes the nodes whose last heartbeat is too old, and applies the consequences.
func (s *State) sanitize(now time.Time, set *Settings) {
	lost := false
	bound := now.Add(-set.KeepAliveInterval * time.Duration(set.KeepAliveAttempts))
	for n, beat := range s.LastHeartbeats {
		if !beat.Before(bound) {
			continue
		}
		delete(s.LastHeartbeats, n)
		delete(s.LastRanks, n)
		delete(s.WaitList, n)
		delete(s.RedundancyList, n)
		if _, is := s.Participants[n]; is {
			delete(s.Participants, n)
			delete(s.Infos, n)
			lost = true
		}
	}
	if lost {
		s.epilogue(set)
	}
}

// epilogue applies the consequences of the removal of a participant.
func (s *State) epilogue(set *Settings) {
	switch {
	case s.Complete && len(s.Participants) == 0:
		s.Complete = false
		s.Round++
		if s.Failed {
			s.Failed = false
			s.Restarts++
		}
	case !s.Complete && len(s.Participants) < set.MinNodes:
		s.Deadline = time.Time{}
	}
}
