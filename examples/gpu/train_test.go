package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/collective/cuda"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/examples/digits/dataset"
	"github.com/hvdrun/hvdrun/internal/cudatest"
	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m, nil)) }

func TestNoDriver(t *testing.T) {
	if err := run(t.Context(), options{driver: "/nowhere/libcuda.so.1"}); !errors.Is(err, cuda.ErrUnavailable) {
		t.Error(err)
	}
}

// TestTrainAlone runs the complete training in a world of one.
func TestTrainAlone(t *testing.T) {
	d := device(t)
	w, err := elastic.Init(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	images, heldOut, err := dataset.Load()
	if err != nil {
		t.Fatal(err)
	}
	m, err := newNetwork(t.Context(), d, 12, 50, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	from, err1 := m.load(t.Context(), images)
	judged, err2 := m.load(t.Context(), heldOut)
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	if err := train(t.Context(), w, m, from, options{epochs: 3, micro: 1, batch: 16, rate: 0.03, seed: 1}); err != nil {
		t.Fatal(err)
	}
	if got, err := m.accuracy(t.Context(), judged); err != nil || got < 0.88 {
		t.Errorf("held-out accuracy %.4f, want at least 0.88: %v", got, err)
	}
}

// TestTrainUnderFailure: three workers on one device, one of which is killed and replaced; all end
// with the parameters of one undisturbed worker, bit by bit.
func TestTrainUnderFailure(t *testing.T) {
	library := cudatest.Library(t)
	dir := t.TempDir()
	if err := sandbox.Build(dir, "github.com/hvdrun/hvdrun/cmd/hvdrun", "github.com/hvdrun/hvdrun/examples/gpu"); err != nil {
		t.Fatal(err)
	}
	command := []string{filepath.Join(dir, "gpu"), "-driver", library, "-epochs", "8", "-hidden", "16", "-microbatches", "4", "-batch", "16", "-lr", "0.05", "-digest"}
	alone, err := exec.CommandContext(t.Context(), command[0], command[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, alone)
	}
	digest := regexp.MustCompile(`digest ([0-9a-f]{16})`)
	want := digest.FindSubmatch(alone)
	accuracy := regexp.MustCompile(`held-out accuracy ([0-9.]+) on Fake in C`).FindSubmatch(alone)
	if want == nil || accuracy == nil {
		t.Fatalf("alone:\n%s", alone)
	}
	if got, err := strconv.ParseFloat(string(accuracy[1]), 64); err != nil || got < 0.9 {
		t.Errorf("held-out accuracy %s, want at least 0.9", accuracy[1])
	}

	release := cudatest.Hold(t, 800) // a worker needs 200 to 760 for an epoch, and at least 1600 in all
	job := follow.Programs{Hvdrun: filepath.Join(dir, "hvdrun")}.Test(t, follow.Job{
		Flags:   []string{"-np", "3", "--min-np", "1", "-H", "localhost:3", "--blacklist-cooldown-range", "0.2,0.2"},
		Command: command,
	})
	for text, ended := "", false; !ended && !strings.Contains(text, "epoch 1 "); {
		select {
		case <-job.Ended(): // killed if the job hangs
			ended = true
		case <-time.After(5 * time.Millisecond):
			out, err := os.ReadFile(job.OutputPath())
			if err == nil {
				text = string(out)
			}
		}
	}
	victim := 0
	if err := job.AwaitEvents(t.Context(), func(all []follow.Event) bool {
		for _, e := range all {
			if e.Name == "world_published" && e.Size == 3 {
				victim = e.Slots[1].PID
			}
		}
		return victim > 0
	}); err != nil {
		t.Error(err)
	} else if err := syscall.Kill(victim, syscall.SIGKILL); err != nil {
		t.Error(err)
	}
	release()
	res, err := job.Wait()
	if err != nil {
		t.Fatal(err)
	}
	digests := digest.FindAllStringSubmatch(res.Output, -1)
	if res.Status != 0 || len(res.Left) > 0 || len(digests) == 0 || follow.Count(res.Events, "reset") == 0 {
		t.Fatalf("exit status %d, left %v\n%s", res.Status, res.Left, res.Story())
	}
	for _, d := range digests {
		if d[1] != string(want[1]) {
			t.Errorf("the parameters are not those of one worker, %s:\n%s", want[1], res.Output)
		}
	}
}
