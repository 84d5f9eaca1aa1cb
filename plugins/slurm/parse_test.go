package main

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

func golden(t testing.TB, name string) string {
	t.Helper()
	text, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestParseJob(t *testing.T) {
	j, err := parseJob(golden(t, "job.txt"), "12", "gpu")
	if err != nil {
		t.Fatal(err)
	}
	got := fmt.Sprintln(j.state, j.phase == running, j.nodes, j.tasks, j.tasksPerNode, j.gpus, j.cpus, j.start)
	want := "RUNNING true [n1 n2 n3 gpu-07] 8 2 map[gpu-07:5 n1:2 n2:2 n3:2] map[gpu-07:12 n1:4 n2:4 n3:4] 2026-11-21T01:25:12\n"
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if j, err = parseJob(golden(t, "job.txt"), "13", "gpu"); err != nil || j.phase != waiting || len(j.nodes) != 0 {
		t.Errorf("the pending task of the array: %+v, %v", j, err)
	}
	if _, err = parseJob(golden(t, "job.txt"), "1", "gpu"); err == nil {
		t.Error("found a job that is not there")
	}
}

func TestParseJobRefuses(t *testing.T) {
	whole := golden(t, "job.txt")
	for from, to := range map[string]string{
		"JobState=RUNNING": "JobState=DANCING",
		"NodeList=n[1-3],": "NodeList=n[1-3",
		"CPU_IDs=0-3":      "CPU_IDs=3-0",
		"Nodes=gpu-07":     "Nodes=n2",
		"gpu:2(IDX:0-1)":   "gpu:99999999999",
		"   JobState=":     "   State=",
	} {
		text := strings.Replace(whole, from, to, 1)
		if j, err := parseJob(text, "12", "gpu"); text == whole || err == nil {
			t.Errorf("%s: %+v", to, j)
		}
	}
}

func TestCountGres(t *testing.T) {
	for list, want := range map[string]int{
		"": 0, "(null)": 0, "gpu": 1, "gpu:2": 2, "gpu:2(IDX:0-1)": 2, "gpu:a100": 1, "gpu:a100:4(IDX:0,2-4)": 4,
		"gpu:a100:2(IDX:0-1),gpu:h100:1(IDX:2)": 3, "gres:gpu:2,mps:100": 2, "mps:100,craynetwork:4": 0, "gpu:(null):3": 3, "gpu:(null):3(IDX:0-2)": 3,
		"gpumem:7": 0, "gpu:2(S:0,1),nic:1": 2,
	} {
		if got, err := countGres(list, "gpu"); err != nil || got != want {
			t.Errorf("%s: %d, %v; want %d", list, got, err, want)
		}
	}
}

func TestJudge(t *testing.T) {
	for want, states := range map[health]string{
		useful: "ALLOCATED MIXED MIXED+PLANNED ALLOCATED+CLOUD MIXED+COMPLETING ALLOCATED+MAINTENANCE COMPLETING IDLE IDLE+COMPLETING " +
			"ALLOCATED$ MIXED@ ALLOCATED+RESERVED",
		leaving: "ALLOCATED+DRAIN MIXED+DRAIN DRAINING ALLOCATED+FAIL FAILING MIXED+COMPLETING+DRAIN ALLOCATED+POWER_DOWN ALLOCATED! " +
			"COMPLETING+DRAIN",
		useless: "DOWN DOWN* DOWN+NOT_RESPONDING DRAINED IDLE+DRAIN IDLE+FAIL FAIL ALLOCATED* ALLOCATED+NOT_RESPONDING FUTURE ERROR " +
			"MIXED+DRAIN+NOT_RESPONDING ALLOCATED~ ALLOCATED+POWERING_UP IDLE+POWERED_DOWN DRAINING* DOWN+DRAIN",
		0: "UNKNOWN UNKNOWN+DRAIN DANCING DANCING+DRAIN ''",
	} {
		for state := range strings.FieldsSeq(states) {
			state = strings.Trim(state, "'")
			if got, err := judge(state); got != want || (err == nil) != (want != 0) {
				t.Errorf("%s: %d, %v; want %d", state, got, err, want)
			}
		}
	}
}

func TestParseNodes(t *testing.T) {
	nodes, err := parseNodes(golden(t, "nodes.txt"))
	if err != nil {
		t.Fatal(err)
	}
	got := fmt.Sprint(nodes["n1"], nodes["n2"], len(nodes))
	if want := "{n1 host-a 10.0.0.1 2} {n2 host-b 10.0.0.2 3} 2"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func FuzzParseJob(f *testing.F) {
	f.Add(golden(f, "job.txt"))
	f.Fuzz(func(t *testing.T, text string) {
		if j, err := parseJob(text, "12", "gpu"); err == nil && j.phase == 0 {
			t.Error("a job in no phase")
		}
	})
}

func FuzzParseNodes(f *testing.F) {
	f.Add(golden(f, "nodes.txt"))
	f.Fuzz(func(t *testing.T, text string) {
		nodes, err := parseNodes(text)
		for _, n := range nodes {
			if err == nil && n.health == 0 {
				t.Error("a node in no state")
			}
		}
	})
}
