// Package show formats what several commands print about a job: times, sizes, the state of a slot,
// tables of tasks.
package show

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/job"
)

// ShortCommand formats a command for the last column of a table.
func ShortCommand(words []string) string {
	text := cli.EscapeCell(strings.NewReplacer("\n", " ", "\t", " ").Replace(strings.Join(words, " ")))
	if cut := []rune(text); len(cut) > 60 {
		return string(cut[:59]) + "…"
	}
	return text
}

// SizeText describes the bounds of a job's worlds.
func SizeText(s job.Status) string {
	switch {
	case !s.Elastic:
		return fmt.Sprintf("%d, not elastic", s.NP)
	case s.MaxNP == 0:
		return fmt.Sprintf("%d or more", s.MinNP)
	}
	return fmt.Sprintf("%d to %d", s.MinNP, s.MaxNP)
}

// LateText describes a worker that mostly comes last to operations; empty for other workers.
func LateText(s *job.Straggler) string {
	if !s.Late() {
		return ""
	}
	by := time.Duration(s.By * float64(time.Second))
	return fmt.Sprintf("comes last to %.0f%% of operations, by %v", 100*s.Last, by.Round(time.Millisecond))
}

// UsageText describes what a worker uses: processors, memory and, if little memory is left, the
// limit. It is empty if the usage is unknown.
func UsageText(u *job.Usage) string {
	if u == nil {
		return ""
	}
	text := fmt.Sprintf("%.1f processors, %s", u.Processors, Bytes(u.Resident))
	if short := ShortText(u); short != "" {
		text += ", " + short
	}
	return text
}

// ShortText describes how little memory is left to a worker; empty if it has enough.
func ShortText(u *job.Usage) string {
	if !u.Short() {
		return ""
	}
	return fmt.Sprintf("only %s of %s of memory left", Bytes(u.Limit-min(u.Used, u.Limit)), Bytes(u.Limit))
}

// FiguresText formats the numbers that a program has reported.
func FiguresText(all []job.Figure) string {
	var b strings.Builder
	for i, f := range all {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s %.6g", f.Name, f.Value)
	}
	return b.String()
}

// Used returns two cells of a table of hosts: the number of slots that have workers, and the runs
// of these workers, each with its number of slots. If all workers belong to one run, runs is only
// its name.
func Used(used map[string]uint32) (slots, runs string) {
	total, words := uint64(0), []string{}
	for _, run := range slices.Sorted(maps.Keys(used)) {
		total += uint64(used[run])
		words = append(words, fmt.Sprintf("%s:%d", cli.EscapeCell(run), used[run]))
	}
	switch len(words) {
	case 0:
		return "0", "-"
	case 1:
		return fmt.Sprint(total), cli.EscapeCell(slices.Collect(maps.Keys(used))[0])
	}
	return fmt.Sprint(total), strings.Join(words, ",")
}

// Bytes formats a size in KiB, MiB or GiB.
func Bytes(n uint64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.0f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%.0f KiB", float64(n)/(1<<10))
}

// SlotState describes a slot's state, with the state of its worker first.
func SlotState(slot job.Slot, now time.Time) string {
	if slot.Out == "" {
		return string(slot.State)
	}
	out := string(slot.Out)
	switch {
	case slot.Until != nil:
		out += fmt.Sprintf(" until %s (in %v)", ClockTime(*slot.Until, now), job.Round(max(0, slot.Until.Sub(now))))
	case slot.Out == job.SlotExcluded:
		out += " for ever"
	}
	if slot.State == slot.Out {
		return out
	}
	return string(slot.State) + ", " + out
}

// Brief formats a number of seconds, to the millisecond if it is short.
func Brief(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	if d < time.Second {
		return d.Round(time.Millisecond).String()
	}
	return job.Round(d).String()
}

// ClockTime formats a time of day, with the date if that is not today's.
func ClockTime(t, now time.Time) string {
	t, now = t.Local(), now.Local()
	if t.Format(time.DateOnly) == now.Format(time.DateOnly) {
		return t.Format(time.TimeOnly)
	}
	return t.Format(time.DateTime)
}

// Grouped formats a number with its digits in groups of three.
func Grouped[T int | uint64](n T) string {
	text := fmt.Sprint(n)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

// Plural returns the number followed by the noun what, in the plural unless n is 1.
func Plural[T int | uint64](n T, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%s %ss", Grouped(n), what)
}
