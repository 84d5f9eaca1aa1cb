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

// openStore opens the torch.distributed store of this world's programs, and returns it with a
// function that closes it. The store exists before the programs start, so no program waits for
// another to open it. All ranks must call openStore.
func (r *runner) openStore(ctx context.Context, p place) (store *torchrun.WorkerStore, closeAll func(), err error) {
	var peers *torchrun.Peers
	closeAll = func() {
		if store != nil {
			store.Close()
		}
		if peers != nil {
			now, cancel := context.WithCancel(context.Background())
			cancel()
			peers.Close(now)
		}
	}
	defer func() {
		if err != nil {
			closeAll()
			err = fmt.Errorf("restart: the store of the programs: %w", err)
		}
	}()
	join := func(key []byte) (err error) {
		run := r.own.RunID + "-" + strconv.FormatUint(r.worker.Generation(), 10)
		peers, err = torchrun.NewPeers(key, run, loopback, r.cfg.Log)
		return err
	}
	first := r.worker.Rank() == 0
	var told []byte // sent by rank 0: the key of this world's connections, then its port
	if first {
		told = make([]byte, identity.ClusterKeyLen)
		rand.Read(told) // never fails: crypto/rand ends the program if there is no randomness
		if err = join(told); err != nil {
			return nil, closeAll, err
		}
		listen := identity.ListenLoopback()
		if p.groupSize > 1 {
			listen = ":0"
		}
		addr, err := peers.Listen(listen)
		if err == nil {
			store, err = torchrun.ServeStore(0, peers, r.cfg.Log)
		}
		if err != nil {
			return nil, closeAll, err
		}
		told = strconv.AppendInt(told, int64(addr.(*net.TCPAddr).Port), 10)
	}
	if told, err = collective.BroadcastBytes(ctx, r.worker.Group(), told, 0); err != nil || first {
		return store, closeAll, err
	}
	if err = join(told[:identity.ClusterKeyLen]); err == nil {
		rank0 := net.JoinHostPort(p.masterAddr, string(told[identity.ClusterKeyLen:]))
		store, err = torchrun.ForwardStore(rank0, 0, peers, r.cfg.Log)
	}
	return store, closeAll, err
}
