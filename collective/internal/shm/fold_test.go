package shm

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
)

// TestFold folds various numbers of parts, at every threshold, with a function for which the order
// matters. Other operations use the same slots in between.
func TestFold(t *testing.T) {
	for _, n := range []int{1, 2, 3, 5} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			members := gathering(t, n, small(n))
			defer leave(t, members)
			for _, size := range sizes(n) {
				r := rand.New(rand.NewPCG(uint64(size), uint64(n)))
				parts := make([][][]byte, n)
				f := Folding{Size: 1, Block: mix}
				for i := range parts {
					for range r.IntN(4) {
						f.Operands = append(f.Operands, Operand{i, len(parts[i])})
						part := aligned(size)
						for j := range part {
							part[j] = byte(r.Uint32())
						}
						parts[i] = append(parts[i], part)
					}
					f.Most = max(f.Most, len(parts[i]))
				}
				r.Shuffle(len(f.Operands), func(i, j int) { f.Operands[i], f.Operands[j] = f.Operands[j], f.Operands[i] })
				operands := make([][]byte, len(f.Operands))
				for i, o := range f.Operands {
					operands[i] = clone(parts[o.Member][o.Number])
				}
				want := aligned(size)
				mix(want, operands)
				eachMust(t, members, func(m *Member) error {
					return foldTwice(m, rand.New(rand.NewPCG(uint64(size), uint64(m.index))), parts[m.index], want, &f)
				})
				for i, o := range f.Operands {
					if !bytes.Equal(operands[i], parts[o.Member][o.Number]) {
						t.Fatalf("%d bytes: part %d of member %d has changed", size, o.Number, o.Member)
					}
				}
			}
		})
	}
}

// mix computes a value that depends on the order of the operands.
func mix(target []byte, operands [][]byte) {
	clear(target)
	for i := range target {
		for _, o := range operands {
			target[i] = 31*target[i] + o[i]
		}
	}
}

func foldTwice(m *Member, r *rand.Rand, parts [][]byte, want []byte, f *Folding) error {
	d := Desc{uint64(len(want)), uint64(len(f.Operands))}
	for round := range 2 {
		dawdle(r)
		got := aligned(len(want))
		if err := m.Fold(background, d, parts, got, f); err != nil {
			return err
		}
		if !bytes.Equal(got, want) {
			return fmt.Errorf("Fold %d of %d bytes, %d parts: a wrong result", round, len(want), len(f.Operands))
		}
		dawdle(r)
		all := bytes.Repeat([]byte{1}, 400*m.members)
		add := &Reduction{Size: 1, Combine: func(dst, a, b []byte) {
			for i := range dst {
				dst[i] = a[i] + b[i]
			}
		}}
		if err := m.AllReduce(background, d, all, add); err != nil {
			return err
		}
		if !bytes.Equal(all, bytes.Repeat([]byte{byte(m.members)}, len(all))) {
			return fmt.Errorf("AllReduce after Fold %d: a wrong result", round)
		}
	}
	return nil
}
