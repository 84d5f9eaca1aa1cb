package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
)

// queue is a Slurm with jobs of one name, which the test starts. Its output is that of Slurm 22.05.
type queue struct {
	jobs  []*queued
	last  int
	ended map[string]string        // by id: what scontrol shows of jobs that have ended
	acts  []string                 // commands with an effect, since the last check
	fail  string                   // the program that fails
	own   *queued                  // the job of job_id
	drain []string                 // drained nodes
	steps map[string]chan struct{} // by node; closed when the step has ended
}

type queued struct{ id, state, end, preempted, node, comment string }

func (q *queue) run(_ context.Context, program string, args ...string) (string, error) {
	if program == q.fail {
		return "", errors.New("slurm: " + program + ": out of order")
	}
	var out strings.Builder
	jobs := q.jobs
	if slices.Contains(args, "--jobs=90") {
		jobs = []*queued{q.own}
	}
	switch last := args[len(args)-1]; {
	case program == "squeue" && slices.Contains(args, "--steps"):
		for name := range q.steps {
			fmt.Fprintf(&out, "90.%s|train|%s\n90.batch|a|b|c\n", name, name)
		}
	case program == "squeue" && last == "--format="+poolFormat:
		for _, j := range jobs {
			fmt.Fprintf(&out, "%s|%s|1|%s|%s|%s\n", j.id, j.state, j.end, j.node, j.comment)
		}
	case program == "squeue":
		for _, j := range jobs {
			fmt.Fprintf(&out, "%-20s%-30s\n", j.id, j.preempted)
		}
	case program == "scontrol" && args[1] == "node":
		for name := range strings.SplitSeq(last, ",") {
			state := "MIXED"
			if slices.Contains(q.drain, name) {
				state += "+DRAIN"
			}
			fmt.Fprintf(&out, "NodeName=%s NodeAddr=%[1]s NodeHostName=%[1]s State=%s\n", name, state)
		}
	case program == "scontrol":
		if q.ended[last] == "" {
			return "", errors.New("slurm: scontrol show: slurm_load_jobs error: Invalid job id specified")
		}
		out.WriteString(q.ended[last])
	case program == "sbatch":
		q.acts = append(q.acts, strings.Join(args, " "))
		return q.submit(mark).id + ";cluster\n", nil
	case program == "scancel":
		q.acts = append(q.acts, "scancel "+strings.Join(args, " "))
	}
	return out.String(), nil
}

// launch begins a step.
func (q *queue) launch(_, program string, args ...string) (<-chan struct{}, error) {
	q.acts = append(q.acts, program+" "+strings.Join(args, " "))
	name := strings.TrimPrefix(args[2], "--nodelist=")
	q.steps[name] = make(chan struct{})
	return q.steps[name], nil
}

func (q *queue) endStep(name string) {
	close(q.steps[name])
	delete(q.steps, name)
}

func (q *queue) submit(comment string) *queued {
	q.last++
	j := &queued{id: fmt.Sprint(q.last), state: "PENDING", end: "N/A", preempted: "N/A", comment: comment}
	q.jobs = append(q.jobs, j)
	return j
}

// start makes a job run on the node with its number.
func (q *queue) start(id string) *queued {
	i := slices.IndexFunc(q.jobs, func(j *queued) bool { return j.id == id })
	j := q.jobs[i]
	j.state, j.end, j.node = "RUNNING", "NONE", "n"+id
	return j
}

// leave ends a job, which scontrol shows as given.
func (q *queue) leave(id, shown string) {
	q.jobs = slices.DeleteFunc(q.jobs, func(j *queued) bool { return j.id == id })
	q.ended[id] = shown
}

// pooled is a source over a queue.
type pooled struct {
	*queue
	*source
	t      *testing.T
	logged strings.Builder
}

func newPooled(t *testing.T, settings ...string) *pooled {
	values := map[string]string{"script": "agent.sh", "job_name": "train", "slots": "2"}
	for i := 0; i < len(settings); i += 2 {
		values[settings[i]] = settings[i+1]
	}
	p := &pooled{queue: &queue{ended: map[string]string{}, steps: map[string]chan struct{}{}}, source: newSource(), t: t}
	p.lookup = env()
	if err := p.Configure(values); err != nil {
		t.Fatal(err)
	}
	log := logrus.New()
	log.Out = &p.logged
	p.source.run, p.source.launch, p.source.log = p.queue.run, p.queue.launch, log
	return p
}

