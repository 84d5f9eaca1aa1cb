package main

import (
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"testing"
)

// TestDelayCollection: values that are large and in use when the first collection comes do not let
// the heap grow to five times their size, even if the runtime calls the finalizer late.
func TestDelayCollection(t *testing.T) {
	percent, limit := debug.SetGCPercent(100), debug.SetMemoryLimit(-1)
	defer debug.SetGCPercent(percent)
	defer debug.SetMemoryLimit(limit)
	entered, release := make(chan struct{}), make(chan struct{})
	runtime.SetFinalizer(new([64]byte), func(*[64]byte) {
		close(entered)
		<-release
	})
	runtime.GC()
	<-entered // the runtime calls finalizers one after the other

	delayCollection()
	kept := make([]byte, 100<<20)
	for range 30 {
		kept[0] += make([]byte, 20<<20)[0] // may be collected at once
	}
	goal := []metrics.Sample{{Name: "/gc/heap/goal:bytes"}}
	metrics.Read(goal)
	if got := goal[0].Value.Uint64(); got > 250<<20 {
		t.Errorf("with 100 MiB in use the heap may grow to %d MiB", got>>20)
	}
	close(release)
	runtime.KeepAlive(kept)

	for range 2 { // of finalizers that wait together, the runtime may call a later one first
		done := make(chan struct{})
		runtime.SetFinalizer(new([64]byte), func(*[64]byte) { close(done) })
		runtime.GC()
		<-done
	}
	if got := debug.SetMemoryLimit(-1); got != limit {
		t.Errorf("the memory limit is %d afterwards, want %d", got, limit)
	}
	if got := debug.SetGCPercent(100); got != 100 {
		t.Errorf("the percentage is %d afterwards, want 100", got)
	}
}
