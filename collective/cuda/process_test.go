package cuda

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/identity"
)

const workerVariable = "CUDA_TEST_WORKER"

func TestMain(m *testing.M) {
	if text := os.Getenv(workerVariable); text != "" {
		if err := work(text); err != nil {
			fmt.Println("error", err)
		}
		return
	}
	pieceSize, bankSize, maxDoomed = 128<<10, 1<<20, 1<<20
	goleak.VerifyTestMain(m)
}

// library builds the driver of testdata and returns its path; device memory is in its folder.
func library(t *testing.T, flags ...string) string {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("there is no gcc here to build the driver of the test with: ", err)
	}
	path := filepath.Join(t.TempDir(), "libfakecuda.so.1")
	args := append([]string{"-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", path, "testdata/fakecuda.c"}, flags...)
	if out, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	t.Setenv("FAKECUDA_FOLDER", filepath.Dir(path))
	return path
}

// TestLibrary: a driver's library is loaded, and called as its header says.
func TestLibrary(t *testing.T) {
	path := library(t)
	all, err := Devices(path)
	if err != nil || len(all) != 1 || all[0].Name != "Fake in C" || all[0].Bus != "0000:1b:00.0" || all[0].Memory != 5<<32 ||
		all[0].Major != 9 || all[0].Multiprocessors != 4 || all[0].UUID != [16]byte(slices.Repeat([]byte{0x42}, 16)) {
		t.Fatalf("%+v, %v", all, err)
	}
	d, err := Open(Config{Library: path})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if free, total, err := d.Memory(); err != nil || free != 3<<32 || total != 5<<32 {
		t.Error(free, total, err)
	}
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	v := make([]float32, pieceSize/4+7)
	for i := range v {
		v[i] = float32(i)
	}
	x, y := vector(t, d, v), vector(t, d, v)
	if err := y.CopySlice(t.Context(), x); err != nil {
		t.Fatal(err)
	}
	if err := Combine(s, x.Slice(1, x.Len()), x.Slice(1, x.Len()), y.Slice(1, x.Len()), collective.Sum); err != nil {
		t.Fatal(err)
	}
	e, err := s.Record()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.Wait(e), e.Synchronize(t.Context())); err != nil {
		t.Fatal(err)
	}
	for i, got := range values(t, x) {
		if got != 2*v[i] {
			t.Fatalf("element %d is %v", i, got)
		}
	}
	var told *Error
	err = Combine(s, x, x, y, collective.Max)
	if !errors.As(err, &told) || err.Error() != "cuda: cuLaunchKernel: CUDA_ERROR_INVALID_VALUE (as the fake says)" {
		t.Error(err)
	}
	if err := d.do(func() error { _, err := d.compile([]byte("nonsense")); return err }); !isCode(err, invalidPTX) ||
		!strings.Contains(err.Error(), "no version that is known") {
		t.Error(err)
	}
}

// TestOldLibrary: what a driver lacks is named.
func TestOldLibrary(t *testing.T) {
	_, err := Open(Config{Library: library(t, "-DcuMemAlloc_v2=cuMemAlloc")})
	if !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "cuMemAlloc_v2") {
		t.Error(err)
	}
}

// assignment is what a process of a world is told first; and then, for each world, a meeting.
type assignment struct{ Library, Credentials string }

type meeting struct {
	Generation uint64
	Rank       int
	Addrs      [][]string
	Rounds     int // 0: until something fails
}

