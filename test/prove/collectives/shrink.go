package main

import (
	"math"
	"slices"
)

// shrink returns the smallest failing program that it finds, starting from a failing one. It ends
// when no smaller program fails, or when more returns false. step is the step in which the program
// fails.
func shrink(p *program, step int, fails func(*program) bool, more func() bool) *program {
	for {
		found := false
		for _, q := range smaller(p, step) {
			if !more() {
				return p
			}
			if fails(q) {
				p, step, found = q, len(q.Steps)-1, true
				break
			}
		}
		if !found {
			return p
		}
	}
}

// weight measures the size of a program, which shrinking reduces.
func (p *program) weight() float64 {
	size := func(n int) float64 { return math.Log2(float64(n) + 1) }
	yes := func(b bool) float64 {
		if b {
			return 1
		}
		return 0
	}
	w := 50*float64(p.ranks()) + 20*float64(len(p.Hosts)) + 4*float64(len(p.Sockets)) + 4*yes(p.Encrypt) + yes(p.Connections > 1) +
		yes(p.Algorithm != "") + yes(p.Fusion > 0) + yes(p.Cycle != 0) + 3*yes(p.Buffers > 0) + 3*size(p.Busy) + 2*float64(p.Procs)
	for _, d := range p.Disturbed {
		w += 3 + size(d.For)/10
	}
	for _, s := range p.Subsets {
		w += 10 + float64(len(s.Ranks))
	}
	for i := range p.Steps {
		s := &p.Steps[i]
		w += 30 + 3*size(s.Times) + size(s.Root)/10
		for _, n := range s.counts() {
			w += 1 + size(n)
		}
		for _, b := range []bool{s.Uneven, s.Into, s.Alloc, s.Rough, s.Scale, s.Beside, s.Compress != "", s.Group > 0, s.Type != "float32", s.Op != "sum"} {
			w += yes(b)
		}
	}
	return w
}

// smaller returns programs smaller than this one, smallest first.
func smaller(p *program, step int) []*program {
	var all []*program
	add := func(change func(q *program)) {
		q := p.clone()
		change(q)
		if len(q.Hosts) == 0 || len(q.Steps) == 0 {
			return
		}
		if q.tidy(); q.weight() < p.weight() {
			all = append(all, q)
		}
	}
	calm := func(q *program) { q.Disturbed, q.Busy, q.Procs, q.Buffers = nil, 0, 0, 0 }
	plain := func(q *program) { q.Subsets, q.Algorithm, q.Fusion, q.Cycle = nil, "", 0, 0 }
	if step >= 0 && step < len(p.Steps) {
		only := func(q *program) { q.keep(step, step+1) }
		add(func(q *program) { calm(q); plain(q); only(q) })
		add(func(q *program) { plain(q); only(q) })
		add(only)
		add(func(q *program) { q.keep(0, step+1) })
	}
	add(calm)
	add(func(q *program) { q.Disturbed = nil })
	for i := range p.Disturbed {
		add(func(q *program) { q.Disturbed = slices.Delete(q.Disturbed, i, i+1) })
	}
	add(func(q *program) { q.Busy = 0 })
	add(func(q *program) { q.Procs = 0 })
	add(func(q *program) { q.Buffers = 0 })
	if n := len(p.Steps); n > 1 {
		add(func(q *program) { q.keep(n/2, n) })
		add(func(q *program) { q.keep(0, n/2) })
		for i := range p.Steps {
			add(func(q *program) { q.drop(i) })
		}
	}
	smallerWorlds(p, add)
	for i := range p.Steps {
		smallerSteps(i, add)
	}
	add(plain)
	add(func(q *program) { q.Encrypt = false })
	add(func(q *program) { q.Connections = 0 })
	add(func(q *program) { q.Sockets = nil })
	return all
}

// smallerWorlds returns programs with fewer ranks.
func smallerWorlds(p *program, add func(func(q *program))) {
	add(func(q *program) { q.Hosts = q.Hosts[:len(q.Hosts)/2] })
	for i := range p.Hosts {
		add(func(q *program) { q.Hosts = slices.Delete(q.Hosts, i, i+1) })
	}
	for _, most := range []int{1, 2, 3, 4} {
		add(func(q *program) {
			for i := range q.Hosts {
				q.Hosts[i] = min(q.Hosts[i], most)
			}
		})
	}
	for i := range p.Hosts {
		add(func(q *program) { q.Hosts[i] = max(1, q.Hosts[i]-1) })
	}
	for i := range p.Subsets {
		add(func(q *program) { q.Subsets[i].Ranks = q.Subsets[i].Ranks[:max(1, len(q.Subsets[i].Ranks)/2)] })
	}
}

// smallerSteps returns programs with a smaller step i.
func smallerSteps(i int, add func(func(q *program))) {
	for _, part := range []int{64, 8, 2} {
		add(func(q *program) {
			s := &q.Steps[i]
			s.Count /= part
			for j := range s.Tensors {
				s.Tensors[j] /= part
			}
		})
	}
	for _, change := range []func(s *step){
		func(s *step) { s.Times = 1 },
		func(s *step) { s.Times /= 2 },
		func(s *step) { s.Tensors = s.Tensors[:min(1, len(s.Tensors))] },
		func(s *step) { s.Tensors = s.Tensors[:(len(s.Tensors)+1)/2] },
		func(s *step) {
			s.Alloc, s.Into, s.Rough, s.Scale, s.Uneven, s.Beside = false, false, false, false, false, false
		},
		func(s *step) { s.Group = 0 },
		func(s *step) { s.Root = 0 },
		func(s *step) {
			if s.Type != "" && s.Do != bytesOp && s.Wrong == nil {
				s.Type = "float32"
			}
		},
		func(s *step) {
			if s.Op != "" {
				s.Op = "sum"
			}
		},
	} {
		add(func(q *program) { change(&q.Steps[i]) })
	}
}

// keep removes the steps before from and those from to on.
func (p *program) keep(from, to int) {
	p.Steps = p.Steps[from:to]
	p.Disturbed = slices.DeleteFunc(p.Disturbed, func(d disturbance) bool { return d.Step >= to || d.Step >= 0 && d.Step < from })
	for i := range p.Disturbed {
		if p.Disturbed[i].Step >= 0 {
			p.Disturbed[i].Step -= from
		}
	}
}

// drop removes a step.
func (p *program) drop(i int) {
	p.Steps = slices.Delete(p.Steps, i, i+1)
	p.Disturbed = slices.DeleteFunc(p.Disturbed, func(d disturbance) bool { return d.Step == i })
	for j := range p.Disturbed {
		if p.Disturbed[j].Step > i {
			p.Disturbed[j].Step--
		}
	}
}
