package launch

import (
	"crypto/rand"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// Without a root nobody is kin: in /proc, 0 stands for parents that cannot be seen, and pid 1 is
// among their children.
func TestKinOfNobody(t *testing.T) {
	k := newKin("", 0)
	defer k.release()
	if n, _ := k.find(); n != 0 || len(k.held) != 0 {
		t.Fatalf("found %v", k.held)
	}
}

func TestKinSparesOthers(t *testing.T) {
	defer adopting.Store(adopting.Swap(false)) // all processes are looked at then
	in, ours, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	defer ours.Close()
	cmd := exec.Command("cat")
	cmd.Stdin = in
	one := "kin-" + rand.Text() + "-1"
	cmd.Env = []string{"HVD_INCARNATION=" + one + "0", "X=HVD_INCARNATION=" + one, "HVD_INCARNATIONS=" + one}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	// Its environment can be read for sure once it has done something.
	if _, err := ours.WriteString("x"); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	for incarnation, want := range map[string]int{one: 0, one + "0": 1, one + "00": 0} {
		k := newKin(incarnation, 0)
		if n, _ := k.find(); n != want {
			t.Errorf("%s: found %d, want %d", incarnation, n, want)
		}
		k.release()
	}
	ours.Close()
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
}

// Who carries nothing at all is not in the middle of an exec: nobody need look again.
func TestEmptyEnvironmentIsClear(t *testing.T) {
	cmd := exec.Command("cat")
	cmd.Env = []string{}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(in, "x"); err != nil { // the exec is over for sure once cat has answered
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if its, unclear := carries(cmd.Process.Pid, "A=b"); its || unclear {
		t.Errorf("carries: %v, unclear: %v", its, unclear)
	}
	in.Close()
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if its, unclear := carries(cmd.Process.Pid, "A=b"); its || unclear {
		t.Errorf("after its end: carries: %v, unclear: %v", its, unclear)
	}
}

// The time to wait is over before we have read anything, as where our own reader is slow, and the
// other end stays open.
func TestLastWordsAreReadAfterTheBound(t *testing.T) {
	var out strings.Builder
	p, err := newPipes(&out, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.closeChild()
	holder := os.NewFile(p.child[1], "child's end")
	p.child = []uintptr{p.child[0], p.child[2]}
	defer holder.Close()
	if _, err := holder.WriteString("last words"); err != nil {
		t.Fatal(err)
	}
	for _, c := range p.copiers {
		if err := c.from.SetReadDeadline(time.Unix(1, 0)); err != nil {
			t.Fatal(err)
		}
	}
	p.start()
	<-p.done
	if out.String() != "last words" {
		t.Fatalf("got %q", out.String())
	}
}
