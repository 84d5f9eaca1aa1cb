package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/hvdrun/hvdrun/discovery"
)

// agentsJob has the fields that are read of the Job whose pods are the hosts.
type agentsJob struct {
	metav1.ObjectMeta `json:"metadata"`

	Spec struct {
		Parallelism    int    `json:"parallelism"`
		CompletionMode string `json:"completionMode"`
		Suspend        bool   `json:"suspend"`
		Template       pod    `json:"template"`
	} `json:"spec"`
	Status struct {
		Conditions []struct {
			Type    string `json:"type"`
			Status  string `json:"status"`
			Message string `json:"message"`
		} `json:"conditions"`
	} `json:"status"`
}

// failure returns the reason why the Job has ended; "": it has not.
func (j *agentsJob) failure() string {
	for _, c := range j.Status.Conditions {
		if (c.Type == "Failed" || c.Type == "Complete") && c.Status == "True" {
			return cmp.Or(c.Message, c.Type)
		}
	}
	return ""
}

// quota has the fields that are read of a ResourceQuota.
type quota struct {
	metav1.ObjectMeta `json:"metadata"`

	Spec struct {
		Hard   map[string]quantity `json:"hard"`
		Scopes []string            `json:"scopes"`
		Where  *struct{}           `json:"scopeSelector"`
	} `json:"spec"`
	Status struct {
		Used map[string]quantity `json:"used"`
	} `json:"status"`
}

// scaling holds the results of the last call of Scale.
type scaling struct {
	seen   int    // the parallelism that it computed
	waited int    // the parallelism that it found in the Job
	unread string // why Kueue's queues cannot be read
}

// Scale sets the parallelism of the Job to the number of pods that most slots need and the
// namespace's quotas allow. If a quota limits it, Scale acts only when two calls compute the same
// number, since the numbers of pods and of the quota may be of different times, and an extra pod
// would take the place of the driver's pod when that is lost. For a Job that Kueue admits as
// elastic, it follows Kueue's rules (see ask); while such a Job is suspended, it requests the pods
// of least slots. It does not change a Job that Kueue admits as a whole, or any other suspended
// Job.
func (s *source) Scale(ctx context.Context, least, most int) error {
	if s.client == nil {
		return errNotConfigured
	}
	if s.cfg.job == "" {
		return discovery.ErrNoScale
	}
	ctx, cancel := context.WithTimeoutCause(quiet(ctx), s.cfg.timeout, fmt.Errorf("no answer in %v", s.cfg.timeout))
	defer cancel()
	if most == 0 {
		return s.client.deleteJob(ctx)
	}
	var job agentsJob
	if err := s.client.read(ctx, s.client.jobPath(), &job); err != nil {
		return fmt.Errorf("the Job %s: %w", s.cfg.job, err)
	}
	if why := job.failure(); why != "" {
		return fmt.Errorf("kubernetes: the Job %s has ended: %s", s.cfg.job, why)
	}
	managed := job.admission()
	if managed == admitted || job.Spec.Suspend && managed != elastic || job.DeletionTimestamp != nil {
		return nil
	}
	slots, err := s.cfg.slotsOf(&job.Spec.Template)
	if err != nil {
		return fmt.Errorf("kubernetes: the pods of the Job %s: %w", s.cfg.job, err)
	}
	if slots == 0 {
		return fmt.Errorf("kubernetes: the pods of the Job %s have no slots", s.cfg.job)
	}
	fewest, wanted := (least+slots-1)/slots, (most+slots-1)/slots
	if job.Spec.Suspend {
		// Kueue admits it as a whole, and the fewest pods soonest.
		return s.setParallelism(ctx, &job, fewest, "Kueue has it suspended")
	}
	pods, err := s.podsOfJob(ctx)
	if err != nil {
		return err
	}
	room, why, err := s.bound(ctx, &job, pods, managed)
	if err != nil {
		return err
	}
	want := max(min(wanted, room), fewest)
	again := why != "" && s.scale.seen != want
	s.scale.seen = want
	if again {
		return nil
	}
	if managed == elastic {
		want = s.scale.ask(job.Spec.Parallelism, want, pods)
	}
	return s.setParallelism(ctx, &job, want, why)
}

// bound returns how many pods of the Job, including existing ones, the quotas allow, and the quota
// that allows least; "": none limits them.
func (s *source) bound(ctx context.Context, job *agentsJob, pods census, managed admission) (most int, why string, err error) {
	var quotas struct {
		Items []quota `json:"items"`
	}
	if err := s.client.read(ctx, "/api/v1/namespaces/"+s.cfg.namespace+"/resourcequotas", &quotas); err != nil {
		return 0, "", fmt.Errorf("the quotas: %w", err)
	}
	most, why, err = allowed(job, pods.all, quotas.Items)
	if err != nil || managed != elastic {
		return most, why, err
	}
	over, said, err := s.excess(ctx, job)
	if err != nil {
		return 0, "", err
	}
	if n := max(pods.granted-over, 0); over > 0 && n < most {
		most, why = n, said
	}
	return most, why, nil
}

