package proc

import (
	"crypto/rand"
	"io"
	"os"
	"os/exec"
	"testing"
)

// TestNoDescendantsWithoutARoot: without a root there are no descendants: in /proc, 0 stands for
// invisible parents, and pid 1 is among their children.
func TestNoDescendantsWithoutARoot(t *testing.T) {
	d := newDescendants("", 0)
	defer d.release()
	if n, _ := d.find(); n != 0 || len(d.held) != 0 {
		t.Fatalf("found %v", d.held)
	}
}

func TestOthersAreSpared(t *testing.T) {
	defer adopting.Store(adopting.Swap(false)) // then all processes are looked at
	in, ours, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	defer ours.Close()
	cmd := exec.Command("cat")
	cmd.Stdin = in
	one := "mark-" + rand.Text() + "-1"
	cmd.Env = []string{"HVD_INCARNATION=" + one + "0", "X=HVD_INCARNATION=" + one, "HVD_INCARNATIONS=" + one}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	// Its environment can certainly be read once it has done something.
	if _, err := ours.WriteString("x"); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	for incarnation, want := range map[string]int{one: 0, one + "0": 1, one + "00": 0} {
		d := newDescendants("HVD_INCARNATION="+incarnation, 0)
		if n, _ := d.find(); n != want {
			t.Errorf("%s: found %d, want %d", incarnation, n, want)
		}
		d.release()
	}
	ours.Close()
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
}

// TestEmptyEnvironmentIsClear: a process with an empty environment is not in the middle of an exec,
// and need not be looked at again.
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
	if _, err := io.WriteString(in, "x"); err != nil { // the exec has certainly completed once cat has answered
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if carried, unclear := carries(cmd.Process.Pid, "A=b"); carried || unclear {
		t.Errorf("carries: %v, unclear: %v", carried, unclear)
	}
	in.Close()
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if carried, unclear := carries(cmd.Process.Pid, "A=b"); carried || unclear {
		t.Errorf("after its end: carries: %v, unclear: %v", carried, unclear)
	}
}
