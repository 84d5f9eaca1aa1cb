package metrics

import (
	"fmt"
	"strings"
)

// alert is an alarm.
type alert struct {
	Name string
	// Expr is the condition of the alarm, and For how long it must hold.
	Expr, For string
	// Severity is "critical" if the job is lost or about to be, and "warning" if somebody should
	// look.
	Severity string
	// Summary is the alarm in one line, which may contain templates of Prometheus.
	Summary string
	// Do says what the alarm means for the job, where to look and what to do.
	Do string
}

// alerts returns all alarms.
func alerts() []alert {
	const losses = `cause=~"death|stall|departure|broken"`
	return []alert{
		{"HvdrunDown", `up{job=~"hvdrun.*"} == 0`, "2m", "critical",
			"{{ $labels.instance }} does not answer: its job has ended, or its driver or agent is gone, or cannot be reached",
			"The metrics end with the job: `hvdrun jobs` on its machine shows whether it is done or has failed, and whether its driver lives. If it is done, remove its target. If it has failed, the last lines of its log name host, slot and rank of the first failure. If the driver is dead, `hvdrun resume` takes the job over while its workers train on. For an agent, check its service: jobs count its workers as lost after --agent-timeout."},
		{"HvdrunWaiting", `hvdrun_job_state{state="waiting"} == 1`, "5m", "warning",
			"the job of {{ $labels.instance }} does not train: it waits for slots",
			"The job ends with status 3 after --elastic-timeout. `hvdrun status` shows how many slots it needs, and which are available, excluded or drained. Add hosts, readmit repaired ones with `hvdrun readmit`, or need fewer with `hvdrun scale --min-np`."},
		{"HvdrunSmall", `hvdrun_world_size < on (job, instance) hvdrun_world_size_needed{for="start"} and on (job, instance) hvdrun_world_generation > 0`, "15m", "warning",
			"the job of {{ $labels.instance }} trains with {{ $value }} workers, fewer than it began with",
			"The job trains, but with fewer workers than it began with. `hvdrun status` shows which hosts or slots are missing, and hvdrun_worker_exits_total whether workers fail there. Add hosts if they are needed."},
		{"HvdrunStalled", `increase(hvdrun_job_seconds_total{part="stalled"}[5m]) > 60`, "0m", "warning",
			"workers of {{ $labels.instance }} held up the others for {{ $value | humanizeDuration }} of the last five minutes",
			"The log names the worker and what it does, and hvdrun_job_stalled_seconds_total its slot. A worker that remains stalled is stopped after --stall-timeout. If a slot stalls again and again, its device, disk or network is slow: exclude it with `hvdrun exclude`, and check its host."},
		{"HvdrunGoodputLow", `rate(hvdrun_job_seconds_total{part="training"}[1h]) < 0.8 and on (job, instance) time() - hvdrun_job_start_time_seconds > 3600`, "10m", "warning",
			"the job of {{ $labels.instance }} trained {{ $value | humanizePercentage }} of the last hour",
			"`hvdrun status` shows how the rest of the time was spent. Much recovering or recomputing: workers are lost, or commits are too rare. Growing: hosts come and go often; --discovery-removal-after helps if the source of hosts is unstable. Synchronising: the state is large for the network, or OnReset functions are slow. Waiting: too few slots."},
		{"HvdrunResets", `sum by (job, instance) (increase(hvdrun_resets_total{` + losses + `}[1h])) > 5`, "0m", "warning",
			"{{ $labels.instance }} has lost workers {{ $value | printf \"%.0f\" }} times in an hour",
			"The label cause and the log give the reason. death: a worker failed. stall: a worker that held up the others was stopped. departure: a worker left by itself. broken: a connection between two live workers broke; check the network. Exclude a slot or host that is lost each time with `hvdrun exclude` until it is repaired."},
		{"HvdrunRecoverySlow", strings.ReplaceAll(quantile("0.9", `hvdrun_recovery_seconds{`+losses+`}`, "1h", "job, instance"), " or ", " > 60 or ") + " > 60", "0m", "warning",
			"{{ $labels.instance }} takes {{ $value | humanizeDuration }} from a loss to the next commit",
			"`hvdrun status` shows which part of the recovery takes long. A recovery ends with a commit, so long steps make it long. The silent death of a whole host is noticed after --agent-timeout, and a survivor that does not join is stopped after --join-timeout."},
		{"HvdrunExcluded", `sum by (job, instance) (hvdrun_job_slots{state="excluded"}) > 0`, "15m", "warning",
			"slots of {{ $labels.instance }} are excluded after failures: {{ $value }}",
			"The workers of these slots failed. `hvdrun status` shows the end of the exclusion and the number of failures, and the log has the exits. Slots return by themselves, later each time. Repair the host, then readmit it with `hvdrun readmit`."},
		{"HvdrunSilent", `hvdrun_worker_beat_age_max_seconds > 60`, "1m", "warning",
			"a worker of {{ $labels.instance }} has been silent for {{ $value | humanizeDuration }}",
			"The rank sends no heartbeats: its process is stopped, or its host is overloaded or cut off. `hvdrun status` names it. If others wait for it, the wait ends after --stall-timeout. In a world of a thousand ranks heartbeats come every ten seconds."},
		{"HvdrunMemoryShort", `hvdrun_worker_memory_short > 0`, "1m", "warning",
			"{{ $value }} ranks of {{ $labels.instance }} have less than a tenth of their memory left: the kernel ends processes when it is full",
			"The memory is that of the machine or of a control group such as a container; caches that the kernel can drop do not count. `hvdrun status` shows the memory of each worker. Use a smaller batch, fewer workers on the host, fewer processes of data loaders, or a higher limit."},
		{"HvdrunDiscoveryFails", `hvdrun_discovery_stale_seconds > 60`, "1m", "warning",
			"the source of hosts of {{ $labels.instance }} has failed for {{ $value | humanizeDuration }}: hosts that come or go are not noticed",
			"The job goes on with the last list of hosts. The log has the error of the script or plugin; `hvdrun discover` runs it once, and `hvdrun discover --verify` checks all that a source must do."},
		{"HvdrunJournalBehind", `hvdrun_journal_behind == 1`, "1m", "critical",
			"the job of {{ $labels.instance }} could not be resumed: its journal cannot be written",
			"Usually the disk of the folder of the job is full, or etcd, which keeps the copy, is out of reach. The job trains on, but cannot be resumed if its driver dies now. `hvdrun status` shows the error. The driver writes the journal anew when it can."},
		{"HvdrunNotificationsSlow", strings.ReplaceAll(quantile("0.99", "hvdrun_notification_delay_seconds", "10m", "job, instance"), " or ", " > 5 or ") + " > 5", "0m", "warning",
			"workers of {{ $labels.instance }} acknowledge changes of hosts after {{ $value | humanizeDuration }}",
			"The workers get too little processor time, or the network to them is slow or loses packets. Training goes on, but the world changes later than it could. The log names workers that do not answer."},
		{"HvdrunBadSlots", `hvdrun_agent_slots{state="bad"} > 0`, "1m", "warning",
			"devices of {{ $labels.instance }} have failed: {{ $value }} slots",
			"Their slots are not used. The log of the agent names the devices, and `hvdrun check` on the host shows what NVML reports. Repair or replace them, and restart the agent."},
	}
}

