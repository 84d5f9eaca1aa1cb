package main

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/hvdrun/hvdrun/discovery"
)

// jobServer answers requests for a Job, quotas and queues, and records changes of the Job.
type jobServer struct {
	mu          sync.Mutex
	job, quotas string
	queues      [2]string // Kueue's: the namespace's, the cluster's; "": may not be read
	conflict    bool
	changes     []string
}

func (j *jobServer) answer(w http.ResponseWriter, r *http.Request) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	switch {
	case r.URL.Path == "/api/v1/namespaces/training/resourcequotas":
		fmt.Fprintf(w, `{"kind":"ResourceQuotaList","apiVersion":"v1","items":[%s]}`, j.quotas)
	case r.URL.Path == "/apis/kueue.x-k8s.io/v1beta2/namespaces/training/localqueues/team":
		j.queue(w, j.queues[0])
	case r.URL.Path == "/apis/kueue.x-k8s.io/v1beta2/clusterqueues/all":
		j.queue(w, j.queues[1])
	case r.URL.Path != "/apis/batch/v1/namespaces/training/jobs/agents":
		return false
	case r.Method == http.MethodGet:
		fmt.Fprint(w, j.job)
	case j.conflict:
		status(w, http.StatusConflict, "the object has been modified")
	default:
		body, _ := io.ReadAll(r.Body) // it comes from the test
		j.changes = append(j.changes, r.Method+" "+string(body))
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Success"}`)
	}
	return true
}

func (j *jobServer) queue(w http.ResponseWriter, text string) {
	if text == "" {
		status(w, http.StatusForbidden, "clusterqueues is forbidden")
		return
	}
	fmt.Fprint(w, text)
}

// jobText returns a Job with this parallelism, whose pods have two slots, 500m of cpu and a GPU.
func jobText(parallelism int, more string) string {
	return fmt.Sprintf(`{"kind":"Job","apiVersion":"batch/v1","metadata":{"name":"agents","resourceVersion":"7"%s},"spec":{"parallelism":%d,
		"completionMode":"Indexed","template":{"metadata":{"annotations":{"hvdrun.dev/slots":"2"}},"spec":{"containers":[{"name":"agent",
		"resources":{"requests":{"cpu":"500m"},"limits":{"cpu":"1","nvidia.com/gpu":"1"}}}]}}}}`, more, parallelism)
}

func quotaText(resource, hard, used string) string {
	return fmt.Sprintf(`{"metadata":{"name":"team"},"spec":{"hard":{%q:%q}},"status":{"used":{%[1]q:%[3]q}}}`, resource, hard, used)
}

// TestScale: the parallelism is what the slots need, as far as quotas allow, and never below the
// least; a quota counts at the second look.
func TestScale(t *testing.T) {
	for _, c := range []struct {
		name        string
		parallelism int
		more        string
		quotas      string
		calls       int
		want        string // the parallelism that is set; "": it is not changed
	}{
		{"slots alone", 1, "", "", 1, "4"},
		{"as it is", 4, "", "", 3, ""},
		{"a quota once", 1, "", quotaText("pods", "4", "3"), 1, ""},
		{"a quota of pods", 1, "", quotaText("pods", "4", "3"), 2, "3"},
		{"requests", 1, "", quotaText("requests.cpu", "2", "1"), 2, "4"},
		{"limits", 1, "", quotaText("limits.cpu", "3", "2"), 2, "3"},
		{"cpu is requests", 4, "", quotaText("cpu", "1", "1500m"), 2, "1"},
		{"GPUs are limits", 4, "", quotaText("requests.nvidia.com/gpu", "2", "2"), 2, "2"},
		{"others' resources", 1, "", quotaText("count/secrets", "1", "1"), 1, "4"},
		{"another quota's scope", 1, "", `{"metadata":{"name":"team"},"spec":{"hard":{"pods":"1"},"scopes":["BestEffort"]}}`, 1, "4"},
		{"not below the least", 4, "", quotaText("pods", "0", "2"), 2, "1"},
		{"Kueue sets it", 1, `,"annotations":{"kueue.x-k8s.io/job-min-parallelism":"1"}`, "", 2, ""},
		{"Kueue admits it as a whole", 1, `,"labels":{"kueue.x-k8s.io/queue-name":"team"}`, "", 2, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := newServer(t)
			for i, phase := range []string{"Running", "Pending", "Failed"} {
				p := newPod(fmt.Sprint("agents-", i), fmt.Sprint("10.0.0.", i), 1)
				p.Labels = map[string]string{"batch.kubernetes.io/job-name": "agents"}
				p.Status.Phase = phase
				a.put(p)
			}
			a.put(newPod("other", "10.0.0.9", 1))
			j := &jobServer{job: jobText(c.parallelism, c.more), quotas: c.quotas}
			a.setAnswer(j.answer)
			s, _ := newSourceFor(t, a, "job", "agents")
			for range c.calls {
				if err := s.Scale(t.Context(), 2, 7); err != nil {
					t.Fatal(err)
				}
			}
			want := ""
			if c.want != "" {
				want = fmt.Sprintf(`PATCH {"metadata":{"resourceVersion":"7"},"spec":{"completions":%s,"parallelism":%[1]s}}`, c.want)
			}
			if got := strings.Join(j.changes, "; "); got != want {
				t.Errorf("changes: %s, want %s", got, want)
			}
		})
	}
}

// TestScaleEnds: the Job is deleted at the end. It is not an error if the Job is gone, or if
// another client changes it at the same time.
func TestScaleEnds(t *testing.T) {
	a := newServer(t)
	j := &jobServer{job: jobText(1, ""), conflict: true}
	a.setAnswer(j.answer)
	s, _ := newSourceFor(t, a, "job", "agents")
	if err := s.Scale(t.Context(), 2, 7); err != nil || len(j.changes) != 0 {
		t.Errorf("a conflict: %v, %q", err, j.changes)
	}
	j.conflict = false
	if err := s.Scale(t.Context(), 0, 0); err != nil || len(j.changes) != 1 || !strings.HasPrefix(j.changes[0], "DELETE ") {
		t.Errorf("the end: %v, %q", err, j.changes)
	}
	a.setAnswer(func(w http.ResponseWriter, _ *http.Request) bool {
		status(w, http.StatusNotFound, "jobs.batch \"agents\" not found")
		return true
	})
	if err := s.Scale(t.Context(), 0, 0); err != nil {
		t.Errorf("the end of what is gone: %v", err)
	}
	if err := s.Scale(t.Context(), 1, 1); err == nil || !strings.Contains(err.Error(), "the Job agents: ") {
		t.Errorf("a Job that is not there: %v", err)
	}
	other, _ := newSourceFor(t, a)
	if err := other.Scale(t.Context(), 1, 1); !errors.Is(err, discovery.ErrNoScale) {
		t.Errorf("without a Job: %v", err)
	}
}
