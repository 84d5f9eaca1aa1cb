package agent

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
)

// callsPause bounds the pause between two attempts to connect to the driver.
const callsPause = 500 * time.Millisecond

// calls are those that workers make by their sockets: the agent makes them at the driver, over one
// connection for all workers of a session, and says for which worker each is.
type calls struct {
	sockets *wire.Known // whose clients are incarnations

	mu   sync.Mutex
	to   netip.AddrPort
	conn *grpc.ClientConn // nil: no driver has asked for calls
}

// carry carries calls until ctx ends.
func (c *calls) carry(ctx context.Context) {
	nothing := func(grpc.ServiceRegistrar) {}
	_ = c.sockets.Serve(ctx, wire.CallsOfWorker, nothing, c.close, wire.CarryCalls(c.at)...) // nil: ctx has ended
}

// at returns where to make the call of a worker.
func (c *calls) at(ctx context.Context) (context.Context, grpc.ClientConnInterface) {
	c.mu.Lock()
	defer c.mu.Unlock()
	incarnation, _ := wire.KnownCaller(ctx).(string)
	return metadata.NewOutgoingContext(ctx, metadata.Pairs(wire.WorkerKey, incarnation)), c.conn
}

// aim has calls made at the driver at that address, as the holder of the credentials, which are
// encoded. Calls that wait for another driver fail: their workers repeat them.
func (c *calls) aim(to netip.AddrPort, credentials string, dial func(ctx context.Context, addr string) (net.Conn, error)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if credentials == "" || c.conn != nil && c.to == to {
		return nil
	}
	own, err := identity.Decode(credentials)
	if err != nil {
		return err
	}
	conn, err := wire.NewClientBy(dial, to.String(), own.ClientTLS(identity.Subject{Role: identity.Driver}), callsPause)
	if err != nil {
		return err
	}
	if c.conn != nil {
		_ = c.conn.Close()
	}
	c.to, c.conn = to, conn
	conn.Connect() // before the first worker calls
	return nil
}

// taken returns whether a driver has asked for calls.
func (c *calls) taken() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.conn != nil
}

func (c *calls) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn != nil {
		_ = c.conn.Close()
	}
}
