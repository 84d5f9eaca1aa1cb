package kubernetes_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/hvdrun/hvdrun/internal/testbed/follow"
	"github.com/hvdrun/hvdrun/internal/testbed/kubernetes"
)

// TestMPIJob runs hvdrun as the launcher of an MPIJob, whose hosts are those of the operator's
// script, which ssh reaches: it grows and shrinks as the MPIJob's workers do.
func TestMPIJob(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), follow.Patience)
	defer cancel()
	operator, err := cluster.StartMPIOperator(ctx)
	if errors.Is(err, kubernetes.ErrMissing) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer operator.Stop()
	const steps = 60
	j := newJob(t, "mpi", "baseline", "-steps", fmt.Sprint(steps), "-step-time", "2ms", "-gate", "20=grow", "-gate", "40=shrink")
	text, err := os.ReadFile("../../../examples/kubernetes/mpi-operator/mpijob.yaml")
	if err != nil {
		t.Fatal(err)
	}
	j.create(bytes.Replace(text, []byte("- -np=2\n"), []byte("- --events-file=/shared/mpi/events\n                - -np=2\n"), 1))
	defer func() {
		if t.Failed() {
			log, _ := os.ReadFile(operator.LogPath())
			t.Logf("the operator:\n%s", lastLines(string(log)))
		}
	}()
	workers := func(n int) {
		t.Helper()
		j.patch(j.path("MPIJob", "train"), fmt.Sprintf(`{"spec": {"mpiReplicaSpecs": {"Worker": {"replicas": %d}}}}`, n))
		j.say("the MPIJob has %d workers", n)
	}
	j.awaitSize(2)
	workers(3)
	j.open("grow")
	j.awaitSize(3)
	workers(1)
	j.open("shrink")
	j.awaitSize(1)
	j.await("the MPIJob has succeeded", func() bool {
		var o struct {
			Status struct {
				Conditions []struct{ Type, Status string } `json:"conditions"`
			} `json:"status"`
		}
		if err := cluster.Do(t.Context(), http.MethodGet, j.path("MPIJob", "train"), nil, &o); err != nil {
			t.Error(err)
		}
		for _, c := range o.Status.Conditions {
			if c.Type == "Succeeded" && c.Status == "True" {
				return true
			}
		}
		return false
	})
	if _, err := os.Stat(filepath.Join(j.dir, "steps")); err != nil {
		t.Error(err)
	}
	j.check(steps)
}
