package scaler

import "time"

// usage describes the resources that this process and its machine use.
type usage struct {
	cpu       float64 // number of busy processors
	rss, free uint64  // bytes
	pid       uint32
}

// due returns when the owner must next call tick, or gone would return true.
func (c *core) due() time.Time {
	end := c.beat.contact.Add(c.cfg.GiveUp)
	if c.id == nil {
		return end
	}
	next := c.beat.last.Add(c.cfg.Heartbeat)
	if c.held > maxHeld {
		next = c.beat.last
	}
	if c.beat.waiting {
		next = c.beat.last.Add(c.cfg.EchoTimeout)
	}
	if end.Before(next) {
		return end
	}
	return next
}

// gone reports whether the scheduler has been silent for too long.
func (c *core) gone(now time.Time) bool {
	return now.Sub(c.beat.contact) >= c.cfg.GiveUp
}

// tick sends a heartbeat if it is due.
func (c *core) tick(now time.Time, look func() usage) {
	if c.id == nil || now.Before(c.due()) {
		return
	}
	if c.beat.waiting {
		c.notef("the scheduler has not answered a heartbeat for %v", c.cfg.EchoTimeout)
		c.out.broken = true
		return
	}
	c.heartbeat(now, look())
}

func (c *core) heartbeat(now time.Time, u usage) {
	slots := make([]processor, c.cfg.Slots)
	for i := range slots {
		slots[i] = processor{PID: u.pid, Initialized: true, HasTask: i < len(c.runs), CPU: u.cpu / float64(c.cfg.Slots), RSS: u.rss / uint64(c.cfg.Slots)}
	}
	c.send(&heartbeat{
		CPU: u.cpu, RSS: u.rss, Free: u.free, Queued: len(c.queued) + c.fetched, LatencyUS: uint32(c.beat.latency.Microseconds()),
		Locked: len(c.runs) >= c.cfg.Slots, Processors: slots,
	})
	c.beat.count++
	c.beat.waiting, c.beat.last = true, now
}

// echo handles the scheduler's answer to a heartbeat, which also acknowledges everything sent
// before that heartbeat.
func (c *core) echo(now time.Time) {
	if !c.beat.waiting {
		return
	}
	c.beat.waiting, c.beat.contact = false, now
	c.beat.latency = now.Sub(c.beat.last) / 2
	c.outbox.heard(c.beat.count)
}
