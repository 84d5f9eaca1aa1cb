// Package replica keeps copies of a job's journal on several nodes, in their memory, for jobs that
// have no other place for it. One node leads: it has the driver, and writes the driver's records to
// all nodes. When it is gone another node leads, and continues from the newest copy that it finds
// on more than half of the nodes.
//
// Leaders are fenced by terms, like the ballots of Paxos and the views of Viewstamped Replication:
// to lead, a node makes the others promise to accept nothing from leaders of earlier terms. So if a
// leader knows that most nodes have a record, the copy of each later leader has it. The lists of
// members are in the copy itself, and change as in Raft: until most nodes of both lists know of the
// change, both count.
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

// maxFrame bounds a message between nodes, in bytes. A journal is compacted long before.
const maxFrame = 32 << 20

// Copy is a node's copy of the job. The zero value is the copy of a job that has not begun.
type Copy = rules.Copy

// Change is one change of a copy.
type Change = rules.Change

// Evidence is what a node knows about another member's process.
type Evidence = rules.Evidence

// Node has a copy. The zero value is ready. Its methods may be called by many goroutines.
type Node struct {
	// Name is the node's name among the members. It must not be changed later. If it differs for
	// each process, leaders notice that another process has a member's address. Empty: it answers
	// to all names.
	Name string

	mu     sync.Mutex
	voter  rules.Voter
	change chan struct{} // closed at the next change; nil: nobody waits
}

// answer does what a leader asks for.
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

// Await blocks until the copy has a file, and returns its content, or the cause of ctx's end.
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

// Serve answers the leader at the other end of a connection until the connection is closed. The
// leader must have proven that it belongs to the job.
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
