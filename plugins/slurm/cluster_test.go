package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"pgregory.net/rapid"

	"github.com/hvdrun/hvdrun/discovery/plugin"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m, nil)) }

// cluster is a real Slurm on this machine: a controller and nodes n1, n2 …, each of which is a
// slurmd with two GPUs that are in truth other devices. All of it is in one folder and in processes
// of this test, and needs no root.
type cluster struct {
	t       *testing.T
	dir     string
	nodes   int
	daemons []*daemon
}

type daemon struct {
	name  string
	cmd   *exec.Cmd
	ended chan error
}

func startCluster(t *testing.T, nodes int) *cluster {
	t.Helper()
	t.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin")
	for _, program := range []string{"munged", "slurmctld", "slurmd", "scontrol", "salloc", "squeue", "sinfo", "scancel"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Fatalf("there is no %s: this test runs a real Slurm, of Debian's packages slurmctld slurmd slurm-client munge; "+
				"make deps installs them", program)
		}
	}
	dir, err := os.MkdirTemp("", "slurm") // t.TempDir is too long for the path of a socket
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{t: t, dir: dir, nodes: nodes}
	t.Setenv("SLURM_CONF", c.path("slurm.conf"))
	t.Cleanup(c.stop) // before the variables are restored
	c.configure()
	c.start("munged", "--foreground", "--force", "--key-file="+c.path("munge.key"), "--socket="+c.path("munge.socket"),
		"--pid-file="+c.path("munge.pid"), "--log-file="+c.path("munge.log"), "--seed-file="+c.path("munge.seed"))
	c.await("munged", func() bool { _, err := os.Stat(c.path("munge.socket")); return err == nil })
	c.start("slurmctld", "-D", "-c")
	for i := range nodes {
		c.start("slurmd", "-D", "-N", fmt.Sprintf("n%d", i+1))
	}
	c.awaitIdle()
	return c
}

// awaitIdle waits until all nodes are up and idle, so that a job gets them at once.
func (c *cluster) awaitIdle() {
	c.t.Helper()
	c.await("all nodes to be idle", func() bool {
		out, _ := exec.Command("sinfo", "--noheader", "--partition=all", "--Node", "--format=%T").Output() // fails until the controller is up
		states := strings.Fields(string(out))
		return len(states) == c.nodes && !slices.ContainsFunc(states, func(s string) bool { return s != "idle" }) // idle* means that the node does not respond
	})
}

func (c *cluster) path(name string) string { return filepath.Join(c.dir, name) }

func (c *cluster) configure() {
	me, err := user.Current()
	if err != nil {
		c.t.Fatal(err)
	}
	host, err := os.Hostname()
	if err != nil {
		c.t.Fatal(err)
	}
	host, _, _ = strings.Cut(host, ".")
	ports := freePorts(c.t, c.nodes+1)
	// Without EnableIPv6, the daemons find no address to listen at if there is only 127.0.0.1.
	conf := fmt.Sprintf(`ClusterName=test
SlurmctldHost=%[1]s(127.0.0.1)
SlurmctldPort=%[2]d
SlurmUser=%[3]s
SlurmdUser=%[3]s
AuthType=auth/munge
AuthInfo=socket=%[4]s/munge.socket
CredType=cred/munge
StateSaveLocation=%[4]s/state
SlurmctldPidFile=%[4]s/slurmctld.pid
SlurmdPidFile=%[4]s/slurmd-%%n.pid
SlurmdSpoolDir=%[4]s/spool-%%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
CommunicationParameters=EnableIPv6
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
SlurmdParameters=config_overrides
GresTypes=gpu
`, host, ports[0], me.Username, c.dir)
	for i := range c.nodes {
		conf += fmt.Sprintf("NodeName=n%d NodeHostname=%s NodeAddr=127.0.0.1 Port=%d CPUs=4 RealMemory=100 Gres=gpu:2\n",
			i+1, host, ports[i+1])
	}
	conf += "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n" +
		"PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=600\n" +
		"PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF\n"
	key := make([]byte, 128)
	rand.Read(key)
	for name, content := range map[string]string{
		"slurm.conf": conf, "munge.key": string(key),
		"gres.conf": "AutoDetect=off\nName=gpu File=/dev/null\nName=gpu File=/dev/zero\n",
	} {
		if err := os.WriteFile(c.path(name), []byte(content), 0o600); err != nil {
			c.t.Fatal(err)
		}
	}
	folders := []string{"state"}
	for i := range c.nodes {
		folders = append(folders, fmt.Sprintf("spool-n%d", i+1))
	}
	for _, name := range folders {
		if err := os.Mkdir(c.path(name), 0o700); err != nil {
			c.t.Fatal(err)
		}
	}
}

