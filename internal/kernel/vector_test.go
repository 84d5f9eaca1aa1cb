//go:build amd64 && unix && !purego

package kernel

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"
)

var everything = flag.Bool("everything", false, "try all pairs of 16-bit numbers and all float32s, which takes minutes")

func addVector(all map[string]*table) {
	if hasAVX2 {
		all["AVX2"] = avx2()
	}
	if hasAVX512 {
		all["AVX512"] = avx512()
	}
}

// vectors returns the implementations that are compared with the twin.
func vectors(t testing.TB) map[string]*table {
	all := map[string]*table{}
	addVector(all)
	if len(all) == 0 {
		t.Skip("this machine has no AVX2")
	}
	return all
}

// specials returns the bits of edge cases of a type.
func specials(typ Type) []uint64 {
	var all []uint64
	exponent := map[Type]int{Float32: 8, Float64: 11, Float16: 5, BFloat16: 8}[typ]
	width := typ.Size() * 8
	if exponent == 0 { // an integer
		for _, v := range []uint64{0, 1, 2, 3, 7, 1 << (width / 2), 1<<(width/2) - 1, 1 << (width - 1), 1<<(width-1) - 1, 0x5555555555555555} {
			all = append(all, v, -v, v+1, ^v)
		}
		return all
	}
	fraction := width - 1 - exponent
	ones := uint64(1)<<fraction - 1
	for _, e := range []uint64{0, 1, 2, 1<<(exponent-1) - 2, 1<<(exponent-1) - 1, 1 << (exponent - 1), 1<<exponent - 3, 1<<exponent - 2, 1<<exponent - 1} {
		for _, f := range []uint64{0, 1, 2, ones, ones - 1, ones >> 1, ones>>1 + 1, ones >> 1 & 0x5555555555555555} {
			v := e<<fraction | f
			all = append(all, v, v|1<<(width-1))
		}
	}
	return all
}

func appendBits(b []byte, typ Type, bits uint64) []byte {
	return append(b, binary.LittleEndian.AppendUint64(nil, bits)[:typ.Size()]...)
}

// fill returns n elements, about half of which are special.
func fill(r *rand.Rand, typ Type, n int) []byte {
	special := specials(typ)
	var b []byte
	for range n {
		v := r.Uint64()
		if r.IntN(2) == 0 {
			v = special[r.IntN(len(special))]
		}
		b = appendBits(b, typ, v)
	}
	return b
}

func eachCombine(t *testing.T, f func(t *testing.T, typ Type, op Op, table *table)) {
	names := [Ops]string{Sum: "sum", Min: "min", Max: "max", Product: "product"}
	for name, table := range vectors(t) {
		for typ := Float32; typ < Types; typ++ {
			for op := Sum; op < Ops; op++ {
				t.Run(fmt.Sprintf("%s/%v/%s", name, typ, names[op]), func(t *testing.T) { f(t, typ, op, table) })
			}
		}
	}
}

// TestSpecialPairs tests each pair of special values, and each special value with random ones.
func TestSpecialPairs(t *testing.T) {
	eachCombine(t, func(t *testing.T, typ Type, op Op, table *table) {
		r := rand.New(rand.NewPCG(1, uint64(typ)))
		special := specials(typ)
		for _, x := range special {
			others := append(slices.Clone(special), r.Uint64(), r.Uint64(), r.Uint64())
			var a, b []byte
			for _, y := range others {
				a, b = appendBits(a, typ, x), appendBits(b, typ, y)
			}
			got, want := make([]byte, len(a)), make([]byte, len(a))
			table.combine[typ][op](got, a, b)
			twin.combine[typ][op](want, a, b)
			if d := differ(typ, got, want); d != "" {
				t.Fatalf("%#x: %s", x, d)
			}
		}
	})
}

// TestPairs tests all pairs of bytes, and all 16-bit values with some others, or with all if the
// flag is set.
func TestPairs(t *testing.T) {
	eachCombine(t, func(t *testing.T, typ Type, op Op, table *table) {
		if typ.Size() > 2 {
			return
		}
		count := 1 << (8 * typ.Size())
		var a []byte
		for v := range count {
			a = appendBits(a, typ, uint64(v))
		}
		r := rand.New(rand.NewPCG(2, uint64(typ)))
		others := specials(typ)
		if *everything || typ.Size() == 1 {
			others = nil
			for v := range count {
				others = append(others, uint64(v))
			}
		} else {
			others = []uint64{others[r.IntN(len(others))], others[r.IntN(len(others))], r.Uint64(), r.Uint64()}
		}
		got, want := make([]byte, len(a)), make([]byte, len(a))
		for _, x := range others {
			b := bytes.Repeat(appendBits(nil, typ, x), count)
			table.combine[typ][op](got, a, b)
			twin.combine[typ][op](want, a, b)
			if d := differ(typ, got, want); d != "" {
				t.Fatalf("with %#x: %s", x, d)
			}
		}
	})
}

