package shm

import (
	"bytes"
	"encoding/binary"
	"os"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestOpenRefuses(t *testing.T) {
	s, err := Create(2)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	good := s.Invitation()
	if len(good) > 128 {
		t.Errorf("an invitation of %d bytes", len(good))
	}
	change := func(at int, value byte) []byte {
		b := bytes.Clone(good)
		b[at] ^= value
		return b
	}
	pipe := make([]int, 2)
	if err := unix.Pipe(pipe); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	toPipe := bytes.Clone(good)
	binary.LittleEndian.PutUint64(toPipe[1+8:], uint64(pipe[0]))
	for name, invite := range map[string][]byte{
		"none":          nil,
		"short":         good[:len(good)-1],
		"version":       change(0, 1),
		"process":       change(1+4, 1),
		"no process":    change(1+3, 0x7f),
		"pipe":          toPipe,
		"descriptor":    change(1+8+2, 1),
		"device":        change(1+2*8, 1),
		"inode":         change(1+3*8, 1),
		"size":          change(1+4*8+1, 0x10),
		"size enormous": change(1+4*8+6, 1),
		"nonce":         change(1+5*8, 1),
	} {
		if s, err := Open(invite, 2); err == nil {
			t.Errorf("%s: opened", name)
			s.Close()
		} else if !strings.HasPrefix(err.Error(), "shm: ") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if s, err := Open(good, 3); err == nil {
		t.Error("opened for another number of members")
		s.Close()
	}
}

// TestHeader changes the parts of the header that another process could overwrite.
func TestHeader(t *testing.T) {
	for name, spoil := range map[string]func(h *header){
		"magic":   func(h *header) { h.magic++ },
		"members": func(h *header) { h.members = 1 << 40 },
		"bank":    func(h *header) { h.bank = 1 << 63 },
		"odd":     func(h *header) { h.bank += 8 },
		"in":      func(h *header) { h.in = 64 },
		"out":     func(h *header) { h.out *= 2 },
		"zero":    func(h *header) { h.out = 0 },
		"nonce":   func(h *header) { h.nonce[0]++ },
	} {
		s, err := Create(2)
		if err != nil {
			t.Fatal(err)
		}
		spoil(s.header)
		if o, err := Open(s.Invitation(), 2); err == nil {
			t.Errorf("%s: opened", name)
			o.Close()
		}
		s.Close()
	}
}

func TestCreateRefuses(t *testing.T) {
	for _, n := range []int{-1, 0, maxMembers + 1} {
		if s, err := Create(n); err == nil {
			t.Errorf("%d members: created", n)
			s.Close()
		}
	}
}

func TestJoinRefuses(t *testing.T) {
	s, err := Create(2)
	if err != nil {
		t.Fatal(err)
	}
	if m, err := s.Join(2, nil); err == nil {
		t.Error("joined as a third member of two")
		m.Close()
	}
	if s.Close() == nil {
		t.Error("closed twice")
	}
	if s, err = Create(maxMembers); err != nil {
		t.Fatal(err)
	}
	m, err := s.Join(maxMembers-1, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Join(0, nil); err == nil {
		t.Error("joined twice")
	}
	if s.Close() == nil {
		t.Error("closed under its member")
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if m.Close() == nil {
		t.Error("left twice")
	}
}

// TestLeaks: a thousand segments are made and left, and nothing remains.
func TestLeaks(t *testing.T) {
	rounds := 1000
	if testing.Short() {
		rounds = 50
	}
	once := func() {
		members := gathering(t, 2, nil)
		eachMust(t, members, func(m *Member) error { return m.Barrier(background, Desc{}) })
		leave(t, members)
	}
	once()
	before := resources(t)
	for range rounds {
		once()
	}
	after := resources(t)
	for what, n := range after {
		if n > before[what]+3 {
			t.Errorf("%s: %d before, %d after", what, before[what], n)
		}
	}
}

func resources(tb testing.TB) map[string]int {
	count := func(dir string) int {
		list, err := os.ReadDir(dir)
		if err != nil {
			tb.Fatal(err)
		}
		return len(list)
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		tb.Fatal(err)
	}
	return map[string]int{"descriptors": count("/proc/self/fd"), "threads": count("/proc/self/task"),
		"segments": bytes.Count(maps, []byte("memfd:hvdrun ")), "goroutines": runtime.NumGoroutine()}
}

// FuzzInvitation: an accepted invitation encodes to the same text, and names a valid process and
// descriptor.
func FuzzInvitation(f *testing.F) {
	v := invitation{pid: 7, fd: 3, device: 1, inode: 2, size: page, nonce: [16]byte{1}}
	f.Add(v.encode())
	v.fd = 1 << 40
	f.Add(v.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		var v invitation
		if v.decode(b) != nil {
			return
		}
		if !bytes.Equal(v.encode(), b) || int(v.pid) < 0 || int(v.fd) < 0 {
			t.Errorf("%x is read as %+v", b, v)
		}
	})
}
