package plan

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Worker is the content of a worker's environment: its identity, its launcher's address, and
// its place in the world for which it was started, which later worlds do not change.
type Worker struct {
	// RunID identifies the job and Incarnation this process; the next worker of the slot has
	// another incarnation.
	RunID, Incarnation string
	// Slot is the worker's slot and Size the number of ranks.
	Slot Slot
	Size int
	// GroupRank and GroupSize are the rank of the worker's host and the number of hosts, as in
	// World.Group. If GroupSize is 0, CrossRank and CrossSize are used, which are equal as long as
	// all hosts have the same number of slots.
	GroupRank, GroupSize int
	// Elastic: the world may change.
	Elastic bool
	// LauncherAddr is the address at which the launcher listens, host:port, for what is not sent
	// over the inherited socket. The launcher sets it.
	LauncherAddr string
	// Credentials are the worker's encoded credentials, one line of text. They are secret and must
	// not be logged.
	Credentials string
	// MasterAddr and MasterPort are the rendezvous of programs written for torchrun. If MasterAddr
	// is empty, neither variable is set.
	MasterAddr string
	MasterPort int
	// Restarts is the number of the job's resets when the worker started; MaxRestarts is their
	// limit.
	Restarts, MaxRestarts int
	// StallWarning is the time after which an asynchronous operation that lacks a rank is logged.
	// 0: the default; negative: never.
	StallWarning time.Duration
	// Tuning is the same for all workers of the job.
	Tuning
	// Algorithm forces an algorithm for collectives. The user sets it: a worker inherits the
	// variable, Environ does not write it.
	Algorithm string
	// OnlySockets disables shared memory between the ranks of a host. The user sets it too.
	OnlySockets bool
}

// Tuning holds the user's settings of a job that its workers read. The workers' environment
// contains them unchanged.
type Tuning struct {
	// EncryptData requires TLS on the connections that carry tensors too; otherwise these are
	// authenticated but not encrypted.
	EncryptData bool
	// NetworkInterfaces names the interfaces whose addresses workers offer to their peers; nil:
	// all. No name contains a comma.
	NetworkInterfaces []string
	// Listen is the IP address on which workers listen for other workers; workers on another
	// machine listen on the address from which that machine reaches it. "": loopback, and all
	// addresses once a host is another machine.
	Listen string
	// PortRange bounds the ports of listeners to which other machines connect: "40000-40100". "":
	// the kernel chooses.
	PortRange string
	// TimelineFilename is the beginning of the names of the files, on each worker's host, in which
	// workers record their operations; "": they record none.
	TimelineFilename string
	// ShareOutput lets other users read the files that workers write: timelines and checkpoints.
	ShareOutput bool
	// FusionThreshold (in MiB) and CycleTime tune asynchronous collectives. 0: the default;
	// negative: no fusion, no delay.
	FusionThreshold int
	CycleTime       time.Duration
	// Connections is the number of connections that share large messages between two workers of
	// different hosts, up to collective.MaxConnections. 0: the default, one.
	Connections int
	// VerifyState is the number of commits after which the ranks compare their states. 0: only
	// after each sync; negative: never.
	VerifyState int
	// HealState gives a rank whose state differs the state of the majority; otherwise training
	// fails.
	HealState bool
	// CommitReplicas is the number of other ranks that keep a copy of the sharded part of each
	// commit.
	CommitReplicas int
}

// The names of hvdrun's own variables in the environment of a worker. Environ also writes those of
// Horovod and torchrun, for programs that read them.
const (
	// MaxFusionThreshold is the largest fusion threshold, in MiB.
	MaxFusionThreshold = 1 << 20

	EnvRunID             = "HVD_RUN_ID"
	EnvSlot              = "HVD_SLOT"
	EnvLauncherAddr      = "HVD_LAUNCHER_ADDR"
	EnvIncarnation       = "HVD_INCARNATION"
	EnvCredentials       = "HVD_CREDENTIALS"
	EnvEncryptData       = "HVD_ENCRYPT_DATA"
	EnvNetworkInterfaces = "HVD_NETWORK_INTERFACES"
	EnvListen            = "HVD_LISTEN"
	EnvPortRange         = "HVD_PORT_RANGE"
	EnvTimelineFilename  = "HVD_TIMELINE_FILENAME"
	EnvShareOutput       = "HVD_SHARE_OUTPUT"
	EnvFusionThreshold   = "HVD_FUSION_THRESHOLD_MB"
	EnvCycleTime         = "HVD_CYCLE_TIME_MS"
	EnvStallWarning      = "HVD_STALL_WARNING"
	EnvConnections       = "HVD_CONNECTIONS"
	EnvVerifyState       = "HVD_VERIFY_STATE"
	EnvHealState         = "HVD_HEAL_STATE"
	EnvCommitReplicas    = "HVD_COMMIT_REPLICAS"
	EnvAlgorithm         = "HVD_COLLECTIVE_ALGORITHM"
	EnvOnlySockets       = "HVD_ONLY_SOCKETS"
	EnvCUDABackend       = "HVD_CUDA_BACKEND"
	EnvNCCLLibrary       = "HVD_NCCL_LIBRARY"

	// EnvAgentProgram is the path of the hvdrun that is the agent of the worker's host. The agent
	// sets it.
	EnvAgentProgram = "HVD_AGENT_PROGRAM"

	// EnvWorkerSocket is the number of the descriptor by which a program in any language speaks
	// with the launcher: see docs/reference/worker-protocol.md. The launcher sets it.
	EnvWorkerSocket = "HVD_WORKER_SOCKET"

	// EnvNoPythonPath, if it is 1, keeps hvdrun's package for Python out of PYTHONPATH.
	EnvNoPythonPath = "HVD_NO_PYTHON_PATH"

	// EnvNCCLShared is a variable of NCCL: 1 permits several ranks on one device.
	EnvNCCLShared = "NCCL_MULTI_RANK_GPU_ENABLE"
)

