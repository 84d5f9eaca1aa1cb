package jobrun

import (
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/job"
)

// shortDisk accepts room more bytes, and then none until it gets more room.
type shortDisk struct {
	strings.Builder
	room int
}

func (d *shortDisk) Write(b []byte) (int, error) {
	n := min(d.room, len(b))
	d.room -= n
	d.Builder.Write(b[:n])
	if n < len(b) {
		return n, syscall.ENOSPC
	}
	return n, nil
}

func (d *shortDisk) Close() error { return nil }

// TestEventFile: what a full disk does not accept is written once there is room again, each line
// complete and in order.
func TestEventFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var logged strings.Builder
		log := logrus.New()
		log.SetOutput(&logged)
		disk := &shortDisk{room: 10}
		f := newEventFile(disk, log)
		event := job.Event{Time: time.Unix(1, 0), Name: job.Reset, Fields: []job.Field{{Key: "count", Value: 1}}}
		f.write(event)
		f.write(event)
		<-time.After(10 * cli.RetryPause)
		synctest.Wait()
		disk.room = 1000
		f.write(event)
		if err := f.close(cli.FlushPatience); err != nil {
			t.Error(err)
		}
		want := `{"time":"1970-01-01T00:00:01.000000000Z","event":"reset","count":1}` + "\n"
		if got := disk.String(); got != strings.Repeat(want, 3) {
			t.Errorf("%q", got)
		}
		if n := strings.Count(logged.String(), "\n"); n != 2 {
			t.Errorf("%d lines logged: %s", n, logged.String())
		}
		full := newEventFile(&shortDisk{}, log)
		full.write(event)
		if err := full.close(cli.FlushPatience); err == nil {
			t.Error("events that were not written are in no error")
		}
	})
}