// freePorts returns free ports below those that the kernel chooses for others.
func freePorts(t *testing.T, n int) (ports []int) {
	t.Helper()
	for range 1000 {
		port := 10000 + mathrand.IntN(20000)
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		defer l.Close() // only once all are found
		if ports = append(ports, port); len(ports) == n {
			return ports
		}
	}
	t.Fatal("no free ports")
	return nil
}

// start runs a daemon in the foreground; it dies with this process.
func (c *cluster) start(program string, args ...string) {
	c.t.Helper()
	name := fmt.Sprintf("%s-%d", program, len(c.daemons))
	log, err := os.Create(c.path(name + ".out"))
	if err != nil {
		c.t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	d := &daemon{name: name, cmd: cmd, ended: make(chan error, 1)}
	go func() { d.ended <- cmd.Wait() }()
	c.daemons = append(c.daemons, d)
}

// stop ends all jobs and daemons, the youngest first, and checks that no process is left.
func (c *cluster) stop() {
	if len(c.daemons) > 1 {
		if err := exec.Command("scancel", "--me").Run(); err != nil {
			c.t.Errorf("scancel: %v", err)
		}
	}
	if c.t.Failed() {
		c.tellLogs()
	}
	for _, d := range slices.Backward(c.daemons) {
		syscall.Kill(-d.cmd.Process.Pid, syscall.SIGTERM)
		select {
		case <-d.ended:
		case <-sandbox.Expired():
			syscall.Kill(-d.cmd.Process.Pid, syscall.SIGKILL)
			<-d.ended
			if !c.t.Failed() { // a slurmd without its controller takes long to end
				c.t.Errorf("%s did not end when it was asked to", d.name)
			}
		}
	}
	for _, pid := range c.leftBehind() {
		c.t.Errorf("process %d was left behind", pid)
		syscall.Kill(pid, syscall.SIGKILL)
	}
	if err := os.RemoveAll(c.dir); err != nil {
		c.t.Error(err)
	}
}

// leftBehind returns other processes with the folder in their environment or arguments.
func (c *cluster) leftBehind() (pids []int) {
	files, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		c.t.Error(err)
	}
	for _, file := range files {
		environ, _ := os.ReadFile(file) // it can be gone, or another user's
		cmdline, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "cmdline"))
		var pid int
		fmt.Sscanf(file, "/proc/%d/", &pid)
		if pid != os.Getpid() && (bytes.Contains(environ, []byte(c.dir)) || bytes.Contains(cmdline, []byte(c.dir))) {
			pids = append(pids, pid)
		}
	}
	return pids
}

func (c *cluster) tellLogs() {
	for _, d := range c.daemons {
		text, _ := os.ReadFile(c.path(d.name + ".out"))
		lines := strings.Split(strings.TrimSpace(string(text)), "\n")
		c.t.Logf("%s:\n%s", d.name, strings.Join(lines[max(0, len(lines)-15):], "\n"))
	}
}

// await waits until so returns true. It fails the test if a daemon ends first.
func (c *cluster) await(what string, so func() bool) {
	c.t.Helper()
	late := sandbox.Expired()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !so() {
		select {
		case <-tick.C:
		case <-late:
			c.t.Fatalf("waited for %s", what)
		}
		for _, d := range c.daemons {
			select {
			case err := <-d.ended:
				d.ended <- err
				c.t.Fatalf("%s has ended: %v", d.name, err)
			default:
			}
		}
	}
}