// setParallelism changes the Job's parallelism if it differs. After a conflict, the next call
// retries.
func (s *source) setParallelism(ctx context.Context, job *agentsJob, want int, why string) error {
	now := job.Spec.Parallelism
	if want == now {
		return nil
	}
	spec := map[string]any{"parallelism": want}
	if job.Spec.CompletionMode == "Indexed" {
		spec["completions"] = want // removes the highest indexes
	}
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{"resourceVersion": job.ResourceVersion}, "spec": spec})
	if err != nil {
		return err
	}
	err = s.client.rest.Patch(types.MergePatchType).AbsPath(s.client.jobPath()).Body(body).MaxRetries(0).Do(ctx).Error()
	if err = fault(ctx, err); err != nil {
		if r, is := errors.AsType[*refusal](err); is && r.code == http.StatusConflict {
			return nil
		}
		return fmt.Errorf("the Job %s: %w", s.cfg.job, err)
	}
	s.log.WithField("job", s.cfg.job).Warn(strings.TrimSuffix(fmt.Sprintf("kubernetes: %d pods, before %d: %s", want, now, why), ": "))
	return nil
}

// podsOfJob counts the pods of the Job. The counts in the Job's status may be ten seconds old.
func (s *source) podsOfJob(ctx context.Context) (n census, err error) {
	list, err := s.client.list(ctx)
	if err != nil {
		return census{}, err
	}
	pods, err := podsOf(list)
	for _, p := range pods {
		if p.Labels["batch.kubernetes.io/job-name"] != s.cfg.job || p.Status.Phase == "Succeeded" || p.Status.Phase == "Failed" {
			continue
		}
		n.all++
		switch {
		case p.DeletionTimestamp != nil:
		case p.gated(""):
			n.gated++
		default:
			n.granted++
		}
	}
	return n, err
}

// allowed returns how many pods of the Job the quotas allow, including the have existing ones, and
// the quota that allows least.
func allowed(job *agentsJob, have int, quotas []quota) (pods int, why string, err error) {
	pods = math.MaxInt32
	for i := range quotas {
		q := &quotas[i]
		if len(q.Spec.Scopes) > 0 || q.Spec.Where != nil {
			continue // which pods it counts is unknown here
		}
		for name, text := range q.Spec.Hard {
			need, err := job.needs(name)
			if err != nil {
				return 0, "", err
			}
			if need == 0 {
				continue
			}
			hard, err := milli(text)
			if err != nil {
				return 0, "", fmt.Errorf("kubernetes: the quota %s: %s: %w", q.Name, name, err)
			}
			used, err := milli(cmp.Or(q.Status.Used[name], "0"))
			if err != nil {
				return 0, "", fmt.Errorf("kubernetes: the quota %s: %s: %w", q.Name, name, err)
			}
			room := int(math.Floor(float64(hard-used) / float64(need)))
			if n := max(have+room, 0); n < pods {
				pods, why = n, fmt.Sprintf("the quota %s has %s of %s", q.Name, text, name)
			}
		}
	}
	return pods, why, nil
}

// needs returns the amount of a quota's resource that a pod of the Job uses, in thousandths.
func (j *agentsJob) needs(name string) (total int64, err error) {
	if name == "pods" || name == "count/pods" {
		return 1000, nil
	}
	limit, resource := strings.HasPrefix(name, "limits."), strings.TrimPrefix(strings.TrimPrefix(name, "limits."), "requests.")
	for _, c := range j.Spec.Template.Spec.Containers {
		text := c.Resources.Limits[resource]
		if !limit {
			text = cmp.Or(c.Resources.Requests[resource], text)
		}
		n, err := milli(cmp.Or(text, "0"))
		if err != nil {
			return 0, fmt.Errorf("kubernetes: %s of container %s: %w", resource, c.Name, err)
		}
		total += n
	}
	return total, nil
}

// milli returns an amount in thousandths.
func milli(text quantity) (int64, error) {
	q, err := resource.ParseQuantity(string(text))
	if err != nil {
		return 0, err
	}
	return q.MilliValue(), nil
}

func (c *client) jobPath() string {
	return "/apis/batch/v1/namespaces/" + c.cfg.namespace + "/jobs/" + c.cfg.job
}

// read requests the object at a path of the API and decodes it into a value.
func (c *client) read(ctx context.Context, path string, into any) error {
	text, err := c.rest.Get().AbsPath(path).MaxRetries(0).Do(ctx).Raw()
	if err != nil {
		return fault(ctx, err)
	}
	if err := json.Unmarshal(text, into); err != nil {
		return fmt.Errorf("kubernetes: %w", err)
	}
	return nil
}

// deleteJob deletes the Job and its pods. It returns nil if the Job does not exist.
func (c *client) deleteJob(ctx context.Context) error {
	how := []byte(`{"kind":"DeleteOptions","apiVersion":"v1","propagationPolicy":"Background"}`)
	err := c.rest.Delete().AbsPath(c.jobPath()).Body(how).MaxRetries(0).Do(ctx).Error()
	if err = fault(ctx, err); err != nil {
		if r, is := errors.AsType[*refusal](err); is && r.code == http.StatusNotFound {
			return nil
		}
		return fmt.Errorf("the Job %s: %w", c.cfg.job, err)
	}
	return nil
}
