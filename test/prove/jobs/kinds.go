package main

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/hvdrun/hvdrun/test/steplog"
)

type kind struct {
	name  string
	about string
	needs func(can) bool                            // nil: no requirement
	draw  func(d *rand.Rand, turn int, s *setup)    // sets the fields that are special to the kind
	play  func(ctx context.Context, t *trial) error // runs the job and returns its errors
}

// kinds are all kinds, in the order of seeds.
var kinds = []kind{
	{"deaths", "workers die by SIGKILL, SIGSEGV, SIGABRT, an exit and lack of memory", nil, func(d *rand.Rand, turn int, s *setup) {
		s.Workers, s.Times = pick(d, 2, 3, 4, 6, 8, 16), 1+d.IntN(3)
		s.How = pick(d, "kill", "segv", "abrt", "exit3", "oom")
	}, playDeaths},
	{"chaos", "workers are killed or asked to leave at random moments: rank 0, newcomers, several at once, during a recovery", nil,
		func(_ *rand.Rand, _ int, s *setup) { disturbed(s, 400, 80*time.Millisecond) }, playChaos},
	{"drivers", "the same, and hvdrun is killed and resumed", nil, func(d *rand.Rand, _ int, s *setup) {
		s.Drivers = 2 + d.IntN(4)
		disturbed(s, 200*s.Drivers, 80*time.Millisecond)
	}, playChaos},
	{"steps", "the same with spares, in training by elastic.Steps, whose sums depend on the order", nil, func(d *rand.Rand, _ int, s *setup) {
		disturbed(s, 400, 80*time.Millisecond)
		slots := 2 + d.IntN(7)
		s.Spares = d.IntN(min(3, slots))
		s.Workers, s.Microbatches, s.Drivers = slots-s.Spares, 8, 2
	}, playChaos},
	{"commits", "workers, often rank 0, are killed while they commit", nil, func(d *rand.Rand, turn int, s *setup) {
		disturbed(s, 300, 20*time.Millisecond)
		s.State, s.Commits = []int64{240_000, 2_400_000}[turn%2], 5+d.IntN(20)
	}, playCommits},
	{"recovery", "how long training is interrupted when a worker is killed, a host is added, an agent is started", nil,
		func(d *rand.Rand, turn int, s *setup) {
			s.Workers, s.Hosts, s.State, s.StepTime, s.Async = 4, 2, 1<<10, time.Millisecond, false
			s.DiscoveryInterval, s.Kills, s.Joins, s.Arrivals = 50*time.Millisecond, 1+d.IntN(4), 1+d.IntN(2), turn%2
		}, playRecovery},
	{"scale", "how a driver bears thousands of simulated workers", nil, func(d *rand.Rand, turn int, s *setup) {
		*s = setup{Seed: s.Seed, Kind: s.Kind, Workers: []int{100, 1000, 300}[turn%3], Hosts: 1, Rounds: 1, State: 1 << 10}
	}, playScale},
	{"state", "a new worker receives a state of up to 2 GiB", nil, func(d *rand.Rand, turn int, s *setup) {
		s.Workers, s.Steps = 2+d.IntN(2), 20
		s.State = []int64{1 << 10, 256 << 20, 2 << 30, 16 << 20, 1 << 30, 64 << 10}[turn%6]
	}, playState},
	{"core", "a worker dies while core dumps are allowed", isRoot, func(d *rand.Rand, turn int, s *setup) {
		s.Workers, s.State = 2, []int64{1 << 20, 1 << 30, 2 << 30}[turn%3]
		s.How = pick(d, "segv", "abrt")
	}, playCore},
	{"many", "64, 150 and 300 workers on one machine meet and train", nil, func(d *rand.Rand, turn int, s *setup) {
		s.Workers, s.Hosts, s.State = []int{150, 16, 300, 64}[turn%4], 1+d.IntN(8), 1<<10<<d.IntN(6)
		if s.Steps, s.Times = 10, d.IntN(2); s.Times > 0 {
			s.Steps = 0
		}
	}, playMany},
	{"stopped", "a worker, an agent or hvdrun is stopped by SIGSTOP", nil, func(d *rand.Rand, turn int, s *setup) {
		s.How, s.Times = pick(d, "worker", "worker for a moment", "agent", "hvdrun"), 1
	}, playStopped},
	{"print", "workers print up to 200 MB in all", nil, func(d *rand.Rand, turn int, s *setup) {
		s.Workers, s.Print = 1+d.IntN(4), []int{2, 200, 50}[turn%3]
		s.Print = max(1, s.Print/s.Workers)
	}, playPrint},
	{"reader", "the output of hvdrun is not read", nil, func(d *rand.Rand, turn int, s *setup) {
		s.Workers, s.How = max(3, s.Workers), pick(d, "signals", "stop")
	}, playReader},
	{"list", "up to 10,000 hosts are listed, most of them unusable", nil, func(d *rand.Rand, turn int, s *setup) {
		s.Listed = []int{100, 10_000, 1_000}[turn%3]
		s.How = []string{"none works", "some work", "interrupted"}[(turn/3+turn)%3]
	}, playList},
	{"removal", "one empty list, or all hosts replaced at once", nil, func(d *rand.Rand, turn int, s *setup) {
		s.Workers, s.How, s.Steps = 4, []string{"empty", "replaced"}[turn%2], 0
	}, playRemoval},
	{"checkpoint", "a stop at any moment: the newest commit is on the disk", nil, func(d *rand.Rand, turn int, s *setup) {
		s.How = pick(d, "SIGINT", "SIGTERM", "stop", "SIGTERM to all")
		s.State = 1 << 10 << d.IntN(17)
		s.After = time.Duration(100+d.IntN(1500)) * time.Millisecond
	}, playCheckpoint},
	{"disk", "the disk of the job's folder, the events, the output or the checkpoints is full for a moment", isRoot, func(d *rand.Rand, turn int, s *setup) {
		s.How = []string{"job", "events", "output", "checkpoints", "checkpoints to the end", "job without room"}[turn%6]
		s.Times = 4 + d.IntN(5) // the journal has space in its last page
		s.Workers = max(4, s.Workers)
	}, playDisk},
	{"pid 1", "hvdrun is PID 1 of a container", isRoot, nil, playInit},
	{"home", "there is no HOME, or none that can be written to", nil, func(d *rand.Rand, turn int, s *setup) {
		s.How = []string{"missing", "unwritable"}[turn%2]
	}, playHome},
	{"no IPv4", "the machine has the loopback ::1 alone", hasSpaces, nil, playSix},
	{"links", "a host of a cluster is cut off", hasSpaces, func(d *rand.Rand, turn int, s *setup) {
		s.Workers, s.Hosts = 6, 3
	}, playLinks},
	{"interrupt", "Ctrl-C at any moment, once or twice, of workers that may ignore signals", nil, func(d *rand.Rand, turn int, s *setup) {
		s.Workers = pick(d, 1, 2, 4, 16, 32)
		s.How, s.Times = pick(d, "", "stubborn"), 1+d.IntN(2)
		s.After = time.Duration(d.IntN(2000)) * time.Millisecond
	}, playInterrupt},
	{"commands", "a person asks for much while workers die", nil, func(d *rand.Rand, turn int, s *setup) {
		s.Workers, s.Times = 3+d.IntN(6), 12
	}, playCommands},
	{"driver", "hvdrun is killed; its job is resumed, or stopped without it", nil, func(d *rand.Rand, turn int, s *setup) {
		s.How = []string{"resume", "stop", "damaged", "orphans"}[turn%4]
	}, playDriver},
	{"orphans", "workers leave orphaned processes in separate sessions, without their environment", nil, func(d *rand.Rand, turn int, s *setup) {
		s.How = pick(d, "done", "SIGINT", "killed")
	}, playOrphans},
	{"done", "a worker that is done never exits", nil, nil, playDone},
	{"frozen", "a worker cannot be killed", func(c can) bool { return c.freezer }, func(d *rand.Rand, turn int, s *setup) {
		s.Workers = max(3, s.Workers)
	}, playFrozen},
	{"tasks", "workers run tasks; they and hvdrun are killed, slots are drained", nil, func(d *rand.Rand, turn int, s *setup) {
		s.Workers, s.Times, s.StepTime = 2+d.IntN(7), 2+d.IntN(4), time.Duration(d.IntN(4))*time.Millisecond
		s.Steps = []int{5_000, 20_000, 1}[turn%3]
	}, playTasks},
	{"model", "tasks depend on each other, fail and are cancelled, while workers, agents and hvdrun are killed, and slots are drained", nil,
		func(d *rand.Rand, turn int, s *setup) {
			s.Workers, s.Times, s.StepTime = 2+d.IntN(7), 5+d.IntN(20), time.Duration(d.IntN(4))*time.Millisecond
			s.Steps = []int{10_000, 3_000, 20_000}[turn%3]
		}, playTasks},
	{"pace", "which share of its pace a job keeps whose workers are killed, asked to leave or stopped at a fixed rate", nil,
		func(d *rand.Rand, turn int, s *setup) {
			disturbed(s, 200, time.Second)
			s.Workers, s.Spares, s.Microbatches, s.StepTime, s.Ask = 4, 1, 4, 200*time.Millisecond, 0 // a step of 50 ms
			s.How = []string{"kill", "mix", "stop"}[turn%3]
		}, playPace},
	{"faults", "the same of a cluster, whose hosts are cut off as well", hasSpaces, func(_ *rand.Rand, _ int, s *setup) {
		disturbed(s, 200, 10*time.Second)
		s.Workers, s.Hosts, s.Spares, s.Microbatches, s.StepTime, s.Ask, s.How = 8, 5, 2, 8, 2*time.Second, 0, "faults" // a step of 250 ms
	}, playPace},
	{"flapping", "a tenth of the hosts leave and come back each second, which the log tells in few lines", nil,
		func(d *rand.Rand, turn int, s *setup) {
			s.Workers, s.State, s.Times = []int{12, 300}[turn%2], 1<<10, 30
			s.Hosts = s.Workers / 3
		}, playFlapping},
}

// disturbed sets the fields that are common to jobs whose workers are killed at any moment.
func disturbed(s *setup, steps int, pause time.Duration) {
	s.Workers, s.Hosts, s.State, s.Steps, s.StepTime, s.Pause, s.Ask = 4, 2, 4*steplog.Size, steps, 2*time.Millisecond, pause, 0.25
}

func isRoot(c can) bool    { return c.root }
func hasSpaces(c can) bool { return c.spaces }
