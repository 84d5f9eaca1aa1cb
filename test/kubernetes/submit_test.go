package kubernetes_test

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
)

// TestSubmit runs the output of hvdrun submit kubernetes in a namespace that only admits restricted
// pods. A quota lets the job grow and then takes a pod away; a pod is evicted; the driver's pod is
// deleted, and the process of the next one is killed; and the job completes.
func TestSubmit(t *testing.T) {
	const steps = 120
	j := newJob(t, "submitted", "restricted", "-steps", fmt.Sprint(steps), "-step-time", "2ms",
		"-gate", "20=grow", "-gate", "40=shrink", "-gate", "60=evict", "-gate", "80=delete", "-gate", "100=kill")
	quota := func(pods int) string {
		return fmt.Sprintf(`{"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "team"}, "spec": {"hard": {"pods": "%d"}}}`, pods)
	}
	j.create([]byte(quota(3)))
	j.submit()
	j.say("submitted; the quota has 3 pods, of which the driver's is one")
	role := "hvdrun.dev/role"
	j.awaitSize(2)
	j.patch(j.path("ResourceQuota", "team"), quota(5))
	j.open("grow")
	j.awaitSize(4)
	j.patch(j.path("ResourceQuota", "team"), quota(4))
	j.open("shrink")
	j.awaitSize(3)
	j.await("3 agents are left", j.agents(3))

	victim := j.live(role, "agent")[0].Metadata.Name
	eviction := map[string]any{"apiVersion": "policy/v1", "kind": "Eviction", "metadata": map[string]any{"name": victim}}
	before := len(j.events())
	if err := cluster.Do(t.Context(), http.MethodPost, j.path("Pod", victim)+"/eviction", eviction, nil); err != nil {
		t.Fatal(err)
	}
	j.say("pod %s is evicted", victim)
	j.open("evict")
	j.await("the evicted pod's worker has left, and one in another pod has come", func() bool {
		var sizes []int
		for _, e := range j.events()[before:] {
			if e.Name == "world_published" {
				sizes = append(sizes, e.Size)
			}
		}
		return len(sizes) > 1 && sizes[0] == 2 && sizes[len(sizes)-1] == 3
	})

	resumed := func() int { return follow.Count(j.events(), "resumed") }
	driver := j.live(role, "driver")[0].Metadata.Name
	worlds := follow.Count(j.events(), "world_published")
	if err := cluster.Do(t.Context(), http.MethodDelete, j.path("Pod", driver), nil, nil); err != nil {
		t.Fatal(err)
	}
	j.say("the driver's pod %s is deleted", driver)
	j.await("another driver goes on", func() bool { return resumed() == 1 })
	j.open("delete")
	driver = j.live(role, "driver")[0].Metadata.Name
	if err := cluster.Kubelet().Kill(driver, "driver"); err != nil {
		t.Fatal(err)
	}
	j.say("the driver in pod %s is killed", driver)
	j.await("another driver goes on", func() bool { return resumed() == 2 })
	if n := follow.Count(j.events(), "world_published"); n != worlds {
		t.Errorf("%d worlds, want %d: the workers have noticed the drivers' ends", n, worlds)
	}
	j.open("kill")
	j.finish(steps)
}
