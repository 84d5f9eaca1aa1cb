package kubernetes_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/kubernetes"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// image is the image of all pods: hvdrun, its plugin, and the training program train, which reads
// its flags from a file. /shared is a folder of the test.
var image struct{ bin, plugins, shared string }

// cluster is the cluster that all tests share.
var cluster *kubernetes.Cluster

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "hvdrun-kubernetes-")
	if err != nil {
		panic(err)
	}
	code := run(m, dir)
	if code == 0 {
		if err := os.RemoveAll(dir); err != nil {
			panic(err)
		}
	}
	os.Exit(code)
}

func run(m *testing.M, dir string) int {
	programs, err := filepath.Abs("../../bin/kubernetes")
	if err != nil {
		panic(err)
	}
	if _, err := os.Stat(programs); errors.Is(err, os.ErrNotExist) || os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, kubernetes.ErrMissing)
		return 0
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		panic(err)
	}
	if err := makeImage(dir); err != nil {
		panic(err)
	}
	begun := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), follow.Patience)
	defer cancel()
	cluster, err = kubernetes.Start(ctx, dir, programs, map[string]string{
		"/usr/local/bin": image.bin, "/usr/local/lib/hvdrun/plugins": image.plugins, "/shared": image.shared})
	if err != nil {
		panic(fmt.Sprint(err, "; what is there is in ", dir))
	}
	fmt.Printf("the API server, the controllers and etcd are up after %v\n", time.Since(begun).Round(time.Millisecond))
	defer cluster.Stop()
	code := m.Run()
	if code != 0 {
		fmt.Println("logs are in", dir)
	}
	return code
}

func makeImage(dir string) error {
	image.bin, image.plugins, image.shared = filepath.Join(dir, "bin"), filepath.Join(dir, "plugins"), filepath.Join(dir, "shared")
	for _, d := range []string{image.bin, image.plugins, image.shared} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return err
		}
	}
	if err := os.Chmod(image.shared, 0o777); err != nil {
		return err
	}
	build := func(dir string, args ...string) error {
		cmd := exec.Command("go", append([]string{"-C", dir, "build"}, args...)...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w: %s", cmd, err, out)
		}
		return nil
	}
	const train = "#!/bin/sh\nread -r namespace < /shared/namespace; cd /shared/$namespace; exec trainer -log steps -dir . $(cat flags)\n"
	return errors.Join(build("../../cmd/hvdrun", "-o", image.bin+"/", "."), build("../trainer", "-o", image.bin+"/", "."),
		build("../../plugins/kubernetes", "-o", image.plugins+"/", "."),
		os.WriteFile(filepath.Join(image.bin, "train"), []byte(train), 0o755))
}

// job is a job in its own namespace.
type job struct {
	*testing.T
	namespace string
	dir       string // in the pods, /shared/NAMESPACE
	begun     time.Time
	told      int // events that were printed
}

// newJob creates a namespace that enforces a level of pod security. The job's workers train with
// the flags.
func newJob(t *testing.T, namespace, level string, flags ...string) *job {
	t.Helper()
	j := &job{T: t, namespace: namespace, dir: filepath.Join(image.shared, namespace), begun: time.Now()}
	if err := os.Mkdir(j.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Chmod(j.dir, 0o777), cluster.Namespace(t.Context(), namespace, level),
		os.WriteFile(filepath.Join(j.dir, "flags"), []byte(strings.Join(flags, " ")), 0o644),
		os.WriteFile(filepath.Join(image.shared, "namespace"), []byte(namespace+"\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, p := range j.pods(nil) {
				for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
					t.Logf("== %s/%s: %s %s\n%s", p.Metadata.Name, c.Name, p.Status.Phase, p.Status.Message, lastLines(cluster.Kubelet().Log(p.Metadata.Name, c.Name)))
				}
			}
			j.print()
		}
		// All pods end at once: otherwise the next test would have less processor time.
		_ = cluster.Do(context.Background(), http.MethodDelete, kubernetes.Path("", "Namespace", namespace), nil, nil)
	})
	return j
}

// lastLines returns the end of a text.
func lastLines(text string) string {
	lines := strings.SplitAfter(text, "\n")
	return strings.Join(lines[max(0, len(lines)-30):], "")
}

// say prints a message with the time since the job began.
func (j *job) say(format string, args ...any) {
	j.Logf("%7.3fs %s", time.Since(j.begun).Seconds(), fmt.Sprintf(format, args...))
}

// create creates the objects of a YAML text.
func (j *job) create(text []byte) {
	j.Helper()
	if err := cluster.Create(j.Context(), j.namespace, text); err != nil {
		j.Fatal(err)
	}
}

// submit creates the objects that hvdrun submit kubernetes prints for a job digits of 1 to 4
// agents, 2 at first, with further flags.
func (j *job) submit(flags ...string) {
	j.Helper()
	args := []string{"submit", "kubernetes", "--name", "digits", "--image", "train:1", "-np", "2", "--min-np", "1", "--max-np", "4",
		"--cpu", "100m", "--memory", "64Mi", "--driver-flag=--events-file=/shared/" + j.namespace + "/events"}
	cmd := exec.Command(filepath.Join(image.bin, "hvdrun"), append(append(args, flags...), "--", "train")...)
	text, err := cmd.Output()
	if err != nil {
		j.Fatalf("%v: %v\n%s", cmd, err, text)
	}
	j.create(text)
}

