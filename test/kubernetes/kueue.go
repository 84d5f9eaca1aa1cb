package kubernetes

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"go.yaml.in/yaml/v3"

	"github.com/hvdrun/hvdrun/test/etcdserver"
)

// Kueue is Kueue's manager, of the version in kueue/go.mod, for a cluster. The caller must call
// Stop before it stops the cluster.
type Kueue struct {
	c        *Cluster
	server   *server
	webhooks []string // paths of their configurations
}

const kueueConfig = `apiVersion: config.kueue.x-k8s.io/v1beta2
kind: Configuration
health: {healthProbeBindAddress: "127.0.0.1:%[1]s"}
metrics: {bindAddress: "0"}
webhook: {host: 127.0.0.1, port: %[2]s, certDir: "%[3]s"}
leaderElection: {leaderElect: false}
internalCertManagement: {enable: false}
integrations: {frameworks: [batch/job]}
featureGates: {ElasticJobsViaWorkloadSlices: true, VisibilityOnDemand: false}
`

// startKueue is a script that starts Kueue in its own mount namespace, because Kueue reads a
// certificate from a fixed path.
const startKueue = `set -e
mkdir "$1/etc"
mount -t tmpfs tmpfs "$1/etc"
mkdir -p "$1/etc/upper/kueue/metrics/certs" "$1/etc/work"
cp "$1/tls.crt" "$1/tls.key" "$1/etc/upper/kueue/metrics/certs"
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$1/etc/upper,workdir=$1/etc/work" /etc
exec "$2" --config "$1/config.yaml" --zap-log-level 2
`

// StartKueue starts Kueue for elastic Jobs only, and blocks until its webhooks answer. ctx bounds
// the start. It returns ErrMissing if the manager was not built.
func (c *Cluster) StartKueue(ctx context.Context) (*Kueue, error) {
	program, components := filepath.Join(c.programs, "kueue"), filepath.Join(c.programs, "kueue.d")
	if _, err := os.Stat(program); err != nil {
		return nil, ErrMissing
	}
	k := &Kueue{c: c}
	if err := k.start(ctx, program, components); err != nil {
		k.Stop()
		return nil, fmt.Errorf("kubernetes: Kueue: %w", err)
	}
	return k, nil
}

func (k *Kueue) start(ctx context.Context, program, components string) error {
	f := files{filepath.Join(k.c.dir, "kueue")}
	if err := os.Mkdir(f.dir, 0o700); err != nil {
		return err
	}
	if _, err := f.keys("127.0.0.1"); err != nil {
		return err
	}
	health, err := etcdserver.FreePort()
	if err != nil {
		return err
	}
	port, err := etcdserver.FreePort()
	if err != nil {
		return err
	}
	if err := errors.Join(os.Rename(f.path("tls.pem"), f.path("tls.crt")),
		f.write("config.yaml", fmt.Sprintf(kueueConfig, health, port, f.dir)), k.define(ctx, components)); err != nil {
		return err
	}
	cmd := exec.Command("/bin/sh", "-c", startKueue, "sh", f.dir, program)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+k.c.Kubeconfig)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	if k.server, err = start(cmd, filepath.Join(k.c.dir, "kueue.log")); err != nil {
		return err
	}
	if err := await(ctx, "http://127.0.0.1:"+health+"/readyz"); err != nil {
		return fmt.Errorf("%w; its log is %s", err, k.server.log)
	}
	ca, err := os.ReadFile(f.path("ca.pem"))
	if err != nil {
		return err
	}
	return k.hook(ctx, filepath.Join(components, "webhook", "manifests.yaml"), "https://127.0.0.1:"+port, ca)
}

// define creates Kueue's kinds and waits until they exist.
func (k *Kueue) define(ctx context.Context, components string) error {
	if err := k.c.Create(ctx, "", []byte("{apiVersion: v1, kind: Namespace, metadata: {name: kueue-system}}")); err != nil {
		return err
	}
	kinds, err := filepath.Glob(filepath.Join(components, "crd", "bases", "*.yaml"))
	if err != nil || len(kinds) == 0 {
		return fmt.Errorf("no definitions in %s: %w", components, err)
	}
	var names []string
	for _, path := range kinds {
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if err := k.c.Create(ctx, "", text); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		_, name, _ := strings.Cut(strings.TrimSuffix(filepath.Base(path), ".yaml"), "_")
		if err := k.c.await(ctx, kueueGroup+"/"+name); err != nil {
			return err
		}
		names = append(names, name)
	}
	return k.listed(ctx, names)
}

// kueueGroup is the API's path of Kueue's kinds.
const kueueGroup = "/apis/kueue.x-k8s.io/v1beta2"

// listed blocks until the API server lists the resources, which happens later than it serves them.
// Kueue exits if one of its resources is not listed.
func (k *Kueue) listed(ctx context.Context, names []string) error {
	return retry(ctx, func() error {
		var list struct{ Resources []struct{ Name string } }
		if err := k.c.Do(ctx, http.MethodGet, kueueGroup, nil, &list); err != nil {
			return err
		}
		there := map[string]bool{}
		for _, r := range list.Resources {
			there[r.Name] = true
		}
		for _, name := range names {
			if !there[name] {
				return fmt.Errorf("the API server does not list %s", name)
			}
		}
		return nil
	})
}

// hook makes the API server ask the manager about Jobs and Kueue's own kinds only: it would not
// answer requests about kinds of other frameworks.
func (k *Kueue) hook(ctx context.Context, path, url string, ca []byte) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	for decoder := yaml.NewDecoder(bytes.NewReader(text)); ; {
		var o struct {
			Version  string           `yaml:"apiVersion"`
			Kind     string           `yaml:"kind"`
			Webhooks []map[string]any `yaml:"webhooks"`
		}
		if err := decoder.Decode(&o); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		var hooks []any
		for _, h := range o.Webhooks {
			where := h["clientConfig"].(map[string]any)["service"].(map[string]any)["path"].(string)
			if !strings.Contains(where, "batch-v1-job") && !strings.Contains(where, "kueue-x-k8s-io") {
				continue
			}
			h["clientConfig"] = map[string]any{"url": url + where, "caBundle": base64.StdEncoding.EncodeToString(ca)}
			hooks = append(hooks, h)
		}
		object := map[string]any{"apiVersion": o.Version, "kind": o.Kind, "metadata": map[string]any{"name": "kueue"}, "webhooks": hooks}
		if err := k.c.Do(ctx, http.MethodPost, Path("", o.Kind, ""), object, nil); err != nil {
			return err
		}
		k.webhooks = append(k.webhooks, Path("", o.Kind, "kueue"))
	}
}

// await blocks until a server answers a request with success.
func await(ctx context.Context, url string) error {
	return retry(ctx, func() error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			return err
		}
		answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			return fmt.Errorf("GET %s: %s", url, answer.Status)
		}
		return nil
	})
}

// LogPath returns the path of the manager's output.
func (k *Kueue) LogPath() string { return k.server.log }

// Stop ends the manager and removes its webhooks from the API server.
func (k *Kueue) Stop() {
	for _, path := range k.webhooks {
		_ = k.c.Do(context.Background(), http.MethodDelete, path, nil, nil) // the cluster ends
	}
	if k.server != nil {
		k.server.stop()
	}
}
