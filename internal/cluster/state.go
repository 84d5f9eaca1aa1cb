package cluster

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// stateVersion is the version of the format of State.
const stateVersion = 1

// GossipKeyLen is the length of a gossip key, in bytes.
const GossipKeyLen = 32

// State is the part of a cluster's folder that changes.
type State struct {
	Version int
	Ring    Ring
	Tokens  []tokenRecord
	// Hosts are the hosts whose certificates are valid, by name.
	Hosts map[string]HostRecord
}

// HostRecord is what the cluster knows about the agent of a host.
type HostRecord struct {
	// Expires is when its last certificate expires.
	Expires time.Time
	// Ring is the version of the gossip keys that the agent uses.
	Ring uint64
	// Removed says that its certificate is not renewed.
	Removed bool `json:",omitempty"`
}

// Phase is the phase of a replacement of the gossip key.
type Phase string

// The phases of a replacement.
const (
	// Stable: there is one key.
	Stable Phase = ""
	// Adding: all agents receive a second key, with which nobody encrypts yet.
	Adding Phase = "adding"
	// Switching: all agents encrypt with the new key, and still decrypt with the old one.
	Switching Phase = "switching"
	// Removing: all agents forget the old key.
	Removing Phase = "removing"
)

// Ring holds the gossip keys: the first encrypts, all decrypt. The version increases with each
// change.
type Ring struct {
	Version uint64
	Keys    [][]byte
	Phase   Phase `json:",omitempty"`
	// Since is when the phase began.
	Since time.Time
}

// newState returns the state of a new cluster, with a new key.
func newState(now time.Time) *State {
	return &State{Version: stateVersion, Ring: Ring{Version: 1, Keys: [][]byte{newGossipKey()}, Since: now}, Hosts: map[string]HostRecord{}}
}

func newGossipKey() []byte {
	key := make([]byte, GossipKeyLen)
	rand.Read(key)
	return key
}

// decodeState parses the text of a State. Errors reveal nothing about it.
func decodeState(text []byte) (*State, error) {
	s := &State{}
	if err := json.Unmarshal(text, s); err != nil {
		return nil, errors.New("it is not valid JSON")
	}
	if s.Version != stateVersion {
		return nil, fmt.Errorf("it is of version %d, and this program knows version %d", s.Version, stateVersion)
	}
	if err := s.Ring.check(); err != nil {
		return nil, err
	}
	if s.Hosts == nil {
		s.Hosts = map[string]HostRecord{}
	}
	return s, nil
}

func (r Ring) check() error {
	want := map[Phase]int{Stable: 1, Adding: 2, Switching: 2, Removing: 1}[r.Phase]
	if r.Version == 0 || want == 0 || len(r.Keys) != want {
		return fmt.Errorf("it has %d gossip keys in the phase %q", len(r.Keys), r.Phase)
	}
	return CheckKeys(r.Keys)
}

// CheckKeys returns an error unless keys are valid gossip keys: one or two.
func CheckKeys(keys [][]byte) error {
	if len(keys) == 0 || len(keys) > 2 {
		return fmt.Errorf("there are %d gossip keys, and not one or two", len(keys))
	}
	for _, key := range keys {
		if len(key) != GossipKeyLen {
			return fmt.Errorf("a gossip key has %d bytes, and not %d", len(key), GossipKeyLen)
		}
	}
	return nil
}

// Issued records that the host has a certificate that expires at the time expires.
func (s *State) Issued(host string, expires, now time.Time) {
	h := s.Hosts[host]
	if expires.After(h.Expires) {
		h.Expires = expires
	}
	s.Hosts[host] = h
	maps.DeleteFunc(s.Hosts, func(_ string, h HostRecord) bool { return h.Expires.Before(now) })
}

// Heard records which version of the keys the host uses, and returns whether that has changed.
func (s *State) Heard(host string, ring uint64) bool {
	h, known := s.Hosts[host]
	if !known || h.Ring == ring {
		return false
	}
	h.Ring = ring
	s.Hosts[host] = h
	return true
}

// Remove stops the renewal of the host's certificate, and rotations no longer wait for the host.
func (s *State) Remove(host string) error {
	h, known := s.Hosts[host]
	if !known {
		return fmt.Errorf("cluster: no host %q has a certificate", host)
	}
	h.Removed = true
	s.Hosts[host] = h
	return nil
}

// BeginRotation begins to replace the gossip key, unless a replacement is in progress.
func (s *State) BeginRotation(now time.Time) (begun bool) {
	if s.Ring.Phase != Stable {
		return false
	}
	s.Ring.Keys = append(s.Ring.Keys, newGossipKey())
	s.Ring.enter(Adding, now)
	return true
}

// AdvanceRotation begins the next phase of a replacement if all hosts use the keys of the current
// one, and it has lasted for hold, within which drivers notice the keys. It returns the hosts that
// it waits for.
func (s *State) AdvanceRotation(now time.Time, hold time.Duration) (advanced bool, waiting []string) {
	if s.Ring.Phase == Stable {
		return false, nil
	}
	for host, h := range s.Hosts {
		if !h.Removed && h.Expires.After(now) && h.Ring != s.Ring.Version {
			waiting = append(waiting, host)
		}
	}
	slices.Sort(waiting)
	if len(waiting) > 0 || now.Sub(s.Ring.Since) < hold && s.Ring.Phase != Removing {
		return false, waiting
	}
	old, last := s.Ring.Keys[0], s.Ring.Keys[len(s.Ring.Keys)-1]
	switch s.Ring.Phase {
	case Adding:
		s.Ring.Keys = [][]byte{last, old}
		s.Ring.enter(Switching, now)
	case Switching:
		s.Ring.Keys = [][]byte{old} // the first, which has been the new key since the last phase
		s.Ring.enter(Removing, now)
	case Removing:
		s.Ring.Phase, s.Ring.Since = Stable, now
	}
	return true, nil
}

// enter begins a phase with new keys, which all must receive.
func (r *Ring) enter(p Phase, now time.Time) {
	r.Phase, r.Since = p, now
	r.Version++
}
