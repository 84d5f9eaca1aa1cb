package discoverytest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/plan"
)

func TestFixed(t *testing.T) {
	Run(t, func(_ *testing.T, hosts []plan.Host) discovery.Discoverer { return discovery.Fixed(hosts) })
}

func TestScript(t *testing.T) {
	Run(t, func(t *testing.T, hosts []plan.Host) discovery.Discoverer {
		var text strings.Builder
		for _, h := range hosts {
			text.WriteString(h.String() + "\n")
		}
		file := filepath.Join(t.TempDir(), "hosts")
		if err := os.WriteFile(file, []byte(text.String()), 0o600); err != nil {
			t.Fatal(err)
		}
		log, _ := logtest.NewNullLogger()
		// One line after the other, so that a list cut short would show.
		command := `while read line; do echo "$line"; done <` + file
		return discovery.Script{Command: command, Log: log}
	})
}

// fake breaks one promise or another.
type fake struct {
	discover func(ctx context.Context) ([]plan.Host, error)
}

func (f fake) Discover(ctx context.Context) ([]plan.Host, error) { return f.discover(ctx) }

type fakeWatcher struct {
	discovery.Discoverer
	watch func(ctx context.Context, found func([]plan.Host)) error
}

func (f fakeWatcher) Watch(ctx context.Context, found func([]plan.Host)) error {
	return f.watch(ctx, found)
}

var errBroken = errors.New("broken")

// liars are Discoverers that break one promise or another about these two hosts; release lets go those that hang.
func liars(want []plan.Host, release chan struct{}) map[string]func() discovery.Discoverer {
	return map[string]func() discovery.Discoverer{
		"a part of the list": func() discovery.Discoverer { return discovery.Fixed(want[:1]) },
		"another order":      func() discovery.Discoverer { return discovery.Fixed{want[1], want[0]} },
		"an error": func() discovery.Discoverer {
			return fake{func(context.Context) ([]plan.Host, error) { return nil, errBroken }}
		},
		"a list with an error": func() discovery.Discoverer {
			return fake{func(context.Context) ([]plan.Host, error) { return slices.Clone(want), errBroken }}
		},
		"an order that changes": func() discovery.Discoverer {
			var calls atomic.Int32
			return fake{func(ctx context.Context) ([]plan.Host, error) {
				hosts := slices.Clone(want)
				if calls.Add(1) == 5 {
					slices.Reverse(hosts)
				}
				return hosts, ctx.Err()
			}}
		},
		"its own list": func() discovery.Discoverer {
			hosts := slices.Clone(want)
			return fake{func(ctx context.Context) ([]plan.Host, error) {
				if ctx.Err() != nil {
					return nil, ctx.Err()
				}
				return hosts, nil
			}}
		},
		"deaf to its context": func() discovery.Discoverer {
			return fake{func(context.Context) ([]plan.Host, error) { return slices.Clone(want), nil }}
		},
		"half a list at the end of the context": func() discovery.Discoverer {
			return fake{func(ctx context.Context) ([]plan.Host, error) {
				if ctx.Err() != nil {
					return slices.Clone(want[:1]), nil
				}
				return slices.Clone(want), nil
			}}
		},
		"hanging": func() discovery.Discoverer {
			return fake{func(context.Context) ([]plan.Host, error) { <-release; return nil, errBroken }}
		},
	}
}

// lyingWatchers are Watchers that break a promise as such, and none as Discoverers.
func lyingWatchers(want []plan.Host, release chan struct{}) map[string]func() discovery.Discoverer {
	return map[string]func() discovery.Discoverer{
		"a watch that hangs": func() discovery.Discoverer {
			return fakeWatcher{discovery.Fixed(want), func(_ context.Context, found func([]plan.Host)) error {
				found(slices.Clone(want))
				<-release
				return nil
			}}
		},
		"a watch that finds nothing": func() discovery.Discoverer {
			return fakeWatcher{discovery.Fixed(want), func(ctx context.Context, _ func([]plan.Host)) error {
				<-ctx.Done()
				return ctx.Err()
			}}
		},
		"a watch that ends": func() discovery.Discoverer {
			return fakeWatcher{discovery.Fixed(want), func(context.Context, func([]plan.Host)) error { return errBroken }}
		},
		"a watch of half a list": func() discovery.Discoverer {
			return fakeWatcher{discovery.Fixed(want), func(ctx context.Context, found func([]plan.Host)) error {
				found(slices.Clone(want[1:]))
				<-ctx.Done()
				return ctx.Err()
			}}
		},
	}
}

// The kit finds out those who do not keep their promises.
func TestKitFindsBrokenPromises(t *testing.T) {
	want := []plan.Host{{Name: "a", Slots: 1}, {Name: "b", Slots: 2}}
	for _, kind := range []func([]plan.Host, chan struct{}) map[string]func() discovery.Discoverer{liars, lyingWatchers} {
		for name := range kind(want, nil) {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { // in virtual time, patience costs nothing
					release := make(chan struct{})
					defer close(release)
					for _, p := range promises {
						if p.check(kind(want, release)[name](), want) != nil {
							return
						}
					}
					t.Error("nobody noticed")
				})
			})
		}
	}
}