// scale asks for slots, and checks the commands and then the list of hosts.
func (p *pooled) scale(most int, list string, acts ...string) {
	p.t.Helper()
	if err := p.Scale(p.t.Context(), 1, most); err != nil {
		p.t.Fatal(err)
	}
	if !slices.Equal(p.acts, acts) {
		p.t.Errorf("%d slots: commands\n%s\nwant\n%s", most, strings.Join(p.acts, "\n"), strings.Join(acts, "\n"))
	}
	p.acts = nil
	if got := found(p.t, p.source); got != list {
		p.t.Errorf("%d slots: hosts %q, want %q", most, got, list)
	}
}

const sbatch = "--parsable --nodes=1 --no-requeue --job-name=train --comment=hvdrun agent.sh"

func TestPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPooled(t)
		p.scale(3, "", sbatch, sbatch) // 2 slots a node
		p.scale(3, "")
		one := p.start("1")
		p.start("2")
		p.scale(4, "")

		// The third job is preempted: Slurm has asked it to end, and another one is submitted.
		p.scale(6, "", sbatch)
		p.start("3").preempted = "2026-11-24T19:09:38"
		p.scale(6, "n3-3:2/draining", sbatch)
		p.leave("3", "   JobState=COMPLETED Reason=None\n   PreemptEligibleTime=2026-11-24T19:09:37 PreemptTime=2026-11-24T19:09:38\n")
		p.scale(6, "")

		// The first job's time ends soon.
		one.end = time.Now().Add(59 * time.Second).Format("2006-01-02T15:04:05")
		p.scale(6, "n1-1:2/draining", "scancel --signal=TERM 1", sbatch)
		p.scale(6, "n1-1:2/draining")
		one.state = "COMPLETING"
		p.scale(6, "n1-1:2/draining")
		p.leave("1", "")

		// Waiting jobs are given back first, then the youngest. Jobs of others count, and stay.
		p.queue.submit("somebody's")
		p.start("6")
		p.scale(2, "n2-2:2/draining", "scancel 5", "scancel 4", "scancel --signal=TERM 2")
		p.leave("5", "")
		p.leave("4", "")
		<-time.After(61 * time.Second) // it does not end by itself
		p.scale(2, "n2-2:2/draining", "scancel 2")
		p.leave("2", "")
		p.scale(1, "")
		p.scale(3, "", sbatch)
		if err := p.Scale(t.Context(), 0, 0); err != nil || !slices.Equal(p.acts, []string{"scancel 7"}) {
			t.Errorf("%q, %v", p.acts, err)
		}
	})
}

// TestPoolDrainedNode: a job whose node is drained is given back, so that its agent drains and
// Slurm gets the node. A job that a person has submitted, and that of job_id, are not given back.
func TestPoolDrainedNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPooled(t, "job_id", "90", "step", "agent")
		p.own = &queued{id: "90", state: "RUNNING", end: "NONE", preempted: "N/A", node: "a1", comment: mark}
		p.drain = []string{"a1", "n1", "n2"}
		p.queue.submit("somebody's")
		p.start("1")
		p.scale(2, "a1-90:2/draining n1-1:2/draining", sbatch)
		p.start("2")
		p.scale(2, "a1-90:2/draining n1-1:2/draining n2-2:2/draining", "scancel --signal=TERM 2", sbatch)
		p.scale(2, "a1-90:2/draining n1-1:2/draining n2-2:2/draining")
		p.start("3")
		p.leave("2", "   JobState=COMPLETED Reason=None\n")
		p.scale(2, "a1-90:2/draining n1-1:2/draining")
		if strings.Contains(p.logged.String(), "ended soon after its start") {
			t.Errorf("the end of the job counts as a fault of its script: %s", &p.logged)
		}
	})
}

