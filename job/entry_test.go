package job

import (
	"testing"
	"time"
)

func TestWords(t *testing.T) {
	for line, want := range map[string]string{
		`"event":"hosts_found","hosts":[{"host":"a","slots":2},{"host":"b","slots":1,"draining":true}]`: "other hosts: a:2 b:1 (draining)",
		`"event":"hosts_found","hosts":[]`:                                                                   "other hosts: none",
		`"event":"discovery_failed","error":"it broke"`:                                                      "failure discovery failed: it broke",
		`"event":"worker_started","host":"a","slot":1,"pid":7`:                                               "start worker started on a:1, pid 7",
		`"event":"worker_ready","host":"a","slot":0`:                                                         "start worker on a:0 waits to join",
		`"event":"draining","host":"a","slot":0,"pid":7,"rank":2`:                                            "drained rank 2 on a:0 was asked to leave by its host",
		`"event":"drain_asked","host":"a","slot":null`:                                                       "drained drain of a",
		`"event":"world_published","generation":2,"size":1,"slots":[{"rank":0,"host":"a","slot":1,"pid":7}]`: "start generation 2 published, 1 worker",
		`"event":"hosts_updated","seq":3,"change":"mixed"`:                                                   "changed the workers are told of hosts: mixed",
		`"event":"first_commit","generation":4,"commits":9`:                                                  "start generation 4 trains, commit 9",
		`"event":"backend","generation":4,"backend":"nccl"`:                                                  "other generation 4 computes on GPUs by nccl",
		`"event":"worker_dying","host":"a","slot":1,"pid":7,"rank":2,"signal":9,"what":"is killed"`:          "failure rank 2 on a:1 is lost: is killed",
		`"event":"worker_exited","host":"a","slot":1,"pid":7,"rank":2,"code":-1,"signal":9,"cause":"failed"`: "failure rank 2 on a:1 failed: killed by signal 9",
		`"event":"worker_exited","host":"a","slot":1,"pid":7,"code":0,"signal":null,"cause":"left"`:          "other the worker on a:1 has ended: left, exit status 0",
		`"event":"excluded","host":"a","slot":null,"until":null`:                                             "excluded a is excluded",
		`"event":"excluded","host":"a","slot":2,"until":"2026-01-02T03:05:05Z"`:                              "excluded a:2 is excluded for 1m0s",
		`"event":"returned","host":"a","slot":1`:                                                             "grown a:1 may be used again",
		`"event":"reset","count":1`:                                                                          "other reset 1",
		`"event":"stalled","host":null,"slot":null,"what":"w"`:                                               "stall the workers do not go on: w",
		`"event":"stalled","host":"a","slot":1,"rank":0,"what":"w"`:                                          "stall rank 0 on a:1 holds up the others: w",
		`"event":"located","host":"a","slot":1,"rank":0,"where":"f.go:1"`:                                    "stall rank 0 on a:1 is at f.go:1",
		`"event":"stall_ended","host":"a","slot":1,"rank":0,"seconds":1.25`:                                  "stall rank 0 on a:1 goes on, after 1.2s",
		`"event":"commit_missing","host":"a","slot":1,"rank":0,"change":"added","seconds":5`:                 "stall rank 0 on a:1 has not left at a commit, 5.0s after it was told of hosts: added",
		`"event":"scaled","min_np":2,"max_np":null`:                                                          "scaled workers allowed: 2 or more",
		`"event":"resumed"`:             "driver another driver has taken over",
		`"event":"job_done","status":0`: "ended the job is done",
		`"event":"job_done","status":130,"message":"stopped by signal: interrupt"`:           "ended the job was stopped, status 130: interrupt",
		`"event":"job_done","status":143,"message":"` + StopCommand{UID: "7"}.Error() + `"`:  "ended the job was stopped, status 143: by command (hvdrun stop), uid 7",
		`"event":"job_done","status":3,"message":"m"`:                                        "ended the job has failed, status 3: m",
		`"event":"task_worker_joined","worker":"w","host":"a"`:                               "start w on a runs tasks",
		`"event":"task_worker_left","worker":"w","host":"a","lost":true`:                     "failure w on a is lost to tasks",
		`"event":"task_failed","function":"f/v1","reason":"error","text":"no"`:               "failure a task of f/v1 failed (error): no",
		`"event":"audit","who":{},"what":"stop","how":"control","host":"a","outcome":"done"`: "asked stop (control) a: done",
		`"event":"of a later version","host":"a","more":[1]`:                                 "other a",
	} {
		e, err := ParseEvent([]byte(`{"time":"2026-01-02T03:04:05Z",` + line + "}"))
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		if kind, text := e.Words(); string(kind)+" "+text != want {
			t.Errorf("%s is told as %q, want %q", line, string(kind)+" "+text, want)
		}
	}
}

func TestParseEvent(t *testing.T) {
	for _, line := range []string{"", "no JSON", `{"event":"reset"}`, `{"time":"2026-01-02T03:04:05Z"}`, `[]`} {
		if e, err := ParseEvent([]byte(line)); err == nil {
			t.Errorf("%q is read as %+v", line, e)
		}
	}
	at := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	e, err := Event{Time: at, Name: WorkerExited, Fields: []Field{{"host", "a"}, {"slot", 1}, {"rank", 0}, {"signal", nil}}}.Entry()
	if err != nil || !e.Time.Equal(at) || e.Name != WorkerExited || e.Place() != "a:1" || e.Rank != 0 || e.Signal != 0 {
		t.Errorf("an event is read as %+v, %v", e, err)
	}
}
