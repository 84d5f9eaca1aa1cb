package dashboardtest

import (
	"fmt"
	"time"

	"github.com/hvdrun/hvdrun/job"
)

// Begun is the time at which the jobs of stories began.
var Begun = time.Date(2026, 11, 23, 9, 12, 30, 0, time.UTC)

// Story returns a job that has run for some hours, with hosts of eight slots that came and went,
// failures, drains and a straggler. Its points of throughput follow from its commits.
func Story() *Job {
	hosts := []string{"gpu-a1", "gpu-a2", "gpu-a4", "gpu-b1", "gpu-b2"}
	j := New(Begun, 8, hosts...)
	j.Change(func(s *job.Status) { s.NP, s.MinNP, s.MaxNP = 16, 8, 48 })
	at := func(minutes float64) time.Time { return Begun.Add(time.Duration(minutes * float64(time.Minute))) }
	type found struct {
		Host  string `json:"host"`
		Slots int    `json:"slots"`
	}
	all := func(names ...string) (list []found) {
		for _, n := range names {
			list = append(list, found{n, 8})
		}
		return list
	}
	j.Tell(at(0), job.HostsFound, "hosts", all("gpu-a1", "gpu-a2"))
	j.Tell(at(0.02), job.WorkerStarted, "host", "gpu-a1", "slot", 0, "pid", 20600)
	j.World(at(0.1), 16, 900*time.Millisecond, 1)
	j.Tell(at(11), job.HostsFound, "hosts", all("gpu-a1", "gpu-a2", "gpu-a3", "gpu-a4"))
	j.Tell(at(11.2), job.HostsUpdated, "seq", 1, "change", "added")
	j.World(at(11.203), 32, 240*time.Millisecond, 5480)
	j.Tell(at(24), job.WorkerExited, "host", "gpu-a3", "slot", 5, "pid", 20629, "rank", 21, "code", 0, "signal", 9, "cause", "failed")
	j.Tell(at(24), job.Excluded, "host", "gpu-a3", "slot", 5, "until", at(26))
	j.World(at(24.003), 31, 300*time.Millisecond, 16100)
	j.Tell(at(26), job.Returned, "host", "gpu-a3", "slot", 5)
	j.Tell(at(26.1), job.HostsUpdated, "seq", 2, "change", "added")
	j.World(at(26.102), 32, 150*time.Millisecond, 17820)
	j.Tell(at(41), job.Audit, "who", map[string]any{"uid": "1000"}, "what", "drain", "host", "gpu-a3", "outcome", "done")
	j.Tell(at(41), job.DrainAsked, "host", "gpu-a3", "slot", nil)
	j.Tell(at(41.001), job.HostsUpdated, "seq", 3, "change", "removed")
	j.World(at(41.004), 24, 210*time.Millisecond, 30060)
	j.Tell(at(52), job.Stalled, "host", "gpu-a4", "slot", 2, "pid", 20626, "rank", 18, "generation", 5,
		"what", "silent for 5.2s, was training, after AllReduce (operation 41930)")
	j.Tell(at(53.9), job.WorkerExited, "host", "gpu-a4", "slot", 2, "pid", 20626, "rank", 18, "code", 0, "signal", 9, "cause", "stopped")
	j.World(at(53.91), 23, 420*time.Millisecond, 37400)
	j.Tell(at(58), job.HostsUpdated, "seq", 4, "change", "added")
	j.World(at(58.002), 40, 260*time.Millisecond, 40400)
	j.Tell(at(74), job.Scaled, "min_np", 8, "max_np", 48)
	j.Tell(at(81), job.WorkerExited, "host", "gpu-b2", "slot", 1, "pid", 20633, "rank", 33, "code", 1, "signal", nil, "cause", "failed")
	j.Tell(at(81), job.Excluded, "host", "gpu-b2", "slot", 1, "until", at(83))
	j.World(at(81.003), 39, 310*time.Millisecond, 64000)
	j.Tell(at(83), job.Returned, "host", "gpu-b2", "slot", 1)
	j.Tell(at(83.1), job.HostsUpdated, "seq", 5, "change", "added")
	j.World(at(83.102), 40, 180*time.Millisecond, 66200)
	j.Change(func(s *job.Status) {
		s.Time, s.Last, s.Since = at(102), at(83.2), at(83.2)
		s.Goodput = Goodput(s.Time.Sub(s.Begun), job.Goodput{
			Parts: []job.Spent{
				{Part: job.PartStarting, Seconds: 6}, {Part: job.PartRecovering, Seconds: 1.4}, {Part: job.PartGrowing, Seconds: 0.6},
				{Part: job.PartShrinking, Seconds: 0.3}, {Part: job.PartSynchronising, Seconds: 2.2}, {Part: job.PartRecomputing, Seconds: 38.1},
				{Part: job.PartStalled, Seconds: 114},
			},
			StalledBy: []job.StalledBy{{Host: "gpu-a4", Slot: 2, Seconds: 114}},
		})
		for hi := range s.Hosts {
			for si := range s.Hosts[hi].Slots {
				slot := &s.Hosts[hi].Slots[si]
				slot.Commits = new(uint64(84310))
				slot.Straggler = &job.Straggler{Last: 0.012 + 0.001*float64(si), By: 0.0004, Operations: 5000}
			}
		}
		s.Hosts[2].Slots[6].Straggler = &job.Straggler{Last: 0.87, By: 0.0214, Operations: 5000}
		s.Hosts[4].Slots[1].Failures, s.Hosts[2].Slots[2].Failures = 1, 1
	})
	return j
}

