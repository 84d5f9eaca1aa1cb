package kubernetes

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/test/etcdserver"
)

// ErrMissing reports that this machine lacks something that a cluster needs.
var ErrMissing = errors.New("kubernetes: make check-kubernetes builds the servers; pods need root, ip, nsenter and setpriv")

// Cluster is a Kubernetes cluster on this machine. The caller must call Stop.
type Cluster struct {
	*Client // an administrator's
	// Kubeconfig is the path of a configuration file with which kubectl acts as the administrator.
	Kubeconfig string

	dir      string
	programs string
	net      *network
	etcd     *etcdserver.Server
	servers  []*server
	kubelet  *Kubelet
	stop     context.CancelFunc
	ended    chan struct{}
}

// server is a process of the control plane.
type server struct {
	cmd *exec.Cmd
	log string
}

// Start starts a cluster with its files in dir, and blocks until its API server answers and its
// default namespace is complete. programs is the folder with kube-apiserver and
// kube-controller-manager. image is the kubelet's (see Kubelet). ctx bounds the start.
func Start(ctx context.Context, dir, programs string, image map[string]string) (*Cluster, error) {
	for _, program := range []string{filepath.Join(programs, "kube-apiserver"), filepath.Join(programs, "kube-controller-manager"), "ip", "nsenter", "setpriv"} {
		if _, err := exec.LookPath(program); err != nil || os.Geteuid() != 0 {
			return nil, ErrMissing
		}
	}
	c := &Cluster{dir: dir, programs: programs, ended: make(chan struct{})}
	if err := c.start(ctx, image); err != nil {
		c.Stop()
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	return c, nil
}

func (c *Cluster) start(ctx context.Context, image map[string]string) (err error) {
	if c.net, err = newNetwork(); err != nil {
		return err
	}
	etcdDir := filepath.Join(c.dir, "etcd")
	if err := os.Mkdir(etcdDir, 0o700); err != nil {
		return err
	}
	if c.etcd, err = etcdserver.Start(ctx, etcdDir, "127.0.0.1"); err != nil {
		return err
	}
	port, err := etcdserver.FreePort()
	if err != nil {
		return err
	}
	f := files{c.dir}
	pool, err := f.keys(c.net.gateway)
	if err != nil {
		return err
	}
	c.Client = &Client{url: "https://127.0.0.1:" + port, token: rand.Text(), http: &http.Client{
		Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, ForceAttemptHTTP2: true},
	}}
	c.Kubeconfig = f.path("kubeconfig")
	if err := errors.Join(
		f.write("tokens", c.token+",admin,admin,system:masters\n"),
		f.write("kubeconfig", fmt.Sprintf(kubeconfig, f.path("ca.pem"), c.url, c.token)),
	); err != nil {
		return err
	}
	err = c.serve(filepath.Join(c.programs, "kube-apiserver"),
		"--etcd-servers=http://"+c.etcd.Endpoint, "--bind-address=0.0.0.0", "--secure-port="+port, "--advertise-address="+c.net.gateway,
		"--tls-cert-file="+f.path("tls.pem"), "--tls-private-key-file="+f.path("tls.key"), "--token-auth-file="+f.path("tokens"),
		"--authorization-mode=RBAC", "--service-cluster-ip-range=10.97.0.0/24",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+f.path("accounts.key"),
		"--service-account-signing-key-file="+f.path("accounts.key"))
	if err != nil {
		return err
	}
	if err := c.await(ctx, "/readyz"); err != nil {
		return err
	}
	managerPort, err := etcdserver.FreePort()
	if err != nil {
		return err
	}
	err = c.serve(filepath.Join(c.programs, "kube-controller-manager"),
		"--kubeconfig="+c.Kubeconfig, "--service-account-private-key-file="+f.path("accounts.key"), "--root-ca-file="+f.path("ca.pem"),
		"--leader-elect=false", "--bind-address=127.0.0.1", "--secure-port="+managerPort,
		// These controllers need real nodes: nobody renews the leases of these.
		"--controllers=*,-node-lifecycle-controller,-node-ipam-controller,-cloud-node-lifecycle-controller,-taint-eviction-controller")
	if err != nil {
		return err
	}
	if err := c.await(ctx, "/api/v1/namespaces/default/configmaps/kube-root-ca.crt"); err != nil {
		return err
	}
	if c.kubelet, err = newKubelet(c, image, port, "node-a", "node-b"); err != nil {
		return err
	}
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	c.stop = stop
	go func() {
		defer close(c.ended)
		c.kubelet.run(running)
	}()
	return nil
}

// serve starts a server of the control plane. It ends with this process.
func (c *Cluster) serve(path string, args ...string) error {
	s, err := start(exec.Command(path, args...), filepath.Join(c.dir, filepath.Base(path)+".log"))
	if err == nil {
		c.servers = append(c.servers, s)
	}
	return err
}

// start starts a process with its output in the file path. It ends with this process.
func start(cmd *exec.Cmd, path string) (*server, error) {
	log, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig, cmd.SysProcAttr.Setpgid = syscall.SIGKILL, true
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return &server{cmd, path}, nil
}

// stop kills a process that was started, and waits for its end.
func (s *server) stop() {
	_ = s.cmd.Process.Kill() // it may have ended
	_ = s.cmd.Wait()
}