// Environ returns the worker's variables as NAME=value, in a fixed order, for appending to its
// inherited environment. All variables except the master's address are always present, so that a
// job started within a worker inherits none of them. The list contains a secret.
func (w Worker) Environ() []string {
	groupRank, groupSize := w.GroupRank, w.GroupSize
	if groupSize == 0 {
		groupRank, groupSize = w.Slot.CrossRank, w.Slot.CrossSize
	}
	var env []string
	text := func(name, value string) { env = append(env, name+"="+value) }
	number := func(name string, n int) { text(name, strconv.Itoa(n)) }

	text("HOROVOD_HOSTNAME", w.Slot.Host)
	number("HOROVOD_RANK", w.Slot.Rank)
	number("HOROVOD_SIZE", w.Size)
	number("HOROVOD_LOCAL_RANK", w.Slot.LocalRank)
	number("HOROVOD_LOCAL_SIZE", w.Slot.LocalSize)
	number("HOROVOD_CROSS_RANK", w.Slot.CrossRank)
	number("HOROVOD_CROSS_SIZE", w.Slot.CrossSize)
	text("HOROVOD_ELASTIC", flag(w.Elastic))

	number("RANK", w.Slot.Rank)
	number("WORLD_SIZE", w.Size)
	number("LOCAL_RANK", w.Slot.LocalRank)
	number("LOCAL_WORLD_SIZE", w.Slot.LocalSize)
	number("GROUP_RANK", groupRank)
	number("GROUP_WORLD_SIZE", groupSize)
	number("ROLE_RANK", w.Slot.Rank)
	number("ROLE_WORLD_SIZE", w.Size)
	text("ROLE_NAME", "default")
	if w.MasterAddr != "" {
		text("MASTER_ADDR", w.MasterAddr)
		number("MASTER_PORT", w.MasterPort)
	}
	number("TORCHELASTIC_RESTART_COUNT", w.Restarts)
	number("TORCHELASTIC_MAX_RESTARTS", w.MaxRestarts)
	text("TORCHELASTIC_RUN_ID", w.RunID)

	text(EnvRunID, w.RunID)
	number(EnvSlot, w.Slot.Index)
	text(EnvLauncherAddr, w.LauncherAddr)
	text(EnvIncarnation, w.Incarnation)
	text(EnvCredentials, w.Credentials)
	text(EnvEncryptData, flag(w.EncryptData))
	text(EnvNetworkInterfaces, strings.Join(w.NetworkInterfaces, ","))
	text(EnvListen, w.Listen)
	text(EnvPortRange, w.PortRange)
	text(EnvTimelineFilename, w.TimelineFilename)
	text(EnvShareOutput, flag(w.ShareOutput))
	text(EnvFusionThreshold, tuned(float64(w.FusionThreshold)))
	text(EnvCycleTime, tuned(w.CycleTime.Seconds()*1e3))
	text(EnvStallWarning, tuned(w.StallWarning.Seconds()))
	number(EnvConnections, w.Connections)
	text(EnvVerifyState, tuned(float64(w.VerifyState)))
	text(EnvHealState, flag(w.HealState))
	number(EnvCommitReplicas, w.CommitReplicas)
	return env
}

