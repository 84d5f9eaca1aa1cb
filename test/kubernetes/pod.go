package kubernetes

import (
	"strings"
	"time"
)

// pod is the part of a pod that the kubelet reads. Its fields have the names of the API.
type pod struct {
	Metadata struct {
		Name              string            `json:"name"`
		Namespace         string            `json:"namespace"`
		UID               string            `json:"uid"`
		Labels            map[string]string `json:"labels"`
		Annotations       map[string]string `json:"annotations"`
		DeletionTimestamp *time.Time        `json:"deletionTimestamp"`
		DeletionGrace     int               `json:"deletionGracePeriodSeconds"`
	} `json:"metadata"`
	Spec struct {
		NodeName        string          `json:"nodeName"`
		Hostname        string          `json:"hostname"`
		Subdomain       string          `json:"subdomain"`
		SchedulingGates []struct{}      `json:"schedulingGates"`
		RestartPolicy   string          `json:"restartPolicy"`
		ServiceAccount  string          `json:"serviceAccountName"`
		InitContainers  []container     `json:"initContainers"`
		Containers      []container     `json:"containers"`
		Volumes         []volume        `json:"volumes"`
		Security        securityContext `json:"securityContext"`
	} `json:"spec"`
	Status struct {
		Phase string `json:"phase"`
		PodIP string `json:"podIP"`
	} `json:"status"`
}

type container struct {
	Name    string   `json:"name"`
	Image   string   `json:"image"`
	Command []string `json:"command"`
	Args    []string `json:"args"`
	Dir     string   `json:"workingDir"`
	Env     []struct {
		Name  string `json:"name"`
		Value string `json:"value"`
		From  *struct {
			Field *fieldRef `json:"fieldRef"`
		} `json:"valueFrom"`
	} `json:"env"`
	Ports []struct {
		Name string `json:"name"`
		Port int    `json:"containerPort"`
	} `json:"ports"`
	Readiness *struct {
		TCP *struct {
			Port any `json:"port"` // a number or a name
		} `json:"tcpSocket"`
		Period int `json:"periodSeconds"`
	} `json:"readinessProbe"`
	Mounts []struct {
		Name     string `json:"name"`
		Path     string `json:"mountPath"`
		ReadOnly bool   `json:"readOnly"`
	} `json:"volumeMounts"`
	Security securityContext `json:"securityContext"`
}

// period returns the time between probes of a container that is ready, in seconds. A container that
// is not ready yet is probed all the time.
func (c container) period() int {
	if c.Readiness == nil || c.Readiness.Period == 0 {
		return 10
	}
	return c.Readiness.Period
}

type fieldRef struct {
	Path string `json:"fieldPath"`
}

// securityContext is the security context of a pod or a container.
type securityContext struct {
	User         *int   `json:"runAsUser"`
	Group        *int   `json:"runAsGroup"`
	FSGroup      *int   `json:"fsGroup"`
	Change       string `json:"fsGroupChangePolicy"`
	NonRoot      *bool  `json:"runAsNonRoot"`
	ReadOnlyRoot bool   `json:"readOnlyRootFilesystem"`
	Escalation   *bool  `json:"allowPrivilegeEscalation"`
	Capabilities struct {
		Add  []string `json:"add"`
		Drop []string `json:"drop"`
	} `json:"capabilities"`
}

type volume struct {
	Name   string `json:"name"`
	Secret *struct {
		Name string `json:"secretName"`
		Mode *int   `json:"defaultMode"`
	} `json:"secret"`
	ConfigMap *struct {
		Name string `json:"name"`
		Mode *int   `json:"defaultMode"`
	} `json:"configMap"`
	Empty *struct {
		Medium string `json:"medium"`
	} `json:"emptyDir"`
	Claim *struct {
		Name string `json:"claimName"`
	} `json:"persistentVolumeClaim"`
	Projected *struct {
		Mode    *int `json:"defaultMode"`
		Sources []struct {
			Token *struct {
				Path    string `json:"path"`
				Seconds int64  `json:"expirationSeconds"`
			} `json:"serviceAccountToken"`
			ConfigMap *struct {
				Name  string `json:"name"`
				Items []struct {
					Key  string `json:"key"`
					Path string `json:"path"`
				} `json:"items"`
			} `json:"configMap"`
			Downward *struct {
				Items []struct {
					Path  string   `json:"path"`
					Field fieldRef `json:"fieldRef"`
				} `json:"items"`
			} `json:"downwardAPI"`
		} `json:"sources"`
	} `json:"projected"`
}

// field returns the value of a field in the downward API.
func (p *pod) field(path string) (string, bool) {
	switch path {
	case "metadata.name":
		return p.Metadata.Name, true
	case "metadata.namespace":
		return p.Metadata.Namespace, true
	case "metadata.uid":
		return p.Metadata.UID, true
	case "spec.nodeName":
		return p.Spec.NodeName, true
	case "status.podIP":
		return p.Status.PodIP, true
	}
	for prefix, values := range map[string]map[string]string{"metadata.labels['": p.Metadata.Labels, "metadata.annotations['": p.Metadata.Annotations} {
		if name, is := strings.CutPrefix(path, prefix); is {
			return values[strings.TrimSuffix(name, "']")], true
		}
	}
	return "", false
}

// containerState is the state of a container, as the pod's status reports it.
type containerState struct {
	name     string
	started  time.Time // zero: it waits
	ended    time.Time // zero: it runs, or waits
	code     int
	signal   int
	restarts int
	ready    bool
}

func (s containerState) status() map[string]any {
	state := map[string]any{"waiting": map[string]any{"reason": "PodInitializing"}}
	switch {
	case !s.ended.IsZero():
		reason := "Completed"
		if s.code != 0 {
			reason = "Error"
		}
		state = map[string]any{"terminated": map[string]any{"exitCode": s.code, "signal": s.signal, "reason": reason,
			"startedAt": s.started.UTC().Format(time.RFC3339), "finishedAt": s.ended.UTC().Format(time.RFC3339)}}
	case !s.started.IsZero():
		state = map[string]any{"running": map[string]any{"startedAt": s.started.UTC().Format(time.RFC3339)}}
	}
	return map[string]any{"name": s.name, "image": "local", "imageID": "local", "state": state, "ready": s.ready,
		"started": !s.started.IsZero() && s.ended.IsZero(), "restartCount": s.restarts}
}
