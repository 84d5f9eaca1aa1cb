package cuda

import (
	"context"
	"errors"
	"math/bits"

	"github.com/hvdrun/hvdrun/collective"
)

// fusion is the bucket of a group's engine on a device.
type fusion struct {
	memory *Slice[byte] // nil until it is allocated
	agreed int          // size in bytes up to which all ranks have memory
}

// leastBucket is the smallest size of a bucket, in bytes.
const leastBucket = 1 << 20

// reduceAll combines vectors, all of one type and operation, with those of the other ranks: in a
// bucket if they fit, otherwise one by one. All ranks call it for the same vectors.
func (d *Device) reduceAll(ctx context.Context, lane *collective.Group, all []*submission) error {
	first, n := all[0], 0
	for _, v := range all {
		n += v.n
	}
	fits := false
	if len(all) > 1 && n > 0 && lane.Size() > 1 {
		var err error
		if fits, err = d.fit(ctx, lane, n*first.kind.Size()); err != nil {
			return err
		}
	}
	if !fits {
		for _, v := range all {
			if err := d.allReduceSlice(ctx, lane, reduction(v.kind, v.op, v.n), v.address, v.ready); err != nil {
				return err
			}
		}
		return nil
	}
	bucket := d.fusion(lane).memory.address
	return d.with(ctx, func(s *staging) error {
		if err := d.do(func() error { return s.gather(bucket, all) }); err != nil {
			return err
		}
		if err := s.settle(ctx); err != nil {
			return err
		}
		if err := d.allReduceSlice(ctx, lane, reduction(first.kind, first.op, n), bucket, nil); err != nil {
			return err
		}
		if err := d.do(func() error { return s.scatter(bucket, all) }); err != nil {
			return err
		}
		return s.settle(ctx)
	})
}

// gather copies vectors to a bucket, one after another, each once it is ready. Like scatter, it is
// called within [Device.do].
func (s *staging) gather(bucket uint64, all []*submission) error {
	a := s.device.api
	for _, v := range all {
		if v.ready != nil {
			if err := a.check("cuStreamWaitEvent", a.streamWaitEvent(s.up, v.ready.handle, 0)); err != nil {
				return err
			}
		}
		if v.n > 0 {
			if err := a.check("cuMemcpyDtoDAsync_v2", a.memcpyDtoDAsync(bucket, v.address, v.bytes(), s.up)); err != nil {
				return err
			}
		}
		bucket += v.bytes()
	}
	return nil
}

// scatter copies the vectors back from a bucket.
func (s *staging) scatter(bucket uint64, all []*submission) error {
	a := s.device.api
	for _, v := range all {
		if v.n > 0 {
			if err := a.check("cuMemcpyDtoDAsync_v2", a.memcpyDtoDAsync(v.address, bucket, v.bytes(), s.up)); err != nil {
				return err
			}
		}
		bucket += v.bytes()
	}
	return nil
}

func (v *submission) bytes() uint64 { return uint64(v.n * v.kind.Size()) }

// fusion returns the bucket of a lane.
func (d *Device) fusion(lane *collective.Group) *fusion {
	d.mu.Lock()
	defer d.mu.Unlock()
	f := d.fusions[lane]
	if f == nil {
		f = &fusion{}
		d.fusions[lane] = f
	}
	return f
}

// fit makes the bucket of a lane large enough for n bytes, and reports whether it is on all ranks.
// All ranks must grow it at the same time; they then exchange whether they could.
func (d *Device) fit(ctx context.Context, lane *collective.Group, n int) (bool, error) {
	f := d.fusion(lane)
	if n <= f.agreed {
		return true, nil
	}
	size := max(leastBucket, 1<<bits.Len(uint(n-1)))
	ok := []uint8{1}
	if f.memory == nil || f.memory.n < size {
		memory, err := Alloc[byte](d, size)
		switch {
		case errors.Is(err, ErrOutOfMemory):
			ok[0] = 0
		case err != nil:
			return false, err
		default:
			last := f.memory
			d.mu.Lock()
			f.memory = memory
			d.mu.Unlock()
			if last != nil {
				if err := last.Free(); err != nil {
					return false, err
				}
			}
		}
	}
	if err := collective.AllReduce(ctx, lane, ok, collective.Min); err != nil || ok[0] == 0 {
		return false, err
	}
	f.agreed = size
	return true, nil
}

// forgetFusions removes the buckets of generations before the given one and returns their memory,
// which other processes may have open. The caller holds d.mu.
func (d *Device) forgetFusions(generation uint64) (memory []uint64) {
	for lane, f := range d.fusions {
		if lane.Generation() >= generation {
			continue
		}
		delete(d.fusions, lane)
		if f.memory != nil {
			d.owned.remove(f.memory.address)
			memory = append(memory, f.memory.address)
		}
	}
	return memory
}
