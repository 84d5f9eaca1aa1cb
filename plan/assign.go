package plan

import "fmt"

// SlotIDs returns every slot of the hosts, host by host, by index.
func SlotIDs(hosts []Host) []SlotID {
	n := 0
	for _, h := range hosts {
		n += max(h.Slots, 0)
	}
	ids := make([]SlotID, 0, n)
	for _, h := range hosts {
		for i := range h.Slots {
			ids = append(ids, SlotID{h.Name, i})
		}
	}
	return ids
}

// Assign gives ranks to slots in the order of ids, which are grouped by host, the oldest host
// first, so that old hosts keep low ranks. At most max slots get one (0: all of them); fewer than
// min are ErrNotEnoughSlots, wrapped with the numbers.
//
// An index may be missing where a slot is excluded: local ranks are dense, the index stays. An id
// that is given twice is an error. The slots are the caller's.
func Assign(ids []SlotID, min, max int) ([]Slot, error) {
	if max > 0 && len(ids) > max {
		ids = ids[:max]
	}
	if len(ids) < min {
		return nil, fmt.Errorf("%w: %d, and %d are needed", ErrNotEnoughSlots, len(ids), min)
	}
	slots := make([]Slot, len(ids))
	for i, id := range ids {
		slots[i].SlotID = id
	}
	if err := Place(slots); err != nil {
		return nil, err
	}
	return slots, nil
}

// Place sets everything of the slots of a world but their ids, from which it follows: ranks are in
// their order. An id that is there twice is an error.
func Place(slots []Slot) error {
	hosts := make(map[string]*tally)
	var cross []int // by local rank: hosts that have it so far, its cross size in the end
	rising := true  // the indices within each host, so that none is there twice
	var host *tally
	for rank := range slots {
		s := &slots[rank]
		if rank == 0 || s.Host != slots[rank-1].Host {
			if host = hosts[s.Host]; host == nil {
				host = &tally{last: s.Index - 1}
				hosts[s.Host] = host
			}
		}
		rising = rising && s.Index > host.last
		if host.size == len(cross) {
			cross = append(cross, 0)
		}
		s.Rank, s.LocalRank, s.CrossRank = rank, host.size, cross[host.size]
		cross[host.size]++
		host.size++
		host.last = s.Index
	}
	if !rising {
		if err := unlike(slots); err != nil {
			return err
		}
	}
	for rank := range slots {
		s := &slots[rank]
		if rank == 0 || s.Host != slots[rank-1].Host {
			host = hosts[s.Host]
		}
		s.LocalSize, s.CrossSize = host.size, cross[s.LocalRank]
	}
	return nil
}

// tally is what Place knows of a host.
type tally struct {
	size int // slots so far
	last int // the index of the last of them
}

// unlike returns an error where a slot is there twice.
func unlike(slots []Slot) error {
	given := make(map[SlotID]bool, len(slots))
	for _, s := range slots {
		if given[s.SlotID] {
			return fmt.Errorf("plan: slot %v is given twice", s.SlotID)
		}
		given[s.SlotID] = true
	}
	return nil
}

// Group returns the place of a host among the hosts of the world and their number, as torchrun
// counts nodes: hosts are numbered in the order of their lowest ranks. The rank is -1 where the
// world has no slot of that host.
func (w World) Group(host string) (rank, size int) {
	rank = -1
	for _, s := range w.Slots {
		if s.LocalRank != 0 {
			continue
		}
		if s.Host == host {
			rank = size
		}
		size++
	}
	return rank, size
}
