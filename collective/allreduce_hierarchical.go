package collective

import (
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

const throughOne = 8 << 10 // up to here one rank of each host goes between them

// usesHierarchy reports whether an AllReduce runs within hosts first and then between them.
func (g *Group) usesHierarchy(op Op) bool {
	return g.hosts != nil && g.algorithm() == Auto && op != Adasum
}

// allReduceHierarchical reduces within each host in its shared memory, then between the hosts, then
// hands the result out within each host. Between hosts goes what one rank has, not what all have:
// the data is cut into as many parts as the smallest host has ranks, and each part has an owner on
// every host, so that the owners of all parts work at the same time. What is small goes through one
// owner. See NVIDIA's and Open MPI's 2-D and HAN allreduce for the same shape.
func (c *call) allReduceHierarchical(data []byte) error {
	size := c.desc.dtype.Size()
	owners := len(c.g.hosts[0])
	for _, ranks := range c.g.hosts {
		owners = min(owners, len(ranks))
	}
	if len(data) <= throughOne {
		owners = 1
	}
	h := c.g.host.Load()
	me := 0
	if h != nil {
		me = h.member.Index()
		err := h.within(c.ctx, c.desc, func(m *shm.Member, call shm.Desc) error {
			return m.Reduce(c.ctx, call, data, owners, h.reduction(c.desc.dtype, c.desc.reduce))
		})
		if err != nil {
			return err
		}
	}
	if me < owners {
		lo, hi := kernel.Split(len(data)/size, owners, me)
		if err := c.allReduceBetweenHosts(me, data[lo*size:hi*size]); err != nil {
			return err
		}
	}
	if h == nil {
		return nil
	}
	return h.within(c.ctx, c.desc, func(m *shm.Member, call shm.Desc) error {
		return m.Gather(c.ctx, call, data, size, owners)
	})
}

// allReduceBetweenHosts reduces one part among its owners on all hosts.
func (c *call) allReduceBetweenHosts(owner int, part []byte) error {
	t := team{ranks: c.owners[:0], size: len(c.g.hosts)}
	for i, ranks := range c.g.hosts {
		t.ranks = append(t.ranks, ranks[owner])
		if ranks[owner] == c.g.rank {
			t.me = i
		}
	}
	c.owners = t.ranks
	if c.desc.reduce == Average {
		t.divide = c.g.size
	}
	return c.allReduceFlat(t, part)
}
