package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
)

// The names that Kueue reads and writes in a Job.
const (
	// minParallelism is an annotation of a Job whose parallelism Kueue sets according to its quota.
	minParallelism = "kueue.x-k8s.io/job-min-parallelism"
	// elasticJob is an annotation ("true") of a Job whose parallelism may change while it runs. It
	// is also the scheduling gate that holds its pods back until Kueue has admitted them.
	elasticJob = "kueue.x-k8s.io/elastic-job"
	// queueName is the label with the LocalQueue of a Job.
	queueName = "kueue.x-k8s.io/queue-name"
	kueueAPI  = "/apis/kueue.x-k8s.io/v1beta2"
)

// admission is how Kueue manages a Job.
type admission int

const (
	unmanaged admission = iota // it does not
	admitted                   // it admits the Job as a whole: the parallelism cannot be changed
	elastic                    // it admits growth while the Job runs
)

// admission returns how Kueue manages the Job. Only the gate in the pods' template shows that Kueue
// treats it as elastic, since the feature ElasticJobsViaWorkloadSlices may be off.
func (j *agentsJob) admission() admission {
	if j.Annotations[elasticJob] == "true" && j.Spec.Template.gated(elasticJob) {
		return elastic
	}
	if j.Annotations[minParallelism] != "" || j.Labels[queueName] != "" {
		return admitted
	}
	return unmanaged
}

// gated returns whether the scheduling gate of that name holds the pod back; "": any gate.
func (p *pod) gated(name string) bool {
	for _, g := range p.Spec.SchedulingGates {
		if name == "" || g.Name == name {
			return true
		}
	}
	return false
}

// census counts the pods of the Job that have not ended.
type census struct {
	all     int
	gated   int // held back by a scheduling gate
	granted int // neither held back nor being deleted
}

// ask returns the parallelism to request, given the current one, the wanted one and the pods. Kueue
// admits all pods of a growth or none. So ask first requests all. If some were not admitted by the
// second call, it requests half of these. In the end one pod waits for quota, and once it is
// admitted, ask requests all again.
func (s *scaling) ask(asked, want int, pods census) int {
	waited := s.waited == asked && pods.gated > 0
	s.waited = asked
	switch {
	case want < asked:
		return want
	case pods.gated == 0 && pods.granted == asked:
		return want
	case waited && pods.granted < asked-1:
		return pods.granted + (asked-pods.granted)/2
	}
	return asked // pods are being created or deleted, have not waited for a whole call, or only one waits
}

// clusterQueue has the fields that are read of a ClusterQueue.
type clusterQueue struct {
	Spec struct {
		Cohort string `json:"cohortName"`
		Groups []struct {
			Flavors []struct {
				Name      string `json:"name"`
				Resources []struct {
					Name    string    `json:"name"`
					Nominal quantity  `json:"nominalQuota"`
					Borrow  *quantity `json:"borrowingLimit"`
				} `json:"resources"`
			} `json:"flavors"`
		} `json:"resourceGroups"`
	} `json:"spec"`
	Status struct {
		Reserved []flavorUsage `json:"flavorsReservation"`
	} `json:"status"`
}

// localQueue has the fields that are read of a LocalQueue.
type localQueue struct {
	Spec struct {
		ClusterQueue string `json:"clusterQueue"`
	} `json:"spec"`
	Status struct {
		Reserved []flavorUsage `json:"flavorsReservation"`
	} `json:"status"`
}

type flavorUsage struct {
	Name      string `json:"name"`
	Resources []struct {
		Name  string   `json:"name"`
		Total quantity `json:"total"`
	} `json:"resources"`
}

// reserved returns how much of a resource of a flavor is reserved, in thousandths.
func reserved(usage []flavorUsage, flavor, resource string) (int64, error) {
	for _, u := range usage {
		for _, r := range u.Resources {
			if u.Name == flavor && r.Name == resource {
				return milli(r.Total)
			}
		}
	}
	return 0, nil
}

// excess returns by how many pods the Job exceeds the quota of its ClusterQueue, which Kueue does
// not enforce on running jobs. It attributes the whole excess to the Job. A resource that the queue
// can borrow from a cohort without a limit has no excess. If the account may not read the queues,
// excess returns 0 and logs that once.
func (s *source) excess(ctx context.Context, job *agentsJob) (pods int, why string, err error) {
	if job.Labels[queueName] == "" {
		return 0, "", nil
	}
	var local localQueue
	path := kueueAPI + "/namespaces/" + s.cfg.namespace + "/localqueues/" + job.Labels[queueName]
	if err = s.client.read(ctx, path, &local); err == nil {
		var queue clusterQueue
		if err = s.client.read(ctx, kueueAPI+"/clusterqueues/"+local.Spec.ClusterQueue, &queue); err == nil {
			pods, why, err = job.excess(&local, &queue)
		}
	}
	r, refused := errors.AsType[*refusal](err)
	if refused && (r.code == http.StatusForbidden || r.code == http.StatusNotFound) {
		if said := r.Error(); said != s.scale.unread {
			s.scale.unread = said
			s.log.WithField("job", s.cfg.job).Warn("kubernetes: pods stay when the quota of Kueue's queue shrinks: " + said)
		}
		return 0, "", nil
	}
	if err != nil {
		return 0, "", fmt.Errorf("the queue %s: %w", job.Labels[queueName], err)
	}
	return pods, why, nil
}

// excess returns by how many pods the Job exceeds the quota of a queue, for the scarcest resource.
func (j *agentsJob) excess(local *localQueue, queue *clusterQueue) (pods int, why string, err error) {
	over := map[string]int64{}
	for _, g := range queue.Spec.Groups {
		for _, f := range g.Flavors {
			for _, r := range f.Resources {
				if queue.Spec.Cohort != "" && r.Borrow == nil {
					continue
				}
				more, err := beyond(f.Name, r.Name, local.Status.Reserved, queue.Status.Reserved, r.Nominal, r.Borrow)
				if err != nil {
					return 0, "", fmt.Errorf("kubernetes: the ClusterQueue %s: %s: %w", local.Spec.ClusterQueue, r.Name, err)
				}
				over[r.Name] += more
			}
		}
	}
	for name, more := range over {
		need, err := j.needs(name)
		if err != nil {
			return 0, "", err
		}
		if need == 0 {
			continue
		}
		if n := int((more + need - 1) / need); n > pods {
			pods = n
		}
	}
	if pods > 0 {
		why = "the ClusterQueue " + local.Spec.ClusterQueue + " has less than is reserved"
	}
	return pods, why, nil
}

// beyond returns by how much the reservations of a flavor's resource exceed the quota, in
// thousandths, but at most what the local queue has reserved.
func beyond(flavor, resource string, local, all []flavorUsage, nominal quantity, borrow *quantity) (int64, error) {
	own, err := reserved(local, flavor, resource)
	if err != nil || own == 0 {
		return 0, err
	}
	total, err := reserved(all, flavor, resource)
	if err != nil {
		return 0, err
	}
	limit, err := milli(cmp.Or(nominal, "0"))
	if err != nil {
		return 0, err
	}
	if borrow != nil {
		more, err := milli(*borrow)
		if err != nil {
			return 0, err
		}
		limit += more
	}
	return min(max(total-limit, 0), own), nil
}
