package collective_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/identity"
)

const workerVariable = "COLLECTIVE_TEST_WORKER"

func TestMain(m *testing.M) {
	if text := os.Getenv(workerVariable); text != "" {
		if err := worker(text); err != nil {
			fmt.Println("error", err)
		}
		return
	}
	m.Run()
}

// plight describes what the processes of a world do until one of them is killed.
type plight struct {
	Ranks    int
	Hosts    string // a letter per rank for its host; empty: the ranks share no memory
	Floats   int    // in each operation
	Messages bool   // each rank sends to the next one instead of reducing
	Resident int    // additional bytes of memory of the killed process
}

// order is the message to one of the processes.
type order struct {
	plight
	Rank        int
	Credentials string
	Key         []byte
}

// ending is what a process prints when its operation has failed.
type ending struct {
	Dead []int
	At   int64 // time of the failure, in nanoseconds of Unix time
}

// worker is the main function of a process. It prints its address, reads the addresses of all,
// works until an operation fails, and prints its ending.
func worker(text string) error {
	var o order
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return err
	}
	c, err := identity.Decode(o.Credentials)
	if err != nil {
		return err
	}
	key, err := identity.ParseDataKey(o.Key)
	if err != nil {
		return err
	}
	e, err := collective.Listen(collective.Config{Credentials: c, ListenAddr: "127.0.0.1:0"})
	if err != nil {
		return err
	}
	fmt.Println(e.Addrs()[0])
	var addrs [][]string
	if err := json.NewDecoder(os.Stdin).Decode(&addrs); err != nil {
		return err
	}
	ballast := make([]byte, o.Resident+1)
	for i := 0; i < len(ballast); i += 4096 {
		ballast[i] = 1
	}
	g, err := e.Connect(context.Background(), collective.Peers{Generation: 1, Key: key, Rank: o.Rank, Addrs: addrs, Hosts: strings.Split(o.Hosts, "")})
	if err != nil {
		return err
	}
	data := make([]float32, o.Floats)
	for i := 0; err == nil; i++ {
		if err = o.work(g, data); i == 3 {
			fmt.Println("working")
		}
	}
	at := time.Now().UnixNano()
	var a *collective.AbortedError
	if !errors.As(err, &a) {
		return err
	}
	ballast[0] = 0
	err = json.NewEncoder(os.Stdout).Encode(ending{a.Dead, at})
	io.Copy(io.Discard, os.Stdin) // if a survivor ended at once, ranks that notice the kill later could report it as dead instead
	return err
}

// work runs one operation of all ranks.
func (p *plight) work(g *collective.Group, data []float32) error {
	ctx := context.Background()
	if !p.Messages {
		return collective.AllReduce(ctx, g, data, collective.Sum)
	}
	sent := collective.SendAsync(ctx, g, data, (g.Rank()+1)%g.Size())
	err := collective.Recv(ctx, g, make([]float32, len(data)), (g.Rank()+g.Size()-1)%g.Size())
	return errors.Join(err, sent.Wait())
}

// suffer starts the processes, kills one after a while, and returns how long each of the others
// took to notice.
func suffer(tb testing.TB, p plight, victim int, after time.Duration) (took []time.Duration) {
	tb.Helper()
	cmds, outs, ins := make([]*exec.Cmd, p.Ranks), make([]*bufio.Scanner, p.Ranks), make([]io.Writer, p.Ranks)
	addrs := make([][]string, p.Ranks)
	next := func(rank int) string {
		tb.Helper()
		if !outs[rank].Scan() {
			tb.Fatalf("rank %d has ended: %v", rank, outs[rank].Err())
		}
		return outs[rank].Text()
	}
	for i := range p.Ranks {
		o := order{p, i, credentials(tb, i).Encode(), dataKey.Bytes()}
		if i != victim {
			o.Resident = 0
		}
		text, err := json.Marshal(o)
		cmds[i] = exec.Command(os.Args[0])
		cmds[i].Env = append(os.Environ(), workerVariable+"="+string(text))
		cmds[i].Stderr = os.Stderr
		in, err1 := cmds[i].StdinPipe()
		out, err2 := cmds[i].StdoutPipe()
		if err := errors.Join(err, err1, err2, cmds[i].Start()); err != nil {
			tb.Fatal(err)
		}
		defer func() { cmds[i].Process.Kill(); cmds[i].Wait() }()
		ins[i], outs[i] = in, bufio.NewScanner(out)
		addrs[i] = []string{next(i)}
	}
	for i := range p.Ranks {
		if err := json.NewEncoder(ins[i]).Encode(addrs); err != nil {
			tb.Fatal(err)
		}
	}
	for i := range p.Ranks {
		if got := next(i); got != "working" {
			tb.Fatalf("rank %d: %s", i, got)
		}
	}
	<-time.After(after)
	at := time.Now()
	if err := cmds[victim].Process.Kill(); err != nil {
		tb.Fatal(err)
	}
	for i := range p.Ranks {
		if i == victim {
			continue
		}
		var e ending
		if err := json.Unmarshal([]byte(next(i)), &e); err != nil {
			tb.Fatalf("rank %d: %s", i, outs[i].Text())
		}
		if !slices.Equal(e.Dead, []int{victim}) {
			tb.Fatalf("rank %d names %v, not rank %d", i, e.Dead, victim)
		}
		took = append(took, time.Duration(e.At-at.UnixNano()))
	}
	return took
}

// TestKilledProcess: one of four processes is killed by SIGKILL during its work, and the others
// report it as dead.
func TestKilledProcess(t *testing.T) {
	for _, p := range []plight{
		{Ranks: 4, Floats: 100_000},
		{Ranks: 4, Floats: 10, Hosts: "aaaa"},
		{Ranks: 4, Floats: 1_000_000, Hosts: "aaaa"},
		{Ranks: 4, Floats: 100_000, Hosts: "aabb"},
		{Ranks: 4, Floats: 100_000, Hosts: "aabb", Messages: true},
	} {
		t.Run(fmt.Sprintf("hosts=%s,floats=%d,messages=%v", p.Hosts, p.Floats, p.Messages), func(t *testing.T) {
			for victim := range p.Ranks {
				suffer(t, p, victim, 0)
			}
		})
	}
}

// BenchmarkKilled measures the time from SIGKILL of a process to the error of the operation in each
// of the others.
func BenchmarkKilled(b *testing.B) {
	for _, p := range []plight{
		{Ranks: 3, Floats: 1, Hosts: "aaa"},
		{Ranks: 3, Floats: 4 << 20, Hosts: "aaa"},
		{Ranks: 3, Floats: 1},
	} {
		for _, resident := range []int{8 << 20, 1 << 30, 4 << 30} {
			p.Resident = resident
			b.Run(fmt.Sprintf("hosts=%s,floats=%d,resident=%dMiB", p.Hosts, p.Floats, resident>>20), func(b *testing.B) {
				var took []time.Duration
				for range b.N {
					took = append(took, suffer(b, p, rand.IntN(p.Ranks), time.Duration(rand.IntN(5))*time.Millisecond)...)
				}
				slices.Sort(took)
				at := func(q float64) float64 { return float64(took[int(q*float64(len(took)-1))]) / 1e6 }
				b.ReportMetric(at(0.5), "median-ms")
				b.ReportMetric(at(0.99), "p99-ms")
				b.ReportMetric(at(1), "max-ms")
			})
		}
	}
}
