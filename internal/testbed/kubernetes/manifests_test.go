package kubernetes_test

import (
	"bytes"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/hvdrun/hvdrun/internal/testbed/kubernetes"
)

// TestManifests does what examples/kubernetes/README.md says: it makes the cluster's keys, applies
// the manifests, scales the StatefulSet up and down, and deletes a pod.
func TestManifests(t *testing.T) {
	const steps = 90
	j := newJob(t, "training", "privileged", "-steps", "90", "-step-time", "2ms", "-gate", "20=grow", "-gate", "40=shrink", "-gate", "60=delete")
	keys := filepath.Join(t.TempDir(), "train")
	hvdrun := func(args ...string) {
		t.Helper()
		if out, err := exec.Command(filepath.Join(image.bin, "hvdrun"), args...).CombinedOutput(); err != nil {
			t.Fatalf("hvdrun %v: %v: %s", args, err, out)
		}
	}
	token := filepath.Join(t.TempDir(), "token")
	hvdrun("cluster", "init", keys)
	hvdrun("cluster", "token", keys, token, "--reusable", "--life", "8760h", "--host", "train-worker-*")
	j.secret("train-cluster", map[string]string{"authority.pem": filepath.Join(keys, "authority.pem"), "state.json": filepath.Join(keys, "state.json")})
	j.secret("train-token", map[string]string{"token": token})
	for _, file := range []string{"rbac.yaml", "cluster.yaml", "workers.yaml"} {
		j.create(manifest(t, file))
	}
	name, worker, driver := "app.kubernetes.io/name", "train-worker", "train-driver"
	ready := func(n int) func() bool {
		return func() bool {
			var set struct {
				Status struct {
					Ready int `json:"readyReplicas"`
				} `json:"status"`
			}
			if err := cluster.Do(t.Context(), http.MethodGet, j.path("StatefulSet", worker), nil, &set); err != nil {
				t.Error(err)
			}
			return set.Status.Ready == n
		}
	}
	scale := func(n string) { j.patch(j.path("StatefulSet", worker), `{"spec":{"replicas":`+n+`}}`) }
	j.await("4 pods are ready", ready(4))
	text := bytes.Replace(manifest(t, "driver.yaml"), []byte("- --min-np=1\n"), []byte("- --min-np=1\n            - --events-file=/shared/training/events\n"), 1)
	j.create(text)
	j.awaitSize(4)
	scale("5")
	j.open("grow")
	j.awaitSize(5)
	scale("2")
	j.open("shrink")
	j.awaitSize(2)
	before := len(j.events())
	if err := cluster.Do(t.Context(), http.MethodDelete, j.path("Pod", worker+"-1"), nil, nil); err != nil {
		t.Fatal(err)
	}
	j.open("delete")
	j.await("the pod that was deleted has been drained", func() bool {
		for _, e := range j.events()[before:] {
			if e.Name == "world_published" && e.Size == 1 {
				return true
			}
		}
		return false
	})
	j.await("the driver's Job is complete", func() bool {
		var o struct {
			Status struct {
				Succeeded int `json:"succeeded"`
				Failed    int `json:"failed"`
			} `json:"status"`
		}
		if err := cluster.Do(t.Context(), http.MethodGet, j.path("Job", driver), nil, &o); err != nil {
			t.Error(err)
		}
		if o.Status.Failed > 0 {
			t.Fatal("the driver has failed")
		}
		return o.Status.Succeeded == 1
	})
	j.await("2 pods of agents are left", func() bool { return len(j.live(name, worker)) == 2 })
	j.check(steps)
}

// manifest reads one, whose image is this machine's.
func manifest(t *testing.T, file string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../../examples/kubernetes", file))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// secret makes one from files.
func (j *job) secret(name string, files map[string]string) {
	j.Helper()
	data := map[string][]byte{}
	for key, path := range files {
		text, err := os.ReadFile(path)
		if err != nil {
			j.Fatal(err)
		}
		data[key] = text
	}
	o := map[string]any{"apiVersion": "v1", "kind": "Secret", "metadata": map[string]any{"name": name}, "data": data}
	if err := cluster.Do(j.Context(), http.MethodPost, kubernetes.Path(j.namespace, "Secret", ""), o, nil); err != nil {
		j.Fatal(err)
	}
}
