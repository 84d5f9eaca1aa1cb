package levels

import (
	"encoding/binary"
	"math"
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/exchange"
)

const (
	// firstShares is the number of bytes of waves after which the hosts divide waves by the speeds
	// of their links, and laterShares the number of further bytes after which they do so again.
	firstShares = 16 << 20
	laterShares = 64 << 20
	// shareUnits is an equal share, and leastShare the smallest one: a slow host always combines a
	// little, so that the speed of its link can still be measured.
	shareUnits = 64
	leastShare = 2
	// leastBusy is how long a connection must have sent for its speed to count as known.
	// Connections on links of more than about 500 MB/s never send that long.
	leastBusy = 20 * time.Millisecond
	// fasterBy is the percentage by which new shares must be faster than the present ones to
	// replace them, because measured speeds are not exact.
	fasterBy = 7
)

// hostShares describes how waves are divided among the hosts. The owner of a share s, a fraction of
// the wave, among n hosts sends and receives 1 + (n−2)·s times the wave: its own data for the other
// owners, and the results of its share. So a host with a slow link combines less, and a host that
// combines nothing sends its data once. Elements are combined in the order of the hosts, so the
// shares change no bit.
type hostShares struct {
	cuts  []int             // by host, the number of units before its share; then the number of all units. Nil for equal shares
	due   int               // bytes of waves until the hosts agree on shares
	bytes int               // bytes of waves since the hosts last agreed
	sent  [][]exchange.Sent // by host, what had been sent there at that time; nil before the first wave
}

// SharesAgreed reports whether the hosts have agreed on shares. It is for tests.
func (c *Call) SharesAgreed() bool { return c.shares.due == laterShares }

// agreeOnShares divides the next n bytes of waves, and later ones, among the hosts by the speeds of
// their links, if it is time to do so. All ranks call it at the same points of their operations.
func (c *Call) agreeOnShares(n int) error {
	s, t := &c.shares, c.levels.column
	switch {
	case c.Forced.Shares != nil:
		s.cuts = c.Forced.Shares
		return nil
	case c.TCP == nil || t.Size < 3 || t.Size > fewHosts: // two hosts send the same, whatever their shares
		return nil
	case s.sent != nil && s.bytes < s.due:
		s.bytes += n
		return nil
	}
	first := s.sent == nil
	speeds := c.measureSpeeds()
	s.bytes, s.due = n, firstShares
	if first {
		return nil
	}
	all, err := c.exchangeSpeeds(speeds)
	if err != nil {
		return err
	}
	s.cuts, s.due = divide(all, t.Size, s.cuts), laterShares
	return nil
}

// measureSpeeds returns the speeds, in KiB/s, at which this rank has sent to the ranks of its
// column since the previous call, by host. A speed that is unknown is 0.
func (c *Call) measureSpeeds() []uint32 {
	s, t := &c.shares, c.levels.column
	if s.sent == nil {
		s.sent = make([][]exchange.Sent, t.Size)
	}
	speeds := make([]uint32, t.Size)
	for _, host := range c.levels.others() {
		now := c.TCP.Sent(t.Rank(host))
		before := s.sent[host]
		s.sent[host] = now
		var speed float64
		for i, is := range now {
			if i < len(before) {
				is.Bytes -= before[i].Bytes
				is.Busy -= before[i].Busy
			}
			if is.Busy >= leastBusy {
				speed += float64(is.Bytes) / 1024 / is.Busy.Seconds()
			}
		}
		speeds[host] = uint32(min(speed, math.MaxUint32))
	}
	return speeds
}

// exchangeSpeeds returns the speeds of all ranks of this rank's column, by the sending host, then
// by the receiving host.
func (c *Call) exchangeSpeeds(own []uint32) (all []uint32, err error) {
	t := c.levels.column
	var with []int
	for _, host := range c.levels.others() {
		with = append(with, t.Rank(host))
	}
	into := exchange.Into{Memory: make([]byte, c.Size*4*t.Size), Each: 4 * t.Size}
	row := into.Of(c.Rank)
	for i, speed := range own {
		binary.LittleEndian.PutUint32(row[4*i:], speed)
	}
	if err := c.ExchangeInto(with, func(int) []byte { return row }, into); err != nil {
		return nil, err
	}
	for host := range t.Size {
		row := into.Of(t.Rank(host))
		for i := range t.Size {
			all = append(all, binary.LittleEndian.Uint32(row[4*i:]))
		}
	}
	return all, nil
}

// divide returns the cuts of the fastest shares for n hosts. It returns nil if equal shares are
// hardly slower, and the present cuts if those are hardly slower or a speed is unknown. The speed
// of a host is the sum of the speeds of its connections, in the slower direction, since they share
// its link while all of them send. It uses integers, so that all hosts get the same result.
func divide(speeds []uint32, n int, cuts []int) []int {
	speed := make([]uint64, n)
	for i := range n {
		var out, in uint64
		for j := range n {
			if i != j && (speeds[i*n+j] == 0 || speeds[j*n+i] == 0) {
				return cuts
			}
			out += uint64(speeds[i*n+j])
			in += uint64(speeds[j*n+i])
		}
		speed[i] = min(out, in)
	}
	all := n * shareUnits
	// at is the time at which a host is done with a share: a fraction, so that it is exact.
	type at struct{ cost, speed uint64 }
	done := func(host, share int) at { return at{uint64(all + (n-2)*share), speed[host]} }
	// later reports whether a exceeds the given percentage of b. No product exceeds 2^55.
	later := func(a, b at, percent uint64) bool { return a.cost*b.speed*100 > b.cost*a.speed*percent }
	last := func(share func(host int) int) at {
		end := done(0, share(0))
		for i := 1; i < n; i++ {
			if d := done(i, share(i)); later(d, end, 100) {
				end = d
			}
		}
		return end
	}
	equal := func(int) int { return shareUnits }
	now := equal
	if cuts != nil {
		now = func(host int) int { return cuts[host+1] - cuts[host] }
	}
	units := make([]int, n)
	for i := range units {
		units[i] = leastShare
	}
	for range all - n*leastShare { // each unit goes to the host that is done with it first
		first := 0
		for i := 1; i < n; i++ {
			if later(done(first, units[first]+1), done(i, units[i]+1), 100) {
				first = i
			}
		}
		units[first]++
	}
	best := last(func(host int) int { return units[host] })
	switch {
	case later(best, last(equal), 100-fasterBy/2):
		return nil
	case later(best, last(now), 100-fasterBy):
		return cuts
	}
	cuts = make([]int, n+1)
	for i, u := range units {
		cuts[i+1] = cuts[i] + u
	}
	return cuts
}