// Death adds the death of a worker, after which the others form a world without it.
func (j *Job) Death(at time.Time) {
	j.Change(func(s *job.Status) {
		s.State, s.Since, s.Time = job.Resetting, at, at
		until := at.Add(time.Second)
		for hi := range s.Hosts {
			for si := range s.Hosts[hi].Slots {
				slot := &s.Hosts[hi].Slots[si]
				if slot.State == job.SlotTraining && (hi*8+si)%5 != 0 {
					slot.State = job.SlotReady
				}
			}
		}
		dead := &s.Hosts[1].Slots[3]
		*dead = job.Slot{Slot: 3, State: job.SlotExcluded, Out: job.SlotExcluded, Until: &until, Failures: 1}
		s.Waits = []job.Wait{{For: "8 of 39 workers to join generation 10: ranks 0 5 10 15 20 25 30 35", Until: at.Add(29 * time.Second)}}
	})
	j.Tell(at, job.WorkerExited, "host", "gpu-a2", "slot", 3, "pid", 20611, "rank", 11, "code", 0, "signal", 11, "cause", "failed")
	j.Tell(at, job.Excluded, "host", "gpu-a2", "slot", 3, "until", at.Add(time.Second))
}

// Hang adds a worker that holds up the others in the user's code.
func (j *Job) Hang(at time.Time) {
	const what, where = "silent for 5.2s, was training, after AllReduce (operation 84310)", "main.loadBatch data.go:41, main.train train.go:88"
	j.Change(func(s *job.Status) {
		s.Time = at
		for hi := range s.Hosts {
			for si := range s.Hosts[hi].Slots {
				s.Hosts[hi].Slots[si].What = "AllReduce (operation 84311) for 5s"
			}
		}
		s.Hosts[3].Slots[2].What, s.Hosts[3].Slots[2].Where = what+"; it will be stopped in 1m55s (--stall-timeout)", where
	})
	worker := []any{"host", "gpu-b1", "slot", 2, "pid", 20626, "rank", 26, "generation", 9, "what", what}
	j.Tell(at, job.Stalled, worker...)
	j.Tell(at.Add(40*time.Millisecond), job.Located, append(worker, "where", where)...)
}

// Growth adds a new host, whose workers start while the others train.
func (j *Job) Growth(at time.Time) {
	j.Change(func(s *job.Status) {
		h := job.Host{Host: "gpu-b3", Listed: true}
		for i := range 8 {
			slot := job.Slot{Slot: i, State: job.SlotStarting, PID: 20900 + i}
			if i < 5 {
				slot.State = job.SlotReady
			}
			h.Slots = append(h.Slots, slot)
		}
		s.Hosts = append(s.Hosts, h)
		s.Time = at
		s.Waits = []job.Wait{{For: "3 of 8 new workers to start", Until: at.Add(24 * time.Second)}}
	})
	j.Tell(at, job.HostsFound, "hosts", []map[string]any{{"host": "gpu-b3", "slots": 8}})
	for i := range 8 {
		j.Tell(at.Add(time.Duration(i)*time.Millisecond), job.WorkerStarted, "host", "gpu-b3", "slot", i, "pid", 20900+i)
	}
}

// Large returns a job of hosts times slots.
func Large(begun time.Time, hosts, slots int) *Job {
	names := make([]string, hosts)
	for i := range names {
		names[i] = fmt.Sprintf("node%03d", i+1)
	}
	j := New(begun, slots, names...)
	j.World(begun.Add(3*time.Second), hosts*slots, time.Second, 1)
	j.Change(func(s *job.Status) {
		s.Goodput = Goodput(s.Time.Sub(s.Begun), job.Goodput{Parts: []job.Spent{{Part: job.PartStarting, Seconds: 3}}})
	})
	return j
}
