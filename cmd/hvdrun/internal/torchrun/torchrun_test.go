package torchrun

import (
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/pflag"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/torchrun"
)

// torchCommand returns the flags of torchrun as a command line and an environment set them, and the
// rest of the command line.
func torchCommand(t *testing.T, env []string, args ...string) (f torchFlags, left []string, err error) {
	t.Helper()
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	f.addFlags(fs)
	if err = fs.Parse(args); err == nil {
		err = f.fromEnvironment(fs, env)
	}
	return f, fs.Args(), err
}

// TestTorchrunFlags: both spellings of flags and the variables are accepted, and flags end where
// the script begins.
func TestTorchrunFlags(t *testing.T) {
	f, left, err := torchCommand(t, []string{"PET_NNODES=1:4", "PET_RDZV_ID=from-env", "PET_MODULE=1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=7"},
		"--nproc_per_node=3", "--rdzv-id", "from-flag", "-r", "3", "-t0:1", "train.py", "--nnodes", "9", "-r")
	if err != nil {
		t.Fatal(err)
	}
	if f.workers != "3" || f.id != "from-flag" || f.nnodes != "1:4" || !f.module || f.redirects != "3" || f.tee != "0:1" || f.shutdownTimeout != "7" {
		t.Errorf("%+v", f)
	}
	if !slices.Equal(left, []string{"train.py", "--nnodes", "9", "-r"}) {
		t.Errorf("%q", left)
	}
	if _, _, err := torchCommand(t, []string{"PET_MAX_RESTARTS=many"}); err == nil || !strings.Contains(err.Error(), "PET_MAX_RESTARTS") {
		t.Error(err)
	}
}

// TestTorchrunProgram: the command that a worker runs.
func TestTorchrunProgram(t *testing.T) {
	for name, c := range map[string]struct {
		flags []string
		want  string
	}{
		"script":    {nil, "python3 -u a.py x"},
		"module":    {[]string{"-m"}, "python3 -u -m a.py x"},
		"no python": {[]string{"--no-python"}, "a.py x"},
		"run path":  {[]string{"--run-path"}, "python3 -u -c import runpy"},
	} {
		f, _, err := torchCommand(t, nil, c.flags...)
		if err != nil {
			t.Fatal(err)
		}
		command, err := f.command([]string{"a.py", "x"}, nil)
		if err != nil || !strings.HasPrefix(strings.Join(command, " "), c.want) {
			t.Errorf("%s: %q, %v", name, command, err)
		}
	}
	f, _, _ := torchCommand(t, nil)
	if command, _ := f.command([]string{"a.py"}, []string{"PYTHON_EXEC=/opt/python"}); command[0] != "/opt/python" {
		t.Errorf("%q", command)
	}
	f, _, _ = torchCommand(t, nil, "-m", "--no-python")
	if _, err := f.command([]string{"a"}, nil); err == nil {
		t.Error("--module and --no-python are taken together")
	}
}

// TestTorchrunRefuses: an error names the invalid flag, before anything listens.
func TestTorchrunRefuses(t *testing.T) {
	for line, want := range map[string]string{
		"--nnodes 0":                                  "--nnodes",
		"--nnodes 3:2":                                "--nnodes",
		"--nnodes 1:2":                                "the number of nodes is fixed",
		"--nproc-per-node some":                       "--nproc-per-node",
		"--nproc-per-node xpu":                        "Intel",
		"--rdzv-backend etcd-v2":                      "--rdzv-backend",
		"--rdzv-conf join":                            "not key=value",
		"--start-method exec":                         "--start-method",
		"--numa-binding node":                         "numactl",
		"--logs-specs mine":                           "--logs-specs",
		"--event-log-handler file":                    "--event-log-handler",
		"--max-restarts -1":                           "--max-restarts",
		"--monitor-interval 0":                        "--monitor-interval",
		"--tee 4":                                     "--tee",
		"--redirects 0:9":                             "--redirects",
		"--local-ranks-filter a":                      "--local-ranks-filter",
		"--nproc-per-node 2 --local-ranks-filter 0,2": "--local-ranks-filter: there is no local rank 2: this node has 2 workers",
		"--nproc-per-node 2 --tee 2:3":                "--tee: there is no local rank 2",
		"--nproc-per-node 2 --redirects 9:3":          "--redirects: there is no local rank 9",
		"--standalone --rdzv-conf join_timeout=-1":    "--rdzv-conf: dynamic: join_timeout",
		"--rdzv-conf keep_alive_max_attempt=x":        "keep_alive_max_attempt",
		"--rdzv-conf timeout=-1":                      "--rdzv-conf: timeout",
		"--rdzv-conf read_timeout=soon":               "--rdzv-conf: read_timeout",
		"--rdzv-conf insecure=maybe":                  "--rdzv-conf: insecure",
		"--rdzv-conf is_host=maybe":                   "--rdzv-conf: is_host",
		"--shutdown-timeout never":                    "--shutdown-timeout",
		"--exit-barrier-timeout never":                "--exit-barrier-timeout",
		"--health-check-port 1 --health-check-addr h": "--health-check-addr",
		"--master-port 70000":                         "--master-port",
		"--nnodes 2 --node-rank 2":                    "--node-rank",
		// The route to another node depends on this machine: --local-addr spares the search.
		"--nnodes 2 --local-addr 127.0.0.1 --master-addr 192.0.2.1":                                                                 "hvdrun agent --generate-key",
		"--nnodes 2 --local-addr 127.0.0.1 --master-addr 192.0.2.1 --rdzv-conf key_file=/none":                                      "key_file",
		"--nnodes 2 --local-addr 127.0.0.1 --master-addr 192.0.2.1 --rdzv-conf key_file=/none,insecure=true":                        "give one of them",
		"--nnodes 1:2 --rdzv-backend c10d":                                                                                          "--rdzv-endpoint is missing",
		"--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint 192.0.2.1:x":                                                              "not host:port",
		"--nnodes 1:2 --rdzv-backend c10d --local-addr 127.0.0.1 --rdzv-endpoint 192.0.2.1 --rdzv-conf is_host=maybe,insecure=true": "is_host",
		"--nnodes 1:2 --rdzv-backend c10d --local-addr 127.0.0.1 --rdzv-endpoint 192.0.2.1 --rdzv-conf join_timeout=0":              "join_timeout",
	} {
		f, _, err := torchCommand(t, nil, strings.Fields(line)...)
		var cfg torchrun.Config
		if err == nil {
			cfg, err = torchConfig(t.Context(), &cli.Program{}, &f, []string{"a.py"})
		}
		if err == nil {
			cfg.Log = quietLog()
			err = f.meet(t.Context(), nil, &cfg)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", line, err, want)
		}
	}
}

