package sockets

import (
	"errors"
	"testing"
	"testing/synctest"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// TestSlowDial: a dial that times out is continued while the peer is on this host or other
// connections arrive, and ends otherwise.
func TestSlowDial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, test := range []struct {
			name  string
			comes int // connections that arrive while dials time out
			want  int
		}{
			{"nothing comes", 0, 1},
			{"three come", 3, 4},
		} {
			dials, lacking := 0, 100
			e := &Endpoint{testHooks: testHooks{dialOnce: func() error {
				dials++
				if dials <= test.comes {
					lacking--
				}
				return errTimeout
			}}}
			_, err := e.dial(t.Context(), way{addrs: []string{"peer"}}, identity.DataKey{}, identity.Hello{}, func() int { return lacking })
			if !errors.Is(err, errTimeout) || dials != test.want {
				t.Errorf("%s: %d dials, %v", test.name, dials, err)
			}
		}
		if !loopback([]string{"192.0.2.1:5", "127.0.0.2:5"}) || loopback([]string{"192.0.2.1:5", "x"}) {
			t.Error("which addresses are of this host")
		}
		done := errors.New("done")
		dials := 0
		e := &Endpoint{testHooks: testHooks{dialOnce: func() error {
			if dials++; dials == 9 {
				return done
			}
			return errTimeout
		}}}
		if _, err := e.dial(t.Context(), way{addrs: []string{"peer"}, local: true}, identity.DataKey{}, identity.Hello{}, func() int { return 1 }); err != done {
			t.Errorf("on this host: %v after %d dials", err, dials)
		}
	})
}
