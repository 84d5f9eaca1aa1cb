package plan_test

import (
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/hvdrun/hvdrun/plan"
)

func worker() plan.Worker {
	return plan.Worker{
		RunID: "run-1", Incarnation: "i7", Slot: slot("b", 3, 5, 1, 2, 1, 2), Size: 6, Elastic: true,
		GroupRank: 2, GroupSize: 4,
		LauncherAddr: "[::1]:4000", Credentials: "s3cret", MasterAddr: "a", MasterPort: 29500,
		Restarts: 1, MaxRestarts: 9, StallWarning: -1,
		Tuning: plan.Tuning{
			EncryptData: true, NetworkInterfaces: []string{"eth0", "ib0"}, Listen: "10.0.0.5", PortRange: "40000-40100", TimelineFilename: "/tmp/t", ShareOutput: true,
			FusionThreshold: 16, CycleTime: 2500 * time.Microsecond, Connections: 4,
			VerifyState: 100, HealState: true, CommitReplicas: 2,
		},
	}
}

func variables(t interface{ Fatalf(string, ...any) }, w plan.Worker) map[string]string {
	env := map[string]string{}
	for _, entry := range w.Environ() {
		name, value, found := strings.Cut(entry, "=")
		if _, twice := env[name]; !found || twice {
			t.Fatalf("%q is no variable, or there twice", entry)
		}
		env[name] = value
	}
	return env
}

func lookupIn(env map[string]string) func(string) (string, bool) {
	return func(name string) (string, bool) { value, found := env[name]; return value, found }
}

