package rendezvous

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire/rendezvouspb"
	"github.com/hvdrun/hvdrun/plan"
)

const (
	// maxMembers and maxAddresses bound what a worker allocates for the bytes of a world, some of
	// which stand for many.
	maxMembers   = 1 << 20
	maxAddresses = 1 << 20
	maxText      = 16 << 20 // bytes of all addresses
	maxPort      = math.MaxUint16
	lenPort      = len(":65535")
)

// membersToWire encodes the members of a world as columns. It omits local and cross ranks, which
// plan.Place computes from the slots.
func membersToWire(w plan.World, members []Member) *rendezvouspb.Members {
	b := newColumns(len(members))
	for r, member := range members {
		b.add(w.Slots[r].Host, uint32(w.Slots[r].Index), len(member.DataAddrs), member.Handle)
		for _, addr := range member.DataAddrs {
			b.address(splitPort(addr))
		}
	}
	return b.m
}

// columns makes Members, member by member.
type columns struct {
	m       *rendezvouspb.Members
	numbers map[string]uint32 // index in Starts of each address without its port
}

func newColumns(members int) columns {
	m := &rendezvouspb.Members{Indices: make([]uint32, 0, members), AddressCounts: make([]uint32, 0, members)}
	return columns{m, make(map[string]uint32)}
}

// add adds a member without its addresses, which follow by address.
func (c columns) add(host string, index uint32, addresses int, handle []byte) {
	m := c.m
	if last := len(m.Hosts) - 1; last < 0 || m.Hosts[last] != host {
		m.Hosts, m.Counts = append(m.Hosts, host), append(m.Counts, 0)
	}
	m.Counts[len(m.Counts)-1]++
	if len(handle) > 0 && m.Handles == nil {
		m.Handles = make([][]byte, len(m.Indices), cap(m.Indices))
	}
	if m.Handles != nil {
		m.Handles = append(m.Handles, handle)
	}
	m.Indices, m.AddressCounts = append(m.Indices, index), append(m.AddressCounts, uint32(addresses))
}

func (c columns) address(start string, port uint32) {
	number, known := c.numbers[start]
	if !known {
		number = uint32(len(c.m.Starts))
		c.numbers[start] = number
		c.m.Starts = append(c.m.Starts, start)
	}
	c.m.AddressStarts, c.m.AddressPorts = append(c.m.AddressStarts, number), append(c.m.AddressPorts, port)
}

// splitPort returns an address without its port, and the port; one without a canonical port number
// is returned whole, with 0.
func splitPort(addr string) (start string, port uint32) {
	at := strings.LastIndexByte(addr, ':')
	if at < 0 {
		return addr, 0
	}
	n, err := strconv.ParseUint(addr[at+1:], 10, 16)
	if err != nil || addr[at+1] == '0' {
		return addr, 0
	}
	return addr[:at], uint32(n)
}

// placeFromWire checks that the place is valid, and newer than a generation. had are the members
// that the worker has said to have; nil: none.
func placeFromWire(m *rendezvouspb.World, after uint64, had *members) (Place, error) {
	size := m.GetSize()
	if m.GetGeneration() <= after || m.GetRank() >= size || m.GetSyncRoot() >= size || size > maxMembers {
		return Place{}, invalidReply("generation %d, rank %d of %d, root %d", m.GetGeneration(), m.GetRank(), size, m.GetSyncRoot())
	}
	key, err := identity.ParseDataKey(m.GetDataKey())
	if err != nil {
		return Place{}, invalidReply("%w", err)
	}
	all := &members{number: m.GetMembersNumber(), size: int(size), whole: m.GetMembers()}
	if d := m.GetDifference(); len(d) > 0 && had == nil {
		return Place{}, invalidReply("a difference from members that this worker has not named")
	} else if len(d) > 0 {
		all.differsFrom(had, d)
	}
	return Place{
		Generation: m.GetGeneration(), Rank: int(m.GetRank()), Size: int(size), SyncRoot: int(m.GetSyncRoot()), Seq: m.GetSeq(),
		Store: m.GetStore(), key: key, members: all,
	}, nil
}

