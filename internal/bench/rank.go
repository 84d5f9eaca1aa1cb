package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Rank is the program of a rank: it joins the job that started it, measures what spec says, and on
// rank 0 writes each row as a line of JSON once the row is complete. It blocks until all ranks are
// done, ctx ends, or a rank is lost; it does not recover from a loss.
func Rank(ctx context.Context, spec Spec, out io.Writer) error {
	w, err := elastic.Init(ctx)
	if err != nil {
		return err
	}
	defer w.Close()
	return elastic.Run(ctx, elastic.NewState(w), func(ctx context.Context) error {
		m := meter{ctx: ctx, group: w.Group(), spec: spec, clock: time.Now()}
		if err := m.meet(w.LocalRank()); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
		if err := m.measure(json.NewEncoder(out)); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
		return nil
	})
}

// meter times operations on one rank.
type meter struct {
	ctx   context.Context
	group *collective.Group
	spec  Spec
	clock time.Time // origin of time: time.Since costs half as much as time.Now

	host   int               // index of this rank's host
	totals []uint64          // by host, for sums
	layer  time.Duration     // duration of a layer of the model for Gradients
	ends   *collective.Group // one rank on each of two hosts; nil: this rank is neither, or there is one host
}

// meet determines the host of each rank. The ranks of a host are consecutive.
func (m *meter) meet(localRank int) error {
	all, err := collective.AllGather(m.ctx, m.group, []int32{int32(localRank)})
	if err != nil {
		return err
	}
	hosts, other := 0, 0
	for rank, one := range all {
		if one[0] != 0 {
			continue
		}
		if hosts++; hosts == 2 {
			other = rank
		}
		if rank <= m.group.Rank() {
			m.host = hosts - 1
		}
	}
	m.totals = make([]uint64, max(1, hosts))
	if hosts > 1 {
		m.ends, err = m.group.Subset(m.ctx, []int{0, other})
	}
	return err
}

// sent returns the bytes that all ranks have sent during a measurement, and those of the host that
// has sent most. since is what this rank had sent before the measurement.
func (m *meter) sent(since uint64) (all, most float64, err error) {
	clear(m.totals)
	m.totals[m.host] = m.group.Sent() - since
	if err := collective.AllReduce(m.ctx, m.group, m.totals, collective.Sum); err != nil {
		return 0, 0, err
	}
	for _, n := range m.totals {
		all, most = all+float64(n), max(most, float64(n))
	}
	return all, most, nil
}

// turns is the number of turns in which the operations of one size alternate, so that disturbances
// on the machine affect all of them.
const turns = 8

