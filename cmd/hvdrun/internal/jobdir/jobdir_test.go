package jobdir

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/internal/agent/client"
)

func TestStateDirs(t *testing.T) {
	temp := t.TempDir()
	last := filepath.Join(temp, "hvdrun-"+strings.TrimPrefix(filepath.Base(filepath.Dir(StateDirs(nil, "/")[0])), "hvdrun-"), "jobs")
	for name, c := range map[string]struct{ env, want []string }{
		"nothing": {nil, []string{last}},
		"home":    {[]string{"HOME=/h", "XDG_RUNTIME_DIR=/r"}, []string{"/h/.local/state/hvdrun/jobs", "/r/hvdrun/jobs", last}},
		"state":   {[]string{"HOME=/h", "XDG_STATE_HOME=/s"}, []string{"/s/hvdrun/jobs", last}},
		"no path": {[]string{"HOME=h", "XDG_STATE_HOME=s", "XDG_RUNTIME_DIR=r"}, []string{last}},
	} {
		if got := StateDirs(c.env, temp); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// TestOwnTemp: a folder in a shared place is used only if it belongs to this user alone: not if it
// is a link, if others can enter it, or if it is another user's.
func TestOwnTemp(t *testing.T) {
	temp := t.TempDir()
	all := StateDirs(nil, temp)[0]
	base := filepath.Dir(all)
	if err := Usable(nil, all, temp, false); !os.IsNotExist(err) {
		t.Errorf("nothing is there: %v", err)
	}
	for range 2 {
		if err := Usable(nil, all, temp, true); err != nil {
			t.Error(err)
		}
	}
	refused := func(says string) {
		t.Helper()
		for _, create := range []bool{false, true} {
			if err := Usable(nil, all, temp, create); err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("%v, want %q", err, says)
			}
		}
	}
	if err := os.Chmod(base, 0o755); err != nil {
		t.Fatal(err)
	}
	refused("others may enter")
	if err := os.Remove(base); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(base, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Usable(nil, all, temp, true); err == nil {
		t.Error("a file was used as a folder")
	}
	if os.Geteuid() != 0 {
		return // the rest requires root
	}
	if err := os.Remove(base); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(base, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(base, 12345, -1); err != nil {
		t.Fatal(err)
	}
	refused("belongs to user 12345")
	private := t.TempDir()
	if err := errors.Join(os.Remove(base), os.Chmod(private, 0o700), os.Symlink(private, base), os.Lchown(base, 12345, -1)); err != nil {
		t.Fatal(err)
	}
	refused("symbolic link of user 12345")
}

// TestClose: of a job that was stopped without its driver, job.json and the output of its agents on
// Slurm's nodes stay: no secret, and nothing that only another driver needs.
func TestClose(t *testing.T) {
	d := &Dir{Path: t.TempDir(), About: File{Version: FileVersion, RunID: "run"}}
	known, err := client.CreateKnown(d.AgentsPath(), "run")
	if err != nil {
		t.Fatal(err)
	}
	d.Agents = known
	slurm := settings.SlurmSettings{Folder: d.SlurmPath()}
	if err := os.Mkdir(slurm.Folder, 0o700); err != nil {
		t.Fatal(err)
	}
	output := filepath.Join(slurm.Folder, "node1-7.out")
	for _, path := range []string{d.MembersPath(), d.TasksJournal(), d.TasksJournal() + ".spare", slurm.KeyPath(), slurm.JoinPath(), slurm.AgentPath(), slurm.BatchPath(), output} {
		if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	left, _ := filepath.Glob(filepath.Join(d.Path, "*"))
	more, _ := filepath.Glob(filepath.Join(slurm.Folder, "*"))
	if got, want := append(left, more...), []string{d.aboutPath(), slurm.Folder, output}; !slices.Equal(got, want) {
		t.Errorf("left: %q, want %q", got, want)
	}
}

// TestPrune: the folder of a job that ended is removed after a week, and that of a lost job after a
// month. A file that was written recently is not read.
func TestPrune(t *testing.T) {
	all := t.TempDir()
	begun := time.Now()
	ended := begun
	for name, about := range map[string]File{"ended": {Begun: begun, Ended: &ended}, "lost": {Begun: begun}} {
		d := &Dir{Path: filepath.Join(all, name), About: about}
		d.About.Version, d.About.RunID = FileVersion, name
		if err := errors.Join(os.Mkdir(d.Path, 0o700), d.Write(), os.WriteFile(d.Journal(), nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	for _, step := range []struct {
		after time.Duration
		left  []string
	}{
		{keepEnded / 2, []string{"ended", "lost"}},
		{keepEnded + time.Hour, []string{"lost"}},
		{keepLost + time.Hour, nil},
	} {
		prune(all, begun.Add(step.after))
		var left []string
		entries, err := os.ReadDir(all)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			left = append(left, e.Name())
		}
		if !slices.Equal(left, step.left) {
			t.Errorf("after %v: %q, want %q", step.after, left, step.left)
		}
	}
}
