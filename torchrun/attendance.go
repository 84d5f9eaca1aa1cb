package torchrun

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/torchrun/dynamic"
)

// byeTimeout bounds the goodbye to another node, and dropTimeout the removal of a dead member in
// the store.
const byeTimeout, dropTimeout = time.Second, 5 * time.Second

// attend starts to detect, until ctx ends, which members of a round die. All members are connected
// to the one with rank 0. If a connection ends without a goodbye, the process at its other end is
// gone, and its member is dropped at once, whereas missing heartbeats would be noticed only after
// seconds. Heartbeats still detect what a connection does not show, such as a machine that is
// silent. A connection that was reset is established again, because a firewall can reset
// connections too. If the store is unreachable, attend makes w end the round.
func (d *Dynamic) attend(ctx context.Context, r dynamic.Round, kv KV, w *watched) {
	of := attendance.of(r.Number)
	stay := func(conn net.Conn, rank int) (cut bool) { // until either end leaves
		departed, cut := departed(ctx, conn)
		if cut {
			return true
		}
		if departed && !d.drop(ctx, r, rank) {
			w.note((*watched).fire)
		}
		if ctx.Err() == nil {
			w.note(func(w *watched) { w.parted = true })
		}
		return false
	}
	if r.Rank != 0 {
		d.wg.Go(func() {
			addr, err := kv.Get(ctx, "store")
			if err != nil {
				return
			}
			for again := false; ; again = true {
				conn, err := d.Peers.dial(ctx, string(addr), of)
				if err == nil && (!welcomed(ctx, conn, r.Rank) || !stay(conn, 0)) {
					return
				}
				if network := (*net.OpError)(nil); err != nil && !(again && errors.As(err, &network)) {
					return // that node does not exist, or has left the round
				}
				if retry.Pause(ctx, retryPause) != nil {
					return
				}
			}
		})
		return
	}
	d.Peers.answer(of, func(conn net.Conn) error {
		var rank [4]byte
		if _, err := io.ReadFull(conn, rank[:]); err != nil {
			return err
		}
		from := binary.BigEndian.Uint32(rank[:])
		_, err := conn.Write([]byte{0})
		if err == nil && from > 0 && from < uint32(len(r.Members)) {
			stay(conn, int(from))
		}
		return err
	})
	d.wg.Go(func() {
		<-ctx.Done()
		d.Peers.refuse(of).Wait()
	})
}

// welcomed announces this node to the node with rank 0, and reports whether that node is still in
// the round. If it is not, welcomed closes the connection.
func welcomed(ctx context.Context, conn net.Conn, rank int) bool {
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	var word [1]byte
	_, err := conn.Write(binary.BigEndian.AppendUint32(nil, uint32(rank)))
	if err == nil {
		_, err = io.ReadFull(conn, word[:])
	}
	if !stop() || err != nil {
		conn.Close()
		return false
	}
	return true
}

// departed blocks until the connection to another member ends, and reports whether that member
// ended without a goodbye. If ctx ends first, departed sends this node's goodbye and returns false.
// cut means that the connection was reset, which a firewall may have done.
func departed(ctx context.Context, conn net.Conn) (is, cut bool) {
	said := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(said)
		_ = conn.SetWriteDeadline(time.Now().Add(byeTimeout))
		_, _ = conn.Write([]byte{0})
		conn.Close()
	})
	var word [1]byte
	_, err := io.ReadFull(conn, word[:])
	if !stop() {
		<-said
		return false, false
	}
	conn.Close()
	cut = errors.Is(err, syscall.ECONNRESET)
	return err != nil && !cut, cut
}

// drop removes a dead member of a round from the record, so that all nodes learn that it is gone.
// It reports whether that succeeded.
func (d *Dynamic) drop(ctx context.Context, r dynamic.Round, rank int) bool {
	node := r.Members[rank].Node
	ctx, cancel := context.WithTimeout(ctx, dropTimeout)
	defer cancel()
	err := d.Handler.Drop(ctx, r.Number, node)
	if err == nil {
		d.Peers.log.Warnf("torchrun: the agent of node %s (pid %d) is gone", node.Addr, node.PID)
	} else if context.Cause(ctx) != context.Canceled {
		d.Peers.log.Warnf("torchrun: the agent of node %s (pid %d) is gone, which the others learn later: %v", node.Addr, node.PID, err)
	}
	return err == nil
}
