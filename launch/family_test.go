package launch

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

// An inherited process that ends is taken note of; one that this process has started itself is left
// to whoever waits for it.
func TestReap(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		Reap(ctx, 0)
	}()
	ours := exec.Command("true")
	if err := startChild(ours); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("sh", "-c", `sleep 0 >/dev/null 2>&1 & echo $!`).Output()
	if err != nil {
		t.Fatal(err)
	}
	stray, err := strconv.Atoi(strings.TrimSpace(string(out)))
	if err != nil {
		t.Fatal(err)
	}
	for limit := time.Now().Add(20 * time.Second); ; <-time.After(time.Millisecond) {
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", stray)); err != nil {
			break
		}
		if time.Now().After(limit) {
			t.Fatal("an inherited process stays defunct")
		}
	}
	if err := ours.Wait(); err != nil {
		t.Errorf("a process of our own: %v", err)
	}
	relatives.reaped(ours.Process.Pid)
	cancel()
	<-done
}

func TestNobodys(t *testing.T) {
	f := family{own: map[int]relative{1: {true, 100}, 2: {true, 200}, 3: {false, 5}}}
	for birth, want := range map[uint64]bool{99: true, 100: false, 250: false} {
		if f.nobodys(birth) != want {
			t.Errorf("born at %d: %v", birth, !want)
		}
	}
	f.reaped(1)
	if !f.nobodys(150) || f.nobodys(200) {
		t.Error("who was born between two workers is of the first")
	}
}
