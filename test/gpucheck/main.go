// Command gpucheck checks and measures, on a machine with GPUs, everything that tests can only
// check with simulated drivers.
//
//	make gpu-check
//	bin/gpu-check/gpucheck -json out.json
//
// It needs the GPU driver and, beside its own binary, those of hvdrun and of examples/gpu; neither
// Go nor a network. Each check is a process, which is killed with its descendants at its time limit
// or at the end of gpucheck. A figure with a target is met or missed; a check fails if a result is
// wrong, not if it is slow. Exit status: 0 all checks have passed or were skipped; 1 one has
// failed, or there is no GPU; 2 invalid flags; 130 interrupted.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"syscall"

	"github.com/hvdrun/hvdrun/collective/cuda"
)

// options are the settings of every check.
type options struct {
	Driver string // library
	NCCL   string // library; empty: found by package cuda
	Quick  bool   // small sizes and few repetitions, to test the checks; figures have no meaning
	Bin    string // directory of hvdrun and the example
	Temp   string // directory of this run
	Python string
	Copy   float64 // copy bandwidth of the device in bytes per second, read and written; 0: not measured
}

func main() {
	runtime.LockOSThread() // child processes are killed when this thread ends; the main thread ends last
	os.Exit(start())
}

func start() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "check":
			return asCheck(ctx)
		case "rank":
			return said(asRank(ctx))
		case "worker":
			return said(asWorker(ctx, os.Args[2:]))
		}
	}
	self, err := os.Executable()
	if err != nil {
		return said(err)
	}
	o := options{}
	out := flag.String("json", "", "file for the figures")
	only := flag.String("only", "", "regular expression of the checks to do")
	flag.StringVar(&o.Driver, "driver", cuda.DefaultLibrary, "library of the driver")
	flag.StringVar(&o.NCCL, "nccl", "", "library of NCCL; empty: HVD_NCCL_LIBRARY, libnccl.so.2, or that of Python's packages")
	flag.StringVar(&o.Python, "python", "python3", "interpreter that may have PyTorch")
	flag.StringVar(&o.Bin, "bin", filepath.Dir(self), "folder of the programs hvdrun and gpu")
	flag.BoolVar(&o.Quick, "quick", false, "small sizes: shows that the checks work, not how fast anything is")
	flag.Parse()
	chosen, err := regexp.Compile(*only)
	if err != nil || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "gpucheck: nothing but flags:", err)
		return 2
	}
	devices, err := cuda.Devices(o.Driver)
	if err == nil && len(devices) == 0 {
		err = cuda.ErrUnavailable
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "gpucheck: no GPU can be used here, nothing was checked:", err)
		return 1
	}
	o.NCCL = ncclOf(ctx, &o)
	r, err := runAll(ctx, o, devices[0].Name, chosen)
	if err == nil && *out != "" {
		err = r.write(*out)
	}
	if err != nil {
		return said(err)
	}
	return r.conclude(os.Stdout)
}

// said prints an error and returns the exit status for it.
func said(err error) int {
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, "gpucheck:", err)
	if errors.Is(err, context.Canceled) {
		return 128 + int(syscall.SIGINT)
	}
	return 1
}

// asCheck runs the check described on standard input and prints its result.
func asCheck(ctx context.Context) int {
	var o options
	err := json.NewDecoder(os.Stdin).Decode(&o)
	if err == nil && len(os.Args) == 3 {
		for _, c := range checks {
			if c.name == os.Args[2] {
				figures, failure := c.do(ctx, &o)
				err = json.NewEncoder(os.Stdout).Encode(resultOf(figures, failure))
				return said(err)
			}
		}
	}
	return said(errors.Join(errors.New("there is no such check"), err))
}