func quietLog() *logrus.Logger {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return log
}

// TestTorchrunWordsStay: flags of the script that have the names of hvdrun's are left to the
// script.
func TestTorchrunWordsStay(t *testing.T) {
	words := []string{"torchrun", "--nproc_per_node", "2", "train.py", "-np", "3", "--verbose"}
	got, err := settings.Normalize(words, []string{settings.TorchrunName}, nil)
	if err != nil || !slices.Equal(got, words) {
		t.Errorf("%q, %v", got, err)
	}
}

// TestTorchrunConf: unknown keys are ignored, as in torchrun.
func TestTorchrunConf(t *testing.T) {
	f, _, err := torchCommand(t, nil, "--rdzv-conf='jion_timeout=5,timeout=7,x=y'")
	if err != nil {
		t.Fatal(err)
	}
	conf, err := f.rdzvConf()
	if err != nil || conf.timeout != 7*time.Second || !slices.Equal(conf.others, []string{"'jion_timeout", "x"}) {
		t.Errorf("%+v, %v", conf, err)
	}
}

func TestTorchBefore22(t *testing.T) {
	for version, want := range map[string]bool{"1.13.0a0": true, "2.1.2+cu121": true, "2.2.0": false, "2.14.1": false, "10.0": false, "": false, "x": false} {
		if before22(version) != want {
			t.Errorf("%q: %v", version, !want)
		}
	}
}

// TestTorchrunStoreAddrs: the addresses at which programs look for the store by themselves.
func TestTorchrunStoreAddrs(t *testing.T) {
	for line, want := range map[string][]string{
		"a.py": nil,
		"--master-addr localhost --master-port 29597 a.py --init_method=tcp://localhost:29597": {"localhost:29597"},
		"--master-addr 127.0.0.1 --master-port 29597 a.py tcp://[::1]:9 tcp://localhost:29597": {"[::1]:9", "localhost:29597"},
		"--standalone --master-port 7 a.py --dist-url tcp://127.0.0.1:29598?rank=0":            {"127.0.0.1:29598"},
		"a.py --listen tcp://localhost:7 --log-url=tcp://127.0.0.1:8 --dist-init-addr tcp://localhost:9 --init_method=tcp://localhost:10": {
			"localhost:9", "localhost:10"},
		"a.py tcp://192.0.2.1:7 tcp://localhost:0 tcp://localhost tcp://[::1]:9": {"[::1]:9"},
	} {
		f, left, err := torchCommand(t, nil, strings.Fields(line)...)
		if err != nil {
			t.Fatal(err)
		}
		if got := f.storeAddrs(left[1:]); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", line, got, want)
		}
	}
}

// TestTorchrunPortInUse: if another program of this machine uses the endpoint, an error reports it
// at once.
func TestTorchrunPortInUse(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	held, err := ln.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	cat := exec.Command("cat") // keeps the port open from here on, and never answers
	cat.ExtraFiles = []*os.File{held}
	end, err := cat.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cat.Start(); err != nil {
		t.Fatal(err)
	}
	defer cat.Wait()
	defer end.Close()
	held.Close()
	ln.Close()
	f, _, err := torchCommand(t, nil, "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", ln.Addr().String(), "a.py")
	if err != nil {
		t.Fatal(err)
	}
	log := logrus.New()
	log.SetOutput(io.Discard)
	home := t.TempDir()
	err = f.meet(t.Context(), []string{"HOME=" + home}, &torchrun.Config{RunID: "run", Backend: "c10d", Log: log})
	if err == nil || !strings.Contains(err.Error(), "is in use by another program of this machine, process ") {
		t.Error(err)
	}
}
