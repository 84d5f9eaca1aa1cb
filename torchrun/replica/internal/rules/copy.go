// Package rules decides which node leads a replica, and which records of the leader are certain to
// be kept. A Ballot decides an election, a Tenure directs a leader, and a Voter answers for a node.
// The package is pure: it uses no network, clock or goroutine; package replica applies it. A test
// explores all states that a few nodes can reach.
package rules

import (
	"maps"
	"slices"
)

// Copy is a node's copy of the job. The zero value is the copy of a job that has not begun.
type Copy struct {
	// Term is the term of the leader that wrote the copy, and Count the number of changes in that
	// term.
	Term  uint64 `json:"term"`
	Count uint64 `json:"count"`
	// Records are the records of the journal. Files are other data that a driver needs, by name.
	Records [][]byte          `json:"records,omitempty"`
	Files   map[string][]byte `json:"files,omitempty"`
	// Behind means that the journal lacks records.
	Behind bool `json:"behind,omitempty"`
	// Members are the lists of members. A quorum of each list is needed to keep a change or to
	// lead. There is one list, or two while the members change: the previous and the next one.
	Members [][]string `json:"members,omitempty"`
}

// Change is one change of a copy.
type Change struct {
	// Records are added to the journal or, if Replace is set, replace it.
	Records [][]byte `json:"records,omitempty"`
	Replace bool     `json:"replace,omitempty"`
	// Behind means that the journal lacks records, until the next Replace.
	Behind bool `json:"behind,omitempty"`
	// File, if not empty, is the name of a file whose content becomes Value.
	File  string `json:"file,omitempty"`
	Value []byte `json:"value,omitempty"`
	// Gone, if not empty, are the names of files to delete.
	Gone []string `json:"gone,omitempty"`
	// Members, if not empty, replace the lists of members.
	Members [][]string `json:"members,omitempty"`
}

// apply applies a change. It keeps the slices of the change.
func (c *Copy) apply(ch Change) {
	switch {
	case len(ch.Members) > 0:
		c.Members = ch.Members
	case len(ch.Gone) > 0:
		for _, name := range ch.Gone {
			delete(c.Files, name)
		}
	case ch.File != "":
		if c.Files == nil {
			c.Files = make(map[string][]byte)
		}
		c.Files[ch.File] = ch.Value
	case ch.Replace:
		c.Records, c.Behind = slices.Clone(ch.Records), false
	default:
		c.Records = append(c.Records, ch.Records...)
		c.Behind = c.Behind || ch.Behind
	}
	c.Count++
}

// Clone returns a copy that shares only contents, which are never changed.
func (c Copy) Clone() Copy {
	c.Records, c.Files = slices.Clone(c.Records), maps.Clone(c.Files)
	return c
}

// newer reports whether c was written after d.
func (c Copy) newer(d Copy) bool {
	return c.Term > d.Term || c.Term == d.Term && c.Count > d.Count
}

// Question is a request of a leader to a node: to promise to follow (Lead), or to write.
type Question struct {
	To   string `json:"to,omitempty"` // the member to which the question is addressed
	Term uint64 `json:"term"`
	Lead bool   `json:"lead,omitempty"`
	// Whole replaces the node's copy. Otherwise Changes follow the first From changes of the term.
	Whole   *Copy    `json:"whole,omitempty"`
	From    uint64   `json:"from,omitempty"`
	Changes []Change `json:"changes,omitempty"`
}

// Reply is a node's answer.
type Reply struct {
	// Promised is the latest term that the node knows of. If it is later than the question's term,
	// the node has refused.
	Promised uint64 `json:"promised"`
	// Copy is the node's copy, in answer to Lead.
	Copy *Copy `json:"copy,omitempty"`
	// Gap means that the changes do not follow those that the node has, so that it needs the whole
	// copy.
	Gap bool `json:"gap,omitempty"`
	// Other means that the node is not the member to which the question is addressed, but now has
	// its address.
	Other bool `json:"other,omitempty"`
}
