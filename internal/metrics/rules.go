package metrics

import (
	"fmt"
	"strings"
)

// runbook is the page with a section for each alarm.
const runbook = "docs/alarms.md"

// alert is an alarm.
type alert struct {
	Name string
	// Expr is true, For so long, when the alarm goes off.
	Expr, For string
	// Severity is "critical" where the job is lost or about to be, "warning" where somebody should
	// look.
	Severity string
	// Summary is the alarm in one line; it may have templates of Prometheus.
	Summary string
}

// Anchor returns the alarm's section in the runbook.
func (a alert) Anchor() string { return strings.ToLower(a.Name) }

// alerts returns all alarms.
func alerts() []alert {
	const losses = `cause=~"death|stall|departure|broken"`
	return []alert{
		{"HvdrunDown", `up{job=~"hvdrun.*"} == 0`, "2m", "critical",
			"{{ $labels.instance }} does not answer: its job has ended, or its driver or agent is gone, or cannot be reached"},
		{"HvdrunWaiting", `hvdrun_job_state{state="waiting"} == 1`, "5m", "warning",
			"the job of {{ $labels.instance }} does not train: it waits for slots"},
		{"HvdrunSmall", `hvdrun_world_size < on (job, instance) hvdrun_world_size_needed{for="start"} and on (job, instance) hvdrun_world_generation > 0`, "15m", "warning",
			"the job of {{ $labels.instance }} trains with {{ $value }} workers, fewer than it began with"},
		{"HvdrunStalled", `increase(hvdrun_job_seconds_total{part="stalled"}[5m]) > 60`, "0m", "warning",
			"workers of {{ $labels.instance }} held up the others for {{ $value | humanizeDuration }} of the last five minutes"},
		{"HvdrunGoodputLow", `rate(hvdrun_job_seconds_total{part="training"}[1h]) < 0.8 and on (job, instance) time() - hvdrun_job_start_time_seconds > 3600`, "10m", "warning",
			"the job of {{ $labels.instance }} trained {{ $value | humanizePercentage }} of the last hour"},
		{"HvdrunResets", `sum by (job, instance) (increase(hvdrun_resets_total{` + losses + `}[1h])) > 5`, "0m", "warning",
			"{{ $labels.instance }} has lost workers {{ $value | printf \"%.0f\" }} times in an hour"},
		{"HvdrunRecoverySlow", strings.ReplaceAll(Quantile("0.9", `hvdrun_recovery_seconds{`+losses+`}`, "1h", "job, instance"), " or ", " > 60 or ") + " > 60", "0m", "warning",
			"{{ $labels.instance }} takes {{ $value | humanizeDuration }} from a loss to the next commit"},
		{"HvdrunExcluded", `sum by (job, instance) (hvdrun_job_slots{state="excluded"}) > 0`, "15m", "warning",
			"slots of {{ $labels.instance }} are excluded after failures: {{ $value }}"},
		{"HvdrunSilent", `hvdrun_worker_beat_age_max_seconds > 60`, "1m", "warning",
			"a worker of {{ $labels.instance }} has been silent for {{ $value | humanizeDuration }}"},
		{"HvdrunMemoryShort", `hvdrun_worker_memory_short > 0`, "1m", "warning",
			"{{ $value }} ranks of {{ $labels.instance }} have less than a tenth of their memory left: the kernel ends processes when it is full"},
		{"HvdrunDiscoveryFails", `hvdrun_discovery_stale_seconds > 60`, "1m", "warning",
			"the source of hosts of {{ $labels.instance }} has failed for {{ $value | humanizeDuration }}: hosts that come or go are not noticed"},
		{"HvdrunJournalBehind", `hvdrun_journal_behind == 1`, "1m", "critical",
			"the job of {{ $labels.instance }} could not be resumed: its journal cannot be written"},
		{"HvdrunNotificationsSlow", strings.ReplaceAll(Quantile("0.99", "hvdrun_notification_delay_seconds", "10m", "job, instance"), " or ", " > 5 or ") + " > 5", "0m", "warning",
			"workers of {{ $labels.instance }} acknowledge changes of hosts after {{ $value | humanizeDuration }}"},
		{"HvdrunBadSlots", `hvdrun_agent_slots{state="bad"} > 0`, "1m", "warning",
			"devices of {{ $labels.instance }} have failed: {{ $value }} slots"},
	}
}

// Rules returns the alarms as a file of rules for Prometheus.
func Rules() []byte {
	var b strings.Builder
	b.WriteString("# Made by: go test ./internal/metrics -update\ngroups:\n  - name: hvdrun\n    rules:\n")
	for _, a := range alerts() {
		fmt.Fprintf(&b, "      - alert: %s\n        expr: >-\n          %s\n", a.Name, a.Expr)
		if a.For != "0m" {
			fmt.Fprintf(&b, "        for: %s\n", a.For)
		}
		fmt.Fprintf(&b, "        labels:\n          severity: %s\n        annotations:\n          summary: '%s'\n          runbook: '%s#%s'\n",
			a.Severity, strings.ReplaceAll(a.Summary, "'", "''"), runbook, a.Anchor())
	}
	return []byte(b.String())
}

// Table returns the metrics as tables in Markdown, one a section.
func Table() string {
	var b strings.Builder
	for i, section := range Sections() {
		if i > 0 {
			b.WriteString("\n")
		}
		fmt.Fprintf(&b, "### %s\n\n| metric | kind | labels | what it tells |\n|---|---|---|---|\n", section)
		for _, m := range list {
			if m.Of == section {
				labels := make([]string, 0, len(m.Labels))
				for _, l := range m.Labels {
					labels = append(labels, "`"+l+"`")
				}
				fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", m.Name, m.Kind, strings.Join(labels, ", "), m.Help)
			}
		}
	}
	return b.String()
}