// rules returns the alarms as a file of rules for Prometheus.
func rules() []byte {
	var b strings.Builder
	b.WriteString("# Made by: go test ./internal/metrics -update\ngroups:\n  - name: hvdrun\n    rules:\n")
	for _, a := range alerts() {
		fmt.Fprintf(&b, "      - alert: %s\n        expr: >-\n          %s\n", a.Name, a.Expr)
		if a.For != "0m" {
			fmt.Fprintf(&b, "        for: %s\n", a.For)
		}
		fmt.Fprintf(&b, "        labels:\n          severity: %s\n        annotations:\n          summary: '%s'\n          description: '%s'\n",
			a.Severity, strings.ReplaceAll(a.Summary, "'", "''"), strings.ReplaceAll(a.Do, "'", "''"))
	}
	return []byte(b.String())
}

// table returns the metrics as text, section by section.
func table() string {
	var b strings.Builder
	b.WriteString("Made by: go test ./internal/metrics -update\n")
	for _, section := range sections() {
		fmt.Fprintf(&b, "\n%s\n", section)
		for _, m := range list {
			if m.Of == section {
				fmt.Fprintf(&b, "  %s  %s", m.Name, m.Kind)
				if len(m.Labels) > 0 {
					fmt.Fprintf(&b, "  by %s", strings.Join(m.Labels, ", "))
				}
				fmt.Fprintf(&b, "\n      %s\n", m.Help)
			}
		}
	}
	return b.String()
}
