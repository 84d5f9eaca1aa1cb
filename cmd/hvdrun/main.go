// Command hvdrun runs a data-parallel training program on all slots of some hosts, and keeps the
// program running when hosts join or leave.
//
// Usage:
//
//	hvdrun [flags] [--] command [args…]
//	hvdrun discover [flags]
//	hvdrun agent [flags]
//	hvdrun bench [flags]
//	hvdrun timeline F
//	hvdrun inspect FILE
//	hvdrun check [flags]
//	hvdrun submit kubernetes [flags] -- command [args…]
//	hvdrun config [flags] [-- command [args…]]
//	hvdrun jobs | resume | status | logs | wait | stop | drain | exclude | readmit | scale [JOB] …
//
// `hvdrun help flags` lists the flags. Every one of them is also an environment variable
// (HVD_MIN_NP for --min-np) and a key of the YAML file that --config-file names.
package main

import (
	"os"
	"runtime"
	"runtime/debug"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/build"
	"github.com/hvdrun/hvdrun/python"
)

func main() {
	if os.Getenv("GOGC") == "" {
		delayCollection()
	}
	python.Version = build.Number()
	os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr, os.Environ()))
}

// delayCollection makes the first garbage collection wait for a heap of 16 MiB instead of 4. Most
// of what a start allocates is still in use when the heap has 4 MiB, and a short job ends before it
// has 16. Later collections are as by default, once the runtime has called the finalizer. Until
// then, the limit keeps large values from growing the heap to five times what is in use.
func delayCollection() {
	percent := debug.SetGCPercent(400)
	limit := debug.SetMemoryLimit(-1)
	debug.SetMemoryLimit(min(limit, 64<<20))
	runtime.SetFinalizer(new([64]byte), func(*[64]byte) {
		debug.SetGCPercent(percent)
		debug.SetMemoryLimit(limit)
	})
}
