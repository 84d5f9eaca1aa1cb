package rendezvous

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/plan"
)

const (
	// maxMembers and maxAddresses bound what a worker makes of the bytes of a world, some of which stand for many.
	maxMembers   = 1 << 20
	maxAddresses = 1 << 20
	maxText      = 16 << 20 // bytes of all addresses
	maxPort      = math.MaxUint16
	lenPort      = len(":65535")
)

// membersToWire puts the members of a world into columns. Their local and cross ranks are not among them: they are what
// plan.Assign makes of the slots.
func membersToWire(w plan.World, members []Member) *wire.World {
	m := &wire.World{Indices: make([]uint32, len(members)), AddressCounts: make([]uint32, len(members))}
	numbers := make(map[string]uint32) // of starts
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
	}
	return m
}

// splitPort returns an address without its port, and that; one that does not end in a port as a number is written comes
// back whole, with 0.
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

// worldFromWire checks that the world answers a join after that generation and that its ranks exist.
func worldFromWire(m *wire.World, after uint64) (World, error) {
	size := uint64(len(m.GetIndices()))
	if m.GetGeneration() <= after || uint64(m.GetRank()) >= size || uint64(m.GetSyncRoot()) >= size {
		return World{}, senseless("generation %d, rank %d of %d, root %d", m.GetGeneration(), m.GetRank(), size, m.GetSyncRoot())
	}
	ids, err := slotsFromWire(m)
	if err != nil {
		return World{}, senseless("%w", err)
	}
	addrs, err := addrsFromWire(m)
	if err != nil {
		return World{}, senseless("%w", err)
	}
	slots, err := plan.Assign(ids, 0, 0)
	if err != nil {
		return World{}, senseless("%w", err)
	}
	return World{
		World: plan.World{Generation: m.GetGeneration(), Slots: slots},
		Rank:  int(m.GetRank()), SyncRoot: int(m.GetSyncRoot()), Seq: m.GetSeq(), DataAddrs: addrs,
	}, nil
}

func senseless(format string, args ...any) error {
	return fmt.Errorf("rendezvous: the driver's answer makes no sense: "+format, args...)
}

// slotsFromWire returns the slots by rank.
func slotsFromWire(m *wire.World) ([]plan.SlotID, error) {
	indices := m.GetIndices()
	if len(indices) > maxMembers || len(m.GetHosts()) != len(m.GetCounts()) {
		return nil, fmt.Errorf("%d ranks, %d hosts with %d counts", len(indices), len(m.GetHosts()), len(m.GetCounts()))
	}
	ids := make([]plan.SlotID, 0, len(indices))
	for h, host := range m.GetHosts() {
		count := m.GetCounts()[h]
		if uint64(count) > uint64(len(indices)-len(ids)) {
			return nil, errors.New("more slots than ranks")
		}
		for range count {
			index := indices[len(ids)]
			if index > math.MaxInt32 {
				return nil, fmt.Errorf("the place of rank %d", len(ids))
			}
			ids = append(ids, plan.SlotID{Host: host, Index: int(index)})
		}
	}
	if len(ids) < len(indices) {
		return nil, errors.New("more ranks than slots")
	}
	return ids, nil
}

// addrsFromWire returns the addresses by rank. All of them are parts of one string: that takes a hundredth of the time of
// as many strings.
func addrsFromWire(m *wire.World) ([][]string, error) {
	counts, starts, ports := m.GetAddressCounts(), m.GetAddressStarts(), m.GetAddressPorts()
	if len(counts) != len(m.GetIndices()) || len(starts) != len(ports) || len(starts) > maxAddresses {
		return nil, fmt.Errorf("%d ranks with addresses, %d addresses with %d ports", len(counts), len(starts), len(ports))
	}
	size := 0
	for i, s := range starts {
		if s >= uint32(len(m.GetStarts())) || ports[i] > maxPort {
			return nil, fmt.Errorf("address %d", i)
		}
		if size += len(m.GetStarts()[s]) + lenPort; size > maxText {
			return nil, fmt.Errorf("addresses of more than %d bytes", maxText)
		}
	}
	var text strings.Builder
	text.Grow(size)
	all := make([]string, len(starts))
	var digits [lenPort]byte
	for i, s := range starts {
		at := text.Len()
		text.WriteString(m.GetStarts()[s])
		if ports[i] != 0 {
			text.Write(strconv.AppendUint(append(digits[:0], ':'), uint64(ports[i]), 10))
		}
		all[i] = text.String()[at:]
	}
	addrs := make([][]string, len(counts))
	for r, n := range counts {
		if n > maxAddrs || uint64(n) > uint64(len(all)) {
			return nil, fmt.Errorf("the addresses of rank %d", r)
		}
		if n > 0 {
			addrs[r], all = all[:n:n], all[n:]
		}
	}
	if len(all) > 0 {
		return nil, errors.New("more addresses than ranks have")
	}
	return addrs, nil
}
