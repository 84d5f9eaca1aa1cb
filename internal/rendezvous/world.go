package rendezvous

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"

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
	m := &rendezvouspb.Members{Indices: make([]uint32, len(members)), AddressCounts: make([]uint32, len(members))}
	numbers := make(map[string]uint32) // index in Starts of each address without its port
	for r, member := range members {
		s := w.Slots[r]
		if r == 0 || s.Host != w.Slots[r-1].Host {
			m.Hosts, m.Counts = append(m.Hosts, s.Host), append(m.Counts, 0)
		}
		m.Counts[len(m.Counts)-1]++
		m.Indices[r] = uint32(s.Index)
		m.AddressCounts[r] = uint32(len(member.DataAddrs))
		for _, addr := range member.DataAddrs {
			start, port := splitPort(addr)
			number, known := numbers[start]
			if !known {
				number = uint32(len(m.Starts))
				numbers[start] = number
				m.Starts = append(m.Starts, start)
			}
			m.AddressStarts, m.AddressPorts = append(m.AddressStarts, number), append(m.AddressPorts, port)
		}
		if len(member.Handle) > 0 && m.Handles == nil {
			m.Handles = make([][]byte, len(members))
		}
		if m.Handles != nil {
			m.Handles[r] = member.Handle
		}
	}
	return m
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

// placeFromWire checks that the place is valid, and newer than a generation.
func placeFromWire(m *rendezvouspb.World, after uint64) (Place, error) {
	size := m.GetSize()
	if m.GetGeneration() <= after || m.GetRank() >= size || m.GetSyncRoot() >= size || size > maxMembers {
		return Place{}, invalidReply("generation %d, rank %d of %d, root %d", m.GetGeneration(), m.GetRank(), size, m.GetSyncRoot())
	}
	key, err := identity.ParseDataKey(m.GetDataKey())
	if err != nil {
		return Place{}, invalidReply("%w", err)
	}
	return Place{
		Generation: m.GetGeneration(), Rank: int(m.GetRank()), Size: int(size), SyncRoot: int(m.GetSyncRoot()), Seq: m.GetSeq(),
		Store: m.GetStore(), key: key, members: m.GetMembers(),
	}, nil
}

// World decodes the members. It takes 0.2 ms for a thousand, with their addresses. An error means
// that the driver's answer is not valid.
func (p Place) World() (World, error) {
	var m rendezvouspb.Members
	if err := proto.Unmarshal(p.members, &m); err != nil {
		return World{}, invalidReply("%w", err)
	}
	if n := len(m.GetIndices()); n != p.Size {
		return World{}, invalidReply("%d members of %d", n, p.Size)
	}
	slots, err := slotsFromWire(&m)
	if err != nil {
		return World{}, invalidReply("%w", err)
	}
	if err := checkAddrs(&m); err != nil {
		return World{}, invalidReply("%w", err)
	}
	return World{
		World: plan.World{Generation: p.Generation, Slots: slots},
		Rank:  p.Rank, SyncRoot: p.SyncRoot, Seq: p.Seq, Key: p.key, Store: p.Store, columns: &m,
	}, nil
}

func invalidReply(format string, args ...any) error {
	return fmt.Errorf("rendezvous: the driver's answer is not valid: "+format, args...)
}

func slotsFromWire(m *rendezvouspb.Members) ([]plan.Slot, error) {
	indices := m.GetIndices()
	if len(indices) > maxMembers || len(m.GetHosts()) != len(m.GetCounts()) {
		return nil, fmt.Errorf("%d ranks, %d hosts with %d counts", len(indices), len(m.GetHosts()), len(m.GetCounts()))
	}
	slots := make([]plan.Slot, len(indices))
	rank := 0
	for h, host := range m.GetHosts() {
		count := m.GetCounts()[h]
		if uint64(count) > uint64(len(slots)-rank) {
			return nil, errors.New("more slots than ranks")
		}
		for range count {
			if indices[rank] > math.MaxInt32 {
				return nil, fmt.Errorf("the place of rank %d", rank)
			}
			slots[rank].SlotID = plan.SlotID{Host: host, Index: int(indices[rank])}
			rank++
		}
	}
	if rank < len(slots) {
		return nil, errors.New("more ranks than slots")
	}
	return slots, plan.Place(slots)
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
