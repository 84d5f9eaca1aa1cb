package cuda

import (
	"context"
	"errors"
	"slices"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// hostsBackend is the backend of ranks on several hosts, if the ranks of each host can open each
// other's memory. A vector is cut into as many parts as the host with the most ranks has ranks; on
// every host each part has an owner. The owner combines its part of the vectors of its host by a
// kernel, in the order of the ranks. The owners of a part on all hosts reduce their results,
// through pinned memory. Then each owner copies the result to the vectors of its host. All owners
// work at the same time, piece by piece. On a host with n ranks, 2/n of the vector is moved over
// the bus of each device and as much over the network; staging moves the whole vector twice.
//
// The sums of the hosts are combined by the group's algorithm or, in asynchronous operations, in
// the strict order of the hosts, wherever in a bucket a vector is. All ranks have the same bits,
// since only the owners of a part reduce it.
type hostsBackend struct {
	stagingBackend // for types without kernels, and operations other than AllReduce
	local          *ipcBackend
	count          int    // of parts
	own            []part // the parts of this rank
	plain          bool   // all hosts have the same number of ranks, a power of two

	failed []*staging // the stagings of failed operations, which the device may still use; guarded by device.mu
}

// part is a part of the vectors that this rank owns on its host.
type part struct {
	index  int
	owners *collective.Group // one rank of each host
}

// piece is the elements of a part that an owner handles at a time.
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

// meetOwners makes a group of the owners of each part. If no rank owns two parts, it makes all
// groups at once.
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

// ranksByHost returns the ranks of each host, in order, with the hosts in the order of their first
// ranks.
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
	// Ranks of other hosts handle the same pieces in the same order, whether their vectors are
	// banked or not.
	mine := vectors[w.local.group.Rank()]
	for at := 0; at < n; at += bankSize / t.Size() {
		step, from := min(bankSize/t.Size(), n-at), address+uint64(at*t.Size())
		if mine.banked {
			if err := w.local.copyAndSettle(ctx, mine.address, from, step*t.Size()); err != nil {
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
			if err := w.local.copyAndSettle(ctx, from, mine.address, step*t.Size()); err != nil {
				return err
			}
		}
	}
	return nil
}

// pieces returns this rank's pieces of the elements from lo to hi, in the order that all ranks use:
// by position, then by part. The elements are divided in steps of the size of a bank.
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

// combine reduces this rank's pieces with the other hosts, and blocks until all ranks of this host
// have done so. Banks begin with the element first.
func (w *hostsBackend) combine(ctx context.Context, t kernel.Type, op collective.Op, vectors []place, first int, all []piece) error {
	size, me := t.Size(), w.local.group.Rank()
	at := func(v place, p piece) uint64 {
		if v.banked {
			return v.address + uint64((p.from-first)*size)
		}
		return v.address + uint64(p.from*size)
	}
	// An average is divided once the sum is complete. The sum of 16-bit floats of this host's ranks
	// is divided by a power of two, as in package collective, so that it does not overflow the
	// type.
	sum, mean := op, op == collective.Average && kernel.Narrow(t) != nil
	if op == collective.Average && !mean {
		sum = collective.Sum
	}
	ranges := func(i int) []copyRange { return []copyRange{{address: at(vectors[me], all[i]), n: all[i].n * size}} }
	j := transfer{count: len(all), down: ranges, up: ranges, step: func(i int, b []byte) error {
		b = b[:all[i].n*size]
		// The other ranks of this host may write to their vectors again once they are aborted, and
		// may have done so while the vectors were combined.
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

// meanOfHosts computes an average of 16-bit floats from the sums of the hosts, each divided by its
// [kernel.Fold]. If the numbers of ranks of the hosts differ, or are not powers of two, the hosts
// exchange float32s.
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

// runTransfer runs a transfer. If it fails, parts of it may still read and write memory of other
// processes until shut.
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
