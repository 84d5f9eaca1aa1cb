package elastic

import (
	"fmt"
	"slices"
)

// Batches assigns samples to the microbatches of each epoch. All ranks must use equal Batches:
// every sync compares the results of String.
type Batches interface {
	// Len returns the number of microbatches of an epoch.
	Len(epoch int) int
	// Samples returns the indices of the samples of microbatch i of an epoch, 0 to Len-1. The
	// caller owns the slice.
	Samples(epoch, i int) []int
	String() string
}

// NewBatches returns the microbatches of n samples: in each epoch every sample is in exactly one of
// them. opts.Batch is the number of samples of a microbatch; the last one of an epoch may have
// fewer. Order and shuffling are as in a [Sampler].
func NewBatches(n int, opts SamplerOptions) Batches {
	return &batches{NewSampler(n, opts)}
}

// batches computes the order of an epoch when it is first asked for, and keeps it until another
// epoch is asked for.
type batches struct{ sampler *Sampler }

func (b *batches) Len(int) int {
	return (b.sampler.n + b.sampler.opts.Batch - 1) / b.sampler.opts.Batch
}

func (b *batches) Samples(epoch, i int) []int {
	s := b.sampler
	s.SetEpoch(epoch)
	s.draw()
	first := i * s.opts.Batch
	if i < 0 || first >= s.n {
		return nil
	}
	all := make([]int, min(s.opts.Batch, s.n-first))
	for j := range all {
		all[j] = s.at(first + j)
	}
	return slices.Clip(all)
}

func (b *batches) String() string {
	o := b.sampler.opts
	return fmt.Sprintf("%d samples, batch %d, shuffle %t, seed %d", b.sampler.n, o.Batch, o.Shuffle, o.Seed)
}
