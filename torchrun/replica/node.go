// Package replica keeps copies of a job's journal in the memory of several nodes, for jobs that
// have no other place for it. Lead makes a node the leader: it runs the driver, and writes the
// driver's records to all nodes. When it is gone another node leads, and continues from the newest
// copy that it finds on more than half of the nodes.
//
// Leaders are fenced by terms, like the ballots of Paxos and the views of Viewstamped Replication:
// to lead, a node makes the others promise to accept nothing from leaders of earlier terms. If a
// leader knows that a quorum of the nodes has a record, the copy of every later leader therefore
// has it. The lists of members are in the copy itself, and change as in Raft: until a quorum of
// both lists has the change, both lists count.
package replica

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"sync"

	"github.com/hvdrun/hvdrun/internal/frame"
	"github.com/hvdrun/hvdrun/torchrun/replica/internal/rules"
)

// maxFrame is the largest size of a message between nodes, in bytes. A journal is compacted long
// before it reaches that size.
const maxFrame = 32 << 20

// Copy is a node's copy of the job. The zero value is the copy of a job that has not begun.
type Copy = rules.Copy

// Change is one change of a copy.
type Change = rules.Change

// Evidence is what a node has observed of another member's process.
type Evidence = rules.Evidence

// Node holds a copy. The zero value is ready to use. Its methods are safe for concurrent use.
type Node struct {
	// Name is the node's name among the members. It must not be changed later. If each process has
	// a different name, leaders notice when another process has a member's address. Empty: the node
	// answers to all names.
	Name string

	mu     sync.Mutex
	voter  rules.Voter
	change chan struct{} // closed at the next change; nil: nobody waits
}

// answer carries out a leader's request.
func (n *Node) answer(q rules.Question) rules.Reply {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.voter.Name = n.Name
	r := n.voter.Answer(q)
	if !q.Lead && n.change != nil {
		close(n.change)
		n.change = nil
	}
	return r
}

// File returns the content of a file, which must not be changed, whether the file exists, and a
// channel that is closed at the next change of the copy.
func (n *Node) File(name string) (value []byte, is bool, change <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.change == nil {
		n.change = make(chan struct{})
	}
	value, is = n.voter.Copy.Files[name]
	return value, is, n.change
}

// Await blocks until the copy has the file, and returns its content, or the cause of ctx's end.
func (n *Node) Await(ctx context.Context, name string) ([]byte, error) {
	for {
		value, is, change := n.File(name)
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

// Serve answers the leader at the other end of a connection until the connection ends. The caller
// must have verified that the leader belongs to the job.
func (n *Node) Serve(conn net.Conn) error {
	for {
		var q rules.Question
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