// World decodes the members. It takes 0.2 ms for a thousand, with their addresses. An error means
// that the driver's answer is not valid.
func (p Place) World() (World, error) {
	m, err := p.members.decode()
	if err != nil {
		return World{}, invalidReply("%w", err)
	}
	slots, err := slotsFromWire(m)
	if err != nil {
		return World{}, invalidReply("%w", err)
	}
	return World{
		World: plan.World{Generation: p.Generation, Slots: slots},
		Rank:  p.Rank, SyncRoot: p.SyncRoot, Seq: p.Seq, Key: p.key, Store: p.Store, columns: m,
	}, nil
}

func invalidReply(format string, args ...any) error {
	return fmt.Errorf("rendezvous: the driver's answer is not valid: "+format, args...)
}

// slotsFromWire returns the slots of members that checkHosts has checked.
func slotsFromWire(m *rendezvouspb.Members) ([]plan.Slot, error) {
	slots := make([]plan.Slot, len(m.GetIndices()))
	rank := 0
	for h, host := range m.GetHosts() {
		for range m.GetCounts()[h] {
			slots[rank].SlotID = plan.SlotID{Host: host, Index: int(m.GetIndices()[rank])}
			rank++
		}
	}
	return slots, plan.Place(slots)
}

// checkHosts checks that each rank has a host and an index.
func checkHosts(m *rendezvouspb.Members) error {
	indices := m.GetIndices()
	if len(indices) > maxMembers || len(m.GetHosts()) != len(m.GetCounts()) {
		return fmt.Errorf("%d ranks, %d hosts with %d counts", len(indices), len(m.GetHosts()), len(m.GetCounts()))
	}
	left := uint64(len(indices))
	for _, count := range m.GetCounts() {
		if uint64(count) > left {
			return errors.New("more slots than ranks")
		}
		left -= uint64(count)
	}
	if left > 0 {
		return errors.New("more ranks than slots")
	}
	for rank, index := range indices {
		if index > math.MaxInt32 {
			return fmt.Errorf("the place of rank %d", rank)
		}
	}
	return nil
}

// checkAddrs checks what World.DataAddrs and World.Handles rely on.
func checkAddrs(m *rendezvouspb.Members) error {
	counts, starts, ports := m.GetAddressCounts(), m.GetAddressStarts(), m.GetAddressPorts()
	if len(counts) != len(m.GetIndices()) || len(starts) != len(ports) || len(starts) > maxAddresses {
		return fmt.Errorf("%d ranks with addresses, %d addresses with %d ports", len(counts), len(starts), len(ports))
	}
	if n := len(m.GetHandles()); n != 0 && n != len(counts) {
		return fmt.Errorf("%d handles of %d ranks", n, len(counts))
	}
	all := 0
	for r, n := range counts {
		if n > maxAddrs {
			return fmt.Errorf("%d addresses of rank %d", n, r)
		}
		all += int(n)
	}
	if all != len(starts) {
		return fmt.Errorf("%d addresses; the ranks have %d", len(starts), all)
	}
	text := 0
	for i, s := range starts {
		if uint64(s) >= uint64(len(m.GetStarts())) || ports[i] > maxPort {
			return fmt.Errorf("start %d or port %d of an address", s, ports[i])
		}
		if text += len(m.GetStarts()[s]) + lenPort; text > maxText {
			return fmt.Errorf("addresses of more than %d bytes", maxText)
		}
	}
	return nil
}

// Handles returns the handles of the joins of all ranks, by rank; nil if none has one. The slices
// are read-only.
func (w World) Handles() [][]byte { return w.columns.GetHandles() }

// DataAddrs returns the addresses of each rank's data listener, in order of preference. Each call
// allocates new slices.
func (w World) DataAddrs() [][]string {
	m := w.columns
	addrs := make([][]string, len(m.GetAddressCounts()))
	next := 0
	for r, n := range m.GetAddressCounts() {
		if n == 0 {
			continue
		}
		addrs[r] = make([]string, n)
		for i := range addrs[r] {
			addrs[r][i] = m.GetStarts()[m.GetAddressStarts()[next]]
			if port := m.GetAddressPorts()[next]; port != 0 {
				addrs[r][i] += ":" + strconv.FormatUint(uint64(port), 10)
			}
			next++
		}
	}
	return addrs
}