// await blocks until the API server answers a request.
func (c *Cluster) await(ctx context.Context, path string) error {
	err := retry(ctx, func() error { return c.Do(ctx, http.MethodGet, path, nil, nil) })
	if err != nil {
		return fmt.Errorf("GET %s: %w; logs are in %s", path, err, c.dir)
	}
	return nil
}

// retry calls try until it returns nil. When ctx ends, it returns try's last error.
func retry(ctx context.Context, try func() error) error {
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for {
		err := try()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-ticker.C:
		}
	}
}

// Namespace creates a namespace whose pods must meet a level of pod security (privileged, baseline,
// restricted), and blocks until pods can run in it.
func (c *Cluster) Namespace(ctx context.Context, name, level string) error {
	err := c.Create(ctx, "", fmt.Appendf(nil, `{apiVersion: v1, kind: Namespace, metadata: {name: %s, labels: {pod-security.kubernetes.io/enforce: %s}}}`, name, level))
	if err != nil {
		return err
	}
	for _, path := range []string{Path(name, "ConfigMap", "kube-root-ca.crt"), Path(name, "ServiceAccount", "default")} {
		if err := c.await(ctx, path); err != nil {
			return err
		}
	}
	return nil
}

// Kubelet returns the kubelet, which runs the pods.
func (c *Cluster) Kubelet() *Kubelet { return c.kubelet }

// Stop ends all processes of the cluster and waits for their end.
func (c *Cluster) Stop() {
	if c.stop != nil {
		c.stop()
		<-c.ended
	}
	for _, s := range c.servers {
		s.stop()
	}
	if c.etcd != nil {
		c.etcd.Stop()
	}
	if c.net != nil {
		c.net.remove()
	}
}

const kubeconfig = `apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {certificate-authority: %s, server: "%s"}}]
users: [{name: u, user: {token: %s}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`

// files writes the files that the servers read, to a folder.
type files struct{ dir string }

func (f files) path(name string) string { return filepath.Join(f.dir, name) }

func (f files) write(name, text string) error {
	return os.WriteFile(f.path(name), []byte(text), 0o600)
}

// keys writes a certificate authority, a server's certificate signed by it, and the key of service
// accounts. It returns the authority.
func (f files) keys(address string) (*x509.CertPool, error) {
	authority, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	root := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(24 * time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "apiserver"}, NotBefore: root.NotBefore, NotAfter: root.NotAfter,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		IPAddresses: []net.IP{net.ParseIP(address), net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"kubernetes.default.svc"},
	}
	server, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	accounts, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	rootDER, err := x509.CreateCertificate(rand.Reader, root, root, &authority.PublicKey, authority)
	if err != nil {
		return nil, err
	}
	leafDER, err := x509.CreateCertificate(rand.Reader, leaf, root, &server.PublicKey, authority)
	if err != nil {
		return nil, err
	}
	text := func(kind string, der []byte) string {
		return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
	}
	serverDER, err := x509.MarshalECPrivateKey(server)
	if err != nil {
		return nil, err
	}
	accountsDER, err := x509.MarshalECPrivateKey(accounts)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM([]byte(text("CERTIFICATE", rootDER)))
	return pool, errors.Join(
		f.write("ca.pem", text("CERTIFICATE", rootDER)), f.write("tls.pem", text("CERTIFICATE", leafDER)),
		f.write("tls.key", text("EC PRIVATE KEY", serverDER)), f.write("accounts.key", text("EC PRIVATE KEY", accountsDER)))
}

// network is a bridge of this machine and a network namespace for each pod.
type network struct {
	name, gateway, subnet string
	spaces                []string // those that exist
	last                  int
}

func newNetwork() (*network, error) {
	n := &network{name: fmt.Sprintf("kube%d", os.Getpid()%1000000), subnet: fmt.Sprintf("10.%d.%d.", 200+os.Getpid()/250%50, os.Getpid()%250)}
	n.gateway, n.last = n.subnet+"1", 1
	return n, errors.Join(
		ip("link", "add", n.name, "type", "bridge"), ip("addr", "add", n.gateway+"/24", "dev", n.name), ip("link", "set", n.name, "up"))
}

func ip(args ...string) error {
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// add creates a namespace for a pod, and returns its name and the pod's address. It is not safe for
// concurrent use.
func (n *network) add() (space, address string, err error) {
	n.last++
	if n.last > 254 {
		return "", "", errors.New("no address is left for a pod")
	}
	address, space = fmt.Sprint(n.subnet, n.last), fmt.Sprintf("%s-%d", n.name, n.last)
	link := fmt.Sprintf("k%dp%d", os.Getpid()%1000000, n.last)
	n.spaces = append(n.spaces, space)
	return space, address, errors.Join(
		ip("netns", "add", space), ip("-n", space, "link", "set", "lo", "up"),
		ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space), ip("link", "set", link, "master", n.name, "up"),
		ip("-n", space, "addr", "add", address+"/24", "dev", "eth0"), ip("-n", space, "link", "set", "eth0", "up"),
		ip("-n", space, "route", "add", "default", "via", n.gateway))
}

// remove deletes the namespaces and the bridge.
func (n *network) remove() {
	for _, space := range n.spaces {
		_ = ip("netns", "del", space) // it is gone, or nothing can be done
	}
	_ = ip("link", "del", n.name)
}
