package elastic

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/timeline"
	"github.com/hvdrun/hvdrun/elastic/internal/fetch"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/rendezvous"
)

// driven is the meeting of a worker that a driver has started.
type driven struct {
	client     *rendezvous.Client
	service    *notify.Service
	endpoint   *collective.Endpoint
	timeline   *timeline.Recorder // nil: no timeline is recorded
	notifyAddr string
	warning    time.Duration // see beater.stallWarning

	chosen atomic.Pointer[func(generation uint64, backend string)] // nil: no callback
	supply atomic.Pointer[func() *fetch.Commit]                    // nil: no commit to supply

	stopServing context.CancelFunc
	serving     sync.WaitGroup
	served      error
}

// newDriven opens the worker's two listeners, for notifications and for its peers. join sends their
// addresses to the driver.
func newDriven(env plan.Worker) (_ *driven, err error) {
	creds, err := identity.Decode(env.Credentials)
	if err != nil {
		return nil, fmt.Errorf("elastic: credentials: %w", err)
	}
	algorithm, err := collective.ParseAlgorithm(env.Algorithm)
	if err != nil {
		return nil, fmt.Errorf("elastic: %s: %w", plan.EnvAlgorithm, err)
	}
	local, err := addressTowards(env.DriverAddr)
	if err != nil {
		return nil, fmt.Errorf("elastic: driver %s: %w", env.DriverAddr, err)
	}
	d := &driven{service: notify.NewService(creds), warning: env.StallWarning}
	if d.client, err = rendezvous.NewClient(rendezvous.ClientConfig{Addr: env.DriverAddr, Credentials: creds}); err != nil {
		return nil, fmt.Errorf("elastic: %w", err)
	}
	data := collective.Config{
		Credentials: creds,
		ListenAddr:  dataListenAddr(local),
		Interfaces:  env.NetworkInterfaces,
		Encrypt:     env.EncryptData,
		Algorithm:   algorithm,
		OnlySockets: env.OnlySockets,
		Connections: env.Connections,
		Log:         logrus.StandardLogger(),
		Visited:     d.visited,
		Backend: func(generation uint64, backend string) {
			if chosen := d.chosen.Load(); chosen != nil {
				(*chosen)(generation, backend)
			}
		},

		FusionThreshold: env.FusionThreshold << 20,
		CycleTime:       env.CycleTime,
		StallWarning:    env.StallWarning,
	}
	if env.TimelineFilename != "" {
		d.timeline = timeline.New(timeline.Config{
			Filename: env.TimelineFilename, RunID: env.RunID, Shared: env.ShareOutput, Log: logrus.StandardLogger(),
		})
		data.Timeline = d.timeline
	}
	if d.endpoint, err = collective.Listen(data); err != nil {
		return nil, errors.Join(fmt.Errorf("elastic: %w", err), d.client.Close())
	}
	listener, err := net.Listen("tcp", netip.AddrPortFrom(local, 0).String())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("elastic: notifications: %w", err), d.endpoint.Close(), d.client.Close())
	}
	d.notifyAddr = listener.Addr().String()
	ctx, stop := context.WithCancel(context.Background())
	d.stopServing = stop
	d.serving.Go(func() { d.served = d.service.Serve(ctx, listener) })
	return d, nil
}

// addressTowards returns this machine's address on the route to the driver. Connecting a UDP socket
// selects the route without sending a packet.
func addressTowards(driver string) (netip.Addr, error) {
	conn, err := net.Dial("udp", driver)
	if err != nil {
		return netip.Addr{}, err
	}
	defer conn.Close()
	addr, err := netip.ParseAddrPort(conn.LocalAddr().String())
	return addr.Addr().Unmap(), err
}

// dataListenAddr returns the address for peers: all addresses, or loopback if the driver is local.
func dataListenAddr(local netip.Addr) string {
	if local.IsLoopback() {
		return netip.AddrPortFrom(local, 0).String()
	}
	return ""
}

func (d *driven) join(ctx context.Context, j rendezvous.Joining) (rendezvous.World, error) {
	j.DataAddrs, j.NotifyAddr = d.endpoint.Addrs(), d.notifyAddr
	place, err := d.client.Join(ctx, j)
	if err != nil {
		return rendezvous.World{}, err
	}
	return place.World()
}

func (d *driven) connect(ctx context.Context, w rendezvous.World) (*collective.Group, error) {
	g, err := d.endpoint.Connect(ctx, collective.Peers{Generation: w.Generation, Rank: w.Rank, Addrs: w.DataAddrs(), Hosts: hostsOf(w.World)})
	if err != nil || d.timeline == nil {
		return g, err
	}
	if err := d.timeline.Enter(ctx, g); err != nil {
		g.Abort(err)
		return nil, err
	}
	return g, nil
}

func (d *driven) report(ctx context.Context, r rendezvous.Report, generation, commits uint64) error {
	return d.client.Report(ctx, r, generation, commits)
}

func (d *driven) beat(ctx context.Context, b rendezvous.Beat) error { return d.client.Beat(ctx, b) }

func (d *driven) connections() uint64 { return d.endpoint.Connections() }

func (d *driven) stallWarning() time.Duration { return d.warning }

func (d *driven) reachable() bool { return d.client.Connected() }

func (d *driven) latest() notify.Update { return d.service.Latest() }

func (d *driven) loss() (notify.Loss, <-chan struct{}) { return d.service.Loss() }

func (d *driven) close() error {
	d.stopServing()
	d.serving.Wait()
	if d.timeline != nil {
		_ = d.timeline.Close() // always nil: it logs write errors itself
	}
	return errors.Join(d.endpoint.Close(), d.served, d.client.Close())
}

func hostsOf(w plan.World) []string {
	hosts := make([]string, len(w.Slots))
	for i, s := range w.Slots {
		hosts[i] = s.Host
	}
	return hosts
}