func TestEnvironHasTheNamesOfTheContract(t *testing.T) {
	want := map[string]string{
		"HOROVOD_RANK": "5", "HOROVOD_SIZE": "6", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
		"HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2", "HOROVOD_HOSTNAME": "b", "HOROVOD_ELASTIC": "1",
		"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2", "GROUP_WORLD_SIZE": "4",
		"ROLE_RANK": "5", "ROLE_WORLD_SIZE": "6", "ROLE_NAME": "default", "MASTER_ADDR": "a", "MASTER_PORT": "29500",
		"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "9", "TORCHELASTIC_RUN_ID": "run-1",
		"HVD_RUN_ID": "run-1", "HVD_SLOT": "3", "HVD_LAUNCHER_ADDR": "[::1]:4000", "HVD_INCARNATION": "i7",
		"HVD_CREDENTIALS": "s3cret", "HVD_ENCRYPT_DATA": "1", "HVD_NETWORK_INTERFACES": "eth0,ib0", "HVD_LISTEN": "10.0.0.5", "HVD_PORT_RANGE": "40000-40100",
		"HVD_TIMELINE_FILENAME": "/tmp/t", "HVD_SHARE_OUTPUT": "1",
		"HVD_FUSION_THRESHOLD_MB": "16", "HVD_CYCLE_TIME_MS": "2.5", "HVD_STALL_WARNING": "0", "HVD_CONNECTIONS": "4",
		"HVD_VERIFY_STATE": "100", "HVD_HEAL_STATE": "1", "HVD_COMMIT_REPLICAS": "2",
	}
	if got := variables(t, worker()); !maps.Equal(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}

func TestEnvironWithoutGroupOrMaster(t *testing.T) {
	w := worker()
	w.GroupRank, w.GroupSize, w.MasterAddr = 0, 0, ""
	env := variables(t, w)
	if env["GROUP_RANK"] != "1" || env["GROUP_WORLD_SIZE"] != "2" {
		t.Errorf("group %s of %s; want that of the cross ranks", env["GROUP_RANK"], env["GROUP_WORLD_SIZE"])
	}
	for _, name := range []string{"MASTER_ADDR", "MASTER_PORT"} {
		if value, found := env[name]; found {
			t.Errorf("%s=%s without a master", name, value)
		}
	}
}

func TestWorkerComesBackFromItsEnvironment(t *testing.T) {
	text := rapid.StringMatching(`[A-Za-z0-9+/=:.-]{1,40}`)
	rapid.Check(t, func(t *rapid.T) {
		place := func(label string) (rank, size int) {
			size = rapid.IntRange(1, 1000).Draw(t, label+" size")
			return rapid.IntRange(0, size-1).Draw(t, label), size
		}
		w := plan.Worker{RunID: text.Draw(t, "run"), Incarnation: text.Draw(t, "incarnation"),
			LauncherAddr: text.Draw(t, "addr"), Credentials: text.Draw(t, "credentials"),
			MasterAddr: text.Draw(t, "master"), MasterPort: rapid.IntRange(0, 65535).Draw(t, "port"),
			Restarts: rapid.IntRange(0, 1000).Draw(t, "restarts"), MaxRestarts: rapid.Int().Draw(t, "max") & 0xffff,
			Elastic: rapid.Bool().Draw(t, "elastic"), Tuning: plan.Tuning{EncryptData: rapid.Bool().Draw(t, "encrypt")}}
		w.Slot.Host = text.Draw(t, "host")
		w.Slot.Index = rapid.IntRange(0, plan.MaxSlots-1).Draw(t, "index")
		w.Slot.Rank, w.Size = place("rank")
		w.Slot.LocalRank, w.Slot.LocalSize = place("local rank")
		w.Slot.CrossRank, w.Slot.CrossSize = place("cross rank")
		w.GroupRank, w.GroupSize = place("group rank")
		w.NetworkInterfaces = rapid.SliceOfN(rapid.StringMatching(`[a-z0-9]{1,8}`), 0, 3).Draw(t, "interfaces")
		if len(w.NetworkInterfaces) == 0 {
			w.NetworkInterfaces = nil
		}
		w.TimelineFilename = rapid.StringMatching(`(/[a-z ]{1,8})?`).Draw(t, "timeline")
		got, started, err := plan.WorkerFromEnv(lookupIn(variables(t, w)))
		if err != nil || !started || !reflect.DeepEqual(got, w) {
			t.Fatalf("got  %+v, %v, %v\nwant %+v", got, started, err, w)
		}
	})
}

func TestWorkerFromEnvNotStartedByHvdrun(t *testing.T) {
	for _, env := range []map[string]string{nil, {"HVD_LAUNCHER_ADDR": ""}, {"HOROVOD_RANK": "x", "HVD_RUN_ID": "r"}} {
		if got, started, err := plan.WorkerFromEnv(lookupIn(env)); started || err != nil {
			t.Errorf("in %v: got %+v, %v, %v", env, got, started, err)
		}
	}
}

// TestWorkerFromEnvUnderTorchrun: a process that torchrun started beside others gets an error,
// because it would train alone.
func TestWorkerFromEnvUnderTorchrun(t *testing.T) {
	for _, c := range []struct {
		size string
		fail bool
	}{{"", false}, {"1", false}, {"2", true}} {
		env := map[string]string{"TORCHELASTIC_RUN_ID": "job", "WORLD_SIZE": c.size}
		_, started, err := plan.WorkerFromEnv(func(name string) (string, bool) { v, is := env[name]; return v, is })
		if started || (err != nil) != c.fail {
			t.Errorf("of %q processes: %v, %v", c.size, started, err)
		}
		if err != nil && !strings.Contains(err.Error(), "torchrun --elastic") {
			t.Error(err)
		}
	}
}

func TestChoicesOfTheUserAreInherited(t *testing.T) {
	env := variables(t, worker())
	if got, _, err := plan.WorkerFromEnv(lookupIn(env)); err != nil || got.Algorithm != "" || got.OnlySockets {
		t.Errorf("without any: %q, %t, %v", got.Algorithm, got.OnlySockets, err)
	}
	env["HVD_COLLECTIVE_ALGORITHM"], env["HVD_ONLY_SOCKETS"] = "ring", "1"
	if got, _, err := plan.WorkerFromEnv(lookupIn(env)); err != nil || got.Algorithm != "ring" || !got.OnlySockets {
		t.Errorf("got %q, %t, %v", got.Algorithm, got.OnlySockets, err)
	}
	env["HVD_ONLY_SOCKETS"] = "please"
	if _, _, err := plan.WorkerFromEnv(lookupIn(env)); err == nil || !strings.Contains(err.Error(), "HVD_ONLY_SOCKETS") {
		t.Errorf("an invalid value: %v", err)
	}
}

func TestWorkerFromEnvNamesTheVariable(t *testing.T) {
	broken := map[string][]string{ // invalid values
		"HVD_RUN_ID": {""}, "HVD_INCARNATION": {""}, "HVD_CREDENTIALS": {""}, "HOROVOD_HOSTNAME": {""},
		"HVD_SLOT":           {"", "x", "-1", "+1", "65536"},
		"HOROVOD_RANK":       {"", "x", "6", "1e1", "99999999999999999999"},
		"HOROVOD_SIZE":       {"", "0", " 6"},
		"HOROVOD_LOCAL_RANK": {"2"}, "HOROVOD_LOCAL_SIZE": {"y"},
		"HOROVOD_CROSS_RANK": {"2"}, "HOROVOD_CROSS_SIZE": {""},
		"HOROVOD_ELASTIC": {"yes"}, "HVD_ENCRYPT_DATA": {"true"},
		"HVD_FUSION_THRESHOLD_MB": {"x", "-1", "NaN", "1e9"}, "HVD_CYCLE_TIME_MS": {"1ms"}, "HVD_STALL_WARNING": {"-0.5", "+Inf"}, "HVD_CONNECTIONS": {"-1", "x"},
		"GROUP_RANK": {"4"}, "MASTER_PORT": {"65536"}, "TORCHELASTIC_MAX_RESTARTS": {"-1"}, "TORCHELASTIC_RESTART_COUNT": {"x"},
	}
	for _, name := range slices.Sorted(maps.Keys(broken)) {
		for _, value := range broken[name] {
			env := variables(t, worker())
			env[name] = value
			got, started, err := plan.WorkerFromEnv(lookupIn(env))
			if err == nil || !started || !strings.Contains(err.Error(), name) {
				t.Errorf("%s=%q: got %+v, %v, %v; want an error that names it", name, value, got, started, err)
			}
			if err != nil && strings.Contains(err.Error(), "s3cret") {
				t.Errorf("%v tells the secret", err)
			}
		}
	}
}

// TestOwnWorker: the credentials are in the environment only until they have been read, and the
// process keeps them. In a worker's child the error says why they are missing.
func TestOwnWorker(t *testing.T) {
	start := func(env map[string]string) {
		for name, value := range env {
			t.Setenv(name, value)
		}
	}
	start(variables(t, worker()))
	for range 2 {
		got, started, err := plan.OwnWorker()
		if err != nil || !started || got.Credentials != worker().Credentials {
			t.Fatalf("got %+v, %v, %v", got, started, err)
		}
		if value, is := os.LookupEnv("HVD_CREDENTIALS"); is {
			t.Errorf("the environment has %q", value)
		}
	}
	start(map[string]string{"HVD_INCARNATION": "next", "HVD_CREDENTIALS": ""})
	_, started, err := plan.OwnWorker()
	if !started || err == nil || !strings.Contains(err.Error(), "HVD_CREDENTIALS is not set: this process was started by a worker") {
		t.Errorf("a child: %v, %v", started, err)
	}
	start(map[string]string{"HVD_CREDENTIALS": "another"})
	if got, _, err := plan.OwnWorker(); err != nil || got.Credentials != "another" {
		t.Errorf("the next worker: %+v, %v", got, err)
	}
}

// TestOwnSocket: OwnSocket returns the socket once.
func TestOwnSocket(t *testing.T) {
	t.Setenv("HVD_WORKER_SOCKET", "five")
	if fd, ok := plan.OwnSocket(); ok {
		t.Errorf("no number: %d", fd)
	}
	t.Setenv("HVD_WORKER_SOCKET", "5")
	if fd, ok := plan.OwnSocket(); fd != 5 || !ok {
		t.Errorf("%d, %v", fd, ok)
	}
	if value, is := os.LookupEnv("HVD_WORKER_SOCKET"); is {
		t.Errorf("it is %q", value)
	}
	if _, ok := plan.OwnSocket(); ok {
		t.Error("again")
	}
}

func TestWorkerFromEnvDoesWithoutTheNamesOfTorchrun(t *testing.T) {
	env := variables(t, worker())
	for _, name := range []string{"GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE",
		"TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "HOROVOD_ELASTIC",
		"HVD_ENCRYPT_DATA", "HVD_NETWORK_INTERFACES", "HVD_TIMELINE_FILENAME", "HVD_FUSION_THRESHOLD_MB", "HVD_CYCLE_TIME_MS", "HVD_STALL_WARNING",
		"HVD_CONNECTIONS", "HVD_LISTEN", "HVD_PORT_RANGE", "HVD_SHARE_OUTPUT",
		"HVD_VERIFY_STATE", "HVD_HEAL_STATE", "HVD_COMMIT_REPLICAS"} {
		delete(env, name)
	}
	got, started, err := plan.WorkerFromEnv(lookupIn(env))
	want := worker()
	want = plan.Worker{RunID: want.RunID, Incarnation: want.Incarnation, Slot: want.Slot, Size: want.Size,
		LauncherAddr: want.LauncherAddr, Credentials: want.Credentials}
	if err != nil || !started || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v, %v; want %+v", got, started, err, want)
	}
}

