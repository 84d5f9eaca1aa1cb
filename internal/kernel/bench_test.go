package kernel

import (
	"fmt"
	"maps"
	"slices"
	"testing"
)

// BenchmarkCombine reports the bytes of dst per second, a third of the bytes read and written.
func BenchmarkCombine(b *testing.B) {
	all := implementations()
	for _, size := range []int{64, 16 << 10, 1 << 20, 64 << 20} {
		x, y := make([]byte, size), make([]byte, size)
		for typ := Float32; typ < Types; typ++ {
			for op := Sum; op < Ops; op++ {
				for _, name := range slices.Sorted(maps.Keys(all)) {
					f := all[name].combine[typ][op]
					b.Run(fmt.Sprintf("%v/%d/%d/%s", typ, op, size, name), func(b *testing.B) {
						b.SetBytes(int64(size))
						for b.Loop() {
							f(x, x, y)
						}
					})
				}
			}
		}
	}
}

// BenchmarkDivide, like BenchmarkScale, works in place.
func BenchmarkDivide(b *testing.B) {
	inPlace(b, func(t *table, typ Type) func([]byte) { return func(b []byte) { t.divide[typ](b, 3) } })
}

func BenchmarkScale(b *testing.B) {
	inPlace(b, func(t *table, typ Type) func([]byte) { return func(b []byte) { t.scale[typ](b, 1) } })
}

// BenchmarkNarrow, like BenchmarkWiden, reports the bytes of the float32s per second.
func BenchmarkNarrow(b *testing.B) {
	half := make([]byte, 32<<20)
	inPlace(b, func(t *table, typ Type) func([]byte) {
		if typ != Float16 && typ != BFloat16 {
			return nil
		}
		return func(b []byte) { t.narrow[typ](half[:len(b)/2], b) }
	})
}

func BenchmarkWiden(b *testing.B) {
	half := make([]byte, 32<<20)
	inPlace(b, func(t *table, typ Type) func([]byte) {
		if typ != Float16 && typ != BFloat16 {
			return nil
		}
		return func(b []byte) { t.widen[typ](b, half[:len(b)/2]) }
	})
}

func inPlace(b *testing.B, with func(t *table, typ Type) func([]byte)) {
	all := implementations()
	for _, size := range []int{16 << 10, 1 << 20, 64 << 20} {
		x := make([]byte, size)
		for _, typ := range []Type{Float32, Float64, Float16, BFloat16, Int8, Uint8, Int16, Uint16, Int32, Uint32, Int64} {
			for _, name := range slices.Sorted(maps.Keys(all)) {
				f := with(all[name], typ)
				if f == nil {
					continue
				}
				b.Run(fmt.Sprintf("%v/%d/%s", typ, size, name), func(b *testing.B) {
					b.SetBytes(int64(size))
					for b.Loop() {
						f(x)
					}
				})
			}
		}
	}
}
