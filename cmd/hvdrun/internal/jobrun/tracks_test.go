package jobrun

import (
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/collective/timeline"
	"github.com/hvdrun/hvdrun/plan"
)

// TestTasksInTimeline: tasks are in the driver's timeline, in a row for their worker, except very
// short ones.
func TestTasksInTimeline(t *testing.T) {
	log := logrus.New()
	log.SetOutput(io.Discard)
	name := filepath.Join(t.TempDir(), "trace")
	to := openTracks(&settings.Settings{Tuning: plan.Tuning{TimelineFilename: name}, RunID: "r"}, log)
	if to == nil {
		t.Fatal("there is no timeline")
	}
	began := time.Unix(1000, 0)
	to.task("a:1", "eval/v1", began, began.Add(3*time.Millisecond))
	to.task("a:1", "quick/v1", began, began.Add(leastTask-1))
	to.file.Close()
	path, _ := timeline.DriverPath(name)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for line := range strings.Lines(string(text)) {
		var e struct {
			Name string
			Ph   string
			Ts   float64
			Dur  float64
		}
		line = strings.Trim(line, "[,\n")
		if line == "" {
			continue
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if e.Name == "eval/v1" {
			if found++; e.Ph != "X" || e.Ts != 1e9 || e.Dur != 3000 {
				t.Errorf("the task is %s", line)
			}
		}
	}
	if found != 1 || strings.Contains(string(text), "quick/v1") || !strings.Contains(string(text), "tasks a:1") {
		t.Errorf("the timeline is %s", text)
	}
}
