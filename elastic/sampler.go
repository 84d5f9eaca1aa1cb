package elastic

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/image"
)

// SamplerOptions says how a Sampler goes through its indices. All ranks must give the same.
type SamplerOptions struct {
	// Shuffle gives every epoch an order of its own, drawn from Seed and the epoch alone. Otherwise
	// it is 0, 1, 2, ….
	Shuffle bool
	Seed    int64
	// Batch is the number of indices that one rank takes in one round. 0 or less: 1.
	Batch int
}

// Sampler divides the indices 0 to n-1 of a data set among the ranks, batch by batch, and knows how
// far the job as a whole has come. It is a Part of the State; what is not committed counts as not
// delivered.
//
// Its whole position is one integer that every rank advances by the same amount in the same round,
// so a resize needs no bookkeeping: the indices from the position on are divided anew. Every rank
// must call Next equally often.
//
// Over an epoch every index is delivered once, whatever resets come between commits. Every rank
// gets equally many indices in a round; where the last round cannot be divided evenly, at most
// size-1 indices of the epoch's beginning are delivered again to fill it.
//
// A Sampler is used by one goroutine at a time. Until NewState gets it, it is rank 0 of 1.
type Sampler struct {
	n    int
	opts SamplerOptions

	rank, size int
	live       samplerState
	kept       alone

	order      []int // of orderEpoch; nil without shuffling, or when not drawn yet
	orderEpoch int
}

// samplerState is what a Sampler commits.
type samplerState struct {
	epoch int
	pos   int  // indices of the epoch that the job has delivered, at most n
	over  bool // Next has said that the epoch is over
}

// NewSampler returns a Sampler of n indices at the beginning of epoch 0.
func NewSampler(n int, opts SamplerOptions) *Sampler {
	opts.Batch = max(opts.Batch, 1)
	return &Sampler{n: max(n, 0), opts: opts, size: 1}
}

// SetEpoch goes to the beginning of epoch e. In epoch e already, it keeps the position: a training
// loop calls it at the top of every epoch, also when it has been restored in the middle of one.
func (s *Sampler) SetEpoch(e int) {
	if e != s.live.epoch {
		s.live = samplerState{epoch: e}
	}
	s.live.over = false
}

// Epoch returns the epoch set last.
func (s *Sampler) Epoch() int { return s.live.epoch }

// Position returns how many indices of the epoch all ranks together have been given.
func (s *Sampler) Position() int { return s.live.pos }

// Next returns this rank's next batch of indices, of Batch or, in the last round of an epoch, of
// fewer; the slice is the caller's. All ranks get equally many. It returns false once at the end of
// an epoch; where the next call is made without a SetEpoch, the epoch begins again.
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

// Len returns how many indices this rank is still to be given in this epoch, if the world stays as
// it is.
func (s *Sampler) Len() int { return (s.n - s.live.pos + s.size - 1) / s.size }

// each returns what a rank gets in the next round: 0 at the end of the epoch.
func (s *Sampler) each() int {
	return min(s.opts.Batch, s.Len())
}

// draw makes the order that of the live epoch.
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

// Save keeps epoch and position.
func (s *Sampler) Save() error { return s.kept.save(s) }

// Restore goes back to the epoch and position kept last.
func (s *Sampler) Restore() error { return s.kept.restore(s) }

// Sync takes over root's epoch and position, and this rank's place in g.
func (s *Sampler) Sync(ctx context.Context, g *collective.Group, root int) error {
	s.place(g.Rank(), g.Size())
	return syncCarried(ctx, g, root, s)
}

// What follows makes it a part of ours.

func (s *Sampler) self() Part   { return s }
func (s *Sampler) name() string { return "" }

func (s *Sampler) sources(to []image.Source) ([]image.Source, error) { return encoded(to, s) }
func (s *Sampler) restore(pieces []image.Piece) error                { return s.decode(pieces[0].Bytes()) }
func (s *Sampler) sums(pieces []image.Piece) ([]uint32, error)       { return pieces[0].Sums(), nil }
func (s *Sampler) travels() bool                                     { return true }

func (s *Sampler) layout() string {
	return fmt.Sprintf("sampler of %d indices, batch %d, shuffle %t, seed %d", s.n, s.opts.Batch, s.opts.Shuffle, s.opts.Seed)
}

func (s *Sampler) place(rank, size int) { s.rank, s.size = rank, size }

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
		return errors.New("elastic: sampler: the position is not one of this sampler")
	}
	s.live = samplerState{epoch: int(epoch), pos: int(pos), over: b[k+l] != 0}
	return nil
}
