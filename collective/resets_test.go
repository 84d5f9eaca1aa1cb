package collective_test

import (
	"os"
	"runtime"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/collectivetest"
)

// TestThousandResets: a thousand worlds, or fewer with -short, over sockets and over shared memory,
// leave nothing behind in a worker: no memory, open files or goroutines.
func TestThousandResets(t *testing.T) {
	for name, hosts := range map[string]string{"sockets": "", "shared": "aa"} {
		t.Run(name, func(t *testing.T) {
			w := newWorkers(t, collective.Config{}, 2)
			w.hosts = hosts
			pass := func(worlds int) {
				for range worlds {
					w.oneWorld(t)
				}
			}
			pass(50) // memory that is kept for later worlds exists after these
			before := held(t)
			pass(collectivetest.Rounds(1000))
			after := held(t)
			const slack = 20 // a goroutine or two may be about to end
			if after.files > before.files+slack || after.goroutines > before.goroutines+slack || after.bytes > before.bytes+1<<20 {
				t.Errorf("before %+v, after %+v", before, after)
			}
		})
	}
}

// oneWorld connects all ranks, reduces, and closes the groups.
func (w *workers) oneWorld(t *testing.T) {
	t.Helper()
	var all sync.WaitGroup
	for _, g := range w.meet(t, len(w.endpoints)) {
		all.Go(func() {
			if err := collective.AllReduce(t.Context(), g, make([]float32, 4096), collective.Sum); err != nil {
				t.Error(err)
			}
			if err := g.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
}

type holdings struct{ files, goroutines, bytes int }

func held(t *testing.T) holdings {
	t.Helper()
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // frees what finalizers have released
	runtime.ReadMemStats(&m)
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return holdings{len(files), runtime.NumGoroutine(), int(m.HeapAlloc)}
}
