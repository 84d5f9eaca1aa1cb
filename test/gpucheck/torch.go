package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/collective/cuda"
	"github.com/hvdrun/hvdrun/collective/cuda/nccl"
	"github.com/hvdrun/hvdrun/plan"
)

//go:embed torch.py
var torchProgram []byte

// measured is the output of torch.py.
type measured struct {
	Skip           string
	Ranks, Devices int
	Version        string
	Speeds         []speed
}

// checkTorch measures NCCL through PyTorch, if that is installed.
func checkTorch(ctx context.Context, o *options) ([]figure, error) {
	if _, err := exec.LookPath(o.Python); err != nil {
		return nil, skipped{"there is no Python: " + err.Error()}
	}
	dir, err := os.MkdirTemp(o.Temp, "torch")
	if err != nil {
		return nil, err
	}
	program := filepath.Join(dir, "torch_nccl.py")
	if err := os.WriteFile(program, torchProgram, 0o666); err != nil {
		return nil, err
	}
	var said bytes.Buffer
	cmd := exec.CommandContext(ctx, o.Python, program, dir, "4096,1048576,67108864,268435456")
	cmd.Stderr = &said
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.Output()
	var m measured
	if err == nil {
		err = json.Unmarshal(out, &m)
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %s", err, tail(said.String()))
	case m.Skip != "":
		return nil, skipped{m.Skip}
	}
	all := []figure{{Name: "NCCL " + m.Version + ": ranks", Value: float64(m.Ranks)}, {Name: "devices", Value: float64(m.Devices)}}
	return append(all, speedFigures(o, m.Ranks, cuda.BackendNCCL, []answer{{Speeds: m.Speeds}})...), nil
}

// whereNCCL prints where Python packages have installed NCCL, outside the dynamic linker's search
// path.
const whereNCCL = `import importlib.util, os
s = importlib.util.find_spec("nvidia.nccl")
for p in s.submodule_search_locations if s else []:
    p = os.path.join(p, "lib", "libnccl.so.2")
    if os.path.exists(p):
        print(p)
        break
`

// ncclOf returns the library to use: the given one, else the one that the dynamic linker finds,
// else that of Python's packages. Empty: none.
func ncclOf(ctx context.Context, o *options) string {
	if o.NCCL != "" || plan.GPUFromEnv().NCCLLibrary != "" {
		return o.NCCL
	}
	if _, err := nccl.Load(""); err == nil {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, o.Python, "-c", whereNCCL).Output()
	if err != nil { // no Python, or no such package
		return ""
	}
	return strings.TrimSpace(string(out))
}
