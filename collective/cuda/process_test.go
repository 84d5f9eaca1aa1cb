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
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/cudatest"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/kernel"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

const workerVariable = "CUDA_TEST_WORKER"

func TestMain(m *testing.M) {
	pieceSize, bankSize, maxDeferred = 128<<10, 1<<20, 1<<20
	endLimit = time.Hour // TestAbortHangs alone sees it end
	if text := os.Getenv(workerVariable); text != "" {
		if err := work(text); err != nil {
			fmt.Println("error", err)
		}
		return
	}
	goleak.VerifyTestMain(sandbox.Tests{M: m, Before: func(string) error {
		return os.Setenv(plan.EnvNCCLLibrary, "/nowhere/libnccl.so.2") // the machine's own library does not work with the fakes
	}})
}

// TestLibrary: a driver's library is loaded, and called as its header declares.
func TestLibrary(t *testing.T) {
	path := cudatest.Library(t)
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
	wild, err := Wrap[float32](d, 4096, 4)
	if err != nil {
		t.Fatal(err)
	}
	err = Combine(s, wild, wild, wild, collective.Sum)
	if !errors.As(err, &told) || err.Error() != "cuda: cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS (as the fake says)" {
		t.Error(err)
	}
	if err := d.do(func() error { _, err := d.compile([]byte("nonsense")); return err }); !isCode(err, invalidPTX) ||
		!strings.Contains(err.Error(), "no version that is known") {
		t.Error(err)
	}
}

// TestOldLibrary: the error names the function that a driver lacks.
func TestOldLibrary(t *testing.T) {
	_, err := Open(Config{Library: cudatest.Library(t, "-DcuMemAlloc_v2=cuMemAlloc")})
	if !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "cuMemAlloc_v2") {
		t.Error(err)
	}
}

// assignment is the first message to a process of a world. A meeting follows for each world.
type assignment struct {
	Library, Credentials, Host, Backend string
	Key                                 []byte
}

type meeting struct {
	Generation uint64
	Rank       int
	Addrs      [][]string
	Hosts      []string
	Rounds     int // 0: until an operation fails
}

// work is the main function of a process. It prints its address, and for each world a line when the
// world uses the backend, and another with its result.
func work(text string) error {
	var a assignment
	if err := json.Unmarshal([]byte(text), &a); err != nil {
		return err
	}
	c, err := identity.Decode(a.Credentials)
	if err != nil {
		return err
	}
	key, err := identity.ParseDataKey(a.Key)
	if err != nil {
		return err
	}
	e, err := collective.Listen(collective.Config{Credentials: c, ListenAddr: "127.0.0.1:0"})
	if err != nil {
		return err
	}
	defer e.Close()
	d, err := Open(Config{Library: a.Library, Backend: a.Backend, host: a.Host})
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
		g, err := e.Connect(context.Background(), collective.Peers{Generation: m.Generation, Key: key, Rank: m.Rank, Addrs: m.Addrs,
			Hosts: m.Hosts})
		if err != nil {
			return err
		}
		working := false
		for i := 1; err == nil && (m.Rounds == 0 || i <= m.Rounds || !working); i++ {
			if err = round(g, s); err != nil || working || i < 3 {
				continue
			}
			var b backend
			if b, err = d.backend(context.Background(), g); err != nil {
				continue
			}
			switch working = g.Size() == 1 || b.name() == a.Backend; {
			case working:
				fmt.Println("working")
			case a.Backend != BackendNCCL: // NCCL's communicators take some time
				err = fmt.Errorf("the ranks go by %s", b.name())
			}
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

// round reduces a vector of ones and checks the result.
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
	if s.device.ncclBackendOf(g) != nil {
		return nil // each group has another communicator, and the test counts those
	}
	return beyond(context.Background(), g, s, float32(g.Size()))
}

// beyond fuses, saves, scatters and broadcasts a vector of equal numbers.
func beyond(ctx context.Context, g *collective.Group, s *Slice[float32], x float32) error {
	parts := []*Slice[float32]{s.Slice(0, 1000), s.Slice(1000, 1003), s.Slice(1003, 2001)}
	if err := GroupedAllReduce(ctx, g, "parts", parts, collective.Average, Options{}); err != nil {
		return err
	}
	p := Tensor("s", s)
	defer p.Free()
	if err := p.Save(); err != nil {
		return err
	}
	mine, err := ReduceScatter(ctx, g, s, collective.Max)
	if err != nil {
		return err
	}
	defer mine.Free()
	if err := Broadcast(ctx, g, s, g.Size()-1); err != nil {
		return err
	}
	b, err := p.Image()
	if err != nil {
		return err
	}
	got := make([]float32, mine.Len())
	if err := mine.CopyTo(ctx, got); err != nil {
		return err
	}
	for _, v := range append(got, kernel.Elements[float32](b)...) {
		if v != x {
			return fmt.Errorf("an element is %v", v)
		}
	}
	return nil
}

// crew is a set of processes that form worlds.
type crew struct {
	library, backend string
	authority        *identity.Authority
	cmds             []*exec.Cmd
	ins              []io.WriteCloser
	outs             []*bufio.Scanner
	addrs            [][]string
	hosts            []string // by process: where it pretends to be; "a" is all others'
	folders          []string // folders of device memory, by process
	alive            []int    // processes by rank
}

// newCrew starts n processes, which end with the test. A process fails if its world does not use
// the backend.
func newCrew(t *testing.T, library, backend string, n int) *crew {
	t.Helper()
	return newCrewOn(t, library, backend, slices.Repeat([]string{"a"}, n)...)
}

// newCrewOn is like newCrew, with processes that pretend to be on the given hosts. Processes on
// different hosts cannot open each other's memory.
func newCrewOn(t *testing.T, library, backend string, hosts ...string) *crew {
	t.Helper()
	authority, err := identity.NewAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	c := &crew{library: library, backend: backend, authority: authority}
	for _, host := range hosts {
		c.start(t, host)
	}
	return c
}

// start starts another process, which becomes the last rank of the next worlds.
func (c *crew) start(t *testing.T, host string) {
	t.Helper()
	folder := ""
	if of := slices.Index(c.hosts, host); of >= 0 {
		folder = c.folders[of]
	} else {
		folder = t.TempDir()
	}
	c.hosts, c.folders = append(c.hosts, host), append(c.folders, folder)
	i := len(c.cmds)
	credentials, err := c.authority.Issue(identity.Subject{Role: identity.Worker, Host: "h", Index: i, Incarnation: fmt.Sprint("i", i)})
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(assignment{c.library, credentials.Encode(), host, c.backend, dataKey.Bytes()})
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), workerVariable+"="+string(text), "FAKECUDA_FOLDER="+folder)
	cmd.Stderr = os.Stderr
	in, err1 := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err := errors.Join(err, err1, err2, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	c.cmds, c.ins, c.outs = append(c.cmds, cmd), append(c.ins, in), append(c.outs, bufio.NewScanner(out))
	c.addrs = append(c.addrs, []string{c.expect(t, i, "127.0.0.1")})
	c.alive = append(c.alive, i)
}

