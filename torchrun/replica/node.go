// Package replica keeps the copy of a job's journal on several nodes at once, in their memory, for
// jobs that have no other place for it. One node leads: it has the driver, whose records it writes
// to all. When it is gone another leads, and goes on from the newest copy that it finds on more
// than half of the nodes.
//
// Leaders are fenced by terms, as the ballots of Paxos and the views of Viewstamped Replication
// are: to lead, a node has the others promise to take nothing from leaders of earlier terms, so a
// record that its leader knows to be on most nodes is in the copy of each leader to come.
package replica

import (
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"net"
	"slices"
	"sync"

	"github.com/hvdrun/hvdrun/internal/frame"
)

// maxFrame bounds a message between nodes, in bytes. A journal is compacted long before.
const maxFrame = 32 << 20

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
}

// apply makes a change. It keeps the change's slices.
func (c *Copy) apply(ch Change) {
	switch {
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

// clone returns a copy that shares only contents, which nobody changes.
func (c Copy) clone() Copy {
	c.Records, c.Files = slices.Clone(c.Records), maps.Clone(c.Files)
	return c
}

// newer returns whether c was written after d.
func (c Copy) newer(d Copy) bool {
	return c.Term > d.Term || c.Term == d.Term && c.Count > d.Count
}

// question is what a leader asks a node: to promise that it follows (Lead), or to write.
type question struct {
	Term uint64 `json:"term"`
	Lead bool   `json:"lead,omitempty"`
	// Whole replaces the node's copy; otherwise Changes follow the first From of the term.
	Whole   *Copy    `json:"whole,omitempty"`
	From    uint64   `json:"from,omitempty"`
	Changes []Change `json:"changes,omitempty"`
}

// reply is what a node answers.
type reply struct {
	// Promised is the latest term that the node knows of. Later than the question's: the node has
	// refused.
	Promised uint64 `json:"promised"`
	// Copy is the node's, in answer to Lead.
	Copy *Copy `json:"copy,omitempty"`
	// Gap: the changes do not follow what the node has. It needs the whole copy.
	Gap bool `json:"gap,omitempty"`
}

// Node has a copy. The zero value is ready. Its methods may be called by many goroutines.
type Node struct {
	mu       sync.Mutex
	promised uint64
	copy     Copy
	change   chan struct{} // closed at the next change; nil: nobody waits
}

// answer does what a leader asks for. A node that has promised nothing to the leader refuses a Lead
// of a term that is not later than its own promise.
func (n *Node) answer(q question) reply {
	n.mu.Lock()
	defer n.mu.Unlock()
	if q.Term < n.promised || q.Lead && q.Term == n.promised {
		return reply{Promised: max(n.promised, q.Term+1)}
	}
	n.promised = q.Term
	switch {
	case q.Lead:
		c := n.copy.clone()
		return reply{Promised: n.promised, Copy: &c}
	case q.Whole != nil:
		n.copy = q.Whole.clone()
	case n.copy.Term != q.Term || n.copy.Count != q.From:
		return reply{Promised: n.promised, Gap: true}
	default:
		for _, ch := range q.Changes {
			n.copy.apply(ch)
		}
	}
	if n.change != nil {
		close(n.change)
		n.change = nil
	}
	return reply{Promised: n.promised}
}

// Await blocks until the copy has a file, and returns its content, or the cause of ctx's end.
func (n *Node) Await(ctx context.Context, name string) ([]byte, error) {
	for {
		n.mu.Lock()
		value, is := n.copy.Files[name]
		if n.change == nil {
			n.change = make(chan struct{})
		}
		change := n.change
		n.mu.Unlock()
		if is {
			return bytes.Clone(value), nil
		}
		select {
		case <-change:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// Serve answers the leader at the other end of a connection until that is closed. Who is there must
// have proven that it is of the job.
func (n *Node) Serve(conn net.Conn) error {
	for {
		var q question
		if err := frame.Read(conn, &q, maxFrame); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if err := frame.Write(conn, n.answer(q), maxFrame); err != nil {
			return err
		}
	}
}