// measure measures all sizes and writes their rows.
func (m *meter) measure(out *json.Encoder) error {
	for i, size := range m.spec.Sizes {
		ops := []Op{m.spec.Op}
		if m.spec.Op == Gradients {
			var err error
			if m.layer, err = m.paced(size); err != nil {
				return err
			}
			ops = append(ops, After, AllReduce)
		}
		if m.spec.Memory && size >= 8 {
			ops = append(ops, CopyAlone, CopyAll)
		}
		if len(m.totals) > 1 && i == 0 {
			ops = append(ops, Stream)
		}
		rows, err := m.measureSize(ops, size)
		if err != nil {
			return fmt.Errorf("%s of %s: %w", m.spec.Op, SizeText(size), err)
		}
		for _, row := range rows {
			if m.group.Rank() == 0 {
				if err := out.Encode(row); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (m *meter) measureSize(ops []Op, size int) ([]Row, error) {
	trials := make([]*trial, len(ops))
	for i, op := range ops {
		t, err := m.trial(op, size)
		if err != nil {
			return nil, err
		}
		defer t.free()
		trials[i] = t
	}
	runtime.GC() // free the tensors of other sizes
	for turn := range turns {
		for _, t := range trials {
			n := len(t.samples)
			if err := m.sample(t, t.samples[n*turn/turns:n*(turn+1)/turns]); err != nil {
				return nil, err
			}
		}
	}
	rows := make([]Row, len(ops))
	for i, t := range trials {
		over := collective.Max
		if t.op == CopyAll {
			over = collective.Average // the ranks' total bandwidth counts, not the slowest rank
		}
		if err := collective.AllReduce(m.ctx, m.group, t.samples, over); err != nil {
			return nil, err
		}
		rows[i] = summarize(t.op, size, t.samples)
		if t.op == Stream {
			rows[i].Bytes = streamSize
			continue
		}
		rows[i].Sent = t.sent / float64(len(t.samples))
		if len(m.totals) > 1 {
			rows[i].HostOut = t.sentMost / float64(len(t.samples))
		}
	}
	return rows, nil
}

// trial prepares an operation: it verifies the result, warms up, and allocates the samples.
func (m *meter) trial(op Op, size int) (*trial, error) {
	if op == Stream {
		size = streamSize
	}
	data, err := m.tensor(op, size/4)
	if err != nil {
		return nil, err
	}
	t := &trial{ctx: m.ctx, group: m.group, ends: m.ends, op: op, data: data, async: m.spec.Async}
	t.parts = t.split(data)
	if m.spec.Into && op.HasInto() {
		n := len(data)
		if op == ReduceScatter {
			n = len(t.parts[m.group.Rank()])
		}
		if t.into, err = m.tensor(op, n); err != nil {
			t.free()
			return nil, err
		}
	}
	if op == SendRecv {
		if t.into, err = m.tensor(op, len(data)); err != nil {
			t.free()
			return nil, err
		}
	}
	if op == Gradients || op == After {
		t.model = m.newModel(len(data))
	}
	if err := t.prepare(); err != nil {
		t.free()
		return nil, err
	}
	clear(t.data) // repeated sums would overflow; zeros take the same time
	n, err := m.warmUp(t)
	if err != nil {
		t.free()
		return nil, err
	}
	t.samples = make([]time.Duration, n)
	return t, nil
}

// sample times one run of a trial per sample, back to back.
func (m *meter) sample(t *trial, samples []time.Duration) error {
	if err := collective.Barrier(m.ctx, m.group); err != nil {
		return err
	}
	if t.op == CopyAlone && m.group.Rank() != 0 || t.op == Stream && m.ends == nil {
		return nil
	}
	before := m.group.Sent()
	for i := range samples {
		begun := time.Since(m.clock)
		err := t.run()
		samples[i] = time.Since(m.clock) - begun
		if err != nil {
			return err
		}
	}
	if t.op == CopyAlone || t.op == Stream {
		return nil
	}
	all, most, err := m.sent(before)
	t.sent, t.sentMost = t.sent+all, t.sentMost+most
	return err
}

// tensor returns n elements in the selected kind of memory.
func (m *meter) tensor(op Op, n int) ([]float32, error) {
	if (m.spec.Alloc || m.spec.Op == Gradients) && op != CopyAlone && op != CopyAll { // an averager allocates such memory too
		return collective.Alloc[float32](n)
	}
	return make([]float32, n), nil
}

// warmUp runs the operation for a twentieth of the time and returns the number of samples that fit
// into the whole time, which is the same on every rank.
func (m *meter) warmUp(t *trial) (int, error) {
	for batch := 3; ; batch *= 2 {
		begun := time.Since(m.clock)
		for range batch {
			if err := t.run(); err != nil {
				return 0, err
			}
		}
		took := []time.Duration{time.Since(m.clock) - begun}
		if err := collective.Broadcast(m.ctx, m.group, took, 0); err != nil {
			return 0, err
		}
		if took[0] >= m.spec.Time/20 || batch >= maxSamples {
			n := float64(m.spec.Time) / (float64(max(took[0], 1)) / float64(batch))
			return int(max(minSamples, min(n, maxSamples))), nil
		}
	}
}

// trial is an operation on data of one size.
type trial struct {
	ctx   context.Context
	group *collective.Group
	ends  *collective.Group
	op    Op
	data  []float32
	parts [][]float32 // of data, by rank
	into  []float32   // for the result; nil: the operation allocates it
	model *model      // for Gradients and After
	async bool        // in the background, if the operation has such a form

	samples        []time.Duration
	sent, sentMost float64 // bytes sent on sockets in all samples: by all ranks, and by the host that sends most
}

func (t *trial) free() {
	if t.model != nil {
		t.model.averager.Close()
	}
	collective.Free(t.data)
	if t.into != nil {
		collective.Free(t.into)
	}
}

func (t *trial) run() (err error) {
	switch t.op {
	case Gradients:
		return t.pass(nil)
	case After:
		return t.passAndReduce()
	case AllReduce:
		if t.async {
			return collective.AllReduceAsync(t.ctx, t.group, "bench", t.data, collective.Sum).Wait()
		}
		return collective.AllReduce(t.ctx, t.group, t.data, collective.Sum)
	case Async:
		return collective.AllReduceAsync(t.ctx, t.group, "bench", t.data, collective.Sum).Wait()
	case Stream:
		if t.ends == nil {
			return nil
		}
		return collective.Broadcast(t.ctx, t.ends, t.data, 0)
	case Broadcast:
		if t.async {
			return collective.BroadcastAsync(t.ctx, t.group, "bench", t.data, 0).Wait()
		}
		return collective.Broadcast(t.ctx, t.group, t.data, 0)
	case AllGather:
		_, err = t.gather()
	case ReduceScatter:
		_, err = t.reduceScatter()
	case AllToAll:
		_, err = t.exchange()
	case SendRecv:
		return t.sendRecv()
	case Barrier:
		return collective.Barrier(t.ctx, t.group)
	case CopyAlone, CopyAll:
		copy(t.data[:len(t.data)/2], t.data[len(t.data)/2:])
	}
	return err
}

// gather gathers the data of each rank.
func (t *trial) gather() ([][]float32, error) {
	own := t.parts[t.group.Rank()]
	if t.into == nil {
		return collective.AllGather(t.ctx, t.group, own)
	}
	var err error
	if t.async {
		err = collective.AllGatherIntoAsync(t.ctx, t.group, "bench", own, t.into).Wait()
	} else {
		err = collective.AllGatherInto(t.ctx, t.group, own, t.into)
	}
	return t.split(t.into), err
}

func (t *trial) reduceScatter() ([]float32, error) {
	if t.into == nil {
		return collective.ReduceScatter(t.ctx, t.group, t.data, collective.Sum)
	}
	if t.async {
		return t.into, collective.ReduceScatterIntoAsync(t.ctx, t.group, "bench", t.data, t.into, collective.Sum).Wait()
	}
	return t.into, collective.ReduceScatterInto(t.ctx, t.group, t.data, t.into, collective.Sum)
}

// exchange returns the part of each rank for this rank.
func (t *trial) exchange() ([][]float32, error) {
	if t.into == nil {
		return collective.AllToAll(t.ctx, t.group, t.parts)
	}
	err := collective.AllToAllInto(t.ctx, t.group, t.data, t.into)
	return t.split(t.into), err
}

// sendRecv sends the tensor around the ring of all ranks.
func (t *trial) sendRecv() error {
	n, rank := t.group.Size(), t.group.Rank()
	if n == 1 {
		copy(t.into, t.data)
		return nil
	}
	sent := collective.SendAsync(t.ctx, t.group, t.data, (rank+1)%n)
	err := collective.Recv(t.ctx, t.group, t.into, (rank+n-1)%n)
	return errors.Join(err, sent.Wait())
}

// split returns the ranks' parts of a tensor, as even as possible.
func (t *trial) split(tensor []float32) [][]float32 {
	parts := make([][]float32, t.group.Size())
	for r := range parts {
		lo, hi := kernel.Split(len(tensor), len(parts), r)
		parts[r] = tensor[lo:hi]
	}
	return parts
}

// prepare fills the data and verifies one run of the operation.
func (t *trial) prepare() error {
	rank := t.group.Rank()
	for i := range t.data {
		t.data[i] = sample(rank, i)
	}
	if err := t.verify(); err != nil {
		return err
	}
	return collective.Barrier(t.ctx, t.group)
}

// sample returns element i of rank's data. Sums of such values are exact.
func sample(rank, i int) float32 { return float32(rank + 1 + i%7) }

// sum returns the sum of element i over n ranks.
func sum(n, i int) float32 { return float32(n*(n+1)/2 + n*(i%7)) }

func (t *trial) verify() error {
	n, rank := t.group.Size(), t.group.Rank()
	var err error
	switch t.op {
	case Gradients:
		return t.verifyPass()
	case AllReduce, Async:
		if err = t.run(); err == nil {
			err = check(t.data, 0, func(i int) float32 { return sum(n, i) })
		}
	case Broadcast:
		if err = t.run(); err == nil {
			err = check(t.data, 0, func(i int) float32 { return sample(0, i) })
		}
	case SendRecv:
		if err = t.run(); err == nil {
			err = check(t.into, 0, func(i int) float32 { return sample((rank+n-1)%n, i) })
		}
	case ReduceScatter:
		var part []float32
		if part, err = t.reduceScatter(); err == nil {
			err = check(part, t.start(rank), func(i int) float32 { return sum(n, i) })
		}
	case AllGather, AllToAll:
		var got [][]float32
		if t.op == AllGather {
			got, err = t.gather()
		} else {
			got, err = t.exchange()
		}
		for r := 0; r < len(got) && err == nil; r++ {
			part := r // part of the tensor that the elements come from
			if t.op == AllToAll {
				part = rank
			}
			if len(got[r]) != len(t.parts[part]) {
				return fmt.Errorf("%d elements arrived from rank %d, not %d", len(got[r]), r, len(t.parts[part]))
			}
			err = check(got[r], t.start(part), func(i int) float32 { return sample(r, i) })
		}
	default:
		return t.run()
	}
	return err
}

// start returns the index at which the part of a rank begins.
func (t *trial) start(rank int) (at int) {
	for _, p := range t.parts[:rank] {
		at += len(p)
	}
	return at
}

// check compares got, which begins at index at, with the expected values.
func check(got []float32, at int, want func(i int) float32) error {
	for i, v := range got {
		if w := want(at + i); v != w {
			return fmt.Errorf("the result is wrong: element %d is %g, not %g", at+i, v, w)
		}
	}
	return nil
}
