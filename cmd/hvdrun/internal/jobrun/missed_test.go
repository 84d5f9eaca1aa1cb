package jobrun

import (
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/job"
)

// TestMissedEvents: wherever one driver's events file ends, and however much of its past the
// journal has dropped, the next driver completes the file: it contains each event once and in
// order.
func TestMissedEvents(t *testing.T) {
	for seed := range uint64(50) {
		synctest.Test(t, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 3))
			const before = "an event of another job\n"
			path := filepath.Join(t.TempDir(), "events")
			if err := os.WriteFile(path, []byte(before), 0o600); err != nil {
				t.Fatal(err)
			}
			var logged strings.Builder
			log := logrus.New()
			log.SetOutput(&logged)
			n, want := 0, before
			next := func(f *eventFile) job.Event {
				n++
				e := job.Event{Time: time.Unix(int64(n), 0), Name: job.Reset, Fields: []job.Field{{Key: "count", Value: n}}}
				f.write(e)
				want += fmt.Sprintf(`{"time":"%s","event":"reset","count":%d}`, e.Time.UTC().Format("2006-01-02T15:04:05.000000000Z07:00"), n) + "\n"
				return e
			}
			// Each driver except the last dies with a full disk.
			var mark []byte
			var since []job.Event // events in the journal
			for turn := range 4 {
				file, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
				if err != nil {
					t.Fatal(err)
				}
				disk := &shortDisk{room: rnd.IntN(600)}
				f := newEventFile(file, log)
				if turn > 0 {
					marked, replayed := f.replay(int64(len(before)))
					if mark != nil {
						marked(mark)
					}
					for _, e := range since {
						replayed(e)
					}
				}
				if turn < 3 {
					f.file = disk
				}
				for range 1 + rnd.IntN(8) {
					since = append(since, next(f))
					if rnd.IntN(3) == 0 {
						synctest.Wait()
					}
					if rnd.IntN(4) == 0 {
						mark, since = f.mark(), nil
					}
				}
				if turn == 3 {
					if err := f.close(cli.FlushPatience); err != nil {
						t.Error(err)
					}
					break
				}
				_ = f.lines.Flush(time.Nanosecond) // the driver dies
				synctest.Wait()
				if _, err := io.WriteString(file, disk.String()); err != nil {
					t.Fatal(err)
				}
				file.Close()
			}
			got, err := os.ReadFile(path)
			if err != nil || string(got) != want {
				t.Fatalf("seed %d: %v\n%s\nwant\n%s\nthe log: %s", seed, err, got, want, logged.String())
			}
		})
	}
}
