// Package torchrun runs unmodified PyTorch programs as torchelastic's agent does. Agent.Run runs on
// each node: it meets the agents of the other nodes in a rendezvous, gives each of its workers its
// ranks and the address of a store (internal/tcpstore), and restarts all workers when one fails or
// when nodes come or go.
//
// It differs from torchelastic's agent where that has known problems. It acts at once when a worker
// ends. It notices nodes that leave, not only nodes that join. The store's protocol has no
// authentication, so workers reach the store only at loopback: the Agent admits the processes that
// it has started, and forwards their connections to the Agent with rank 0 over mutual TLS. All
// waits can be configured.
package torchrun