func TestGPUFromEnv(t *testing.T) {
	for _, c := range []struct {
		backend, library, shared string
		want                     plan.GPU
	}{
		{"", "", "", plan.GPU{}},
		{"ipc", "/lib/nccl", "1", plan.GPU{Backend: "ipc", NCCLLibrary: "/lib/nccl", NCCLShared: true}},
		{"", "", "0", plan.GPU{}},
	} {
		t.Setenv("HVD_CUDA_BACKEND", c.backend)
		t.Setenv("HVD_NCCL_LIBRARY", c.library)
		t.Setenv("NCCL_MULTI_RANK_GPU_ENABLE", c.shared)
		if got := plan.GPUFromEnv(); got != c.want {
			t.Errorf("%+v was read as %+v", c, got)
		}
	}
}

// FuzzWorkerFromEnv: an environment is refused, or yields a valid worker that survives Environ.
func FuzzWorkerFromEnv(f *testing.F) {
	f.Add(strings.Join(worker().Environ(), "\x00"))
	f.Add("HVD_LAUNCHER_ADDR=a:1\x00HOROVOD_RANK=99999999999999999999")
	f.Fuzz(func(t *testing.T, environ string) {
		env := map[string]string{}
		for entry := range strings.SplitSeq(environ, "\x00") {
			name, value, _ := strings.Cut(entry, "=")
			env[name] = value
		}
		w, ok, err := plan.WorkerFromEnv(lookupIn(env))
		if !ok || err != nil {
			return
		}
		s := w.Slot
		if s.Rank < 0 || s.Rank >= w.Size || s.LocalRank >= s.LocalSize || s.CrossRank >= s.CrossSize || s.Index >= plan.MaxSlots {
			t.Errorf("taken: %+v", w)
		}
		again, _, err := plan.WorkerFromEnv(lookupIn(variables(t, w)))
		w.Algorithm, w.OnlySockets = "", false // workers inherit these, so Environ omits them
		if w.GroupSize == 0 {
			w.GroupRank, w.GroupSize = s.CrossRank, s.CrossSize
		}
		for _, d := range []struct{ was, is *time.Duration }{{&w.CycleTime, &again.CycleTime}, {&w.StallWarning, &again.StallWarning}} {
			if (*d.was - *d.is).Abs() < time.Microsecond { // of up to 68 years
				*d.was = *d.is
			}
		}
		if err != nil || !reflect.DeepEqual(again, w) {
			t.Errorf("%+v became %+v, %v", w, again, err)
		}
	})
}
