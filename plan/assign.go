package plan

import "fmt"

// Assign assigns ranks to slots in the order of ids, which must be grouped by host, oldest host
// first, so that old hosts keep low ranks.
//
// Indices may have gaps because slots may be excluded: local ranks are dense, the index is
// unchanged. A duplicate id is an error. The caller owns the result.
func Assign(ids []SlotID) ([]Slot, error) {
	slots := make([]Slot, len(ids))
	for i, id := range ids {
		slots[i].SlotID = id
	}
	if err := Place(slots); err != nil {
		return nil, err
	}
	return slots, nil
}

// Place sets all fields of a world's slots from their ids: ranks follow the order of slots. A
// duplicate id is an error.
func Place(slots []Slot) error {
	hosts := make(map[string]*tally)
	var cross []int // by local rank: number of hosts so far, finally its cross size
	rising := true  // indices increase within each host, so there is no duplicate
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
		if err := checkDistinct(slots); err != nil {
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

// tally is Place's state of a host.
type tally struct {
	size int // slots so far
	last int // index of the last one
}

// checkDistinct returns an error if a slot occurs twice.
func checkDistinct(slots []Slot) error {
	given := make(map[SlotID]bool, len(slots))
	for _, s := range slots {
		if given[s.SlotID] {
			return fmt.Errorf("plan: slot %v is given twice", s.SlotID)
		}
		given[s.SlotID] = true
	}
	return nil
}

// Group returns the rank of a host among the hosts of the world and their number, as torchrun
// counts nodes: hosts are numbered in the order of their lowest ranks. The rank is -1 if the world
// has no slot on that host.
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
