package elastic

import (
	"context"
	"math/rand/v2"
	"net"
	"time"

	"github.com/hvdrun/hvdrun/elastic/internal/transfer"
	"github.com/hvdrun/hvdrun/internal/line"
)

const (
	lookBound   = 5 * time.Second // timeout for asking the driver for its world
	mostSources = 8               // limits the number of workers that one fetch asks
)

// supplier is a meeting through which workers fetch each other's commits.
type supplier interface {
	// give makes the supply available to other workers; nil ends that.
	give(*transfer.Supply)
	// sources returns some workers that may have a commit.
	sources(ctx context.Context) ([]transfer.Source, error)
}

// supply lets other workers fetch this state's commits.
func (s *State) supply() {
	to, ok := s.worker.meeting.(supplier)
	layout, memory := s.parts.memory()
	if !ok || len(memory) == 0 {
		return
	}
	if s.feed == nil {
		s.feed = s.newFeed()
	}
	to.give(&transfer.Supply{Feed: s.feed, Newest: func() *transfer.Commit {
		number, blobs := s.saved.Lend()
		if blobs == nil {
			return nil
		}
		return &transfer.Commit{Number: number, Layout: layout, Blobs: s.parts.memoryIn(blobs)}
	}})
}

// withdraw ends what supply has started.
func (s *State) withdraw() {
	if to, ok := s.worker.meeting.(supplier); ok {
		to.give(nil)
	}
	if s.feed != nil {
		s.feed.End()
		s.feed = nil
	}
}

func (d *driven) give(s *transfer.Supply) { d.supply.Store(s) }

// visited serves a connection of another worker.
func (d *driven) visited(conn net.Conn) {
	if err := transfer.Serve(conn, d.supply.Load); err != nil {
		ownLog().Debugf("elastic: serving the state to another worker: %v", err)
	}
}

// look returns the job's newest world.
func (d *driven) look(ctx context.Context) (line.World, error) {
	look, cancel := context.WithTimeout(ctx, lookBound)
	defer cancel()
	return d.Look(look)
}

func (d *driven) sources(ctx context.Context) ([]transfer.Source, error) {
	world, err := d.look(ctx)
	if err != nil {
		return nil, err
	}
	addrs := world.DataAddrs()
	var sources []transfer.Source
	for _, rank := range rand.Perm(len(addrs)) {
		if len(sources) < mostSources {
			sources = append(sources, func(ctx context.Context) (net.Conn, error) {
				return d.endpoint.Visit(ctx, world.Generation, world.Key, addrs[rank])
			})
		}
	}
	return sources, nil
}