// expect returns the next line of a process, which must begin with want.
func (c *crew) expect(t *testing.T, process int, want string) string {
	t.Helper()
	if !c.outs[process].Scan() {
		t.Fatalf("process %d has ended: %v", process, c.outs[process].Err())
	}
	got := c.outs[process].Text()
	if !strings.HasPrefix(got, want) {
		t.Fatalf("process %d says %q, not %q", process, got, want)
	}
	return got
}

// meet forms a world of the running processes, and returns when all use the backend.
func (c *crew) meet(t *testing.T, generation uint64, rounds int) {
	t.Helper()
	var of [][]string
	var on []string
	for _, p := range c.alive {
		of, on = append(of, c.addrs[p]), append(on, c.hosts[p])
	}
	for rank, p := range c.alive {
		if err := json.NewEncoder(c.ins[p]).Encode(meeting{generation, rank, of, on, rounds}); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range c.alive {
		c.expect(t, p, "working")
	}
}

// kill kills a rank during its work, and returns when the others have reported the loss.
func (c *crew) kill(t *testing.T, victim int) {
	t.Helper()
	if err := c.cmds[c.alive[victim]].Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for rank, p := range c.alive {
		if rank != victim {
			c.expect(t, p, fmt.Sprint("lost ", []int{victim}))
		}
	}
	c.alive = slices.Delete(c.alive, victim, victim+1)
}

// done waits for the end of a world with a limited number of rounds.
func (c *crew) done(t *testing.T) {
	t.Helper()
	for _, p := range c.alive {
		c.expect(t, p, "done")
	}
}

// end waits for the processes to end.
func (c *crew) end(t *testing.T) {
	t.Helper()
	for _, p := range c.alive {
		c.ins[p].Close()
		if err := c.cmds[p].Wait(); err != nil {
			t.Error(err)
		}
	}
}

// TestProcesses: four processes, on one host or several, open each other's memory. Each in turn is
// killed during its work; the others are released and form a world without it.
func TestProcesses(t *testing.T) {
	path := cudatest.Library(t)
	for name, of := range map[string]struct {
		backend string
		hosts   []string // by process
	}{
		"one host":    {BackendIPC, []string{"a", "a", "a", "a"}},
		"two hosts":   {BackendHosts, []string{"a", "b", "a", "b"}},
		"uneven ones": {BackendHosts, []string{"a", "b", "b", "b"}},
	} {
		t.Run(name, func(t *testing.T) { testProcesses(t, newCrewOn(t, path, of.backend, of.hosts...)) })
	}
}

func testProcesses(t *testing.T, c *crew) {
	for generation := uint64(1); len(c.alive) > 1; generation++ {
		c.meet(t, generation, 0)
		c.kill(t, int(generation)%len(c.alive)) // the other processes report the rank of the killed one
	}
	c.meet(t, 100, 3)
	c.done(t)
	c.end(t)
}
