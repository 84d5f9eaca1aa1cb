package torchrun

import (
	"strconv"
	"strings"

	"github.com/hvdrun/hvdrun/plan"
)

// place is a node's place in a round.
type place struct {
	round Round
	ranks ranks
	host  string // host of the store that its workers reach
	port  int
}

// localRankMacro stands for the local rank in arguments.
const localRankMacro = "${local_rank}"

// environment returns the environment with which a worker is started.
func (a *Agent) environment(p place, local int, w paths, incarnation string) []string {
	c := &a.cfg
	env := append([]string(nil), c.Env...)
	set := func(name, value string) { env = append(env, name+"="+value) }
	number := func(name string, n int) { set(name, strconv.Itoa(n)) }
	inherited := func(name, value string) {
		if _, is := lookup(c.Env, name); !is {
			set(name, value)
		}
	}
	number("LOCAL_RANK", local)
	if devices, ok := a.device(local); c.VirtualLocalRank && ok {
		number("LOCAL_RANK", 0)
		set("CUDA_VISIBLE_DEVICES", devices)
	}
	number("RANK", p.ranks.Base+local)
	number("GROUP_RANK", p.round.Rank)
	number("ROLE_RANK", p.ranks.RoleBase+local)
	set("ROLE_NAME", c.Role)
	number("LOCAL_WORLD_SIZE", c.Workers)
	number("WORLD_SIZE", p.ranks.World)
	number("GROUP_WORLD_SIZE", p.round.World)
	number("ROLE_WORLD_SIZE", p.ranks.RoleWorld)
	set("MASTER_ADDR", p.host)
	number("MASTER_PORT", p.port)
	number("TORCHELASTIC_RESTART_COUNT", p.round.Restarts)
	number("TORCHELASTIC_MAX_RESTARTS", c.MaxRestarts)
	set("TORCHELASTIC_RUN_ID", c.RunID)
	set("TORCHELASTIC_USE_AGENT_STORE", "True")
	inherited("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
	if c.Workers > 1 {
		inherited("OMP_NUM_THREADS", "1")
	}
	set("TORCHELASTIC_ERROR_FILE", w.errorFile)
	if a.timer != nil {
		set("TORCHELASTIC_TIMER_FILE", a.timer.path)
	}
	if c.Mark != "" {
		set(plan.EnvRunID, c.Mark)
	}
	set(plan.EnvIncarnation, incarnation)
	return env
}

// device returns the only device that a worker sees if VirtualLocalRank is set; false: there is no
// device for it.
func (a *Agent) device(local int) (string, bool) {
	all, is := lookup(a.cfg.Env, "CUDA_VISIBLE_DEVICES")
	if !is || all == "" {
		return strconv.Itoa(local), true
	}
	list := strings.Split(all, ",")
	if local >= len(list) {
		return "", false
	}
	return strings.TrimSpace(list[local]), true
}

// lookup returns the last value of a variable.
func lookup(env []string, name string) (value string, is bool) {
	for _, entry := range env {
		if v, ok := strings.CutPrefix(entry, name+"="); ok {
			value, is = v, true
		}
	}
	return value, is
}

// arguments returns the command line of a worker.
func arguments(command []string, local int) []string {
	args := make([]string, len(command))
	for i, word := range command {
		args[i] = strings.ReplaceAll(word, localRankMacro, strconv.Itoa(local))
	}
	return args
}
