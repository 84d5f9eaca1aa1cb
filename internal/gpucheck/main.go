// Command gpucheck tries on a machine with GPUs all that the tests can only try on fakes of a
// driver, and measures it.
//
//	make gpu-check
//	bin/gpu-check/gpucheck -json out.json
//
// It needs the driver, and beside its own binary those of hvdrun and of examples/gpu; neither Go
// nor a network. Each check is a process of its own, which is killed with all that it has started
// when its time is up, or at the end of gpucheck. A figure with a target is met or missed; a check
// fails if something is wrong, not if something is slow. Exit status: 0 all checks have passed or
// were skipped; 1 one has failed, or there is no GPU; 2 bad flags; 130 interrupted.
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

// options are what every check is told.
type options struct {
	Driver string // library
	NCCL   string // library; empty: as package cuda finds it
	Quick  bool   // sizes and repetitions are small: it is to be seen that the checks work, figures mean nothing
	Bin    string // folder of hvdrun and the example
	Temp   string // folder of this run
	Python string
	Copy   float64 // bytes a second that the device copies, reads and writes; 0: not measured
}

func main() {
	runtime.LockOSThread() // what this thread starts is killed when the thread ends, and the first one does so last
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

// said prints an error and returns the exit status.
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

// asCheck does one check, told of on standard input, and prints its result.
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