// do runs a command to its end and returns its output.
func (c *cluster) do(program string, args ...string) string {
	c.t.Helper()
	ctx, cancel := context.WithDeadline(c.t.Context(), sandbox.Limit())
	defer cancel()
	out, err := exec.CommandContext(ctx, program, args...).CombinedOutput()
	if err != nil {
		c.t.Fatalf("%s %q: %v\n%s", program, args, err, out)
	}
	return string(out)
}

var granted = regexp.MustCompile(`Granted job allocation (\d+)`)

// allocate starts a job without a program, which lasts until it is cancelled.
func (c *cluster) allocate(args ...string) (jobID string) {
	c.t.Helper()
	out := c.do("salloc", append([]string{"--no-shell"}, args...)...)
	m := granted.FindStringSubmatch(out)
	if m == nil {
		c.t.Fatalf("salloc: %s", out)
	}
	return m[1]
}

// plugin builds the plugin and returns its path.
func (c *cluster) plugin() string {
	c.t.Helper()
	if err := sandbox.Build(c.path("plugins"), "github.com/hvdrun/hvdrun/plugins/slurm"); err != nil {
		c.t.Fatal(err)
	}
	return c.path("plugins/slurm")
}

// newReal returns a source that asks the cluster.
func newReal(t *testing.T, values map[string]string, lookup func(string) (string, bool)) (*source, *bytes.Buffer) {
	t.Helper()
	s := newSource()
	s.lookup = lookup
	if err := s.Configure(values); err != nil {
		t.Fatal(err)
	}
	var logged bytes.Buffer
	log := logrus.New()
	log.Out = &logged
	s.log = log
	return s, &logged
}

// TestRealSlurm runs the plugin against a real Slurm. It takes some seconds, mostly for the start
// of the daemons.
func TestRealSlurm(t *testing.T) {
	c := startCluster(t, 3)
	t.Run("life of a job", func(t *testing.T) { testRealLife(t, c) })
	t.Run("inside of a job", func(t *testing.T) { testRealInside(t, c) })
	t.Run("jobs of a name", func(t *testing.T) { testRealNames(t, c) })
	t.Run("as a process", func(t *testing.T) { testRealProcess(t, c) })
	t.Run("hostlist", func(t *testing.T) { testRealHostlist(t, c) })
}

// testRealLife watches a job from its start to its end, while an administrator drains nodes,
// declares them failed, and takes them away.
func testRealLife(t *testing.T, c *cluster) {
	id := c.allocate("--no-kill", "-N3", "--gres=gpu:2")
	s, logged := newReal(t, map[string]string{"job_id": id, "interval": "50ms"}, env())
	lists := make(chan string, 100)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Watch(ctx, func(hosts []plan.Host) { lists <- text(hosts) }) }()
	expect := func(want string) {
		t.Helper()
		late := sandbox.Expired()
		for got := "nothing"; got != want; {
			select {
			case got = <-lists:
			case err := <-ended:
				t.Fatalf("stopped watching: %v", err)
			case <-late:
				t.Fatalf("found %q last, want %q", got, want)
			}
		}
	}
	expect("n1:2 n2:2 n3:2")
	c.do("scontrol", "update", "nodename=n2", "state=drain", "reason=it is State=DOWN soon")
	expect("n1:2 n2:2/draining n3:2")
	c.do("scontrol", "update", "nodename=n2", "state=resume")
	expect("n1:2 n2:2 n3:2")
	c.do("scontrol", "update", "nodename=n1", "state=fail", "reason=fan")
	expect("n1:2/draining n2:2 n3:2")
	c.do("scontrol", "update", "nodename=n3", "state=noresp")
	expect("n1:2/draining n2:2")
	c.do("scontrol", "update", "nodename=n1", "state=down", "reason=fan")
	expect("n2:2") // the job continues without n1
	c.do("scancel", id)
	expect("")
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if !strings.Contains(logged.String(), "has ended") || !strings.Contains(logged.String(), "CANCELLED") {
		t.Errorf("logged: %s", logged)
	}
	late, _ := newReal(t, map[string]string{"job_id": id}, env())
	if hosts, err := late.Discover(t.Context()); err == nil || !strings.Contains(err.Error(), "CANCELLED") {
		t.Errorf("a job that has ended: %v, %v", hosts, err)
	}
	never, _ := newReal(t, map[string]string{"job_id": "4000"}, env())
	if hosts, err := never.Discover(t.Context()); err == nil || !strings.Contains(err.Error(), "Invalid job id") {
		t.Errorf("a job that never was: %v, %v", hosts, err)
	}
	c.do("scontrol", "update", "nodename=n1", "state=resume")
	c.awaitIdle()
}

