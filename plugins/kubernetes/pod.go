package main

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/hvdrun/hvdrun/plan"
)

// slotsAnnotation is the annotation with the number of slots of a pod.
const slotsAnnotation = "hvdrun.dev/slots"

// pod has the fields that are read of a Pod, with the names of the API. The Pod of k8s.io/api has a
// hundred more fields, which would be compiled, linked, and held in memory for each pod.
type pod struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Spec struct {
		Hostname   string      `json:"hostname"`
		Subdomain  string      `json:"subdomain"`
		Containers []container `json:"containers"`

		SchedulingGates []struct {
			Name string `json:"name"`
		} `json:"schedulingGates"`
	} `json:"spec"`
	Status struct {
		Phase      string `json:"phase"`
		PodIP      string `json:"podIP"`
		Conditions []struct {
			Type   string `json:"type"`
			Status string `json:"status"`
		} `json:"conditions"`
		ContainerStatuses []struct {
			Name  string `json:"name"`
			State struct {
				Terminated *struct{} `json:"terminated"`
			} `json:"state"`
		} `json:"containerStatuses"`
	} `json:"status"`
}

// DeepCopyObject implements runtime.Object. The copy shares Spec and Status, which nobody changes.
func (p *pod) DeepCopyObject() runtime.Object {
	q := *p
	q.ObjectMeta = *p.ObjectMeta.DeepCopy()
	return &q
}

// podList is a list of pods, or a page of it.
type podList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`

	Items []pod `json:"items"`
}

// DeepCopyObject implements runtime.Object. The copy shares the items.
func (l *podList) DeepCopyObject() runtime.Object {
	m := *l
	m.ListMeta = *l.ListMeta.DeepCopy()
	return &m
}

type container struct {
	Name      string `json:"name"`
	Resources struct {
		Limits   map[string]quantity `json:"limits"`
		Requests map[string]quantity `json:"requests"`
	} `json:"resources"`
}

// quantity is an amount of a resource, which the API writes as a number or a string.
type quantity string

// UnmarshalJSON accepts both.
func (q *quantity) UnmarshalJSON(text []byte) error {
	*q = quantity(strings.Trim(string(text), `"`))
	return nil
}

func (p *pod) ready() bool {
	for _, c := range p.Status.Conditions {
		if c.Type == "Ready" {
			return c.Status == "True"
		}
	}
	return false
}

// over returns whether the container that runs workers (if none is named, every container) has
// ended although the pod still exists.
func (p *pod) over(container string) bool {
	some := false
	for _, s := range p.Status.ContainerStatuses {
		if container != "" && s.Name != container {
			continue
		}
		if s.State.Terminated == nil {
			return false
		}
		some = true
	}
	return some
}

// hostsOf returns the hosts of the pods, oldest first, and the faults of some pods, by name.
//
// A pod that is running and Ready is a host. A terminating pod is a draining host as long as it
// runs, Ready or not. A pod whose slots cannot be determined has none.
func (c *config) hostsOf(pods []*pod) (hosts []plan.Host, faults map[string]string, err error) {
	sorted := slices.SortedFunc(slices.Values(pods), func(a, b *pod) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
			cmp.Compare(a.Name, b.Name))
	})
	faults = map[string]string{}
	taken := map[string]int{}
	owners := []string{}
	for _, p := range sorted {
		draining := p.DeletionTimestamp != nil
		if p.Status.Phase != "Running" || p.Status.PodIP == "" || !draining && !p.ready() || p.over(c.container) {
			continue
		}
		slots, err := c.slotsOf(p)
		if err != nil {
			faults[p.Name] = err.Error()
		}
		host := plan.Host{Name: c.nameOf(p), Slots: slots, Draining: draining}
		i, twice := taken[host.Name]
		switch {
		case !twice:
			taken[host.Name] = len(hosts)
			hosts, owners = append(hosts, host), append(owners, p.Name)
		case hosts[i].Draining:
			hosts[i], owners[i] = host, p.Name // the successor already exists
		case !draining:
			return nil, nil, fmt.Errorf("kubernetes: the pods %s and %s are both called %s: set host to something else",
				owners[i], p.Name, host.Name)
		}
	}
	return hosts, faults, nil
}

// nameOf returns the name of the pod as a host.
func (c *config) nameOf(p *pod) string {
	switch c.host {
	case "name":
		// The host name in the pod, which in a Job differs from the pod's own name.
		return cmp.Or(p.Spec.Hostname, p.Name)
	case "fqdn":
		// The DNS name of pods with a headless service, such as those of a StatefulSet.
		name := cmp.Or(p.Spec.Hostname, p.Name)
		if p.Spec.Subdomain != "" {
			name += "." + p.Spec.Subdomain
		}
		return name + "." + p.Namespace + ".svc." + c.clusterDomain
	}
	return p.Status.PodIP
}

// slotsOf returns the number of slots of the pod: its annotation, else its limit of GPUs, else the
// default.
func (c *config) slotsOf(p *pod) (int, error) {
	if text, given := p.Annotations[slotsAnnotation]; given {
		n, err := count(text)
		if err != nil {
			return 0, fmt.Errorf("annotation %s: %w", slotsAnnotation, err)
		}
		return n, nil
	}
	total, limited := 0, false
	for _, container := range p.Spec.Containers {
		limit, given := container.Resources.Limits[c.resource]
		if !given || c.container != "" && container.Name != c.container {
			continue
		}
		n, err := count(string(limit))
		if err != nil {
			return 0, fmt.Errorf("limit of %s of container %s: %w", c.resource, container.Name, err)
		}
		total, limited = min(total+n, plan.MaxSlots), true
	}
	if limited {
		return total, nil
	}
	return c.defaultSlots, nil
}

func count(text string) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 || n > plan.MaxSlots {
		return 0, fmt.Errorf("%q is not a number from 0 to %d", shorten(text), plan.MaxSlots)
	}
	return n, nil
}

// shorten truncates text that a message repeats.
func shorten(text string) string {
	const most = 200
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}
