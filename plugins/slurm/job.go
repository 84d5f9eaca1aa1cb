package main

import (
	"fmt"
	"strconv"
	"strings"
)

// phase says what the state of a job means for its nodes.
type phase uint8

const (
	waiting phase = iota + 1 // it has no nodes yet, and may get some
	running
	ending // its nodes are about to be taken away
	ended
)

// phases maps all states of jobs that Slurm's programs print.
var phases = map[string]phase{
	"PENDING": waiting, "CONFIGURING": waiting, "SUSPENDED": waiting, "REQUEUED": waiting, "REQUEUE_FED": waiting,
	"REQUEUE_HOLD": waiting, "SPECIAL_EXIT": waiting, "RESV_DEL_HOLD": waiting, "POWER_UP_NODE": waiting,
	"RUNNING": running, "RESIZING": running, "SIGNALING": running, "STOPPED": running,
	"COMPLETING": ending, "STAGE_OUT": ending, "EXPEDITING": ending,
	"COMPLETED": ended, "CANCELLED": ended, "FAILED": ended, "TIMEOUT": ended, "NODE_FAIL": ended, "PREEMPTED": ended,
	"BOOT_FAIL": ended, "DEADLINE": ended, "OUT_OF_MEMORY": ended, "REVOKED": ended, "LAUNCH_FAILED": ended,
	"RECONFIG_FAIL": ended,
}

// job is one record of scontrol show job -d.
type job struct {
	id           string
	state        string
	phase        phase
	start        string // as text, which sorts by time
	nodes        []string
	tasks        int // of the whole job
	tasksPerNode int // 0: not requested
	gpus         map[string]int
	cpus         map[string]int
}

// parseJob parses the job with the id from the output of scontrol show job -d, which has records
// separated by blank lines: one for each task of an array and each component of a heterogeneous
// job. It recognizes lines by their beginnings, since values may contain anything, such as the
// job's name.
func parseJob(text, id, gres string) (job, error) {
	for record := range strings.SplitSeq(text, "\n\n") {
		if strings.HasPrefix(record, "JobId="+id+" ") {
			j, err := parseRecord(record, id, gres)
			if err != nil {
				return job{}, fmt.Errorf("slurm: job %s: %w", id, err)
			}
			return j, nil
		}
	}
	return job{}, fmt.Errorf("slurm: scontrol shows no job %s", id)
}

func parseRecord(record, id, gres string) (job, error) {
	j := job{id: id, gpus: map[string]int{}, cpus: map[string]int{}}
	for line := range strings.SplitSeq(record, "\n") {
		line = strings.TrimSpace(line)
		key, _, _ := strings.Cut(line, "=")
		var err error
		switch key {
		case "JobState":
			j.state, _ = field(line, "JobState")
			if j.phase = phases[j.state]; j.phase == 0 {
				err = fmt.Errorf("state %q is not known", shorten(j.state))
			}
		case "StartTime":
			j.start, _ = field(line, "StartTime")
		case "NodeList":
			if list, _ := field(line, "NodeList"); list != "" && list != "(null)" {
				j.nodes, err = expandHostlist(list)
			}
		case "NumNodes":
			tasks, _ := field(line, "NumTasks")
			j.tasks, err = countOf(tasks)
		case "Socks/Node":
			per, _ := field(line, "NtasksPerN:B:S:C")
			per, _, _ = strings.Cut(per, ":")
			j.tasksPerNode, err = countOf(per)
		case "Nodes":
			err = j.detail(line, gres)
		}
		if err != nil {
			return job{}, err
		}
	}
	if j.phase == 0 {
		return job{}, fmt.Errorf("scontrol shows no state")
	}
	return j, nil
}

// countOf parses a number, which may be missing or a star.
func countOf(text string) (int, error) {
	if text == "" || text == "*" || text == "N/A" {
		return 0, nil
	}
	low, _, _ := strings.Cut(text, "-") // 2-4 is a requested range
	return number(low)
}

// detail parses the line with what the job has on some nodes: Nodes=n[1-3] CPU_IDs=0-3 Mem=0
// GRES=gpu:2(IDX:0-1).
func (j *job) detail(line, gres string) error {
	list, _ := field(line, "Nodes")
	nodes, err := expandHostlist(list)
	if err != nil {
		return err
	}
	ids, _ := field(line, "CPU_IDs")
	cpus, err := countIDs(ids)
	if err != nil {
		return err
	}
	has, ok := field(line, "GRES")
	if !ok {
		has, _ = field(line, "GRES_IDX") // up to Slurm 19
	}
	gpus, err := countGres(has, gres)
	if err != nil {
		return err
	}
	for _, node := range nodes {
		if _, twice := j.cpus[node]; twice {
			return fmt.Errorf("scontrol shows node %s twice", node)
		}
		j.gpus[node], j.cpus[node] = gpus, cpus
	}
	return nil
}

// countIDs returns how many numbers a list such as 0-3,8 has.
func countIDs(ids string) (int, error) {
	if ids == "" || ids == "(null)" {
		return 0, nil
	}
	numbers, err := expandRanges(ids)
	return len(numbers), err
}

// countGres returns the number of a resource in gpu:a100:2(IDX:0,3),gpu:h100:1(IDX:4),mps:100. A
// resource without a number counts as one.
func countGres(list, name string) (int, error) {
	total := 0
	for _, item := range splitOutside(list, '(', ')') {
		if open := strings.LastIndexByte(item, '('); open >= 0 && strings.HasSuffix(item, ")") {
			item = item[:open] // without the indices
		}
		item = strings.TrimPrefix(item, "gres:")
		words := strings.Split(item, ":")
		if words[0] != name {
			continue
		}
		count := 1
		if last := words[len(words)-1]; len(words) > 1 && last != "" && strings.Trim(last[:1], "0123456789") == "" {
			var err error
			if count, err = strconv.Atoi(last); err != nil || count > maxNodes {
				return 0, fmt.Errorf("%q has no number", shorten(item))
			}
		}
		total += count
	}
	return total, nil
}

// field returns the value of the first key=value in the line with this key, up to the next blank.
func field(line, key string) (value string, found bool) {
	rest := line
	if !strings.HasPrefix(rest, key+"=") {
		_, after, there := strings.Cut(rest, " "+key+"=")
		if !there {
			return "", false
		}
		rest = key + "=" + after
	}
	value, _, _ = strings.Cut(rest[len(key)+1:], " ")
	return value, true
}
