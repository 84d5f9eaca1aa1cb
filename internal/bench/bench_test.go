package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/plan"
)

func TestParseSizes(t *testing.T) {
	for _, c := range []struct {
		text string
		want []int
		err  string
	}{
		{text: "4", want: []int{4}},
		{text: "1MiB, 4,64KiB,4", want: []int{4, 65536, 1 << 20}},
		{text: "4GiB,12B", want: []int{12, 4 << 30}},
		{text: "", err: `"" is not a number of bytes`},
		{text: "4,", err: `"" is not a number of bytes`},
		{text: "KiB", err: `"KiB" is not a number of bytes`},
		{text: "4KB", err: `"4KB" is not a number of bytes`},
		{text: "1.5KiB", err: `"1.5KiB" is not a number of bytes`},
		{text: "-4", err: `"-4" is not a number of bytes`},
		{text: "0", err: "is not a multiple of the 4 bytes"},
		{text: "6", err: "is not a multiple of the 4 bytes"},
		{text: "5GiB", err: "exceeds the largest size, 4GiB"},
		{text: "9223372036854775804", err: "exceeds the largest size"},
		{text: "99999999999999999999", err: "is not a number of bytes"},
	} {
		got, err := ParseSizes(c.text)
		if c.err == "" && (err != nil || !slices.Equal(got, c.want)) {
			t.Errorf("%q: %v, %v", c.text, got, err)
		}
		if c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
			t.Errorf("%q: %v, want %q", c.text, err, c.err)
		}
	}
}

