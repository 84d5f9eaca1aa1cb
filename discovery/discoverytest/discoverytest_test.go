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
	"time"

	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/discovery/conformance"
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
		// One line after the other, so that the test would notice a list that is cut short.
		command := `while read line; do echo "$line"; done <` + file
		return discovery.Script{Command: command, Log: log}
	})
}

// fake is a Discoverer whose Discover is a function.
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

// liars returns Discoverers that each break a promise about these two hosts. The hanging ones
// return when release is closed.
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

// follower returns a Watcher that keeps the promises of a Discoverer and watches by a function that
// does not keep those of a Watcher.
func follower(want []plan.Host, watch func(ctx context.Context, found func([]plan.Host)) error) func() discovery.Discoverer {
	return func() discovery.Discoverer { return fakeWatcher{discovery.Fixed(want), watch} }
}

// lyingWatchers returns Watchers that each break a promise of a Watcher and keep those of a
// Discoverer.
func lyingWatchers(want []plan.Host, release chan struct{}) map[string]func() discovery.Discoverer {
	whole := func() []plan.Host { return slices.Clone(want) }
	var shared, second atomic.Int32
	return map[string]func() discovery.Discoverer{
		"a watch that hangs": follower(want, func(_ context.Context, found func([]plan.Host)) error {
			found(whole())
			<-release
			return nil
		}),
		"a watch that hangs where its context has ended": follower(want, func(ctx context.Context, found func([]plan.Host)) error {
			if ctx.Err() != nil {
				<-release
			}
			found(whole())
			<-ctx.Done()
			return ctx.Err()
		}),
		"a watch that finds nothing": follower(want, func(ctx context.Context, _ func([]plan.Host)) error {
			<-ctx.Done()
			return ctx.Err()
		}),
		"a watch that ends": follower(want, func(context.Context, func([]plan.Host)) error { return errBroken }),
		"a watch of half a list": follower(want, func(ctx context.Context, found func([]plan.Host)) error {
			found(whole()[1:])
			<-ctx.Done()
			return ctx.Err()
		}),
		"a watch of half a list after the whole": follower(want, func(ctx context.Context, found func([]plan.Host)) error {
			found(whole())
			found(whole()[1:])
			<-ctx.Done()
			return ctx.Err()
		}),
		"a watch of its own list": follower(want, func(ctx context.Context, found func([]plan.Host)) error {
			if shared.Add(1) == 1 {
				return errBroken
			}
			hosts := whole()
			found(hosts)
			found(hosts)
			<-ctx.Done()
			return ctx.Err()
		}),
		"a second watch that knows the list already": follower(want, func(ctx context.Context, found func([]plan.Host)) error {
			if second.Add(1) == 1 {
				found(whole())
			}
			<-ctx.Done()
			return ctx.Err()
		}),
		"a watch that finds twice at once": follower(want, func(ctx context.Context, found func([]plan.Host)) error {
			go found(whole())
			go found(whole())
			<-ctx.Done()
			return ctx.Err()
		}),
		"a watch that finds after its end": follower(want, func(ctx context.Context, found func([]plan.Host)) error {
			found(whole())
			<-ctx.Done()
			time.AfterFunc(time.Millisecond, func() { found(whole()) })
			return ctx.Err()
		}),
	}
}

// moody fails if it is asked twice at the same time.
type moody struct {
	discovery.Fixed
	busy *atomic.Int32
}

func (m moody) Discover(ctx context.Context) ([]plan.Host, error) {
	defer m.busy.Add(-1)
	if m.busy.Add(1) > 1 {
		return nil, errBroken
	}
	<-time.After(time.Millisecond)
	return m.Fixed.Discover(ctx)
}

type moodyWatcher struct{ moody }

func (m moodyWatcher) Discover(ctx context.Context) ([]plan.Host, error) {
	if m.busy.Load() > 0 {
		return nil, errBroken
	}
	return m.Fixed.Discover(ctx)
}

func (m moodyWatcher) Watch(ctx context.Context, found func([]plan.Host)) error {
	m.busy.Add(1)
	defer m.busy.Add(-1)
	hosts, _ := m.Fixed.Discover(context.Background())
	found(hosts)
	<-ctx.Done()
	return ctx.Err()
}

// busy returns Discoverers that cannot do two things at the same time.
func busy(want []plan.Host, _ chan struct{}) map[string]func() discovery.Discoverer {
	return map[string]func() discovery.Discoverer{
		"one question at a time": func() discovery.Discoverer { return moody{Fixed: want, busy: new(atomic.Int32)} },
		"no question while it watches": func() discovery.Discoverer {
			return moodyWatcher{moody{Fixed: want, busy: new(atomic.Int32)}}
		},
	}
}

// TestKitFindsBrokenPromises: for each of these Discoverers some check of the kit fails.
func TestKitFindsBrokenPromises(t *testing.T) {
	want := []plan.Host{{Name: "a", Slots: 1}, {Name: "b", Slots: 2}}
	for _, kind := range []func([]plan.Host, chan struct{}) map[string]func() discovery.Discoverer{liars, lyingWatchers, busy} {
		for name := range kind(want, nil) {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { // in virtual time, patience costs nothing
					release := make(chan struct{})
					defer close(release)
					d := kind(want, release)[name]()
					if !slices.ContainsFunc(conformance.All(), func(p conformance.Promise) bool { return p.Check(d, want) != nil }) {
						t.Error("nobody noticed")
					}
					<-time.After(time.Minute) // for the goroutines that it has left behind
				})
			})
		}
	}
}

