package gossip

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"strconv"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/hvdrun/hvdrun/plan"
)

// maxMeta is the largest number of bytes of an encoded Meta.
const maxMeta = memberlist.MetaMaxSize

// MetaVersion is the version of the encoding of a Meta. A member ignores a newer one.
const MetaVersion = 1

// maxIncarnation is the largest length of an Incarnation in bytes.
const maxIncarnation = 32

const flagDraining = 1

// Meta is what an agent advertises to the whole cluster. It is small and changes rarely.
type Meta struct {
	// Name is the host's name, unique in the cluster. The driver knows the host by it.
	Name string
	// Slots is the number of workers that the host can run, including BadSlots.
	Slots int
	// Start is when the agent started, by the host's clock. Older hosts keep lower ranks. Zero:
	// when it joined.
	Start time.Time
	// LaunchAddr is the host:port at which the agent starts workers. Without a host (":7947"), the
	// host is the one at which the cluster reaches the agent.
	LaunchAddr string
	// Draining: the host is about to leave; its workers must leave at the next step boundary.
	Draining bool
	// BadSlots are the indices of slots whose devices have failed, in ascending order.
	BadSlots []int
	// Incarnation identifies this start of the agent. Empty: Join generates a random one.
	Incarnation string
}

// Host returns the agent's host as discovery lists it.
func (m Meta) host() plan.Host { return plan.Host{Name: m.Name, Slots: m.Slots, Draining: m.Draining} }

// check returns an error if no agent can advertise the Meta.
func (m Meta) check() error {
	if err := plan.CheckHosts([]plan.Host{m.host()}); err != nil {
		return fmt.Errorf("gossip: %w", err)
	}
	switch {
	case len(m.Incarnation) > maxIncarnation:
		return fmt.Errorf("gossip: the incarnation has %d bytes; at most %d", len(m.Incarnation), maxIncarnation)
	case m.Start.Before(time.Unix(0, math.MinInt64)) || m.Start.After(time.Unix(0, math.MaxInt64)):
		return fmt.Errorf("gossip: no agent started at %v", m.Start)
	}
	if m.LaunchAddr != "" {
		_, port, err := net.SplitHostPort(m.LaunchAddr)
		if err == nil {
			_, err = strconv.ParseUint(port, 10, 16)
		}
		if err != nil {
			return fmt.Errorf("gossip: the launch address %q is not host:port", m.LaunchAddr)
		}
	}
	for i, slot := range m.BadSlots {
		if slot < 0 || slot >= m.Slots || i > 0 && slot <= m.BadSlots[i-1] {
			return fmt.Errorf("gossip: bad slots %v are not indices of %d slots, in ascending order", m.BadSlots, m.Slots)
		}
	}
	return nil
}

// versionError means that the version of a Meta is newer than those that this program knows.
type versionError struct{ Version, Known int }

// Error names both versions.
func (e *versionError) Error() string {
	return fmt.Sprintf("gossip: an agent of version %d; this program knows those up to %d", e.Version, e.Known)
}

// encode encodes the Meta in at most maxMeta bytes: the version, flags, the slots, the start in
// nanoseconds, the texts, each preceded by its length, and the bad slots, preceded by their number,
// each as its distance from the previous one. It returns an error if the Meta is too long or no
// agent can advertise it.
func (m Meta) encode() ([]byte, error) {
	if err := m.check(); err != nil {
		return nil, err
	}
	var flags byte
	if m.Draining {
		flags |= flagDraining
	}
	b := []byte{MetaVersion, flags}
	b = binary.AppendUvarint(b, uint64(m.Slots))
	b = binary.BigEndian.AppendUint64(b, uint64(m.Start.UnixNano()))
	for _, text := range []string{m.Name, m.Incarnation, m.LaunchAddr} {
		b = binary.AppendUvarint(b, uint64(len(text)))
		b = append(b, text...)
	}
	b = binary.AppendUvarint(b, uint64(len(m.BadSlots)))
	last := -1
	for _, slot := range m.BadSlots {
		b = binary.AppendUvarint(b, uint64(slot-last))
		last = slot
	}
	if len(b) > maxMeta {
		return nil, fmt.Errorf("gossip: the metadata of host %q has %d bytes; at most %d are allowed", m.Name, len(b), maxMeta)
	}
	return b, nil
}

var errMeta = errors.New("gossip: the metadata of an agent is malformed")

// decodeMeta decodes the result of encode. If the version is newer, it returns a *versionError. It
// does not keep b.
func decodeMeta(b []byte) (Meta, error) {
	if len(b) > maxMeta || len(b) < 2 || b[0] == 0 {
		return Meta{}, errMeta
	}
	if b[0] > MetaVersion {
		return Meta{}, &versionError{int(b[0]), MetaVersion}
	}
	r := reader{rest: b[2:]}
	m := Meta{Draining: b[1]&flagDraining != 0, Slots: r.number(plan.MaxSlots)}
	m.Start = time.Unix(0, int64(r.fixed())).UTC()
	m.Name, m.Incarnation, m.LaunchAddr = r.text(), r.text(), r.text()
	last := -1
	for range r.number(len(r.rest)) { // each takes at least a byte
		last += r.number(plan.MaxSlots)
		m.BadSlots = append(m.BadSlots, last)
	}
	if r.broken || len(r.rest) > 0 || b[1]&^flagDraining != 0 {
		return Meta{}, errMeta
	}
	if err := m.check(); err != nil {
		return Meta{}, err
	}
	return m, nil
}

// reader decodes fields from the front of rest, until one is invalid.
type reader struct {
	rest   []byte
	broken bool
}

func (r *reader) number(most int) int {
	n, size := binary.Uvarint(r.rest)
	if r.broken || size <= 0 || n > uint64(max(most, 0)) {
		r.broken = true
		return 0
	}
	r.rest = r.rest[size:]
	return int(n)
}

func (r *reader) bytes(n int) []byte {
	if r.broken || n > len(r.rest) {
		r.broken = true
		return nil
	}
	b := r.rest[:n]
	r.rest = r.rest[n:]
	return b
}

func (r *reader) text() string { return string(r.bytes(r.number(maxMeta))) }

func (r *reader) fixed() uint64 {
	if b := r.bytes(8); b != nil {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}
