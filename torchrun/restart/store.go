package restart

import (
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"strconv"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/torchrun"
)

// worldStore is the torch.distributed store of a world's programs, at the loopback port that they
// are given as MASTER_PORT. It exists before they start, so no program waits for another to open
// it.
type worldStore struct {
	peers *torchrun.Peers
	store *torchrun.WorkerStore
}

// openStore opens the store of this world. All ranks must call it.
func (r *runner) openStore(ctx context.Context, p place) (*worldStore, error) {
	group := r.worker.Group()
	key := make([]byte, identity.ClusterKeyLen)
	if r.worker.Rank() == 0 {
		rand.Read(key) // never fails: crypto/rand ends the program if there is no randomness
	}
	key, err := collective.BroadcastBytes(ctx, group, key, 0)
	if err != nil {
		return nil, err
	}
	s := &worldStore{}
	run := r.own.RunID + "-" + strconv.FormatUint(r.worker.Generation(), 10)
	if s.peers, err = torchrun.NewPeers(key, run, loopback, r.cfg.Log); err != nil {
		return nil, fmt.Errorf("restart: %w", err)
	}
	if err := s.open(ctx, r, group, p); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *worldStore) open(ctx context.Context, r *runner, group *collective.Group, p place) (err error) {
	first := r.worker.Rank() == 0
	var port []byte
	if first {
		listen := identity.ListenLoopback()
		if p.groupSize > 1 {
			listen = ":0"
		}
		addr, lerr := s.peers.Listen(listen)
		if lerr == nil {
			s.store, lerr = torchrun.ServeStore(0, s.peers, r.cfg.Log)
		}
		if lerr != nil {
			return fmt.Errorf("restart: %w", lerr)
		}
		_, text, _ := net.SplitHostPort(addr.String())
		port = []byte(text)
	}
	if port, err = collective.BroadcastBytes(ctx, group, port, 0); err != nil || first {
		return err
	}
	if s.store, err = torchrun.ForwardStore(net.JoinHostPort(p.masterAddr, string(port)), 0, s.peers, r.cfg.Log); err != nil {
		return fmt.Errorf("restart: %w", err)
	}
	return nil
}

// addr returns MASTER_ADDR and MASTER_PORT.
func (s *worldStore) addr() (host string, port int, err error) {
	host, text, err := net.SplitHostPort(s.store.Addr())
	if err == nil {
		port, err = strconv.Atoi(text)
	}
	return host, port, err
}

// close closes the store, if there is one.
func (s *worldStore) close() {
	if s == nil {
		return
	}
	if s.store != nil {
		s.store.Close()
	}
	now, cancel := context.WithCancel(context.Background())
	cancel()
	s.peers.Close(now)
}