// pushing is a correct Watcher.
type pushing struct{ changes chan []plan.Host }

func (p pushing) Discover(ctx context.Context) ([]plan.Host, error) {
	now := <-p.changes
	p.changes <- now
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return slices.Clone(now), nil
}

func (p pushing) Watch(ctx context.Context, found func([]plan.Host)) error {
	var last []plan.Host
	for first := true; ; first = false {
		now, err := p.Discover(ctx)
		if err != nil {
			return err
		}
		if first || !slices.Equal(now, last) {
			last = now
			found(slices.Clone(now))
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Millisecond):
		}
	}
}

func TestPushing(t *testing.T) {
	newD := func(hosts []plan.Host) (pushing, func([]plan.Host)) {
		p := pushing{make(chan []plan.Host, 1)}
		p.changes <- hosts
		return p, func(hosts []plan.Host) { <-p.changes; p.changes <- hosts }
	}
	Run(t, func(_ *testing.T, hosts []plan.Host) discovery.Discoverer { p, _ := newD(hosts); return p })
	RunDraining(t, func(_ *testing.T, hosts []plan.Host) discovery.Discoverer { p, _ := newD(hosts); return p })
	RunChanging(t, func(*testing.T) (discovery.Discoverer, func([]plan.Host)) { return newD(nil) })
}

// TestNoWatch: a Watcher that finds that it cannot push passes the tests.
func TestNoWatch(t *testing.T) {
	newD := func(_ *testing.T, hosts []plan.Host) discovery.Discoverer {
		return fakeWatcher{discovery.Fixed(hosts), func(context.Context, func([]plan.Host)) error { return discovery.ErrNoWatch }}
	}
	Run(t, newD)
	RunDraining(t, newD)
}

func TestMerged(t *testing.T) {
	newD := func(_ *testing.T, hosts []plan.Host) discovery.Discoverer {
		half := len(hosts) / 2
		return discovery.Merge(discovery.Named{Name: "one", Source: discovery.Fixed(hosts[:half])},
			discovery.Named{Name: "other", Source: discovery.Fixed(hosts[half:])})
	}
	Run(t, newD)
	RunDraining(t, newD)
}

func TestFailing(t *testing.T) {
	RunFailing(t, func(*testing.T) discovery.Discoverer { return discovery.Script{Command: "echo a; exit 1"} })
	RunFailing(t, func(*testing.T) discovery.Discoverer {
		return discovery.Merge(discovery.Named{Name: "good", Source: discovery.Fixed{{Name: "a", Slots: 1}}},
			discovery.Named{Name: "bad", Source: discovery.Script{Command: "exit 1"}})
	})
}

// TestKitFindsHiddenFailures: the kit detects sources that hide that they cannot find their hosts.
func TestKitFindsHiddenFailures(t *testing.T) {
	failing := fake{func(context.Context) ([]plan.Host, error) { return nil, errBroken }}
	half := discovery.Fixed{{Name: "a", Slots: 1}}
	for name, d := range map[string]discovery.Discoverer{
		"half a list": half,
		"no hosts":    discovery.Fixed(nil),
		"half a list and an error": fake{func(context.Context) ([]plan.Host, error) {
			return half, errBroken
		}},
		"hanging": fake{func(ctx context.Context) ([]plan.Host, error) { <-ctx.Done(); return nil, ctx.Err() }},
		"a watch of half a list": fakeWatcher{failing, func(_ context.Context, found func([]plan.Host)) error {
			found(slices.Clone(half))
			return errBroken
		}},
		"a watch that ends well": fakeWatcher{failing, func(context.Context, func([]plan.Host)) error { return nil }},
		"a watch that hangs": fakeWatcher{failing, func(ctx context.Context, _ func([]plan.Host)) error {
			<-ctx.Done()
			return ctx.Err()
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if conformance.Fails(d) == nil {
					t.Error("nobody noticed")
				}
			})
		})
	}
}

// TestKitFindsStaleLists: the kit detects sources that miss changes of their hosts.
func TestKitFindsStaleLists(t *testing.T) {
	lists := [][]plan.Host{{{Name: "a", Slots: 1}}, {{Name: "a", Slots: 1}, {Name: "b", Slots: 1}}}
	var now []plan.Host
	set := func(hosts []plan.Host) { now = hosts }
	current := fake{func(context.Context) ([]plan.Host, error) { return now, nil }}
	once := fakeWatcher{current, func(ctx context.Context, found func([]plan.Host)) error {
		<-time.After(time.Millisecond)
		found(slices.Clone(lists[0]))
		<-ctx.Done()
		return ctx.Err()
	}}
	for name, d := range map[string]discovery.Discoverer{"one that remembers": discovery.Fixed(lists[0]), "a push that never comes": once} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if conformance.Changes(d, set, lists...) == nil {
					t.Error("nobody noticed")
				}
			})
		})
	}
}
