package main

import (
	"fmt"
	"strings"
	"testing"
)

// TestAdmission: the number of requested pods follows what Kueue admits.
func TestAdmission(t *testing.T) {
	for _, c := range []struct {
		name   string
		quota  int // pods that Kueue admits
		want   int
		asked  int // pods that the Job requests at first
		looks  int
		expect string // pods that are requested at each look
	}{
		{"all fits", 8, 8, 1, 3, "8 8 8"},
		{"nothing more fits", 1, 8, 1, 12, "8 8 4 4 2 2 2 2 2 2 2 2"},
		{"a part fits", 5, 8, 1, 16, "8 8 4 8 8 6 6 5 8 8 6 6 6 6 6 6"},
		{"less is wanted", 8, 2, 4, 3, "2 2 2"},
		{"less is wanted than waits", 1, 1, 4, 2, "1 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var s scaling
			asked, granted := c.asked, min(c.asked, c.quota)
			var got []string
			for range c.looks {
				asked = s.ask(asked, c.want, census{all: asked, gated: max(asked-granted, 0), granted: granted})
				if asked <= c.quota {
					granted = asked
				}
				got = append(got, fmt.Sprint(asked))
			}
			if got := strings.Join(got, " "); got != c.expect {
				t.Errorf("asked for %s, want %s", got, c.expect)
			}
		})
	}
	var s scaling
	for _, pods := range []census{{all: 2, granted: 2}, {all: 4, granted: 4}, {all: 4, granted: 2}} {
		if n := s.ask(3, 8, pods); n != 3 {
			t.Errorf("asked for %d, want 3 until what was asked for is done: %+v", n, pods)
		}
	}
}

const elasticMeta = `,"labels":{"kueue.x-k8s.io/queue-name":"team"},"annotations":{"kueue.x-k8s.io/elastic-job":"true"}`

// elasticText returns a Job that Kueue has gated.
func elasticText(parallelism int) string {
	return strings.Replace(jobText(parallelism, elasticMeta), `"containers"`, `"schedulingGates":[{"name":"kueue.x-k8s.io/elastic-job"}],"containers"`, 1)
}

// queueTexts returns a LocalQueue with its reservation of processors, and its ClusterQueue with the
// reservation of all its queues.
func queueTexts(own, all, nominal, more string) [2]string {
	usage := func(total string) string {
		return fmt.Sprintf(`{"flavorsReservation":[{"name":"flavor","resources":[{"name":"cpu","total":%q}]}]}`, total)
	}
	return [2]string{
		fmt.Sprintf(`{"spec":{"clusterQueue":"all"},"status":%s}`, usage(own)),
		fmt.Sprintf(`{"spec":{"resourceGroups":[{"flavors":[{"name":"other","resources":[{"name":"cpu","nominalQuota":"0"}]},
			{"name":"flavor","resources":[{"name":"cpu","nominalQuota":%q}]}]}]%s},"status":%s}`, nominal, more, usage(all)),
	}
}

// TestScaleElastic: an elastic Job grows as Kueue admits its pods, gives back what exceeds the
// quota if the quota can be read, and requests the least after it was suspended.
func TestScaleElastic(t *testing.T) {
	for _, c := range []struct {
		name    string
		job     string
		granted int
		gated   int
		queues  [2]string
		quotas  string
		calls   int
		want    string // the parallelism that is set; "": it is not changed
	}{
		{"all at first", elasticText(2), 2, 0, [2]string{}, "", 1, "4"},
		{"a first look at what waits", elasticText(4), 1, 3, [2]string{}, "", 1, ""},
		{"half of what waits", elasticText(4), 1, 3, [2]string{}, "", 2, "2"},
		{"one waits", elasticText(2), 1, 1, [2]string{}, "", 3, ""},
		{"suspended", strings.Replace(elasticText(4), `"parallelism"`, `"suspend":true,"parallelism"`, 1), 0, 0, [2]string{}, "", 1, "1"},
		{"suspended at the least", strings.Replace(elasticText(1), `"parallelism"`, `"suspend":true,"parallelism"`, 1), 0, 0, [2]string{}, "", 2, ""},
		{"a ResourceQuota too", elasticText(2), 2, 0, [2]string{}, quotaText("pods", "3", "2"), 2, "3"},
		{"more than the queue has, once", elasticText(4), 4, 0, queueTexts("2", "2", "1500m", ""), "", 1, ""},
		{"more than the queue has", elasticText(4), 4, 0, queueTexts("2", "2", "1500m", ""), "", 2, "3"},
		{"while one waits", elasticText(4), 3, 1, queueTexts("1500m", "1500m", "1", ""), "", 2, "2"},
		{"a part of a pod", elasticText(4), 4, 0, queueTexts("2", "2", "1900m", ""), "", 2, "3"},
		{"others' too", elasticText(4), 4, 0, queueTexts("2", "3", "1", ""), "", 2, "1"},
		{"what the queue has", elasticText(4), 4, 0, queueTexts("2", "2", "2", ""), "", 2, ""},
		{"borrowed", elasticText(4), 4, 0, queueTexts("2", "2", "1", `,"cohortName":"c"`), "", 2, ""},
		{"other queues' alone", elasticText(4), 4, 0, queueTexts("0", "2", "1", ""), "", 2, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := newServer(t)
			for i := range c.granted + c.gated {
				p := newPod(fmt.Sprint("agents-", i), fmt.Sprint("10.0.0.", i), 1)
				p.Labels = map[string]string{"batch.kubernetes.io/job-name": "agents"}
				if i >= c.granted {
					p.Status.Phase = "Pending"
					p.Spec.SchedulingGates = append(p.Spec.SchedulingGates, struct {
						Name string `json:"name"`
					}{elasticJob})
				}
				a.put(p)
			}
			j := &jobServer{job: c.job, quotas: c.quotas, queues: c.queues}
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