// WorkerFromEnv parses the variables of Environ; lookup is os.LookupEnv or similar. It returns
// false if hvdrun did not start this process, that is if HVD_LAUNCHER_ADDR is missing or empty; it
// is an error if torchrun started the process as one of several, since each would train alone.
// Errors name the variable.
func WorkerFromEnv(lookup func(string) (string, bool)) (Worker, bool, error) {
	if addr, _ := lookup(EnvLauncherAddr); addr == "" {
		_, torch := lookup("TORCHELASTIC_RUN_ID")
		if size, _ := lookup("WORLD_SIZE"); torch && size != "" && size != "1" {
			return Worker{}, false, fmt.Errorf("plan: this process was started as one of %s (WORLD_SIZE) that torchrun, or --restart-workers, "+
				"restarts when one fails: start programs of package elastic by hvdrun torchrun --elastic, or without --restart-workers", size)
		}
		return Worker{}, false, nil
	}
	r := envReader{lookup: lookup}
	var w Worker
	w.LauncherAddr = r.text(EnvLauncherAddr)
	w.RunID = r.text(EnvRunID)
	w.Incarnation = r.text(EnvIncarnation)
	w.Credentials = r.text(EnvCredentials)
	w.Slot.Host = r.text("HOROVOD_HOSTNAME")
	w.Slot.Index = r.number(EnvSlot, MaxSlots-1)
	w.Slot.Rank, w.Size = r.rank("HOROVOD_RANK", "HOROVOD_SIZE")
	w.Slot.LocalRank, w.Slot.LocalSize = r.rank("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
	w.Slot.CrossRank, w.Slot.CrossSize = r.rank("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE")
	w.Elastic = r.flag("HOROVOD_ELASTIC")
	w.EncryptData = r.flag(EnvEncryptData)
	if list, _ := lookup(EnvNetworkInterfaces); list != "" {
		w.NetworkInterfaces = strings.Split(list, ",")
	}
	w.Listen, _ = lookup(EnvListen)
	w.PortRange, _ = lookup(EnvPortRange)
	w.TimelineFilename, _ = lookup(EnvTimelineFilename)
	w.ShareOutput = r.flag(EnvShareOutput)
	w.FusionThreshold = int(r.tuning(EnvFusionThreshold, 1, MaxFusionThreshold))
	w.CycleTime = time.Duration(r.tuning(EnvCycleTime, 1e6, math.MaxInt32))
	w.StallWarning = time.Duration(r.tuning(EnvStallWarning, 1e9, math.MaxInt32))
	if r.has(EnvConnections) {
		w.Connections = r.number(EnvConnections, MaxSlots)
	}
	w.VerifyState = int(r.tuning(EnvVerifyState, 1, math.MaxInt32))
	w.HealState = r.flag(EnvHealState)
	if r.has(EnvCommitReplicas) {
		w.CommitReplicas = r.number(EnvCommitReplicas, MaxSlots)
	}
	w.Algorithm, _ = lookup(EnvAlgorithm)
	w.OnlySockets = r.flag(EnvOnlySockets)
	// The variables below are torchrun's. The program or a wrapper may have changed or removed
	// them.
	if r.has("GROUP_WORLD_SIZE") {
		w.GroupRank, w.GroupSize = r.rank("GROUP_RANK", "GROUP_WORLD_SIZE")
	}
	if r.has("MASTER_ADDR") && r.has("MASTER_PORT") {
		w.MasterAddr = r.text("MASTER_ADDR")
		w.MasterPort = r.number("MASTER_PORT", math.MaxUint16)
	}
	if r.has("TORCHELASTIC_RESTART_COUNT") {
		w.Restarts = r.number("TORCHELASTIC_RESTART_COUNT", math.MaxInt)
	}
	if r.has("TORCHELASTIC_MAX_RESTARTS") {
		w.MaxRestarts = r.number("TORCHELASTIC_MAX_RESTARTS", math.MaxInt)
	}
	if r.err != nil {
		return Worker{}, true, r.err
	}
	return w, true, nil
}

// own holds the credentials that OwnWorker has removed from the environment.
var own struct {
	sync.Mutex
	incarnation, credentials string
}

// EnvTasks names the socket of a job's scheduler, or the file of an invitation to a job of another
// machine, to programs that submit tasks from outside.
const EnvTasks = "HVD_TASKS"

// OwnTasks returns the value of EnvTasks.
func OwnTasks() string { return os.Getenv(EnvTasks) }

// OwnWorker is like WorkerFromEnv, for this process. It removes the credentials from the
// environment, so that processes that the program starts do not inherit them, and remembers them
// for later calls. The file environ of the process in /proc still shows its initial environment, to
// the same user.
func OwnWorker() (Worker, bool, error) {
	own.Lock()
	defer own.Unlock()
	w, started, err := WorkerFromEnv(func(name string) (string, bool) {
		value, is := os.LookupEnv(name)
		if name == EnvCredentials && value == "" && os.Getenv(EnvIncarnation) == own.incarnation {
			return own.credentials, own.credentials != ""
		}
		return value, is
	})
	switch {
	case err != nil && started && os.Getenv(EnvCredentials) == "":
		return w, started, fmt.Errorf("%w: this process was started by a worker that has already joined its job and keeps "+
			"its credentials; start it from hvdrun, or before the parent calls elastic.Init", err)
	case err != nil || !started:
		return w, started, err
	}
	own.incarnation, own.credentials = w.Incarnation, w.Credentials
	if err := os.Unsetenv(EnvCredentials); err != nil {
		return w, started, fmt.Errorf("plan: removing %s from the environment: %w", EnvCredentials, err)
	}
	return w, started, nil
}

// GPU is the configuration of collectives on GPUs in the environment of a process. The user sets
// the variables; Environ does not write them.
type GPU struct {
	// Backend forces a backend by name. Empty: the best that all ranks can use.
	Backend string
	// NCCLLibrary is the path of NCCL's library. Empty: found by the dynamic linker.
	NCCLLibrary string
	// NCCLShared: NCCL permits several ranks on one device.
	NCCLShared bool
}

// GPUFromEnv parses the environment of this process, whether or not hvdrun started it.
func GPUFromEnv() GPU {
	var g GPU
	g.Backend, _ = os.LookupEnv(EnvCUDABackend)
	g.NCCLLibrary, _ = os.LookupEnv(EnvNCCLLibrary)
	shared, _ := os.LookupEnv(EnvNCCLShared)
	g.NCCLShared = shared == "1"
	return g
}

// envReader keeps the first error, so that a reader of many variables need not check after each.
type envReader struct {
	lookup func(string) (string, bool)
	err    error
}

func (r *envReader) fail(err error) {
	if r.err == nil {
		r.err = err
	}
}

func (r *envReader) has(name string) bool {
	value, _ := r.lookup(name)
	return value != ""
}

func (r *envReader) text(name string) string {
	value, _ := r.lookup(name)
	if value == "" {
		r.fail(errors.New("plan: " + name + " is not set"))
	}
	return value
}

// number parses a number from 0 to most.
func (r *envReader) number(name string, most int) int {
	value := r.text(name)
	if value == "" {
		return 0
	}
	n, err := strconv.Atoi(value)
	if err != nil || !isNumber(value) || n > most {
		r.fail(fmt.Errorf("plan: %s is %q, not a number from 0 to %d", name, shorten(value), most))
		return 0
	}
	return n
}

// rank parses a rank and the size that bounds it.
func (r *envReader) rank(rankName, sizeName string) (rank, size int) {
	size = r.number(sizeName, math.MaxInt)
	rank = r.number(rankName, math.MaxInt)
	if r.err == nil && rank >= size {
		r.fail(fmt.Errorf("plan: %s is %d, but %s is %d", rankName, rank, sizeName, size))
	}
	return rank, size
}

// tuning parses a value that tuned has written, and returns it times unit. It returns 0 if the
// variable is not set, and -1 if the value is 0.
func (r *envReader) tuning(name string, unit, most float64) int64 {
	value, _ := r.lookup(name)
	if value == "" {
		return 0
	}
	n, err := strconv.ParseFloat(value, 64)
	if err != nil || !(n >= 0 && n <= most) {
		r.fail(fmt.Errorf("plan: %s is %q, not a number from 0 to %v", name, shorten(value), most))
		return 0
	}
	if n == 0 {
		return -1
	}
	return int64(math.Round(n * unit))
}

// tuned formats an optional setting: empty for the default, 0 for disabled.
func tuned(n float64) string {
	switch {
	case n == 0:
		return ""
	case n < 0:
		return "0"
	}
	return strconv.FormatFloat(n, 'f', -1, 64)
}

// flag parses a value written by flag; false if it is not set.
func (r *envReader) flag(name string) bool {
	value, _ := r.lookup(name)
	if value != "" && value != "0" && value != "1" {
		r.fail(fmt.Errorf("plan: %s is %q; it must be 0 or 1", name, shorten(value)))
	}
	return value == "1"
}

func flag(set bool) string {
	if set {
		return "1"
	}
	return "0"
}

// SocketName returns the name of the launcher's end of a worker's socket. By this name the worker
// verifies that its descriptor is that socket: a process between the launcher and the worker may
// have closed the socket and reused the number.
func SocketName(incarnation string) string { return "@hvdrun/" + incarnation }

// OwnSocket returns the descriptor of the socket that the launcher gave to this process, or false
// if it gave none. It removes the variable from the environment, since one process uses the socket.
func OwnSocket() (fd int, ok bool) {
	fd, err := strconv.Atoi(os.Getenv(EnvWorkerSocket))
	if err != nil || fd < 0 || os.Unsetenv(EnvWorkerSocket) != nil {
		return 0, false
	}
	return fd, true
}
