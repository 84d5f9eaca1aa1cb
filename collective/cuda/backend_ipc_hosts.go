package cuda

import (
	"context"
	"errors"
	"slices"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// hostsBackend is the backend of ranks on several hosts, where those of each host open each other's
// memory. A vector is cut into as many parts as the host with most ranks has; on every host each
// part has an owner. The owner combines the vectors of its host by a kernel, in the order of the
// ranks; the owners of a part on all hosts reduce what they have, through pinned memory; then each
// copies the result to the vectors of its host. All owners do so at the same time, piece by piece.
// 2/n of the vector goes over the bus of a device whose host has n ranks, and as much to the
// network; staging moves the whole vector twice.
//
// Between hosts the result has the bits of the group's algorithm over the sums of the hosts. In
// asynchronous operations it has the bits of the strict order of the hosts, wherever in a bucket a
// vector lies. All ranks have the same, for a part is reduced by its owners alone.
type hostsBackend struct {
	stagingBackend // for types without kernels, and operations other than AllReduce
	local          *ipcBackend
	count          int    // of parts
	own            []part // of these, this rank's
	plain          bool   // all hosts have the same number of ranks, a power of two

	failed []*staging // of what has failed, with which the device may not be done; guarded by device.mu
}

// part is one of those into which vectors are cut.
type part struct {
	index  int
	owners *collective.Group
}

// piece is what an owner does at a time: some elements of a part.
type piece struct {
	from, n int
	owners  *collective.Group
}

// newHostsBackend makes the backend of ranks with these records. It is an operation of the group.
func newHostsBackend(ctx context.Context, d *Device, g *collective.Group, all []record) (*hostsBackend, error) {
	byHost := ranksByHost(all)
	here, err := g.Partition(ctx, byHost)
	if err != nil {
		return nil, err
	}
	w := &hostsBackend{stagingBackend: stagingBackend{d, g}, plain: true}
	for _, ranks := range byHost {
		w.count = max(w.count, len(ranks))
		w.plain = w.plain && len(ranks) == len(byHost[0]) && kernel.Fold(len(ranks)) == len(ranks)
	}
	if err := w.meetOwners(ctx, byHost); err != nil {
		return nil, err
	}
	var local []record
	for _, r := range all {
		if r.Host == all[g.Rank()].Host {
			local = append(local, r)
		}
	}
	w.local, err = newIPCBackend(d, here, local)
	return w, err
}

// meetOwners connects the owners of each part, those of all parts at a time if no rank has two.
func (w *hostsBackend) meetOwners(ctx context.Context, byHost [][]int) error {
	owners, apart := make([][]int, w.count), true
	for _, ranks := range byHost {
		for i := range owners {
			owners[i] = append(owners[i], ranks[i*len(ranks)/w.count])
		}
		apart = apart && len(ranks) == w.count
	}
	me := w.group.Rank()
	if apart {
		of, err := w.group.Partition(ctx, owners)
		if err == nil {
			w.own = []part{{slices.IndexFunc(owners, func(of []int) bool { return slices.Contains(of, me) }), of}}
		}
		return err
	}
	for i := range owners {
		of, err := w.group.Subset(ctx, owners[i])
		if err != nil {
			return err
		}
		if of != nil {
			w.own = append(w.own, part{i, of})
		}
	}
	return nil
}

// ranksByHost are the ranks of each host, in order, the hosts in the order of their first ranks.
func ranksByHost(all []record) [][]int {
	var byHost [][]int
	at := map[string]int{}
	for rank, r := range all {
		i, known := at[r.Host]
		if !known {
			i = len(byHost)
			at[r.Host] = i
			byHost = append(byHost, nil)
		}
		byHost[i] = append(byHost[i], rank)
	}
	return byHost
}

func (*hostsBackend) name() string { return BackendHosts }

func (w *hostsBackend) shut() error {
	w.device.mu.Lock()
	left := w.failed
	w.failed = nil
	w.device.mu.Unlock()
	for _, s := range left {
		s.retire()
	}
	return w.local.shut()
}

func (w *hostsBackend) takeDeferred() []uint64 { return w.local.takeDeferred() }

func (w *hostsBackend) deferFree(address, bytes uint64) bool {
	return w.local.deferFree(address, bytes)
}

func (w *hostsBackend) allReduce(ctx context.Context, t kernel.Type, op collective.Op, address uint64, n int, ready *Event) error {
	if !hasKernels(t) {
		return w.stagingBackend.allReduce(ctx, t, op, address, n, ready)
	}
	err := w.allReduceTwoLevels(ctx, t, op, address, n, ready)
	if errors.Is(err, collective.ErrAborted) { // all groups of the generation have ended: this one's error names its own ranks
		return collective.Barrier(ctx, w.group)
	}
	return err
}

func (w *hostsBackend) allReduceTwoLevels(ctx context.Context, t kernel.Type, op collective.Op, address uint64, n int, ready *Event) error {
	if err := w.local.after(ctx, ready); err != nil {
		return err
	}
	vectors, err := w.local.exchange(ctx, address) // after it, all vectors are ready
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(vectors, func(v place) bool { return v.banked }) {
		return w.combine(ctx, t, op, vectors, 0, w.pieces(t, 0, n))
	}
	// Ranks of other hosts do the same pieces in the same order, whether vectors of theirs are
	// banked or not.
	mine := vectors[w.local.group.Rank()]
	for at := 0; at < n; at += bankSize / t.Size() {
		step, from := min(bankSize/t.Size(), n-at), address+uint64(at*t.Size())
		if mine.banked {
			if err := w.copyAndSettle(ctx, mine.address, from, step*t.Size()); err != nil {
				return err
			}
		}
		if err := collective.Barrier(ctx, w.local.group); err != nil {
			return err
		}
		if err := w.combine(ctx, t, op, vectors, at, w.pieces(t, at, at+step)); err != nil {
			return err
		}
		if mine.banked {
			if err := w.copyAndSettle(ctx, from, mine.address, step*t.Size()); err != nil {
				return err
			}
		}
	}
	return nil
}

// copyAndSettle copies between a vector and the bank.
func (w *hostsBackend) copyAndSettle(ctx context.Context, to, from uint64, n int) error {
	if err := w.local.copy(to, from, n); err != nil {
		return err
	}
	return w.local.settle(ctx)
}

// pieces are this rank's of the elements from lo to hi, in the order of all ranks: by place, then
// by part. A bank holds what is cut at a time.
func (w *hostsBackend) pieces(t kernel.Type, lo, hi int) []piece {
	var all []piece
	each := pieceSize / t.Size()
	for step := bankSize / t.Size(); lo < hi; lo += step {
		n := min(step, hi-lo)
		_, longest := kernel.Split(n, w.count, 0)
		for at := 0; at < longest; at += each {
			for _, p := range w.own {
				begin, end := kernel.Split(n, w.count, p.index)
				if begin += at; begin < end {
					all = append(all, piece{lo + begin, min(each, end-begin), p.owners})
				}
			}
		}
	}
	return all
}

// combine reduces this rank's pieces on all hosts, and returns when all ranks of the host have
// theirs. Banks begin with the element first.
func (w *hostsBackend) combine(ctx context.Context, t kernel.Type, op collective.Op, vectors []place, first int, all []piece) error {
	size, me := t.Size(), w.local.group.Rank()
	at := func(v place, p piece) uint64 {
		if v.banked {
			return v.address + uint64((p.from-first)*size)
		}
		return v.address + uint64(p.from*size)
	}
	// An average is divided once the sum is complete. What the ranks of this host have of halves is
	// divided by a power of two, as package collective does, so that it fits their type.
	sum, mean := op, op == collective.Average && kernel.Narrow(t) != nil
	if op == collective.Average && !mean {
		sum = collective.Sum
	}
	ranges := func(i int) []copyRange { return []copyRange{{address: at(vectors[me], all[i]), n: all[i].n * size}} }
	j := transfer{count: len(all), down: ranges, up: ranges, step: func(i int, b []byte) error {
		b = b[:all[i].n*size]
		// The other ranks of this host write to their vectors again once they are aborted, and may
		// have done so while those were combined.
		if err := w.local.group.Err(); err != nil {
			return err
		}
		if mean {
			return w.meanOfHosts(ctx, t, all[i].owners, b)
		}
		if err := onHost[t].allReduce(ctx, all[i].owners, b, sum); err != nil {
			return err
		}
		if op == collective.Average {
			kernel.Divide(t)(b, w.group.Size())
		}
		return nil
	}}
	if len(vectors) > 1 {
		j.before = func(i int, stream uintptr) error {
			sources := make([]uint64, len(vectors))
			for rank, v := range vectors {
				sources[rank] = at(v, all[i])
			}
			args := over(t, all[i].n, []uint64{sources[me]}, sources...)
			args.number = divisor(t, kernel.Fold(len(vectors)))
			return w.device.launch(stream, combination(sum), t, args)
		}
		j.after = func(i int, stream uintptr) error {
			a, from := w.device.api, at(vectors[me], all[i])
			var errs []error
			for rank, v := range vectors {
				if rank != me {
					errs = append(errs, a.check("cuMemcpyDtoDAsync_v2", a.memcpyDtoDAsync(at(v, all[i]), from, uint64(all[i].n*size), stream)))
				}
			}
			return errors.Join(errs...)
		}
	}
	if err := w.runTransfer(ctx, j); err != nil {
		return err
	}
	return collective.Barrier(ctx, w.local.group)
}

// meanOfHosts makes an average of halves of what each host has, divided by its [kernel.Fold].
// Where hosts have unequal numbers of ranks, or no power of two, float32s go between them.
func (w *hostsBackend) meanOfHosts(ctx context.Context, t kernel.Type, owners *collective.Group, b []byte) error {
	if w.plain {
		return onHost[t].allReduce(ctx, owners, b, collective.Average)
	}
	n := len(b) / t.Size()
	wide := make([]byte, kernel.Float32.Size()*n)
	kernel.Widen(t)(wide, b)
	kernel.Scale(kernel.Float32)(wide, float64(kernel.Fold(w.local.group.Size())))
	if err := onHost[kernel.Float32].allReduce(ctx, owners, wide, collective.Sum); err != nil {
		return err
	}
	kernel.Divide(kernel.Float32)(wide, w.group.Size())
	kernel.Narrow(t)(b, wide)
	return nil
}

// runTransfer makes a transfer. Where it fails, parts of it may still read and write what belongs
// to others, until shut.
func (w *hostsBackend) runTransfer(ctx context.Context, j transfer) error {
	d := w.device
	if err := d.begin(); err != nil {
		return err
	}
	defer d.end()
	s, err := d.staging()
	if err != nil {
		return err
	}
	if err = s.run(ctx, j); err != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		w.failed = append(w.failed, s)
		return err
	}
	d.keep(s)
	return nil
}
