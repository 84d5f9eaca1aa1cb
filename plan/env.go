package plan

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Worker is what the environment of a worker tells it: who it is, whom to ask for its world, and
// its place in the world for which it was started, which later worlds do not change.
type Worker struct {
	// RunID names the job, Incarnation this process: a slot's next worker has another.
	RunID, Incarnation string
	// Slot is the worker's place, Size the number of ranks.
	Slot Slot
	Size int
	// GroupRank and GroupSize are the place of the worker's host among the world's hosts and their
	// number, as World.Group returns them. Where GroupSize is 0, CrossRank and CrossSize stand in,
	// which are the same as long as every host has as many slots.
	GroupRank, GroupSize int
	// Elastic says that the world may change.
	Elastic bool
	// DriverAddr is the host:port of the rendezvous.
	DriverAddr string
	// Credentials are the worker's, encoded as one line of text. They are secret: never log them.
	Credentials string
	// MasterAddr and MasterPort are a place at which programs written for torchrun may meet. An
	// empty MasterAddr leaves both out.
	MasterAddr string
	MasterPort int
	// Restarts counts the job's resets at the worker's start, MaxRestarts bounds them.
	Restarts, MaxRestarts int
	// EncryptData asks for TLS on the connections that carry tensors.
	EncryptData bool
	// NetworkInterfaces names those whose addresses may be offered to peers; nil means all. No name
	// holds a comma.
	NetworkInterfaces []string
	// TimelineFilename is what the files are named after in which the worker writes down its
	// operations; "" asks for none.
	TimelineFilename string
	// FusionThreshold (in MiB), CycleTime and StallWarning tune asynchronous collectives. 0: as is
	// usual; negative: not at all, no fusion, no delay, no warning.
	FusionThreshold         int
	CycleTime, StallWarning time.Duration
	// Connections share the large messages between two workers of different hosts. 0: as is usual,
	// one.
	Connections int
	// VerifyState is after how many commits the ranks compare their states. 0: only after each
	// sync; negative: not at all.
	VerifyState int
	// HealState says that ranks that differ are given the state of most others; training fails
	// otherwise.
	HealState bool
	// CommitReplicas is how many other ranks keep what a rank alone has of each commit.
	CommitReplicas int
	// Algorithm forces one in collectives. It is the user's: a worker inherits the variable,
	// Environ does not write it.
	Algorithm string
	// OnlySockets asks for no shared memory between the ranks of a host. It is the user's as well.
	OnlySockets bool
}

// The names that hvdrun itself gives to the environment of a worker. Besides, Environ writes those
// of Horovod and of torchrun, for programs that read them.
const (
	// MaxFusionThreshold is the largest, in MiB.
	MaxFusionThreshold = 1 << 20

	EnvRunID             = "HVD_RUN_ID"
	EnvSlot              = "HVD_SLOT"
	EnvDriverAddr        = "HVD_DRIVER_ADDR"
	EnvIncarnation       = "HVD_INCARNATION"
	EnvCredentials       = "HVD_CREDENTIALS"
	EnvEncryptData       = "HVD_ENCRYPT_DATA"
	EnvNetworkInterfaces = "HVD_NETWORK_INTERFACES"
	EnvTimelineFilename  = "HVD_TIMELINE_FILENAME"
	EnvFusionThreshold   = "HVD_FUSION_THRESHOLD_MB"
	EnvCycleTime         = "HVD_CYCLE_TIME_MS"
	EnvStallWarning      = "HVD_STALL_WARNING"
	EnvConnections       = "HVD_CONNECTIONS"
	EnvVerifyState       = "HVD_VERIFY_STATE"
	EnvHealState         = "HVD_HEAL_STATE"
	EnvCommitReplicas    = "HVD_COMMIT_REPLICAS"
	EnvAlgorithm         = "HVD_COLLECTIVE_ALGORITHM"
	EnvOnlySockets       = "HVD_ONLY_SOCKETS"
)

