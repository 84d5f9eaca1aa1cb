// Package cudatest builds a fake driver's library, for tests of programs that use package cuda on
// machines without a GPU. It has the driver's functions and device memory that processes can open
// from each other, and runs kernels on the processor. Its timing is not that of a device:
// operations in a stream complete at once.
package cudatest

import (
	"bytes"
	"embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/test/sandbox"
)

// Library builds the library and returns its path, for cuda.Config.Library. It sets the environment
// that the library needs; processes that share a device must inherit both. Flags are passed to the
// C compiler: -DWRONG=1 makes sums of float32 wrong by a bit. Without a C compiler the test is
// skipped.
func Library(t testing.TB, flags ...string) string {
	t.Helper()
	t.Setenv("FAKECUDA_FOLDER", memoryFolder(t))
	return build(t, t.TempDir(), "libfakecuda.so.1", "fakecuda.c", flags)
}

// Hold makes each process that uses the driver of [Library] wait in every launch of a kernel after
// this number of launches, until release is called.
func Hold(t testing.TB, launches int) (release func()) {
	t.Helper()
	path := filepath.Join(os.Getenv("FAKECUDA_FOLDER"), "hold")
	if err := os.WriteFile(path, fmt.Append(nil, launches), 0o600); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := os.Remove(path); err != nil {
			t.Error(err)
		}
	}
}

// memoryFolder returns a folder for the files that are the device's memory, in memory if possible,
// since allocations on a disk are slow.
func memoryFolder(t testing.TB) string {
	folder, err := os.MkdirTemp("/dev/shm", "hvdrun-fakecuda-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(folder); err != nil {
			t.Error(err)
		}
	})
	return folder
}

// NCCL builds a fake NCCL over a driver of [Library], and returns its path, for cuda.Config.NCCL.
// Its ranks, several of which may be on one device, meet in the driver's folder.
func NCCL(t testing.TB, driver string, flags ...string) string {
	t.Helper()
	return build(t, filepath.Dir(driver), "libfakenccl.so.2", "fakenccl.c", flags)
}

// Assemble assembles PTX for several generations of devices with NVIDIA's own assembler, ptxas of
// the CUDA toolkit. If that is not in PATH, the test is skipped.
func Assemble(t testing.TB, ptx string) {
	t.Helper()
	ptxas, err := exec.LookPath("ptxas")
	if err != nil {
		t.Skip("there is no ptxas here: ", err)
	}
	path := filepath.Join(t.TempDir(), "text.ptx")
	if err := os.WriteFile(path, []byte(ptx), 0o600); err != nil {
		t.Fatal(err)
	}
	known := 0
	for _, generation := range []string{"sm_70", "sm_80", "sm_90"} {
		out, err := exec.Command(ptxas, "--warning-as-error", "-arch", generation, "-o", os.DevNull, path).CombinedOutput()
		if bytes.Contains(out, []byte("is not defined for option 'gpu-name'")) {
			continue // CUDA 13 no longer has sm_70
		}
		if known++; err != nil || len(out) > 0 {
			t.Errorf("%s: %v\n%s", generation, err, out)
		}
	}
	if known == 0 {
		t.Error("ptxas knows none of these generations")
	}
}

//go:embed testdata
var sources embed.FS

// built maps what libraries are built from to the libraries.
var built sync.Map

// build compiles a library, or copies one that was built from the same parts, by this process or
// an earlier one.
func build(t testing.TB, folder, name, source string, flags []string) string {
	t.Helper()
	path, key := filepath.Join(folder, name), fmt.Sprint(source, flags)
	if code, there := built.Load(key); there {
		if err := os.WriteFile(path, code.([]byte), 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("there is no gcc here to build the libraries of the test with: ", err)
	}
	parts := fmt.Sprintf("%s %q %s", gcc, flags, source)
	for _, name := range []string{"fakecuda.c", "fakenccl.c", "ptx.h"} {
		text, err := sources.ReadFile("testdata/" + name)
		if err != nil {
			t.Fatal(err)
		}
		parts += string(text)
	}
	code, err := sandbox.Once(parts, func(path string) error {
		dir := t.TempDir()
		if err := os.CopyFS(dir, sources); err != nil {
			return err
		}
		args := append([]string{"-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", path, filepath.Join(dir, "testdata", source)}, flags...)
		if out, err := exec.Command(gcc, args...).CombinedOutput(); err != nil {
			return fmt.Errorf("gcc: %w\n%s", err, out)
		}
		return nil
	})
	if err == nil {
		err = os.WriteFile(path, code, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	built.Store(key, code)
	return path
}