// testRealInside uses the environment that Slurm gives to the programs of a job whose tasks are not
// spread evenly.
func testRealInside(t *testing.T, c *cluster) {
	out := c.do("salloc", "-N2", "-n7", "--nodelist=n[1-2]", "sh", "-c", "env; scontrol show job -d $SLURM_JOB_ID")
	var pairs []string
	for line := range strings.Lines(out) {
		if name, value, found := strings.Cut(strings.TrimSpace(line), "="); found && strings.HasPrefix(name, "SLURM_") {
			pairs = append(pairs, name, value)
		}
	}
	lookup := env(pairs...)
	id, _ := lookup("SLURM_JOB_ID")
	tasks, err := tasksPerNode(id, lookup)
	if err != nil || tasks["n1"]+tasks["n2"] != 7 || len(tasks) != 2 {
		t.Errorf("%v, %v\n%s", tasks, err, out)
	}
	j, err := parseJob(out[strings.Index(out, "JobId="+id):], id, "gpu")
	if err != nil || j.tasks != 7 || j.cpus["n1"] != tasks["n1"] || j.cpus["n2"] != tasks["n2"] {
		t.Errorf("%+v, %v\n%s", j, err, out)
	}
}

func testRealNames(t *testing.T, c *cluster) {
	s, _ := newReal(t, map[string]string{"job_name": "grows", "slots": "cpus"}, env())
	if got := found(t, s); got != "" {
		t.Errorf("before there is a job: %s", got)
	}
	c.allocate("--job-name=grows", "-N1", "-n2", "--nodelist=n2")
	if got := found(t, s); got != "n2:2" {
		t.Error(got)
	}
	c.allocate("--job-name=grows", "-N1", "-n3", "--nodelist=n1")
	c.allocate("--job-name=other", "-N1", "-n1", "--nodelist=n1")
	if got := found(t, s); got != "n2:2 n1:3" && got != "n1:3 n2:2" { // they can start within the same second
		t.Error(got)
	}
	c.do("scancel", "--me")
	c.awaitIdle()
	if got := found(t, s); got != "" {
		t.Errorf("after the jobs: %s", got)
	}
}

// testRealProcess runs the plugin as hvdrun does.
func testRealProcess(t *testing.T, c *cluster) {
	path := c.plugin()
	log := logrus.New()
	log.Out = io.Discard
	id := c.allocate("--no-kill", "-N2", "--gres=gpu:1", "--nodelist=n[1-2]")
	for settings, want := range map[string]string{
		"job_id=" + id: "n1:1 n2:1",
		"colour=red":   `unknown setting "colour"; the settings are: bin, cpus_per_slot`,
	} {
		key, value, _ := strings.Cut(settings, "=")
		p := plugin.New(plugin.Config{Path: path, Settings: map[string]string{key: value}, Log: log})
		hosts, err := p.Discover(t.Context())
		if got := text(hosts); got != want && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %s, %v", settings, got, err)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
	c.do("scancel", id)
}

// testRealHostlist compares expandHostlist with Slurm's own expansion.
func testRealHostlist(t *testing.T, c *cluster) {
	rapid.Check(t, func(rt *rapid.T) {
		list, want := anyList(rt, false)
		names := strings.Fields(c.do("scontrol", "show", "hostnames", list))
		if !slices.Equal(names, want) {
			rt.Fatalf("%s: scontrol says %v, the test %v", list, names, want)
		}
		if got, err := expandHostlist(list); err != nil || !slices.Equal(got, names) {
			rt.Fatalf("%s: got %v, %v; scontrol says %v", list, got, err, names)
		}
		short := strings.TrimSpace(c.do("scontrol", "show", "hostlist", strings.Join(names, ",")))
		if got, err := expandHostlist(short); err != nil || !slices.Equal(got, names) {
			rt.Fatalf("%s: got %v, %v; it stands for %v", short, got, err, names)
		}
	})
}
