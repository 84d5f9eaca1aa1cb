package kubernetes

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// Kubelet runs pods: it assigns them to its nodes, starts their containers in order, reports their
// status to the API server, and ends them as their deletion requires, by SIGTERM and, after the
// grace period, by SIGKILL. If a pod needs something that it does not support, such as a volume or
// a probe of another kind, the pod fails with a message in its status.
type Kubelet struct {
	*Client
	net *network
	// image maps paths in the image to folders of this machine. Folders that all users may write
	// are shared by all pods; the others are read-only.
	image map[string]string
	dir   string
	port  string // of the API server
	nodes []string

	mu   sync.Mutex
	pods map[string]*running // by UID
	next int                 // the node that gets the next pod
	wg   sync.WaitGroup
}

func newKubelet(c *Cluster, image map[string]string, port string, nodes ...string) (*Kubelet, error) {
	k := &Kubelet{Client: c.Client, net: c.net, image: image, dir: filepath.Join(c.dir, "pods"), port: port, nodes: nodes, pods: map[string]*running{}}
	for _, name := range nodes {
		node := map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": name}}
		if err := c.Do(context.Background(), http.MethodPost, Path("", "Node", ""), node, nil); err != nil {
			return nil, err
		}
	}
	return k, os.MkdirAll(k.dir, 0o711)
}

// run serves pods until ctx ends, and then kills those that are left.
func (k *Kubelet) run(ctx context.Context) {
	for ctx.Err() == nil {
		version, err := k.list(ctx)
		if err == nil {
			err = k.watch(ctx, "/api/v1/pods", version, func(e event) {
				var p pod
				if json.Unmarshal(e.Object, &p) == nil {
					k.see(ctx, &p, e.Type == "DELETED")
				}
			})
		}
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond): // the watch has ended: list again
			_ = err
		}
	}
	k.wg.Wait()
}

// list handles all existing pods, and returns the version from which to watch.
func (k *Kubelet) list(ctx context.Context) (string, error) {
	var list struct {
		Metadata struct {
			Version string `json:"resourceVersion"`
		} `json:"metadata"`
		Items []pod `json:"items"`
	}
	if err := k.Do(ctx, http.MethodGet, "/api/v1/pods", nil, &list); err != nil {
		return "", err
	}
	there := map[string]bool{}
	for i := range list.Items {
		there[list.Items[i].Metadata.UID] = true
		k.see(ctx, &list.Items[i], false)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for uid, r := range k.pods {
		if !there[uid] {
			r.remove()
		}
	}
	return list.Metadata.Version, nil
}

// see handles the API server's description of a pod.
func (k *Kubelet) see(ctx context.Context, p *pod, deleted bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	r := k.pods[p.Metadata.UID]
	switch {
	case deleted:
		if r != nil {
			r.remove()
		}
		return
	case p.Spec.NodeName == "":
		if len(p.Spec.SchedulingGates) == 0 && p.Metadata.DeletionTimestamp == nil {
			node := k.nodes[k.next%len(k.nodes)]
			k.next++
			binding := map[string]any{"apiVersion": "v1", "kind": "Binding", "metadata": map[string]any{"name": p.Metadata.Name},
				"target": map[string]any{"apiVersion": "v1", "kind": "Node", "name": node}}
			// A conflict means that the pod was bound or deleted meanwhile; the watch reports that.
			_ = k.Do(ctx, http.MethodPost, Path(p.Metadata.Namespace, "Pod", p.Metadata.Name)+"/binding", binding, nil)
		}
		return
	case r == nil && (p.Status.Phase == "Succeeded" || p.Status.Phase == "Failed"):
		return
	case r == nil:
		space, address, err := k.net.add()
		r = &running{k: k, pod: p, space: space, address: address, deleted: make(chan struct{}), gone: make(chan struct{}), failed: err,
			states: map[string]*containerState{}, procs: map[string]*os.Process{}}
		r.pod.Status.PodIP = address
		for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
			r.states[c.Name] = &containerState{name: c.Name}
		}
		r.dir = filepath.Join(k.dir, p.Metadata.UID)
		k.pods[p.Metadata.UID] = r
		k.wg.Go(func() { r.run(ctx) })
	}
	if p.Metadata.DeletionTimestamp != nil {
		r.delete(time.Duration(p.Metadata.DeletionGrace) * time.Second)
	}
}

// Log returns what a container of a pod has printed.
func (k *Kubelet) Log(p, container string) string {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, r := range k.pods {
		if r.pod.Metadata.Name == p {
			text, _ := os.ReadFile(r.logPath(container)) // there is no file before its start
			return string(text)
		}
	}
	return ""
}

// Volume returns the folder of a claim. The folder is created when a pod first needs it.
func (k *Kubelet) Volume(namespace, claim string) string {
	return filepath.Join(k.dir, "claims", namespace, claim)
}

// Kill kills the processes of a container of a pod, as the loss of a machine or a lack of memory
// would.
func (k *Kubelet) Kill(p, container string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, r := range k.pods {
		if r.pod.Metadata.Name == p {
			return r.kill(container)
		}
	}
	return fmt.Errorf("kubernetes: there is no pod %s", p)
}

// hosts rewrites the host files of the pods in a namespace, which replace a DNS server.
func (k *Kubelet) hosts(ctx context.Context, namespace string) error {
	var services struct {
		Items []struct {
			Metadata struct {
				Name string `json:"name"`
			} `json:"metadata"`
			Spec struct {
				Selector map[string]string `json:"selector"`
				Early    bool              `json:"publishNotReadyAddresses"`
			} `json:"spec"`
		} `json:"items"`
	}
	if err := k.Do(ctx, http.MethodGet, Path(namespace, "Service", ""), nil, &services); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	var text strings.Builder
	var pods []*running
	for _, r := range k.pods {
		if r.pod.Metadata.Namespace == namespace && r.alive() {
			pods = append(pods, r)
		}
	}
	slices.SortFunc(pods, func(a, b *running) int { return cmp.Compare(a.address, b.address) })
	for _, s := range services.Items {
		for _, r := range pods {
			if matches(s.Spec.Selector, r.pod.Metadata.Labels) && (s.Spec.Early || r.isReady()) {
				fmt.Fprintf(&text, "%s %s %[2]s.%s %[2]s.%[3]s.svc.cluster.local\n", r.address, s.Metadata.Name, namespace)
			}
		}
	}
	for _, r := range pods {
		name, sub := cmp.Or(r.pod.Spec.Hostname, r.pod.Metadata.Name), r.pod.Spec.Subdomain
		if sub != "" {
			fmt.Fprintf(&text, "%s %s.%s %[2]s.%[3]s.%s.svc.cluster.local\n", r.address, name, sub, namespace)
		}
	}
	for _, r := range pods {
		own := "127.0.0.1 localhost\n" + r.address + " " + cmp.Or(r.pod.Spec.Hostname, r.pod.Metadata.Name) + "\n"
		if err := rewrite(filepath.Join(r.dir, "hosts"), own+text.String()); err != nil {
			return err
		}
	}
	return nil
}

// rewrite changes a file in place: pods that have it mounted would not see a new file.
func rewrite(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte(text), 0); err != nil {
		return err
	}
	return f.Truncate(int64(len(text)))
}

func matches(selector, labels map[string]string) bool {
	for key, value := range selector {
		if labels[key] != value {
			return false
		}
	}
	return len(selector) > 0
}
