package elastic

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
)

// SamplerOptions configure a Sampler. All ranks must use the same.
type SamplerOptions struct {
	// Shuffle uses a different order in every epoch, which depends only on Seed and the epoch.
	// Otherwise the order is 0, 1, 2, ….
	Shuffle bool
	Seed    int64
	// Batch is the number of indices per rank and round. 0 or less: 1.
	Batch int
}

// Sampler divides the indices 0 to n-1 of a data set among the ranks, batch by batch, and records
// the progress of the whole job. It is a Part of the State: after a restore, indices since the last
// commit are delivered again.
//
// Its position is one integer that every rank advances by the same amount in the same round, so
// after a resize the indices from the position on are divided among the new ranks. Every rank must
// call Next the same number of times.
//
// In an epoch every index is delivered once, regardless of resets between commits. Every rank gets
// the same number of indices in a round; if the last round does not divide evenly, at most size-1
// indices from the beginning of the epoch are repeated to fill it.
//
// A Sampler must be used by one goroutine at a time. Until NewState sets its rank, it is rank 0 of
// 1.
type Sampler struct {
	part
	n    int
	opts SamplerOptions

	rank, size int
	live       samplerState

	order      []int // of orderEpoch; nil: not shuffled or not computed yet
	orderEpoch int
}

// samplerState is what a Sampler commits.
type samplerState struct {
	epoch int
	pos   int  // indices of the epoch delivered to all ranks, at most n
	over  bool // Next has reported the end of the epoch
}

// NewSampler returns a Sampler of n indices at the beginning of epoch 0. If n is 0 or less every
// epoch is empty: Next returns false at once. It does not fail and starts nothing. If ranks use
// different n or options, the first sync fails.
func NewSampler(n int, opts SamplerOptions) *Sampler {
	opts.Batch = max(opts.Batch, 1)
	s := &Sampler{n: max(n, 0), opts: opts, size: 1}
	order := fmt.Sprintf("shuffle %t, seed %d", opts.Shuffle, opts.Seed)
	s.c = content{
		self:   s,
		layout: func() string { return fmt.Sprintf("sampler of %d indices, batch %d, %s", s.n, opts.Batch, order) },
		kind:   func() string { return fmt.Sprintf("sampler of %d indices, %s", s.n, order) },
		encode: s.encode, decode: s.decode, setRank: s.setRank,
		text: func(b []byte) string {
			fresh := NewSampler(s.n, s.opts)
			if fresh.decode(b) != nil {
				return ""
			}
			return fmt.Sprintf("epoch %d, position %d", fresh.live.epoch, fresh.live.pos)
		},
	}
	return s
}

// SetEpoch moves to the beginning of epoch e. If e is the current epoch it keeps the position, so a
// training loop can call it at the top of every epoch, also after a restore in the middle of an
// epoch.
func (s *Sampler) SetEpoch(e int) {
	if e != s.live.epoch {
		s.live = samplerState{epoch: e}
	}
	s.live.over = false
}

// Epoch returns the current epoch, 0 before the first SetEpoch.
func (s *Sampler) Epoch() int { return s.live.epoch }

// Position returns the number of indices of the epoch that have been delivered to all ranks
// together.
func (s *Sampler) Position() int { return s.live.pos }

// Next returns this rank's next batch of Batch indices, or fewer in the last round of an epoch. All
// ranks get the same number; the caller owns the slice. At the end of an epoch it returns false
// once. Without a SetEpoch, the following call starts the epoch again.
func (s *Sampler) Next() ([]int, bool) {
	if s.live.over {
		s.live.pos, s.live.over = 0, false
	}
	each := s.each()
	if each == 0 {
		s.live.over = true
		return nil, false
	}
	s.draw()
	batch := make([]int, each)
	first := s.live.pos + s.rank*each
	for i := range batch {
		batch[i] = s.at((first + i) % s.n)
	}
	s.live.pos = min(s.live.pos+s.size*each, s.n)
	return batch, true
}

// Len returns the number of indices that this rank still gets in this epoch if the world does not
// change.
func (s *Sampler) Len() int { return (s.n - s.live.pos + s.size - 1) / s.size }

// each returns the number of indices per rank in the next round; 0 at the end of the epoch.
func (s *Sampler) each() int {
	return min(s.opts.Batch, s.Len())
}

// draw computes the order of the current epoch.
func (s *Sampler) draw() {
	if !s.opts.Shuffle || (s.order != nil && s.orderEpoch == s.live.epoch) {
		return
	}
	if s.order == nil {
		s.order = make([]int, s.n)
	}
	for i := range s.order {
		s.order[i] = i
	}
	var seed [32]byte
	binary.LittleEndian.PutUint64(seed[:], uint64(s.opts.Seed))
	binary.LittleEndian.PutUint64(seed[8:], uint64(s.live.epoch))
	rand.New(rand.NewChaCha8(seed)).Shuffle(s.n, func(i, j int) { s.order[i], s.order[j] = s.order[j], s.order[i] })
	s.orderEpoch = s.live.epoch
}

func (s *Sampler) at(i int) int {
	if s.order == nil {
		return i
	}
	return s.order[i]
}

func (s *Sampler) setRank(rank, size int) { s.rank, s.size = rank, size }

func (s *Sampler) encode() ([]byte, error) {
	b := binary.AppendVarint(nil, int64(s.live.epoch))
	b = binary.AppendVarint(b, int64(s.live.pos))
	if s.live.over {
		return append(b, 1), nil
	}
	return append(b, 0), nil
}

func (s *Sampler) decode(b []byte) error {
	epoch, k := binary.Varint(b)
	pos, l := binary.Varint(b[max(k, 0):])
	if k <= 0 || l <= 0 || len(b) != k+l+1 || pos < 0 || pos > int64(s.n) {
		return errors.New("elastic: sampler: the saved position is not valid for this data")
	}
	s.live = samplerState{epoch: int(epoch), pos: int(pos), over: b[k+l] != 0}
	return nil
}