func TestSizeText(t *testing.T) {
	for n, want := range map[int]string{0: "0", 4: "4", 1020: "1020", 1024: "1KiB", 1536: "1536", 3 << 20: "3MiB", 4 << 30: "4GiB"} {
		if got := SizeText(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}

func TestSummarize(t *testing.T) {
	var hundred []time.Duration
	for i := range 100 {
		hundred = append(hundred, time.Duration(100-i)*time.Microsecond)
	}
	for _, c := range []struct {
		samples []time.Duration
		want    Row
	}{
		{[]time.Duration{1500}, Row{Op: AllReduce, Bytes: 8, Samples: 1, Min: 1.5, Median: 1.5, P99: 1.5}},
		{[]time.Duration{3000, 1000}, Row{Op: AllReduce, Bytes: 8, Samples: 2, Min: 1, Median: 2, P99: 3}},
		{[]time.Duration{3000, 1000, 9000}, Row{Op: AllReduce, Bytes: 8, Samples: 3, Min: 1, Median: 3, P99: 9}},
		{hundred, Row{Op: AllReduce, Bytes: 8, Samples: 100, Min: 1, Median: 50.5, P99: 99}},
	} {
		if got := summarize(AllReduce, 8, c.samples); got != c.want {
			t.Errorf("%+v, want %+v", got, c.want)
		}
	}
}

// ring runs body for each rank of a group in this process.
func ring(t *testing.T, n int, body func(g *collective.Group) error) {
	t.Helper()
	groups := collective.Local(n)
	errs := make(chan error)
	for _, g := range groups {
		go func() {
			err := body(g)
			if err != nil {
				g.Abort(err)
			}
			errs <- err
		}()
	}
	for range groups {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	for _, g := range groups {
		g.Close()
	}
}

// TestMeasure: every operation is correct, even with more ranks than elements, and is measured at
// each size.
func TestMeasure(t *testing.T) {
	for _, op := range ops {
		for _, n := range []int{1, 2, 3, 5} {
			sizes := []int{4, 28, 4096}
			if op == Barrier {
				sizes = []int{0}
			}
			testMeasure(t, n, Spec{Op: op, Sizes: sizes})
			if op.HasInto() {
				testMeasure(t, n, Spec{Op: op, Sizes: []int{4 * n, 4096 * n}, Into: true})
			}
			if op.HasAsync() {
				testMeasure(t, n, Spec{Op: op, Sizes: []int{4 * n, 4096 * n}, Into: op.HasInto(), Async: true})
			}
		}
	}
}

func testMeasure(t *testing.T, n int, spec Spec) {
	t.Helper()
	op, sizes := spec.Op, spec.Sizes
	spec.Time, spec.Memory = time.Millisecond, true
	var out bytes.Buffer
	ring(t, n, func(g *collective.Group) error {
		m := meter{ctx: t.Context(), group: g, clock: time.Now(), spec: spec}
		w := io.Discard
		if g.Rank() == 0 {
			w = &out
		}
		if err := m.meet(g.Rank()); err != nil {
			return err
		}
		return m.measure(json.NewEncoder(w))
	})
	var got []Row
	for dec := json.NewDecoder(&out); ; {
		var r Row
		if err := dec.Decode(&r); err != nil {
			break
		}
		if r.Samples < minSamples || r.Min <= 0 || r.Median < r.Min || r.P99 < r.Median {
			t.Errorf("%s on %d: %+v", op, n, r)
		}
		got = append(got, r)
	}
	for _, size := range sizes {
		also := []Op{op, CopyAlone, CopyAll}
		if op == Gradients {
			also = append(also, After, AllReduce)
		}
		for _, want := range also {
			found := slices.ContainsFunc(got, func(r Row) bool { return r.Op == want && r.Bytes == size })
			if copied := want == CopyAlone || want == CopyAll; found != (!copied || size >= 8) {
				t.Errorf("%s on %d: row of %s for %d: %v", op, n, want, size, found)
			}
		}
	}
}

func TestCheck(t *testing.T) {
	want := func(i int) float32 { return float32(i) }
	if err := check([]float32{3, 4}, 3, want); err != nil {
		t.Error(err)
	}
	if err := check([]float32{3, 5}, 3, want); err == nil || err.Error() != "the result is wrong: element 4 is 5, not 4" {
		t.Error(err)
	}
}

// results returns two rounds of a peer and of hvdrun.
func results(memory bool) *Report {
	r := &Report{Op: AllReduce, Ranks: 2, Rounds: 2}
	add := func(round int, peer string, row Row) { r.Results = append(r.Results, Result{row, round, peer}) }
	for round := 1; round <= 2; round++ {
		more := float64(round - 1)
		add(round, Ours, Row{Op: AllReduce, Bytes: 4, Samples: 100, Min: 0.25, Median: 0.3 + more/10, P99: 0.5})
		add(round, Ours, Row{Op: AllReduce, Bytes: 1 << 20, Samples: 100, Min: 100, Median: 120 + more, P99: 200})
		add(round, "gloo", Row{Op: AllReduce, Bytes: 4, Samples: 100, Min: 20 - more, Median: 35, P99: 500})
		if memory {
			add(round, Ours, Row{Op: CopyAlone, Bytes: 1 << 20, Samples: 100, Min: 20, Median: 26.2144, P99: 28})
			add(round, Ours, Row{Op: CopyAll, Bytes: 1 << 20, Samples: 100, Min: 50, Median: 52.4288, P99: 60})
		}
	}
	return r
}

func TestTable(t *testing.T) {
	for _, c := range []struct {
		memory bool
		want   string
	}{
		{false, `
  bytes  min us  median us  p99 us   GB/s  gloo us  ratio
      4    0.25       0.35    0.50  0.011    35.00    100
   1MiB     100        120     200   8.70        -      -
`},
		{true, `
  bytes  min us  median us  p99 us   GB/s  gloo us  ratio  copy by 1 GB/s  by 2 GB/s  roof GB/s  share
      4    0.25       0.35    0.50  0.011    35.00    100               -          -          -      -
   1MiB     100        120     200   8.70        -      -           20.00      20.00       8.00   1.09
`},
	} {
		var b strings.Builder
		if err := results(c.memory).WriteTable(&b); err != nil {
			t.Fatal(err)
		}
		head, body, _ := strings.Cut(b.String(), "\n")
		if !strings.HasPrefix(head, "allreduce, float32, 2 ranks; ") || body != c.want {
			t.Errorf("%s\n%s", head, body)
		}
	}
}

// TestTableOfPeers: each of many libraries has its own line; of several variants the fastest is
// shown, and each is described.
func TestTableOfPeers(t *testing.T) {
	r := results(false)
	for name, us := range map[string]float64{"mpich": 7, "mpich-posix": 0.7, "torch": 100} {
		r.Results = append(r.Results, Result{Row{Op: AllReduce, Bytes: 4, Samples: 10, Min: us, Median: us, P99: us}, 1, name})
	}
	slices.SortStableFunc(r.Results, func(a, b Result) int { return strings.Compare(a.Peer, b.Peer) })
	r.About = []string{peerNamed(t, "gloo").About(""), peerNamed(t, "mpich-posix").About("MPICH Version:      5.0.2")}
	var b strings.Builder
	if err := r.WriteTable(&b); err != nil {
		t.Fatal(err)
	}
	const want = `
  bytes  min us  median us  p99 us   GB/s
      4    0.25       0.35    0.50  0.011
   1MiB     100        120     200   8.70

  median us · ratio             4  1MiB
               gloo   35.00 · 100     -
              mpich  7.00 · 20.00     -
        mpich-posix   0.70 · 2.00     -
              torch     100 · 286     -
            fastest   mpich-posix     -

gloo: of an unknown version
mpich-posix: MPICH Version: 5.0.2, UCX_TLS=posix,self
`
	if _, body, _ := strings.Cut(b.String(), "\n"); body != want {
		t.Error(body)
	}
}

// TestTableOfHosts: the table's additions for ranks on several hosts, and for gradients.
func TestTableOfHosts(t *testing.T) {
	r := &Report{Op: Gradients, Ranks: 4, Hosts: 2, Rounds: 1}
	for _, row := range []Row{
		{Op: Gradients, Bytes: 1 << 20, Samples: 10, Min: 11000, Median: 12000, P99: 13000, Sent: 2 << 20, HostOut: 1 << 20},
		{Op: After, Bytes: 1 << 20, Samples: 10, Min: 19000, Median: 20000, P99: 30000, Sent: 2 << 20, HostOut: 1 << 20},
		{Op: AllReduce, Bytes: 1 << 20, Samples: 10, Min: 9000, Median: 10000, P99: 11000, Sent: 2 << 20, HostOut: 1 << 20},
		{Op: Stream, Bytes: streamSize, Samples: 10, Min: 100000, Median: 160000, P99: 200000},
	} {
		r.Results = append(r.Results, Result{row, 1, Ours})
	}
	var b strings.Builder
	if err := r.WriteTable(&b); err != nil {
		t.Fatal(err)
	}
	want := `gradients, float32, 4 ranks on 2 hosts; least, and medians of 1 rounds; ratio: how many times longer the peer takes

  bytes  min us  median us  p99 us   GB/s  reduced after us  reduction us  hidden  on sockets  of a host  share of wire
   1MiB   11000      12000   13000  0.087             20000         10000   0.800     2.00MiB    1.00MiB          0.833

hidden: the share of one reduction after the backward pass that is saved where gradients are reduced during the pass,
which takes as long as a reduction

on sockets: bytes sent for an operation by all ranks, and by the host that sends most; share of wire: those by the time
that one rank needs to send them to a rank of another host, 16MiB at 0.105 GB/s
`
	if b.String() != want {
		t.Errorf("%s", b.String())
	}
	b.Reset()
	if err := r.WriteTSV(&b); err != nil {
		t.Fatal(err)
	}
	for _, op := range []Op{Gradients, After, AllReduce, Stream} {
		if !strings.Contains(b.String(), "all\thvdrun\t"+string(op)+"\t4\t") {
			t.Errorf("no row of %s in\n%s", op, b.String())
		}
	}
}

// TestMeet: ranks count the bytes of their own host, even if hosts have different numbers of ranks.
func TestMeet(t *testing.T) {
	local := []int{0, 1, 2, 0, 0, 1} // three hosts
	hosts := make([]int, len(local))
	ring(t, len(local), func(g *collective.Group) error {
		m := meter{ctx: t.Context(), group: g, clock: time.Now()}
		if err := m.meet(local[g.Rank()]); err != nil {
			return err
		}
		hosts[g.Rank()] = m.host
		if len(m.totals) != 3 || (m.ends != nil) != (g.Rank() == 0 || g.Rank() == 3) {
			return fmt.Errorf("rank %d: %d hosts, an end of the stream: %v", g.Rank(), len(m.totals), m.ends != nil)
		}
		return nil
	})
	if !slices.Equal(hosts, []int{0, 0, 0, 1, 2, 2}) {
		t.Error(hosts)
	}
}

func TestTSV(t *testing.T) {
	var b strings.Builder
	if err := results(false).WriteTSV(&b); err != nil {
		t.Fatal(err)
	}
	want := strings.ReplaceAll(`round peer op ranks bytes samples min_us median_us p99_us GBps socket_bytes host_bytes
1 hvdrun allreduce 2 4 100 0.250 0.300 0.500 0.0133 0 0
1 hvdrun allreduce 2 1048576 100 100.000 120.000 200.000 8.7381 0 0
1 gloo allreduce 2 4 100 20.000 35.000 500.000 0.0001 0 0
2 hvdrun allreduce 2 4 100 0.250 0.400 0.500 0.0100 0 0
2 hvdrun allreduce 2 1048576 100 100.000 121.000 200.000 8.6659 0 0
2 gloo allreduce 2 4 100 19.000 35.000 500.000 0.0001 0 0
all hvdrun allreduce 2 4 200 0.250 0.350 0.500 0.0114 0 0
all hvdrun allreduce 2 1048576 200 100.000 120.500 200.000 8.7019 0 0
all gloo allreduce 2 4 200 19.000 35.000 500.000 0.0001 0 0
`, " ", "\t")
	if b.String() != want {
		t.Errorf("%s", b.String())
	}
}

func TestParsePeers(t *testing.T) {
	for _, c := range []struct {
		text, err string
		n         int
	}{
		{text: "openmpi,openmpi-tcp,gloo", n: 3},
		{text: "nccl", err: `"nccl" is not one of openmpi, openmpi-tcp, openmpi-nocma, openmpi-acoll, openmpi-xhc, openmpi-ucx, ` +
			"openmpi-linear, openmpi-rabenseifner, mpich, mpich-posix, mpich-ucc, torch, gloo"},
		{text: "gloo, gloo", err: "gloo is listed twice"},
		{text: "", err: `"" is not one of`},
	} {
		got, err := ParsePeers(c.text)
		if len(got) != c.n && err == nil || (err != nil) != (c.err != "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%q: %v, %v", c.text, got, err)
		}
	}
}

func TestPeerCommands(t *testing.T) {
	spec := Spec{Op: AllReduce, Sizes: []int{4, 1 << 20}, Time: 500 * time.Millisecond}
	remote := Place{Ranks: 3, Hosts: []plan.Host{{Name: "a", Slots: 2}, {Name: "b", Slots: 1}}, Shell: []string{"ssh", "-p", "22"}}
	through := remote
	through.Interfaces = []string{"eth0", "eth1"}
	const shell = " -wdir / --mca plm_rsh_agent ssh -p 22 --mca plm_rsh_no_tree_spawn 1"
	const carried = " sh -c SCRIPT sh 1 PIECE allreduce 0.5 4,1048576"
	t.Setenv("PATH", t.TempDir())
	for _, c := range []struct {
		peer string
		at   Place
		want string
		job  bool
	}{
		{"openmpi", Place{Ranks: 2}, "mpirun --allow-run-as-root --oversubscribe --mca oob_tcp_if_include lo --mca btl_tcp_if_include lo" +
			" -n 2 PROGRAM allreduce 0.5 4,1048576", false},
		{"openmpi-tcp", Place{Ranks: 2}, "mpirun --allow-run-as-root --oversubscribe --mca oob_tcp_if_include lo --mca btl_tcp_if_include lo" +
			" --mca pml ob1 --mca btl self,tcp -n 2 PROGRAM allreduce 0.5 4,1048576", false},
		{"gloo", Place{Ranks: 2}, "PROGRAM allreduce 0.5 4,1048576 2 FOLDER", false},
		{"openmpi-ucx", Place{Ranks: 2}, "env UCX_TLS=posix,self mpirun --allow-run-as-root --oversubscribe --mca oob_tcp_if_include lo" +
			" --mca btl_tcp_if_include lo --mca pml ucx --mca opal_common_ucx_tls any --mca opal_common_ucx_devices any" +
			" -n 2 PROGRAM allreduce 0.5 4,1048576", false},
		{"mpich-ucc", Place{Ranks: 2}, "env MPIR_CVAR_CH4_UCX_ENABLE_UCC=1 env UCX_TLS=posix,self mpirun -n 2 PROGRAM allreduce 0.5 4,1048576", false},
		{"torch", Place{Ranks: 2}, "PROGRAM allreduce 0.5 4,1048576 2 FOLDER", false},
		{"torch", remote, strings.TrimSpace(carried), true},
		{"openmpi", remote, "mpirun --allow-run-as-root --oversubscribe -H a:2,b:1" + shell + " -n 3" + carried, false},
		{"openmpi-tcp", through, "mpirun --allow-run-as-root --oversubscribe -H a:2,b:1" + shell +
			" --mca oob_tcp_if_include eth0,eth1 --mca btl_tcp_if_include eth0,eth1 --mca pml ob1 --mca btl self,tcp -n 3" + carried, false},
		{"gloo", remote, strings.TrimSpace(carried), true},
	} {
		p, folder := peerNamed(t, c.peer), t.TempDir()
		if err := os.MkdirAll(filepath.Dir(p.program(folder)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p.program(folder), []byte("#!/bin/sh\n"), 0o700); err != nil {
			t.Fatal(err)
		}
		words, err := p.Command(folder, c.at, spec)
		if err != nil {
			t.Fatal(err)
		}
		for i, word := range words {
			switch {
			case word == p.program(folder):
				words[i] = "PROGRAM"
			case strings.HasPrefix(word, filepath.Dir(p.program(folder))):
				words[i] = "FOLDER"
			case word == carriedScript:
				words[i] = "SCRIPT"
			case i > 2 && words[i-2] == "sh":
				words[i] = "PIECE"
			}
		}
		if got := strings.Join(words, " "); got != c.want || p.InJob(c.at) != c.job {
			t.Errorf("%s: in a job: %v\n%s, want\n%s", p.Name, p.InJob(c.at), got, c.want)
		}
	}
	remote.Shell = []string{"ssh", "-i", "my key"}
	want := `cannot be started: the command of ssh has the word "my key", and mpirun takes no blanks and colons there`
	if _, err := peers[0].Command(t.TempDir(), remote, spec); err == nil || err.Error() != want {
		t.Error(err)
	}
	want = "is only measured on one machine"
	if _, err := peerNamed(t, "mpich").Command(t.TempDir(), remote, spec); err == nil || err.Error() != want {
		t.Error(err)
	}
}

func peerNamed(t *testing.T, name string) Peer {
	t.Helper()
	found, err := ParsePeers(name)
	if err != nil {
		t.Fatal(err)
	}
	return found[0]
}

// TestCarried: a program reaches a host within the command that runs it, in as many pieces as
// needed, and is removed afterwards.
func TestCarried(t *testing.T) {
	path := filepath.Join(t.TempDir(), "program")
	noise := make([]byte, 3*maxPiece) // cannot be packed
	for i := range noise {
		noise[i] = "0123456789abcdefghijklmnopqrstuvwxyz"[rand.IntN(36)]
	}
	text := "#!/bin/sh\necho \"$@\"; echo \"$0\"; exit 3\n" + string(noise)
	if err := os.WriteFile(path, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
	words, err := carried(path, []string{"a b", "c"})
	if err != nil {
		t.Fatal(err)
	}
	if words[4] == "1" {
		t.Error("the program is in one piece: the test is too small")
	}
	cmd := exec.Command(words[0], words[1:]...)
	temp := t.TempDir()
	cmd.Env = append(os.Environ(), "TMPDIR="+temp)
	out, err := cmd.Output()
	var exit *exec.ExitError
	if first, _, _ := strings.Cut(string(out), "\n"); first != "a b c" || !errors.As(err, &exit) || exit.ExitCode() != 3 {
		t.Errorf("%q, %v", out, err)
	}
	if left, err := os.ReadDir(temp); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestProbe(t *testing.T) {
	at := Place{Hosts: []plan.Host{{Name: "b", Slots: 1}}, Shell: []string{"ssh", "-T"}}
	if got := strings.Join(peers[0].Probe(at, "b"), "|"); got != "ssh|-T|b|command -v orted || command -v prted" {
		t.Error(got)
	}
	if got := peerNamed(t, "gloo").Probe(at, "b"); got != nil {
		t.Error(got)
	}
	for _, c := range []struct {
		code         int
		output, want string
	}{
		{127, "", "host b: mpirun is not installed (Debian: apt-get install openmpi-bin libopenmpi-dev)"},
		{1, "", "host b: mpirun is not installed (Debian: apt-get install openmpi-bin libopenmpi-dev)"},
		{255, "Welcome\nssh: connect to host b port 22: Connection refused\n",
			"host b cannot be reached by ssh, as mpirun needs: ssh: connect to host b port 22: Connection refused"},
	} {
		if err := peers[0].Unusable("b", c.code, c.output); err.Error() != c.want {
			t.Errorf("%d: %v, want %s", c.code, err, c.want)
		}
	}
}

func TestReadPeer(t *testing.T) {
	spec := Spec{Op: AllReduce, Sizes: []int{4, 8}}
	rows, err := ReadPeer(strings.NewReader("4\t10\t1.0\t2.0\t3.0\n8\t11\t1\t2\t3\n"), spec)
	if err != nil || len(rows) != 2 || rows[1] != (Row{Op: AllReduce, Bytes: 8, Samples: 11, Min: 1, Median: 2, P99: 3}) {
		t.Error(rows, err)
	}
	for _, bad := range []string{"", "4\t10\t1\t2\t3\n", "8\t10\t1\t2\t3\n4\t10\t1\t2\t3\n", "4\t0\t1\t2\t3\n8\t1\t1\t2\t3\n",
		"4\t10\t1\tNaN\t3\n8\t1\t1\t2\t3\n", "hello\n4\t10\t1\t2\t3\n8\t1\t1\t2\t3\n"} {
		if rows, err := ReadPeer(strings.NewReader(bad), spec); err == nil {
			t.Errorf("%q: %v", bad, rows)
		}
	}
}

// TestPrepare: the error about a missing peer names the packages to install.
func TestPrepare(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	for _, p := range peers {
		_, err := p.Prepare(t.TempDir(), AllReduce)
		if err == nil || !strings.Contains(err.Error(), "is not installed (Debian: apt-get install ") {
			t.Errorf("%s: %v", p.Name, err)
		}
	}
	err := peerNamed(t, "gloo").Uncompiled("gloo.cc: In function main:\ngloo.cc:10:10: fatal error: gloo/allgatherv.h: No such file\n")
	if err.Error() != "g++ fails: gloo.cc:10:10: fatal error: gloo/allgatherv.h: No such file (Debian: apt-get install g++ libgloo-dev)" {
		t.Error(err)
	}
	if _, err := peerNamed(t, "gloo").Prepare(t.TempDir(), ReduceScatter); err == nil || err.Error() != "it has no reducescatter" {
		t.Error(err)
	}
}

// FuzzReadPeer: the output of a peer's program is either read as a row for each size, or refused.
func FuzzReadPeer(f *testing.F) {
	f.Add("4\t10\t1e-6\t2e-6\t3e-6\n")
	f.Add("4\t10\tNaN\t2\t3\n")
	f.Add("4\t0\t1\t2\t+Inf")
	spec := Spec{Op: AllReduce, Sizes: []int{4}}
	f.Fuzz(func(t *testing.T, text string) {
		rows, err := ReadPeer(strings.NewReader(text), spec)
		if err != nil {
			return
		}
		if len(rows) == 0 || rows[0].Bytes != 4 {
			t.Errorf("%q: %+v", text, rows)
		}
		for _, r := range rows {
			if r.Samples < 1 || !(r.Min > 0 && r.Min <= r.Median && r.Median <= r.P99) {
				t.Errorf("%q: %+v", text, r)
			}
		}
	})
}
