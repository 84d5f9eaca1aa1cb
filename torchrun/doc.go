// Package torchrun runs unmodified PyTorch programs as torchelastic's agent does: one Agent on each
// node meets the others in a rendezvous, gives each of its workers its ranks and the address of a
// store (internal/tcpstore), and restarts all workers when one fails or nodes come and go.
//
// It differs from torchelastic's agent where that one has known problems. It acts on the end of a
// worker at once. It notices nodes that leave, not only nodes that come. The store's protocol has
// no authentication, so workers reach it only at loopback: the Agent admits the processes that it
// has started, and forwards them to the Agent with rank 0 over mutual TLS. All waits have settings.
package torchrun
