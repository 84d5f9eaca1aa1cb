// Package rules decides who leads a replica, and which records of the leader are sure to be kept.
// It is pure: it knows no network, clock or goroutine; package replica applies it. A test explores
// all states that a few nodes can reach.
package rules

import (
	"maps"
	"slices"
)

// Copy is what a node has of the job. The zero value is the copy of a job that has not begun.
type Copy struct {
	// Term is that of the leader that wrote it, and Count the number of its changes since.
	Term  uint64 `json:"term"`
	Count uint64 `json:"count"`
	// Records are the journal's, and Files what else a driver needs, by name.
	Records [][]byte          `json:"records,omitempty"`
	Files   map[string][]byte `json:"files,omitempty"`
	// Behind: the journal lacks records.
	Behind bool `json:"behind,omitempty"`
	// Members are the lists of members whose quorums it takes to keep a change, or to lead: one,
	// and while the members change those before and after.
	Members [][]string `json:"members,omitempty"`
}

// Change is one change of a copy.
type Change struct {
	// Records are added to the journal, or are all of it where Replace is set.
	Records [][]byte `json:"records,omitempty"`
	Replace bool     `json:"replace,omitempty"`
	// Behind says that the journal lacks records, until the next Replace.
	Behind bool `json:"behind,omitempty"`
	// File, if not empty, is the name of a file whose content becomes Value.
	File  string `json:"file,omitempty"`
	Value []byte `json:"value,omitempty"`
	// Gone, if not empty, are the names of files that are no more.
	Gone []string `json:"gone,omitempty"`
	// Members, if not empty, become the copy's.
	Members [][]string `json:"members,omitempty"`
}

// apply makes a change. It keeps the change's slices.
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

// Clone returns a copy that shares only contents, which nobody changes.
func (c Copy) Clone() Copy {
	c.Records, c.Files = slices.Clone(c.Records), maps.Clone(c.Files)
	return c
}

// newer returns whether c was written after d.
func (c Copy) newer(d Copy) bool {
	return c.Term > d.Term || c.Term == d.Term && c.Count > d.Count
}

// Question is what a leader asks a node: to promise that it follows (Lead), or to write.
type Question struct {
	To   string `json:"to,omitempty"` // the member that is asked
	Term uint64 `json:"term"`
	Lead bool   `json:"lead,omitempty"`
	// Whole replaces the node's copy; otherwise Changes follow the first From of the term.
	Whole   *Copy    `json:"whole,omitempty"`
	From    uint64   `json:"from,omitempty"`
	Changes []Change `json:"changes,omitempty"`
}

// Reply is what a node answers.
type Reply struct {
	// Promised is the latest term that the node knows of. Later than the question's: the node has
	// refused.
	Promised uint64 `json:"promised"`
	// Copy is the node's, in answer to Lead.
	Copy *Copy `json:"copy,omitempty"`
	// Gap: the changes do not follow what the node has. It needs the whole copy.
	Gap bool `json:"gap,omitempty"`
	// Other: the node is not the member that is asked, but has its address now.
	Other bool `json:"other,omitempty"`
}
