package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/test/follow"
)

// records returns the audit records in a file of JSON lines: an events file, a log with records in
// a field, or a file of records alone.
func records(t *testing.T, path string) (all []audit.Record) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if !strings.HasSuffix(line, "\n") {
			break // the last line is incomplete
		}
		var entry struct {
			Event string
			Audit *audit.Record
		}
		var r audit.Record
		if err := errors.Join(json.Unmarshal([]byte(line), &entry), json.Unmarshal([]byte(line), &r)); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		switch {
		case entry.Audit != nil:
			all = append(all, *entry.Audit)
		case entry.Event == audit.Name, r.What != "" && entry.Event == "":
			all = append(all, r)
		}
	}
	return all
}

// TestAudit: the job's events file records who ran, changed and stopped the job. The agent's log
// records which driver started workers, by the serial number of its certificate, which the
// cluster's folder also records.
func TestAudit(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	keys := filepath.Join(dir, "cluster")
	if out, err := exec.Command(binaries.Hvdrun, "cluster", "init", keys).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	net := address()
	background(t, "cluster", "serve", keys, "--listen", net+":7945")
	_, agentLog := background(t, "agent", "--enroll", net+":7945", "--token-file", filepath.Join(keys, "token"), "--state-dir", filepath.Join(dir, "a"),
		"--name", "a", "--slots", "1", "--bind", net+":7946", "--log-format", "json")
	source := []string{"--gossip-join", net + ":7946", "--cluster", keys, "--gossip-bind", "127.0.0.1:0"}
	if !follow.Await(t, func() bool {
		out, err := exec.Command(binaries.Hvdrun, append([]string{"discover"}, source...)...).CombinedOutput()
		return err == nil && strings.Contains(string(out), "agent")
	}) {
		t.Fatal("there is no cluster")
	}
	r := start(t, Job{
		Flags:   append(flags("-np", "1", "--min-np", "1"), source...),
		Trainer: []string{"-steps", "100000", "-step-time", "10ms", "--", "hush"},
		Env:     []string{"SECRET=hush"},
	})
	worker := world(t, r, 0, 1).Slots[0].PID
	order := func(args ...string) int {
		t.Helper()
		cmd := r.Subcommand(t.Context(), args...)
		out, err := cmd.CombinedOutput()
		if err != nil && cmd.ProcessState == nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
		return cmd.Process.Pid
	}
	scale, drain := order("scale", "--max-np", "3"), order("drain", "a") // the drain is refused
	stop := order("stop")
	finish(t, r, 143, 100000)

	uid := strconv.Itoa(os.Getuid())
	me := func(pid int) audit.Who { return audit.Who{UID: uid, PID: pid} }
	driver := audit.Who{Role: "driver", UID: uid, PID: r.PID}
	var got []string
	for _, a := range records(t, r.Job.EventsPath()) {
		if a.Who.Role == "driver" {
			driver.Run = a.Who.Run
		}
		got = append(got, said(a))
	}
	person := audit.Who{Run: driver.Run, UID: uid, PID: r.PID}
	want := []string{
		said(audit.Record{Who: person, What: "run", Outcome: audit.Done}),
		said(audit.Record{Who: driver, What: "start", Host: "a", Slot: new(0), PID: worker, Outcome: audit.Done}),
		said(audit.Record{Who: me(scale), What: "scale", How: "at most 3", Outcome: audit.Done}),
		said(audit.Record{Who: me(drain), What: "drain", Host: "a", Outcome: "refused"}),
		said(audit.Record{Who: me(stop), What: "stop", Outcome: audit.Done}),
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("the events file has\n%s\nand not\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	checkAgent(t, records(t, agentLog), records(t, filepath.Join(keys, "audit.jsonl")), driver.Run, worker)
	for _, path := range []string{r.Job.EventsPath(), agentLog} {
		if text, _ := os.ReadFile(path); strings.Contains(string(text), "hush") {
			t.Errorf("%s has an argument, or a variable, of a worker:\n%s", path, text)
		}
	}
}

// said formats a record without its time, folder and program, and without the reason of a refusal.
func said(r audit.Record) string {
	outcome, _, _ := strings.Cut(r.Outcome, ":")
	slot := -1
	if r.Slot != nil {
		slot = *r.Slot
	}
	return fmt.Sprintf("%+v %s %q host %q slot %d pid %d: %s", r.Who, r.What, r.How, r.Host, slot, r.PID, outcome)
}

// checkAgent compares the agent's records with those of the cluster's folder: the certificate with
// which the driver began the session and started the worker has the serial number that the folder
// records.
func checkAgent(t *testing.T, agent, folder []audit.Record, run string, worker int) {
	t.Helper()
	serial := ""
	for _, a := range folder {
		if a.What == "issue" && a.Run == run {
			serial = a.How[strings.LastIndex(a.How, " ")+1:]
		}
	}
	found := map[string]audit.Record{}
	for _, a := range agent {
		if a.Who.Run == run {
			found[a.What] = a
		}
		if a.Who.Run == run && (a.Who.Role != "driver" || a.Who.UID != strconv.Itoa(os.Getuid()) || a.Who.Serial != serial || a.Outcome != audit.Done) {
			t.Errorf("serial number %q: the agent has %v", serial, a)
		}
	}
	for _, what := range []string{"attach", "start", "end"} {
		if _, is := found[what]; !is {
			t.Errorf("the agent has no record of %q: %v", what, agent)
		}
	}
	if found["start"].PID != worker || found["start"].Dir == "" || found["start"].Program == "" {
		t.Errorf("the worker is process %d, and the agent has %v", worker, found["start"])
	}
}
