package elastic

import "slices"

// shard is a Local value of one worker. Its place is that of its first owner.
type shard struct {
	Place int
	H     uint64 // digest of its owner's last step
}

// census records where the shards are in a world.
type census struct {
	generation uint64
	counted    int // ranks
	places     []int
	orphans    []int
	deaths     int // deaths in the job until the first rank was counted
	removed    int
}

// enrol checks, when training begins, that a worker's shard belongs to its state, and that the
// world lacks only shards whose loss is allowed. The caller holds mu.
func (p *process) enrol() {
	j := p.job
	fail := func(format string, args ...any) {
		j.mu.Unlock()
		j.errorf(format, args...)
		j.mu.Lock()
	}
	generation := p.worker.Generation()
	// A new worker can take over a shard that was orphaned in the previous world. The shard then
	// has the step at which its owner left.
	waited := p.seen.Place != p.shard.Place && (j.counted == nil || j.counted.generation != generation-1 || slices.Contains(j.counted.orphans, p.shard.Place))
	waited = waited || p.seen == p.shard && p.seenSteps == p.record.Steps // and is still unchanged
	now := mix(p.record.H, uint64(p.shard.Place))
	if p.shard.H != now && !waited && p.shard.H|p.seen.H != 0 {
		fail("worker %d: a shard of another state: %+v in %+v", p.id, p.shard, p.record)
	}
	p.seen, p.seenSteps = p.shard, p.record.Steps
	if j.census == nil || j.census.generation < generation {
		j.census = &census{generation: generation, deaths: j.deaths, removed: j.removals}
	}
	c := j.census
	if c.generation != generation {
		return
	}
	c.places = append(c.places, p.shard.Place)
	if p.shard.Place != p.id {
		j.ends["taken"]++
	}
	set := p.state.locals.set(p.state.locals.current)
	for _, n := range set.own()[1:] {
		var orphan shard
		if err := p.state.locals.parts[0].(*local[shard]).decode(set.of[n][0].Bytes(), &orphan); err != nil {
			fail("worker %d: orphan %d: %v", p.id, n, err)
		}
		c.places, c.orphans = append(c.places, orphan.Place), append(c.orphans, orphan.Place)
		j.ends["left"]++
	}
	if c.counted++; c.counted < p.worker.Size() {
		return
	}
	slices.Sort(c.places)
	if len(slices.Compact(slices.Clone(c.places))) != len(c.places) {
		fail("generation %d: a shard is there twice: %v", generation, c.places)
	}
	if before := j.counted; before != nil {
		deaths, removed := c.deaths-before.deaths, c.removed-before.removed
		for _, place := range before.places {
			if (deaths == 0 || deaths+removed <= j.replicas) && !slices.Contains(c.places, place) {
				fail("generation %d: shard %d is lost, %d copies, %d deaths: %v, in generation %d %v", generation, place, j.replicas, deaths,
					c.places, before.generation, before.places)
			}
		}
		switch {
		case deaths == 0 && removed > 0:
			j.ends["handed over"]++
		case deaths > 0 && deaths+removed <= j.replicas:
			j.ends["survived deaths"]++
		}
	}
	j.counted = c
}