// TestPoolFaults: if jobs end early, others are submitted after growing pauses.
func TestPoolFaults(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPooled(t)
		p.scale(2, "", sbatch)
		for id, pause := range []time.Duration{10 * time.Second, 20 * time.Second, 40 * time.Second} {
			p.start(fmt.Sprint(id + 1))
			p.leave(fmt.Sprint(id+1), "   JobState=FAILED Reason=NonZeroExitCode\n")
			p.scale(2, "")
			<-time.After(pause - time.Millisecond)
			p.scale(2, "")
			<-time.After(time.Millisecond)
			p.scale(2, "", sbatch)
		}
		if n := strings.Count(p.logged.String(), "ended soon after its start"); n != 3 {
			t.Errorf("%d warnings: %s", n, &p.logged)
		}
		p.start("4") // it runs for long, so the failures are forgotten
		p.scale(2, "")
		<-time.After(2 * time.Minute)
		p.scale(2, "")
		p.leave("4", "   JobState=FAILED Reason=NonZeroExitCode\n")
		p.scale(2, "", sbatch)
		p.leave("5", "   JobState=CANCELLED Reason=None\n") // cancelled by a person
		p.scale(2, "", sbatch)

		// The outcome of a job cannot be read, and is asked for again.
		p.leave("6", "   JobState=FAILED Reason=NonZeroExitCode\n")
		p.fail = "scontrol"
		if err := p.Scale(t.Context(), 1, 2); err == nil || !strings.Contains(err.Error(), "out of order") {
			t.Error(err)
		}
		p.fail = ""
		p.scale(2, "")
		<-time.After(10 * time.Second)
		p.scale(2, "", sbatch)
	})
}

// TestPoolSteps: agents are started on the nodes of the job in which hvdrun runs, and again when
// they end. These nodes count before others are requested.
func TestPoolSteps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPooled(t, "job_id", "90", "step", "agent")
		p.own = &queued{id: "90", state: "RUNNING", end: "NONE", preempted: "N/A", node: "a[1-2]", comment: mark}
		step := func(node string) string {
			return "srun --jobid=90 --job-name=train --nodelist=" + node +
				" --nodes=1 --ntasks=1 --overlap --mem=0 --mpi=none --cpu-bind=none --input=none sh agent"
		}
		p.scale(4, "", step("a1"), step("a2"))
		p.scale(4, "")
		p.scale(5, "", sbatch)
		p.scale(1, "", "scancel 1") // the job's own nodes are not given back
		p.leave("1", "   JobState=CANCELLED Reason=None\n")

		p.endStep("a2") // soon after its start
		p.scale(4, "")
		<-time.After(submitBackoff.First)
		p.scale(4, "", step("a2"))
		<-time.After(2 * settled)
		p.endStep("a1")
		p.scale(4, "", step("a1"))

		// Another plugin finds the steps and gives them back.
		q := newPooled(t, "job_id", "90", "step", "agent")
		q.queue.own, q.queue.steps = p.own, p.queue.steps
		q.scale(4, "")
		if err := q.Scale(t.Context(), 0, 0); err != nil || !slices.Equal(q.acts, []string{"scancel --signal=TERM 90.a1 90.a2"}) {
			t.Errorf("%q, %v", q.acts, err)
		}
		q.acts = nil

		// The job ends soon. Its steps are not asked to end, because its nodes do not belong to
		// this plugin.
		p.own.end = time.Now().Add(time.Second).Format("2006-01-02T15:04:05")
		p.scale(4, "a1-90:2/draining a2-90:2/draining", sbatch, sbatch)
	})
}

func TestPoolErrors(t *testing.T) {
	p := newPooled(t)
	for _, c := range []struct{ job, preempted, says string }{
		{"1|RUNNING|1|NONE|n1", "", "5 columns"},
		{"x|RUNNING|1|NONE|n1|", "", "number"},
		{"1|DREAMING|1|NONE|n1|", "", "DREAMING"},
		{"1|RUNNING|x|NONE|n1|", "", "number"},
		{"1|RUNNING|1|NONE|n[1|", "", "n[1"},
		{"1|RUNNING|1|NONE|n1|", "1 N/A N/A", "preemption"},
	} {
		p.source.run = func(_ context.Context, program string, args ...string) (string, error) {
			if program == "squeue" && args[len(args)-1] == "--format="+poolFormat {
				return c.job, nil
			}
			return c.preempted, nil
		}
		if hosts, err := p.Discover(t.Context()); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, %v", c.job, hosts, err)
		}
	}
	p.source.run, p.fail = p.queue.run, "sbatch"
	if err := p.Scale(t.Context(), 1, 2); err == nil || !strings.Contains(err.Error(), "sbatch: out of order") {
		t.Error(err)
	}
}
