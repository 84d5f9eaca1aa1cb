package driver_test

import (
	"context"
	"fmt"
	"io"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/job"
)

// Another program than hvdrun runs a job of one worker on this machine.
func ExampleRun() {
	log := logrus.New()
	log.SetOutput(io.Discard)
	err := driver.Run(context.Background(), driver.Config{
		Command: []string{"true"},
		Source:  discovery.Fixed{{Name: "localhost", Slots: 1}},
		Size:    job.Size{NP: 1},
		Events: func(e job.Event) {
			if e.Name == "worker_exited" || e.Name == "job_done" {
				fmt.Println(e.Name)
			}
		},
		Log: log,
	})
	fmt.Println(job.ExitStatus(err), err)
	// Output:
	// worker_exited
	// job_done
	// 0 <nil>
}
