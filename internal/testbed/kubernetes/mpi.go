package kubernetes

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// MPIOperator is Kubeflow's MPI operator, of the version in kueue/go.mod, beside a cluster. The
// caller must call Stop, before that of the cluster.
type MPIOperator struct{ server *server }

// StartMPIOperator starts it, and blocks until its kind is there. It returns ErrMissing where the
// operator was not built.
func (c *Cluster) StartMPIOperator(ctx context.Context) (*MPIOperator, error) {
	program := filepath.Join(c.programs, "mpi-operator")
	text, err := os.ReadFile(filepath.Join(c.programs, "mpi.d", "kubeflow.org_mpijobs.yaml"))
	if err != nil {
		return nil, ErrMissing
	}
	if err := c.Create(ctx, "", append([]byte("{apiVersion: v1, kind: Namespace, metadata: {name: mpi-operator}}\n---\n"), text...)); err != nil {
		return nil, err
	}
	if err := c.await(ctx, "/apis/kubeflow.org/v2beta1/mpijobs"); err != nil {
		return nil, err
	}
	// In a network of its own: it listens on a fixed port.
	c.kubelet.mu.Lock()
	space, _, err := c.net.add()
	c.kubelet.mu.Unlock()
	if err != nil {
		return nil, err
	}
	f := files{c.dir}
	if err := f.write("kubeconfig-pods", fmt.Sprintf(kubeconfig, f.path("ca.pem"), "https://"+c.net.gateway+":"+c.kubelet.port, c.token)); err != nil {
		return nil, err
	}
	cmd := exec.Command("ip", "netns", "exec", space, program)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+f.path("kubeconfig-pods"))
	s, err := start(cmd, f.path("mpi-operator.log"))
	if err != nil {
		return nil, err
	}
	return &MPIOperator{s}, nil
}

// LogPath is the path of what the operator prints.
func (o *MPIOperator) LogPath() string { return o.server.log }

// Stop ends the operator.
func (o *MPIOperator) Stop() { o.server.stop() }