// guarded is memory of n bytes that begins or ends at an inaccessible page.
type guarded struct{ memory []byte }

func newGuarded(t *testing.T) *guarded {
	page := syscall.Getpagesize()
	m, err := syscall.Mmap(-1, 0, 4*page, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Munmap(m) })
	for _, p := range [][]byte{m[:page], m[3*page:]} {
		if err := syscall.Mprotect(p, syscall.PROT_NONE); err != nil {
			t.Fatal(err)
		}
	}
	return &guarded{m[page : 3*page : 3*page]}
}

func (g *guarded) first(n int) []byte { return g.memory[:n:n] }

func (g *guarded) last(n int) []byte { return g.memory[len(g.memory)-n:] }

// TestLengths tests every short length, at either end of accessible memory, also with dst as its
// own source.
func TestLengths(t *testing.T) {
	x, y, z := newGuarded(t), newGuarded(t), newGuarded(t)
	eachCombine(t, func(t *testing.T, typ Type, op Op, table *table) {
		r := rand.New(rand.NewPCG(3, uint64(typ)))
		for count := range 201 {
			n := count * typ.Size()
			a, b, want := fill(r, typ, count), fill(r, typ, count), make([]byte, n)
			twin.combine[typ][op](want, a, b)
			for _, place := range []func(*guarded, int) []byte{(*guarded).first, (*guarded).last} {
				pa, pb, dst := place(x, n), place(y, n), place(z, n)
				for _, to := range [][]byte{dst, pa, pb} {
					copy(pa, a)
					copy(pb, b)
					table.combine[typ][op](to, pa, pb)
					if d := differ(typ, to, want); d != "" {
						t.Fatal(d)
					}
				}
				copy(pa, a)
				twin.combine[typ][op](want, a, a)
				table.combine[typ][op](pa, pa, pa)
				if d := differ(typ, pa, want); d != "" {
					t.Fatalf("with itself: %s", d)
				}
				twin.combine[typ][op](want, a, b)
			}
		}
	})
}

// TestOffsets: no alignment is required, also for large lengths, and the memory beside dst does not
// change.
func TestOffsets(t *testing.T) {
	eachCombine(t, func(t *testing.T, typ Type, op Op, table *table) {
		r := rand.New(rand.NewPCG(4, uint64(typ)))
		const largest = 5000
		a, b := fill(r, typ, largest+100), fill(r, typ, largest+100)
		dst, want := make([]byte, len(a)), make([]byte, len(a))
		for range 40 {
			n := r.IntN(1000) * typ.Size()
			if r.IntN(10) == 0 {
				n = r.IntN(largest) * typ.Size()
			}
			i, j, k := r.IntN(70), r.IntN(70), r.IntN(70)
			for l := range dst {
				dst[l] = byte(l)
			}
			copy(want, dst)
			table.combine[typ][op](dst[k:k+n], a[i:i+n], b[j:j+n])
			twin.combine[typ][op](want[k:k+n], a[i:i+n], b[j:j+n])
			if !bytes.Equal(dst, want) {
				t.Fatalf("%d bytes at %d from %d and %d: %s", n, k, i, j, differ(typ, dst[k:], want[k:]))
			}
		}
	})
}

func TestScaleAndDivide(t *testing.T) {
	g := newGuarded(t)
	for name, table := range vectors(t) {
		for typ := Float32; typ < Types; typ++ {
			r := rand.New(rand.NewPCG(5, uint64(typ)))
			every := make([]byte, 0, 1<<19)
			for v := range 1 << 16 { // all upper halves
				every = appendBits(every, typ, uint64(v)<<max(0, 8*typ.Size()-16))
			}
			check := func(count int, what any, f, reference func(b []byte)) {
				data := every
				if count < 1<<16 {
					data = fill(r, typ, count)
				}
				want := bytes.Clone(data)
				reference(want)
				got := bytes.Clone(data)
				if count < 300 {
					got = g.last(len(data))
					copy(got, data)
				}
				f(got)
				if d := differ(typ, got, want); d != "" {
					t.Fatalf("%s, %v by %v: %s", name, typ, what, d)
				}
			}
			for _, n := range []int{1, 2, 3, 7, 48, 1000, 1 << 20, 16777217, math.MaxInt64} {
				for _, count := range append(r.Perm(100)[:10], 1<<16) {
					check(count, n, func(b []byte) { table.divide[typ](b, n) }, func(b []byte) { twin.divide[typ](b, n) })
				}
			}
			for _, x := range []float64{0, 1, -1, 1.0 / 3, 65504, 1e-40, 5e-324, 1e300, math.Inf(-1), math.NaN(), math.Float64frombits(0xfff4567800000000)} {
				for _, count := range append(r.Perm(100)[:10], 1<<16) {
					check(count, x, func(b []byte) { table.scale[typ](b, x) }, func(b []byte) { twin.scale[typ](b, x) })
				}
			}
		}
	}
}