// Environ returns the worker's variables as NAME=value, in a fixed order, for appending to the
// environment that it inherits: all of them are always there, so that nothing is inherited from a
// job that started this one, save the master's address where there is none. The list holds a
// secret.
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
	text(EnvDriverAddr, w.DriverAddr)
	text(EnvIncarnation, w.Incarnation)
	text(EnvCredentials, w.Credentials)
	text(EnvEncryptData, flag(w.EncryptData))
	text(EnvNetworkInterfaces, strings.Join(w.NetworkInterfaces, ","))
	text(EnvTimelineFilename, w.TimelineFilename)
	text(EnvFusionThreshold, tuned(float64(w.FusionThreshold)))
	text(EnvCycleTime, tuned(w.CycleTime.Seconds()*1e3))
	text(EnvStallWarning, tuned(w.StallWarning.Seconds()))
	number(EnvConnections, w.Connections)
	text(EnvVerifyState, tuned(float64(w.VerifyState)))
	text(EnvHealState, flag(w.HealState))
	number(EnvCommitReplicas, w.CommitReplicas)
	return env
}

// WorkerFromEnv reads back what Environ wrote; lookup is os.LookupEnv, or the like. It returns
// false where hvdrun did not start this process: there is no HVD_DRIVER_ADDR, or an empty one.
// Errors name the variable.
func WorkerFromEnv(lookup func(string) (string, bool)) (Worker, bool, error) {
	if addr, _ := lookup(EnvDriverAddr); addr == "" {
		return Worker{}, false, nil
	}
	r := envReader{lookup: lookup}
	var w Worker
	w.DriverAddr = r.text(EnvDriverAddr)
	w.RunID = r.text(EnvRunID)
	w.Incarnation = r.text(EnvIncarnation)
	w.Credentials = r.text(EnvCredentials)
	w.Slot.Host = r.text("HOROVOD_HOSTNAME")
	w.Slot.Index = r.number(EnvSlot, MaxSlots-1)
	w.Slot.Rank, w.Size = r.place("HOROVOD_RANK", "HOROVOD_SIZE")
	w.Slot.LocalRank, w.Slot.LocalSize = r.place("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
	w.Slot.CrossRank, w.Slot.CrossSize = r.place("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE")
	w.Elastic = r.flag("HOROVOD_ELASTIC")
	w.EncryptData = r.flag(EnvEncryptData)
	if list, _ := lookup(EnvNetworkInterfaces); list != "" {
		w.NetworkInterfaces = strings.Split(list, ",")
	}
	w.TimelineFilename, _ = lookup(EnvTimelineFilename)
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
	// The names below are torchrun's. A program or its wrapper may have replaced or dropped them.
	if r.has("GROUP_WORLD_SIZE") {
		w.GroupRank, w.GroupSize = r.place("GROUP_RANK", "GROUP_WORLD_SIZE")
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

// envReader keeps the first error, so that a reader of many variables need not look after each.
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

// number reads one of 0 to most.
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

// place reads a rank and the size that bounds it.
func (r *envReader) place(rankName, sizeName string) (rank, size int) {
	size = r.number(sizeName, math.MaxInt)
	rank = r.number(rankName, math.MaxInt)
	if r.err == nil && rank >= size {
		r.fail(fmt.Errorf("plan: %s is %d, but %s is %d", rankName, rank, sizeName, size))
	}
	return rank, size
}

// tuning reads what tuned wrote, in units; one that is not set is 0.
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

// tuned is a number that people give: empty where nothing is said, 0 for not at all.
func tuned(n float64) string {
	switch {
	case n == 0:
		return ""
	case n < 0:
		return "0"
	}
	return strconv.FormatFloat(n, 'f', -1, 64)
}

// flag reads what flag wrote; one that is not set is false.
func (r *envReader) flag(name string) bool {
	value, _ := r.lookup(name)
	if value != "" && value != "0" && value != "1" {
		r.fail(fmt.Errorf("plan: %s is %q, neither 0 nor 1", name, shorten(value)))
	}
	return value == "1"
}

func flag(set bool) string {
	if set {
		return "1"
	}
	return "0"
}
