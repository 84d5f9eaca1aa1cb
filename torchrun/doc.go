// Package torchrun runs unmodified PyTorch programs as torchelastic's agent does: one Agent on each
// node meets the others in a rendezvous, gives each of its workers its ranks and the address of
// a store (internal/tcpstore), and starts all anew when one fails or nodes come and go.
//
// It differs from torchelastic's where that is known to hurt. The end of a worker is acted on at
// once. Nodes that leave are noticed, not only those that come. The store's protocol has no
// authentication, so workers reach it at loopback alone, where the Agent admits the processes that
// it has started and forwards them to the Agent with rank 0 over mutual TLS. All waits have
// settings.
package torchrun