// TestConversions tests every half-precision number. Of the float32s it tests special ones, random
// ones, and those next to and between neighbouring half-precision numbers; if the flag is set, it
// tests all.
func TestConversions(t *testing.T) {
	source, target := newGuarded(t), newGuarded(t)
	for name, table := range vectors(t) {
		for _, typ := range []Type{Float16, BFloat16} {
			r := rand.New(rand.NewPCG(6, uint64(typ)))
			var halves []byte
			for v := range 1 << 16 {
				halves = appendBits(halves, typ, uint64(v))
			}
			got, want := make([]byte, 1<<18), make([]byte, 1<<18)
			table.widen[typ](got, halves)
			twin.widen[typ](want, halves)
			if d := differ(Float32, got, want); d != "" {
				t.Fatalf("%s, widened from %v: %s", name, typ, d)
			}
			narrow := func(src []byte) {
				got, want := make([]byte, len(src)/2), make([]byte, len(src)/2)
				table.narrow[typ](got, src)
				twin.narrow[typ](want, src)
				if d := differ(typ, got, want); d != "" {
					t.Fatalf("%s, narrowed to %v: %s", name, typ, d)
				}
			}
			narrow(want)
			narrow(fill(r, Float32, 10000))
			var beside []byte
			for i := 0; i < len(want)-4; i += 4 {
				lo, hi := binary.LittleEndian.Uint32(want[i:]), binary.LittleEndian.Uint32(want[i+4:])
				mid := lo + (hi-lo)/2
				for _, v := range []uint32{lo - 1, lo + 1, mid - 1, mid, mid + 1, mid + 2} {
					beside = appendBits(beside, Float32, uint64(v))
				}
			}
			narrow(beside)
			for count := range 201 {
				for _, place := range []func(*guarded, int) []byte{(*guarded).first, (*guarded).last} {
					src, dst := place(source, 4*count), place(target, 2*count)
					copy(src, fill(r, Float32, count))
					want := make([]byte, 4*count)
					twin.narrow[typ](want[:2*count], src)
					if table.narrow[typ](dst, src); !bytes.Equal(dst, want[:2*count]) {
						t.Fatalf("%s, %d narrowed to %v: %s", name, count, typ, differ(typ, dst, want[:2*count]))
					}
					twin.widen[typ](want, dst)
					if table.widen[typ](src, dst); !bytes.Equal(src, want) {
						t.Fatalf("%s, %d widened from %v: %s", name, count, typ, differ(Float32, src, want))
					}
				}
			}
			if !*everything {
				continue
			}
			block := make([]uint32, 1<<20)
			for first := 0; first < 1<<32; first += len(block) {
				for i := range block {
					block[i] = uint32(first + i)
				}
				narrow(bytesOf(block))
			}
		}
	}
}

func FuzzCombine(f *testing.F) {
	tables := vectors(f)
	f.Add(uint8(Float16), uint8(Min), uint8(3), bytes.Repeat([]byte{0x01, 0x7c, 0xff, 0xff}, 50))
	f.Add(uint8(Float32), uint8(Sum), uint8(0), bytes.Repeat([]byte{0, 0, 0x80, 0x7f, 0, 0, 0x80, 0xff, 1}, 30))
	f.Fuzz(func(t *testing.T, typ, op, offset uint8, data []byte) {
		combine := Combine(Type(typ), Op(op))
		if combine == nil {
			return
		}
		offset %= 64
		n := max(0, len(data)-int(offset)) / 2 / Type(typ).Size() * Type(typ).Size()
		if n == 0 {
			return
		}
		a, b := data[offset:int(offset)+n], data[int(offset)+n:int(offset)+2*n]
		want, got := make([]byte, n), make([]byte, n)
		twin.combine[typ][op](want, a, b)
		for name, table := range tables {
			if table.combine[typ][op](got, a, b); !bytes.Equal(got, want) {
				t.Errorf("%s: %s", name, differ(Type(typ), got, want))
			}
		}
	})
}
