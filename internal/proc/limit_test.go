package proc

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestProcessLimit: the error of a fork for which there are too many processes names the limit that
// is reached, also if it is that of a control group above.
func TestProcessLimit(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "job", "worker")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(root, name), []byte(text+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, group := range []string{".", "job", "job/worker"} {
		write(group+"/cgroup.procs", "")
	}
	write("job/pids.max", "100")
	write("job/pids.current", "99")
	write("job/worker/pids.max", "max")
	write("job/worker/pids.current", "99")
	if full, most := fullGroup(dir); full != filepath.Join(root, "job") || most != 100 {
		t.Errorf("%s, %d", full, most)
	}
	write("job/pids.current", "50")
	if full, most := fullGroup(dir); most != 0 {
		t.Errorf("%s, %d", full, most)
	}
	own := "8:cpu,pids:/job\n0::/\n"
	mounts := "31 1 0:21 / " + root + " rw - cgroup cgroup rw,cpu,pids\n"
	if got, is := groupOf("pids", own, mounts); !is || got != filepath.Join(root, "job") {
		t.Errorf("version 1: %s, %v", got, is)
	}
	err := (&children{started: map[int]startedChild{}, forking: map[int]uint64{}}).fork(false, func() (int, error) { return 0, unix.EAGAIN })
	if !errors.Is(err, unix.EAGAIN) || !strings.Contains(err.Error(), "processes and threads") {
		t.Error(err)
	}
}
