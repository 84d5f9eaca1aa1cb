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

// Assign gives ranks to slots in the order of ids, which are grouped by host, the oldest host first, so that old hosts
// keep low ranks. At most max slots get one (0: all of them); fewer than min are ErrNotEnoughSlots, wrapped with the
// numbers.
//
// An index may be missing where a slot is excluded: local ranks are dense, the index stays. An id that is given twice is
// an error. The slots are the caller's.
func Assign(ids []SlotID, min, max int) ([]Slot, error) {
	if max > 0 && len(ids) > max {
		ids = ids[:max]
	}
	if len(ids) < min {
		return nil, fmt.Errorf("%w: %d, and %d are needed", ErrNotEnoughSlots, len(ids), min)
	}
	slots := make([]Slot, len(ids))
	number := make(map[string]int) // of a host, in the order of their first slots
	var local, top []int           // by host: slots so far, its local size in the end; the highest index so far
	var cross []int                // by local rank: hosts that have it so far, its cross size in the end
	rising := true                 // the indices within each host, so that none is given twice
	hosts, host := make([]int, len(ids)), 0
	for rank, id := range ids {
		if rank == 0 || id.Host != ids[rank-1].Host {
			var known bool
			if host, known = number[id.Host]; !known {
				host = len(local)
				number[id.Host] = host
				local, top = append(local, 0), append(top, id.Index-1)
			}
		}
		hosts[rank] = host
		rising = rising && id.Index > top[host]
		localRank := local[host]
		if localRank == len(cross) {
			cross = append(cross, 0)
		}
		slots[rank] = Slot{SlotID: id, Rank: rank, LocalRank: localRank, CrossRank: cross[localRank]}
		local[host]++
		top[host] = id.Index
		cross[localRank]++
	}
	if !rising {
		if id, twice := repeated(ids); twice {
			return nil, fmt.Errorf("plan: slot %v is given twice", id)
		}
	}
	for rank := range slots {
		slots[rank].LocalSize = local[hosts[rank]]
		slots[rank].CrossSize = cross[slots[rank].LocalRank]
	}
	return slots, nil
}

// repeated returns the first id that is given twice, if any is.
func repeated(ids []SlotID) (id SlotID, twice bool) {
	given := make(map[SlotID]bool, len(ids))
	for _, id := range ids {
		if given[id] {
			return id, true
		}
		given[id] = true
	}
	return id, false
}

// Group returns the place of a host among the hosts of the world and their number, as torchrun counts nodes: hosts are
// numbered in the order of their lowest ranks. The rank is -1 where the world has no slot of that host.
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
