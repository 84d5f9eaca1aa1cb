package plugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/hashicorp/go-hclog"
	goplugin "github.com/hashicorp/go-plugin"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/internal/wire/discoverypb"
	"github.com/hvdrun/hvdrun/plan"
)

// Serve makes this process a plugin that provides the hosts of d. It blocks until hvdrun no longer
// needs the plugin; main should then return. If d is a discovery.Watcher, Serve pushes its lists;
// if it is a discovery.Scaler, Serve asks it for hosts; if it is a Configurer, it gets its
// settings. If this process was not started by hvdrun, Serve prints what the program is and exits
// with status 1.
//
// Output after the call, to stdout or stderr, goes to hvdrun's log line by line.
func Serve(d discovery.Discoverer) {
	goplugin.Serve(&goplugin.ServeConfig{
		HandshakeConfig:  handshake,
		VersionedPlugins: map[int]goplugin.PluginSet{protocolVersion: {serviceName: &seam{served: d}}},
		GRPCServer:       goplugin.DefaultGRPCServer,
		Logger:           hclog.New(&hclog.LoggerOptions{Level: hclog.Warn, Output: os.Stderr, JSONFormat: true}),
	})
}

// seam is both ends of the service for go-plugin: in a plugin it holds the served Discoverer, in
// hvdrun the connection.
type seam struct {
	goplugin.NetRPCUnsupportedPlugin
	served discovery.Discoverer
}

func (s *seam) GRPCServer(_ *goplugin.GRPCBroker, r *grpc.Server) error {
	discoverypb.RegisterDiscoveryServer(r, &server{source: s.served})
	return nil
}

func (s *seam) GRPCClient(_ context.Context, _ *goplugin.GRPCBroker, c *grpc.ClientConn) (any, error) {
	return c, nil
}

// server serves the Discoverer.
type server struct {
	discoverypb.UnimplementedDiscoveryServer
	source discovery.Discoverer
}

func (s *server) Configure(_ context.Context, r *discoverypb.ConfigureRequest) (*discoverypb.ConfigureReply, error) {
	settings := r.GetSettings()
	if settings == nil {
		settings = map[string]string{}
	}
	configure := func(settings map[string]string) error { return CheckSettings(settings) }
	if c, ok := s.source.(Configurer); ok {
		configure = c.Configure
	}
	if err := configure(settings); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	return &discoverypb.ConfigureReply{}, nil
}

func (s *server) Discover(ctx context.Context, _ *discoverypb.DiscoverRequest) (*discoverypb.HostList, error) {
	hosts, err := s.source.Discover(ctx)
	if err != nil {
		return nil, answer(ctx, err)
	}
	return toWire(hosts)
}

func (s *server) Watch(_ *discoverypb.WatchRequest, stream grpc.ServerStreamingServer[discoverypb.HostList]) error {
	w, ok := s.source.(discovery.Watcher)
	if !ok {
		return status.Error(codes.Unimplemented, discovery.ErrNoWatch.Error())
	}
	ctx, cancel := context.WithCancelCause(stream.Context())
	defer cancel(nil)
	var mu sync.Mutex // a source may push from several goroutines
	err := w.Watch(ctx, func(hosts []plan.Host) {
		mu.Lock()
		defer mu.Unlock()
		if ctx.Err() != nil {
			return
		}
		list, err := toWire(hosts)
		if err == nil {
			err = stream.Send(list)
		}
		if err != nil {
			cancel(err)
		}
	})
	mu.Lock()
	refused := context.Cause(ctx)
	cancel(nil) // a later push must still find that the stream has ended
	mu.Unlock()
	switch {
	case refused != nil && stream.Context().Err() == nil:
		return refused
	case errors.Is(err, discovery.ErrNoWatch):
		return status.Error(codes.Unimplemented, err.Error())
	}
	return answer(stream.Context(), err)
}

func (s *server) Scale(ctx context.Context, r *discoverypb.ScaleRequest) (*discoverypb.ScaleReply, error) {
	scaler, ok := s.source.(discovery.Scaler)
	err := discovery.ErrNoScale
	if ok {
		err = scaler.Scale(ctx, int(r.GetLeast()), int(r.GetMost()))
	}
	if errors.Is(err, discovery.ErrNoScale) {
		return nil, status.Error(codes.Unimplemented, err.Error())
	}
	if err != nil {
		return nil, answer(ctx, err)
	}
	return &discoverypb.ScaleReply{}, nil
}

// answer returns err as the other end should receive it.
func answer(ctx context.Context, err error) error {
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return status.FromContextError(ctx.Err()).Err()
	}
	return status.Error(codes.Unknown, err.Error())
}

func toWire(hosts []plan.Host) (*discoverypb.HostList, error) {
	if err := checkList(hosts); err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	list := &discoverypb.HostList{Hosts: make([]*discoverypb.Host, len(hosts))}
	for i, h := range hosts {
		list.Hosts[i] = &discoverypb.Host{Name: h.Name, Slots: uint32(h.Slots), Draining: h.Draining}
	}
	return list, nil
}

func fromWire(list *discoverypb.HostList) ([]plan.Host, error) {
	hosts := make([]plan.Host, len(list.GetHosts()))
	for i, h := range list.GetHosts() {
		hosts[i] = plan.Host{Name: h.GetName(), Slots: int(h.GetSlots()), Draining: h.GetDraining()}
	}
	return hosts, checkList(hosts)
}

// checkList returns an error for a list that is not valid.
func checkList(hosts []plan.Host) error {
	if len(hosts) > maxHosts {
		return fmt.Errorf("the list has %d hosts; at most %d are allowed", len(hosts), maxHosts)
	}
	if err := plan.CheckHosts(hosts); err != nil {
		return fmt.Errorf("the list of hosts is invalid: %w", err)
	}
	return nil
}
