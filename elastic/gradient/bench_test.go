package gradient_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/gradient"
)

const (
	benchLayers = 32
	benchLayer  = 256 << 10 // float32s of a layer
)

// pace simulates computing layers one after the other, each of the same duration: on the processor,
// or on a device for which the processor waits.
type pace struct {
	device bool
	layer  time.Duration
	due    time.Time
}

func (p *pace) compute(layer []float32) {
	p.due = p.due.Add(p.layer)
	if p.device {
		<-time.After(time.Until(p.due))
		return
	}
	part := layer[:4<<10]
	for began := time.Now(); time.Since(began) < p.layer; {
		for i := range part {
			part[i] = part[i]*0.5 + 1
		}
	}
}

// BenchmarkOverlap measures a step whose backward pass takes as long as the reduction of its
// gradients: 32 layers of 1 MiB, by the number of ranks. It alternates between one AllReduce after
// the pass, an averager without calls of Ready, and an averager with one call per layer. The last
// can save at most half of the time of the first.
func BenchmarkOverlap(b *testing.B) {
	for _, hosts := range []string{"aa", "ab", "abcd"} {
		for i, where := range []string{"device", "processor"} {
			b.Run(fmt.Sprintf("hosts=%s/%s", hosts, where), func(b *testing.B) { benchOverlap(b, hosts, i == 0) })
		}
	}
}

func benchOverlap(b *testing.B, hosts string, device bool) {
	n := len(hosts)
	groups := connected(b, hosts)
	defer closeAll(groups)
	lengths := slices.Repeat([]int{benchLayer}, benchLayers)
	averagers, plain := make([]*gradient.Averager[float32], n), make([][]float32, n)
	for rank := range n {
		averagers[rank] = gradient.NewAverager[float32](&seat{groups[rank]}, gradient.Options{}, lengths...)
		defer averagers[rank].Close()
		var err error
		if plain[rank], err = collective.Alloc[float32](benchLayers * benchLayer); err != nil {
			b.Fatal(err)
		}
		defer collective.Free(plain[rank])
	}
	ctx := context.Background()
	var layer time.Duration
	after := func(rank int) error {
		clear(plain[rank])
		for p, l := (pace{device, layer, time.Now()}), 0; l < benchLayers; l++ {
			p.compute(plain[rank][l*benchLayer:])
		}
		return collective.AllReduce(ctx, groups[rank], plain[rank], collective.Average)
	}
	pass := func(ready bool) func(rank int) error {
		return func(rank int) error {
			a := averagers[rank]
			_, err := a.Pass(ctx, func() error {
				p := pace{device, layer, time.Now()}
				for l := benchLayers - 1; l >= 0; l-- {
					p.compute(a.Tensor(l))
					if ready {
						a.Ready(l)
					}
				}
				return nil
			})
			return err
		}
	}
	ways := []func(rank int) error{after, pass(false), pass(true)}
	times := make([][]float64, len(ways))
	timed := func(way func(rank int) error) float64 {
		began := time.Now()
		each(b, n, way)
		return float64(time.Since(began)) / 1e6
	}
	var alone []float64
	for range 10 {
		alone = append(alone, timed(after))
	}
	slices.Sort(alone)
	layer = time.Duration(alone[len(alone)/2] * 1e6 / benchLayers)
	for _, way := range ways {
		timed(way)
	}
	for b.Loop() {
		for i, way := range ways {
			times[i] = append(times[i], timed(way))
		}
	}
	for i, name := range strings.Fields("ms/after ms/untold ms/overlapped") {
		slices.Sort(times[i])
		b.ReportMetric(times[i][len(times[i])/2], name)
	}
	b.ReportMetric(alone[len(alone)/2], "ms/reduction")
	b.ReportMetric(times[2][len(times[2])/2]/times[0][len(times[0])/2], "overlapped/after")
}
