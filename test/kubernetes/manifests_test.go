package kubernetes_test

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/test/kubernetes"
)

// TestManifests does what examples/kubernetes/README.md says, in a namespace that only admits
// restricted pods: it creates the cluster's keys, applies the kustomizations, scales the
// StatefulSet up and down, and deletes a pod.
func TestManifests(t *testing.T) {
	const steps = 90
	j := newJob(t, "training", "restricted", "-steps", "90", "-step-time", "2ms", "-gate", "20=grow", "-gate", "40=shrink", "-gate", "60=delete")
	j.deploy(j.render("base", ""))
	name, worker, driver := "app.kubernetes.io/name", "train-worker", "train-driver"
	scale := func(n string) { j.patch(j.path("StatefulSet", worker), `{"spec":{"replicas":`+n+`}}`) }
	j.drive()
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
	j.complete(driver)
	j.await("2 pods of agents are left", func() bool { return len(j.live(name, worker)) == 2 })
	j.check(steps)
}

// TestManifestsRunAs runs a job with agents that are root and start workers as another user, who
// does not have the key.
func TestManifestsRunAs(t *testing.T) {
	const steps = 20
	j := newJob(t, "run-as", "privileged", "-steps", fmt.Sprint(steps))
	j.deploy(j.render("run-as", ""))
	j.drive()
	j.complete("train-driver")
	if info, err := os.Stat(filepath.Join(j.dir, "steps")); err != nil || info.Sys().(*syscall.Stat_t).Uid != 65534 {
		t.Errorf("the workers did not run as nobody: %v, %+v", err, info)
	}
	j.check(steps)
}

// TestChart does what deploy/chart/README.md says: it creates the cluster's keys, installs the
// agents, and runs a job on them.
func TestChart(t *testing.T) {
	const steps, helm = 20, "../../bin/kubernetes/helm"
	if _, err := os.Stat(helm); err != nil {
		t.Skip("the chart is NOT tested, make check-kubernetes builds helm:", err)
	}
	j := newJob(t, "chart", "restricted", "-steps", fmt.Sprint(steps))
	render := func(args ...string) []byte {
		cmd := exec.Command(helm, append([]string{"template", "train", "../../deploy/chart", "--set", "image=local/train:2"}, args...)...)
		cmd.Env = append(os.Environ(), "HOME="+t.TempDir())
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v: %v: %s", cmd, err, err.(*exec.ExitError).Stderr)
		}
		return out
	}
	j.deploy(render())
	j.create(render("--show-only", "templates/driver.yaml", "--set-json", `driver={"command": ["train"], "flags": ["--events-file=/shared/chart/events"]}`))
	j.complete("train-driver")
	j.check(steps)
}

// deploy creates keys and the objects of agents, and waits until the agents run.
func (j *job) deploy(objects []byte) {
	j.Helper()
	keys, token := filepath.Join(j.TempDir(), "train"), filepath.Join(j.TempDir(), "token")
	for _, args := range [][]string{{"init", keys}, {"token", keys, token, "--reusable", "--life", "8760h", "--host", "train-worker-*"}} {
		if out, err := exec.Command(filepath.Join(image.bin, "hvdrun"), append([]string{"cluster"}, args...)...).CombinedOutput(); err != nil {
			j.Fatalf("hvdrun cluster %v: %v: %s", args, err, out)
		}
	}
	j.secret("train-cluster", map[string]string{"authority.pem": filepath.Join(keys, "authority.pem"), "state.json": filepath.Join(keys, "state.json")})
	j.secret("train-token", map[string]string{"token": token})
	j.create(objects)
	j.await("4 pods are ready", func() bool {
		var set struct {
			Status struct {
				Ready int `json:"readyReplicas"`
			} `json:"status"`
		}
		if err := cluster.Do(j.Context(), http.MethodGet, j.path("StatefulSet", "train-worker"), nil, &set); err != nil {
			j.Error(err)
		}
		return set.Status.Ready == 4
	})
}

// drive starts the driver, which writes its events.
func (j *job) drive() {
	j.Helper()
	j.create(j.render("job", `patches:
  - target: {kind: Job, name: train-driver}
    patch: |-
      - {op: add, path: /spec/template/spec/containers/0/args/0, value: --events-file=/shared/`+j.namespace+`/events}
`))
}

// complete waits until a driver's Job is complete.
func (j *job) complete(driver string) {
	j.Helper()
	j.await("the driver's Job is complete", func() bool {
		var o struct {
			Status struct {
				Succeeded  int                     `json:"succeeded"`
				Conditions []struct{ Type string } `json:"conditions"`
			} `json:"status"`
		}
		if err := cluster.Do(j.Context(), http.MethodGet, j.path("Job", driver), nil, &o); err != nil {
			j.Error(err)
		}
		for _, c := range o.Status.Conditions {
			if c.Type == "Failed" {
				j.Fatal("the driver has failed")
			}
		}
		return o.Status.Succeeded == 1
	})
}

// render returns the objects of a kustomization of the examples, changed by an overlay.
func (j *job) render(folder, changes string) []byte {
	j.Helper()
	overlay := j.TempDir()
	base, err := filepath.Abs(filepath.Join("../../examples/kubernetes", folder))
	if err != nil {
		j.Fatal(err)
	}
	if base, err = filepath.Rel(overlay, base); err != nil {
		j.Fatal(err)
	}
	text := "resources: [" + base + "]\nimages: [{name: registry.example/train, newName: local/train, newTag: \"2\"}]\n" + changes
	if err := os.WriteFile(filepath.Join(overlay, "kustomization.yaml"), []byte(text), 0o600); err != nil {
		j.Fatal(err)
	}
	cmd := exec.Command("../../bin/kubernetes/kustomize", "build", overlay)
	out, err := cmd.Output()
	if err != nil {
		j.Fatalf("%v: %v: %s", cmd, err, err.(*exec.ExitError).Stderr)
	}
	if bytes.Contains(out, []byte("registry.example/train")) {
		j.Errorf("the overlay's image is not everywhere:\n%s", out)
	}
	return out
}

// secret creates a Secret from files.
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
