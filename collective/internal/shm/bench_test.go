package shm

import (
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"
	"unsafe"

	"github.com/hvdrun/hvdrun/internal/kernel"
)

// BenchmarkAllReduce runs members in their own processes, which sum float32s in place without
// pauses. A sample is one operation. Its time is the largest of the members' times.
func BenchmarkAllReduce(b *testing.B) {
	for _, n := range []int{2, 4} {
		for _, size := range []int{4, 1 << 10, 8 << 10, 64 << 10, 1 << 20, 64 << 20} {
			b.Run(fmt.Sprintf("ranks=%d/bytes=%d", n, size), func(b *testing.B) {
				b.SetBytes(int64(size))
				benchmark(b, n, size, 0)
			})
			if size > 16<<10 {
				b.Run(fmt.Sprintf("ranks=%d/bytes=%d/arena", n, size), func(b *testing.B) {
					b.SetBytes(int64(size))
					benchmark(b, n, size, 1)
				})
			}
		}
	}
}

const maxSamples = 20_000

var sumOfFloats = Reduction{Size: 4, Combine: kernel.Combine(kernel.Float32, kernel.Sum)}

func benchmark(b *testing.B, n, size, arena int) {
	c := perform(b, "bench", n, nil, "SHM_TEST_BYTES="+strconv.Itoa(size), "SHM_TEST_ARENA="+strconv.Itoa(arena))
	defer c.finish()
	data := room(size, arena)
	if arena == 1 {
		defer Free(data)
	}
	samples := aligned(8 * maxSamples)
	must := func(err error) {
		if err != nil {
			b.Fatal(err)
		}
	}
	must(warmUp(c.member, data))
	for _, count := range []int{b.N, 0} {
		_, err := agree(c.member, count)
		must(err)
		if count > 0 {
			b.ResetTimer()
			must(measure(c.member, data, samples, count))
			b.StopTimer()
			must(largest(c.member, samples))
		}
	}
	times := unsafe.Slice((*float64)(unsafe.Pointer(unsafe.SliceData(samples))), maxSamples)[:min(b.N, maxSamples)]
	slices.Sort(times)
	b.ReportMetric(times[len(times)/2], "median-µs")
	b.ReportMetric(times[0], "min-µs")
	b.ReportMetric(times[len(times)*99/100], "p99-µs")
}

func benchRole(m *Member) error {
	data := room(number("SHM_TEST_BYTES"), number("SHM_TEST_ARENA"))
	samples := aligned(8 * maxSamples)
	if err := warmUp(m, data); err != nil {
		return err
	}
	for {
		count, err := agree(m, 0)
		if err != nil || count == 0 {
			return err
		}
		if err := measure(m, data, samples, count); err != nil {
			return err
		}
		if err := largest(m, samples); err != nil {
			return err
		}
	}
}

func room(size, arena int) []byte {
	if arena == 0 {
		return aligned(size)
	}
	b, err := Alloc(size)
	if err != nil {
		panic(err)
	}
	return b
}

func warmUp(m *Member, data []byte) error {
	clear(data)
	for range 3 {
		if err := m.AllReduce(background, Desc{}, data, &sumOfFloats); err != nil {
			return err
		}
	}
	return nil
}

// agree tells all members how many operations follow, which only member 0 knows.
func agree(m *Member, count int) (int, error) {
	n := int64(count)
	b := unsafe.Slice((*byte)(unsafe.Pointer(&n)), 8)
	err := m.AllReduce(background, Desc{}, b, &Reduction{Size: 8, Combine: kernel.Combine(kernel.Int64, kernel.Sum)})
	return int(n), err
}

func measure(m *Member, data, samples []byte, count int) error {
	times := unsafe.Slice((*float64)(unsafe.Pointer(unsafe.SliceData(samples))), maxSamples)
	base := time.Now()
	d := Desc{uint64(len(data)), 1}
	if err := m.Barrier(background, d); err != nil {
		return err
	}
	for i := range count {
		start := time.Since(base)
		if err := m.AllReduce(background, d, data, &sumOfFloats); err != nil {
			return err
		}
		times[i%maxSamples] = float64(time.Since(base)-start) / 1e3
	}
	return nil
}

func largest(m *Member, samples []byte) error {
	return m.AllReduce(background, Desc{}, samples, &Reduction{Size: 8, Combine: kernel.Combine(kernel.Float64, kernel.Max)})
}
