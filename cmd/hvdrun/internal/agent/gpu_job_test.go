package agent

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/discovery/gossip"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/internal/agent"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/gpu"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// TestMain also lets this program run as a worker.
func TestMain(m *testing.M) {
	testscript.Main(sandbox.Tests{M: m}, map[string]func(){"toil": toil})
}

// toil is a worker that trains until the driver dismisses it.
func toil() {
	ctx := context.Background()
	w, err := elastic.Init(ctx)
	if err == nil {
		step := 0
		s := elastic.NewState(w, elastic.Value("step", &step))
		err = elastic.Run(ctx, s, func(context.Context) error {
			for tick := time.Tick(2 * time.Millisecond); ; step++ {
				<-tick
				if err := s.Commit(); err != nil {
					return err
				}
			}
		})
		err = errors.Join(err, w.Close())
	}
	if !errors.Is(err, elastic.ErrRemoved) {
		panic(err)
	}
}

// agentCluster is a cluster of agents in this process.
type agentCluster struct {
	t    *testing.T
	base gossip.Config
	key  []byte
}

// run starts the agent of a host; if d is not nil, with its devices, whose failures it reads from
// faults. stop asks the agent to stop and waits for its end.
func (c agentCluster) run(name string, slots int, d *slotDevices, faults <-chan gpu.Event) (stop func()) {
	cfg := agent.Config{Name: name, Slots: slots, Key: c.key, Bind: "127.0.0.1:0", Join: c.base.Join, Log: c.base.Log}
	if d != nil {
		cfg.Launcher = boundLauncher{launch.Local{}, d}
		cfg.Health = func(ctx context.Context, bad func([]int)) error {
			log, _ := logtest.NewNullLogger()
			return d.watch(ctx, log, func(int) { bad(d.badSlots(slots)) }, func(ctx context.Context, f func(gpu.Event)) error {
				for {
					select {
					case e := <-faults:
						f(e)
					case <-ctx.Done():
						return nil
					}
				}
			})
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- agent.Run(ctx, cfg) }()
	c.t.Cleanup(cancel)
	return func() {
		c.t.Helper()
		cancel()
		if err := <-done; err != nil {
			c.t.Errorf("agent %s: %v", name, err)
		}
	}
}

// jobEvents collects the events of a job.
type jobEvents struct {
	t   *testing.T
	all chan job.Event
	log []string
}

// await reads events until one has the name and contains all the words, such as "host=b".
func (j *jobEvents) await(name job.EventName, words ...string) {
	j.t.Helper()
	limit := sandbox.Expired()
	for {
		select {
		case e := <-j.all:
			line := string(e.Name)
			for _, f := range e.Fields {
				line += fmt.Sprintf(" %s=%v", f.Key, f.Value)
			}
			j.log = append(j.log, line)
			if e.Name == name && !slices.ContainsFunc(words, func(w string) bool { return !slices.Contains(strings.Fields(line), w) }) {
				return
			}
		case <-limit:
			j.t.Fatalf("waited for %s %q; came:\n%s", name, words, strings.Join(j.log, "\n"))
		}
	}
}

// TestJobLosesADevice: a device reports a critical XID. Its slot's worker is killed, no other is
// started there, all agents learn of it, and the job continues without the slot. When the agent is
// started again, as it must be to reset a device, the slot returns.
func TestJobLosesADevice(t *testing.T) {
	log, _ := logtest.NewNullLogger()
	c := agentCluster{t: t, key: bytes.Repeat([]byte{7}, identity.ClusterKeyLen)}
	c.base = gossip.Config{BindAddr: "127.0.0.1:0", Key: c.key, Log: log}
	seed, err := gossip.Join(t.Context(), c.base)
	if err != nil {
		t.Fatal(err)
	}
	defer seed.Leave(context.Background())
	c.base.Join = []string{seed.Addr()}
	source := gossip.NewSource(c.base)
	defer source.Close()

	faults := make(chan gpu.Event)
	stopA := c.run("a", 1, nil, nil)
	stopB := c.run("b", 2, twoDevices(), faults)
	s := &settings.Settings{Cluster: settings.ClusterSettings{Source: source}, RunID: rand.Text()}
	cluster, err := identity.ForCluster(c.key, "")
	if err != nil {
		t.Fatal(err)
	}
	s.Cluster.Credentials, err = cluster.Issue(identity.Subject{RunID: s.RunID, Role: identity.Driver})
	if err != nil {
		t.Fatal(err)
	}
	authority, err := identity.NewAuthority(s.RunID)
	if err != nil {
		t.Fatal(err)
	}
	agents, err := hostsource.Agents(t.Context(), s, authority, nil, log)
	if err != nil {
		t.Fatal(err)
	}
	launcher := client.New(agents)
	defer launcher.Close()
	program, err := exec.LookPath("toil")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	j := &jobEvents{t: t, all: make(chan job.Event, 10000)}
	ended := make(chan error, 1)
	go func() {
		ended <- driver.Run(ctx, driver.Config{
			RunID: s.RunID, Command: []string{program}, Env: os.Environ(), Source: source, Launcher: launcher, Log: log,
			Authority: authority,
			Size:      job.Size{NP: 3, Min: 1, Elastic: true},
			Blame:     job.Blame{CooldownMin: 100 * time.Millisecond, CooldownMax: 400 * time.Millisecond},
			Events:    func(e job.Event) { j.all <- e },
		})
	}()
	defer func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("the job: %v", err)
		}
	}()
	j.await(job.WorldPublished, "size=3")
	j.await(job.FirstCommit)

	faults <- fails(0, "GPU-a", true) // the device of slot 1
	j.await(job.WorkerExited, "host=b", "slot=1", fmt.Sprintf("signal=%d", syscall.SIGKILL), "cause=failed")
	j.await(job.WorldPublished, "size=2")
	j.await(job.FirstCommit)
	known := func() bool {
		b, _ := source.Agent("b")
		return slices.Equal(b.BadSlots, []int{1})
	}
	for tries := 0; tries < 3 || !known(); tries++ { // the agent refuses; the world stays
		j.await(job.WorkerExited, "host=b", "slot=1", "code=127")
	}

	stopB()
	j.await(job.WorldPublished, "size=1")
	stopB = c.run("b", 2, twoDevices(), faults)
	j.await(job.WorldPublished, "size=3")
	j.await(job.FirstCommit)
	cancel()
	j.await(job.JobDone)
	stopA()
	stopB()
	for i, line := range j.log {
		if strings.HasPrefix(line, "worker_exited host=b slot=1 pid=0 ") && strings.HasPrefix(j.log[i+1], "reset ") {
			t.Errorf("a refused start has cost a reset: %s", line)
		}
	}
}