// agents returns a function that returns whether n agents of the job run.
func (j *job) agents(n int) func() bool {
	return func() bool { return len(j.live("hvdrun.dev/role", "agent")) == n }
}

// finish waits for the end of a submitted job, and checks that no worker has failed.
func (j *job) finish(steps int) {
	j.Helper()
	j.complete("digits-driver")
	j.await("no agent is left, nor their Job", func() bool {
		err := cluster.Do(j.Context(), http.MethodGet, j.path("Job", "digits-agents"), nil, nil)
		return kubernetes.Code(err) == http.StatusNotFound && j.agents(0)()
	})
	for _, e := range j.events() {
		if e.Name == "worker_exited" && e.Cause == "failed" {
			j.Errorf("a worker has failed: %v", e)
		}
	}
	j.check(steps)
}

func (j *job) path(kind, name string) string { return kubernetes.Path(j.namespace, kind, name) }

// patch changes an object.
func (j *job) patch(path, text string) {
	j.Helper()
	if err := cluster.Patch(j.Context(), path, kubernetes.MergePatch, json.RawMessage(text), nil); err != nil {
		j.Fatal(err)
	}
}

// pod is the part of a pod that tests read.
type pod struct {
	Metadata struct {
		Name    string            `json:"name"`
		Labels  map[string]string `json:"labels"`
		Deleted *time.Time        `json:"deletionTimestamp"`
	} `json:"metadata"`
	Spec struct {
		InitContainers []struct{ Name string } `json:"initContainers"`
		Containers     []struct{ Name string } `json:"containers"`
	} `json:"spec"`
	Status struct {
		Phase   string `json:"phase"`
		Message string `json:"message"`
	} `json:"status"`
}

// pods returns the pods for which keep returns true; nil: all.
func (j *job) pods(keep func(pod) bool) []pod {
	var list struct {
		Items []pod `json:"items"`
	}
	if err := cluster.Do(context.WithoutCancel(j.Context()), http.MethodGet, j.path("Pod", ""), nil, &list); err != nil {
		j.Error(err)
		return nil
	}
	return slices.DeleteFunc(list.Items, func(p pod) bool { return keep != nil && !keep(p) })
}

// live returns the running pods with a label that are not being deleted.
func (j *job) live(key, value string) []pod {
	return j.pods(func(p pod) bool {
		return p.Metadata.Labels[key] == value && p.Status.Phase == "Running" && p.Metadata.Deleted == nil
	})
}

// events returns the job's events.
func (j *job) events() []follow.Event {
	text, err := os.ReadFile(filepath.Join(j.dir, "events"))
	if err != nil {
		return nil
	}
	var events []follow.Event
	for line := range bytes.Lines(text) {
		var e follow.Event
		if json.Unmarshal(line, &e) == nil {
			events = append(events, e)
		}
	}
	return events
}

// print prints the events that were not printed yet.
func (j *job) print() {
	events := j.events()
	for _, e := range events[min(j.told, len(events)):] {
		if e.Name != "audit" && e.Name != "first_commit" {
			j.Logf("%7.3fs   %v", e.Time.Sub(j.begun).Seconds(), e)
		}
	}
	j.told = len(events)
}

// await waits until done returns true.
func (j *job) await(what string, done func() bool) {
	j.Helper()
	over := ""
	if !follow.Poll(func() bool {
		for _, e := range j.events() {
			if e.Name == "job_done" && e.Status != 0 {
				over = e.String()
			}
		}
		return over != "" || done()
	}) || over != "" {
		j.print()
		j.Fatalf("did not happen: %s; %s", what, over)
	}
	j.print()
	j.say("%s", what)
}

// size returns the size of the last published world.
func (j *job) size() int {
	size := 0
	for _, e := range j.events() {
		if e.Name == "world_published" {
			size = e.Size
		}
	}
	return size
}

// awaitSize waits until a world of this size trains.
func (j *job) awaitSize(size int) {
	j.Helper()
	j.await(fmt.Sprintf("a world of %d trains", size), func() bool { return j.size() == size })
}

// open opens a gate of the trainer: it creates the file for which workers wait.
func (j *job) open(gate string) {
	j.Helper()
	if err := os.WriteFile(filepath.Join(j.dir, gate), nil, 0o644); err != nil {
		j.Fatal(err)
	}
}

// check checks that no step was lost or done twice.
func (j *job) check(steps int) {
	j.Helper()
	lines, err := steplog.Follow[steplog.Line](filepath.Join(j.dir, "steps")).Next()
	if err != nil {
		j.Fatal(err)
	}
	pids := map[string]int{} // numbers a pod's own PIDs, and again those of the next pod of its name
	for i, l := range lines {
		if pids[l.Worker] == 0 {
			pids[l.Worker] = len(pids) + 1
		}
		lines[i].PID = pids[l.Worker]
	}
	if err := steplog.Check(lines, steps, steplog.Size); err != nil {
		j.Error(err)
	}
	count := map[string]int{}
	for _, e := range j.events() {
		count[string(e.Name)]++
	}
	var words []string
	for _, name := range slices.Sorted(maps.Keys(count)) {
		words = append(words, fmt.Sprintf("%s %d", name, count[name]))
	}
	j.say("%d steps, none lost; events: %s", steps, strings.Join(words, ", "))
}