// work is a process. It prints its address; in each world it says when it works, and how that ended.
func work(text string) error {
	var a assignment
	if err := json.Unmarshal([]byte(text), &a); err != nil {
		return err
	}
	c, err := identity.Decode(a.Credentials)
	if err != nil {
		return err
	}
	e, err := collective.Listen(collective.Config{Credentials: c, ListenAddr: "127.0.0.1:0"})
	if err != nil {
		return err
	}
	defer e.Close()
	d, err := Open(Config{Library: a.Library})
	if err != nil {
		return err
	}
	defer d.Close()
	s, err := Alloc[float32](d, 100_003)
	if err != nil {
		return err
	}
	defer s.Free()
	fmt.Println(e.Addrs()[0])
	for in := json.NewDecoder(os.Stdin); ; {
		var m meeting
		if err := in.Decode(&m); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		g, err := e.Connect(context.Background(), collective.Peers{Generation: m.Generation, Rank: m.Rank, Addrs: m.Addrs,
			Hosts: slices.Repeat([]string{"a"}, len(m.Addrs))})
		if err != nil {
			return err
		}
		for i := 1; err == nil && (m.Rounds == 0 || i <= m.Rounds); i++ {
			if err = round(g, s); err == nil && i == 3 {
				fmt.Println("working")
			}
		}
		d.mu.Lock()
		w, met := d.ways[g]
		d.mu.Unlock()
		if met && w == nil {
			err = errors.New("the ranks do not see each other's memory")
		}
		g.Close()
		var lost *collective.AbortedError
		switch {
		case err == nil:
			fmt.Println("done")
		case errors.As(err, &lost):
			fmt.Println("lost", lost.Dead)
		default:
			return err
		}
	}
}

// round sums ones.
func round(g *collective.Group, s *Slice[float32]) error {
	v := slices.Repeat([]float32{1}, s.Len())
	if err := s.CopyFrom(context.Background(), v); err != nil {
		return err
	}
	if err := AllReduce(context.Background(), g, s, collective.Sum); err != nil {
		return err
	}
	if err := s.CopyTo(context.Background(), v); err != nil {
		return err
	}
	for i, got := range v {
		if got != float32(g.Size()) {
			return fmt.Errorf("element %d is %v", i, got)
		}
	}
	return nil
}

// TestProcesses: four processes open each other's memory; each in turn is killed in the middle of its work, the others are freed and meet
// again without it.
func TestProcesses(t *testing.T) {
	path := library(t)
	authority, err := identity.NewAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	const ranks = 4
	var cmds []*exec.Cmd
	var outs []*bufio.Scanner
	var ins []io.WriteCloser
	var addrs [][]string
	expect := func(process int, want string) string {
		t.Helper()
		if !outs[process].Scan() {
			t.Fatalf("process %d has ended: %v", process, outs[process].Err())
		}
		got := outs[process].Text()
		if !strings.HasPrefix(got, want) {
			t.Fatalf("process %d says %q, not %q", process, got, want)
		}
		return got
	}
	for i := range ranks {
		c, err := authority.Issue(identity.Subject{Role: identity.Worker, Host: "h", Index: i, Incarnation: fmt.Sprint("i", i)})
		if err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(assignment{path, c.Encode()})
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), workerVariable+"="+string(text))
		cmd.Stderr = os.Stderr
		in, err1 := cmd.StdinPipe()
		out, err2 := cmd.StdoutPipe()
		if err := errors.Join(err, err1, err2, cmd.Start()); err != nil {
			t.Fatal(err)
		}
		defer func() { cmd.Process.Kill(); cmd.Wait() }()
		cmds, ins, outs = append(cmds, cmd), append(ins, in), append(outs, bufio.NewScanner(out))
		addrs = append(addrs, []string{expect(i, "127.0.0.1")})
	}
	alive := []int{0, 1, 2, 3}
	meet := func(generation uint64, rounds int) {
		var of [][]string
		for _, p := range alive {
			of = append(of, addrs[p])
		}
		for rank, p := range alive {
			if err := json.NewEncoder(ins[p]).Encode(meeting{generation, rank, of, rounds}); err != nil {
				t.Fatal(err)
			}
		}
		for _, p := range alive {
			expect(p, "working")
		}
	}
	for generation := uint64(1); len(alive) > 1; generation++ {
		meet(generation, 0)
		victim := int(generation) % len(alive)
		if err := cmds[alive[victim]].Process.Kill(); err != nil {
			t.Fatal(err)
		}
		for rank, p := range alive {
			if rank != victim {
				expect(p, fmt.Sprint("lost ", []int{victim}))
			}
		}
		alive = slices.Delete(alive, victim, victim+1)
	}
	meet(100, 3)
	expect(alive[0], "done")
	ins[alive[0]].Close()
	if err := cmds[alive[0]].Wait(); err != nil {
		t.Error(err)
	}
}
