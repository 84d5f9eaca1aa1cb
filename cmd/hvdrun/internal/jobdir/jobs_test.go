package jobdir

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/job"
)

// TestTheJob: a command without a job's name means the one that runs or can be taken over; dead
// jobs do not count.
func TestTheJob(t *testing.T) {
	state, keys := privateDir(t), privateDir(t)
	env := []string{"XDG_STATE_HOME=" + state, "HOME=" + state}
	add := func(name string, about File) {
		t.Helper()
		d := &Dir{Path: filepath.Join(state, "hvdrun", "jobs", name), About: about}
		d.About.Version, d.About.RunID, d.About.Command = FileVersion, name, []string{"train", name}
		if err := safefile.MakeDir(d.Path, safefile.Private); err != nil {
			t.Fatal(err)
		}
		if err := d.Write(); err != nil {
			t.Fatal(err)
		}
	}
	ended := time.Now()
	add("ended", File{Ended: &ended})
	add("dead1", File{Boot: journal.BootID()}) // its key was in the memory of its hvdrun
	add("dead2", File{Boot: journal.BootID(), Keys: filepath.Join(keys, "gone")})
	if d, err := TheJob(env, ""); err == nil || !strings.HasPrefix(err.Error(), "no job runs") {
		t.Errorf("%+v, %v", d, err)
	}
	add("left1", File{Host: "other", Boot: "theirs", Keys: keys})
	if d, err := TheJob(env, ""); err != nil || d.About.RunID != "left1" {
		t.Errorf("%+v, %v", d, err)
	}
	add("left2", File{Host: "other", Boot: "theirs", Keys: keys})
	_, err := TheJob(env, "")
	if err == nil || !strings.Contains(err.Error(), "\n  left1  begun ") || !strings.HasSuffix(err.Error(), "  train left2") ||
		strings.Contains(err.Error(), "dead") {
		t.Error(err)
	}
	// The shell's completion offers the same jobs.
	p := &cli.Program{Env: env}
	for _, cmd := range []*cobra.Command{CompletesJobs(p, &cobra.Command{}), CompletesPlaces(p, &cobra.Command{})} {
		words, _ := cmd.ValidArgsFunction(cmd, nil, "")
		if !slices.Equal(words, []string{"left1\ttrain left1", "left2\ttrain left2"}) {
			t.Errorf("completes to %q", words)
		}
	}
	status := job.Status{Hosts: []job.Host{{Host: "a", Slots: make([]job.Slot, 1)},
		{Host: "fe80::1", Slots: []job.Slot{{State: "training"}, {Slot: 1, State: "free"}}}}}
	if got := placesOf(status); !slices.Equal(got, []string{"a", "[fe80::1]", "[fe80::1]:0\ttraining", "[fe80::1]:1\tfree"}) {
		t.Errorf("places complete to %q", got)
	}
}
