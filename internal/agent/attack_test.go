package agent

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io/fs"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/agent/enroll"
	keeping "github.com/hvdrun/hvdrun/internal/cluster"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
	"github.com/hvdrun/hvdrun/internal/wire/enrollpb"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// robber has everything that is on a host and everything that one of its workers can read, and
// tries to run a command on host b.
type robber struct {
	t      *testing.T
	victim string // the address at which the agent of b accepts drivers
	label  string
	// loot is the contents of the files of the host's agent, worker the credentials of one of its
	// workers.
	loot      map[string][]byte
	worker    *identity.Credentials
	registrar string // host:port; empty: no registrar runs
}

// steal reads all files of a folder.
func steal(t *testing.T, dir string) map[string][]byte {
	t.Helper()
	loot := map[string][]byte{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		loot[path], err = os.ReadFile(path)
		return err
	})
	if err != nil || len(loot) == 0 {
		t.Fatalf("%d files, %v", len(loot), err)
	}
	return loot
}

// enter tries to begin a session with the agent of b, in which commands could be started there.
func (r robber) enter(conf *tls.Config) error {
	conf.InsecureSkipVerify, conf.VerifyConnection = true, nil // an attacker does not verify its victim
	conn, err := wire.NewClient(r.victim, conf)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithDeadline(r.t.Context(), sandbox.Limit())
	defer cancel()
	stream, err := agentpb.NewAgentClient(conn).Session(ctx)
	if err == nil {
		stream.Send(attach())
		_, err = stream.Recv()
	}
	if ctx.Err() != nil {
		r.t.Fatal("the agent neither lets in nor refuses")
	}
	return err
}

func (r robber) as(c *identity.Credentials) error {
	return r.enter(c.ClientTLS(identity.Subject{Role: identity.Agent, Host: "b"}))
}

// keys returns everything in the loot that could be the key of an authority.
func (r robber) keys() (all [][]byte) {
	for _, text := range r.loot {
		var ring struct{ Keys [][]byte }
		if json.Unmarshal(text, &ring) == nil {
			all = append(all, ring.Keys...)
		}
		if key, err := hex.DecodeString(strings.TrimSpace(string(text))); err == nil && len(key) == identity.ClusterKeyLen {
			all = append(all, key)
		}
	}
	return all
}

// try returns the error of each way to reach b, by name; nil: the way is open.
func (r robber) try() map[string]error {
	driver := identity.Subject{RunID: "robbery", Role: identity.Driver}
	ways := map[string]error{"the credentials of a worker": r.as(r.worker)}
	for i, key := range r.keys() {
		for _, label := range []string{"", r.label} {
			authority, err := identity.ForCluster(key, label)
			if err != nil {
				r.t.Fatal(err)
			}
			own, err := authority.Issue(driver)
			if err != nil {
				r.t.Fatal(err)
			}
			ways[fmt.Sprintf("an authority of key %d, label %q", i, label)] = r.as(own)
		}
	}
	for path, text := range r.loot {
		agent, err := identity.ParsePEM(text)
		if err != nil {
			continue
		}
		ways["an agent's certificate"] = r.as(agent)
		ways["a certificate signed by an agent"] = r.enter(forge(r.t, text, driver))
		ways["a certificate signed by itself"] = r.enter(forge(r.t, nil, driver))
		for name, host := range map[string]string{"this host": "a", "host b": "b", "a driver": "../robbery/driver", "none": ""} {
			ways["a certificate for "+name+" by the registrar, "+filepath.Base(path)] = r.extort(agent, host)
		}
		if _, err := identity.ParseAuthority(text); err == nil {
			r.t.Errorf("%s is an authority", path)
		}
	}
	return ways
}

// extort requests a certificate from the registrar, and tries to enter with it.
func (r robber) extort(agent *identity.Credentials, host string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		r.t.Fatal(err)
	}
	uri, err := url.Parse("hvdrun:///robbery/driver?host=&index=0&incarnation=")
	if err != nil {
		r.t.Fatal(err)
	}
	request, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		DNSNames: []string{"driver.hvdrun.internal"}, URIs: []*url.URL{uri},
	}, key)
	if err != nil {
		r.t.Fatal(err)
	}
	conn, err := wire.NewClient(r.registrar, agent.ClientTLS(identity.Subject{Role: identity.Registrar}))
	if err != nil {
		r.t.Fatal(err)
	}
	defer conn.Close()
	reply, err := enrollpb.NewRegistrarClient(conn).Enroll(r.t.Context(), &enrollpb.EnrollRequest{Host: host, Request: request})
	if err != nil {
		return err
	}
	got, err := identity.Assemble(key, reply.GetCertificate(), reply.GetAuthority())
	if err != nil {
		r.t.Fatal(err)
	}
	if who := got.Subject(); who != agent.Subject() {
		r.t.Errorf("the registrar made the agent of a %+v", who)
	}
	return r.as(got)
}

// forge returns the TLS configuration of a client with a driver's certificate that is signed by the
// key in text, or by its own key.
func forge(t *testing.T, text []byte, s identity.Subject) *tls.Config {
	t.Helper()
	own, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(7), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, DNSNames: []string{"driver.hvdrun.internal"},
		URIs: []*url.URL{{Scheme: "hvdrun", Path: "/" + s.RunID + "/driver", RawQuery: "host=&index=0&incarnation="}},
	}
	signer, issuer, chain := own, template, [][]byte{}
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if block.Type == "CERTIFICATE" {
			chain = append(chain, block.Bytes)
			continue
		}
		key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		signer = key.(*ecdsa.PrivateKey)
	}
	if len(chain) > 0 {
		if issuer, err = x509.ParseCertificate(chain[0]); err != nil {
			t.Fatal(err)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, issuer, own.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{
		Certificates: []tls.Certificate{{Certificate: append([][]byte{der}, chain...), PrivateKey: own}}, NextProtos: []string{"h2"},
	}
}

// hostB runs the agent of b until the test ends.
func hostB(t *testing.T, creds *identity.Credentials) *host {
	t.Helper()
	ln, err := identity.Drivers.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := &host{newServer("b", 1, quiet()), ln.Addr().String()}
	serveUntilEnd(t, func(ctx context.Context) error { return h.serve(ctx, ln, creds) })
	return h
}

func serveUntilEnd(t *testing.T, serve func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// workerOf returns the credentials of a worker of a job.
func workerOf(t *testing.T) *identity.Credentials {
	t.Helper()
	job, err := identity.NewAuthority("job")
	if err != nil {
		t.Fatal(err)
	}
	worker, err := job.Issue(identity.Subject{Role: identity.Worker, Host: "a", Incarnation: "i"})
	if err != nil {
		t.Fatal(err)
	}
	return worker
}

// TestWorkerCannotReachOtherHosts: a worker that has everything on its host, including the agent's
// folder and a used token, cannot run anything on another host.
func TestWorkerCannotReachOtherHosts(t *testing.T) {
	dir, err := keeping.Init(filepath.Join(t.TempDir(), "cluster"), keeping.Grant{}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	ln, err := identity.Enrollment.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	serveUntilEnd(t, func(ctx context.Context) error {
		return enroll.Server{Dir: dir, AgentLife: enroll.DefaultAgentLife, Pause: enroll.DefaultPause, Log: quiet()}.Serve(ctx, ln)
	})
	home := t.TempDir()
	creds := map[string]*identity.Credentials{}
	for _, name := range []string{"a", "b"} {
		token, err := dir.NewToken(keeping.Grant{Expires: time.Now().Add(time.Hour)}, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(home, name, "token")
		if err := os.Mkdir(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := token.WriteFile(file); err != nil {
			t.Fatal(err)
		}
		m, err := enroll.Join(t.Context(), enroll.Config{
			Addr: ln.Addr().String(), TokenFile: file, Host: name, Dir: filepath.Join(home, name, "state"), Log: quiet(),
		})
		if err != nil {
			t.Fatal(err)
		}
		creds[name] = m.Credentials()
	}
	h := hostB(t, creds["b"])
	r := robber{
		t: t, victim: h.addr, label: "blue", loot: steal(t, filepath.Join(home, "a")), worker: workerOf(t), registrar: ln.Addr().String(),
	}
	ways := r.try()
	if len(ways) < 10 {
		t.Errorf("only %d ways were tried", len(ways))
	}
	for way, err := range ways {
		if code := status.Code(err); code != codes.Unavailable && code != codes.PermissionDenied {
			t.Errorf("by %s: %v", way, err)
		}
	}
	_, err = enroll.Join(t.Context(), enroll.Config{
		Addr: ln.Addr().String(), TokenFile: filepath.Join(home, "a", "token"), Host: "b", Dir: filepath.Join(home, "again"), Log: quiet(),
	})
	if err == nil || !strings.Contains(err.Error(), `was used by host "a"`) {
		t.Errorf("a used token made another host: %v", err)
	}
	h.unheard(t)
	// The holder of the cluster's folder gets access, in the same way.
	driver, err := dir.Driver("r", "alice", "1000", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if err := r.as(driver); err != nil {
		t.Errorf("the driver is refused: %v", err)
	}
}

// TestSharedKeyOpensOtherHosts: with one shared key, the same attack succeeds. Therefore users of a
// shared key get a warning.
func TestSharedKeyOpensOtherHosts(t *testing.T) {
	home := t.TempDir()
	file := filepath.Join(home, "key")
	if err := identity.GenerateClusterKey(file); err != nil {
		t.Fatal(err)
	}
	key, err := identity.ReadClusterKey(file)
	if err != nil {
		t.Fatal(err)
	}
	h := hostB(t, credentials(t, key, "blue", identity.Subject{Role: identity.Agent, Host: "b"}))
	r := robber{t: t, victim: h.addr, label: "blue", loot: steal(t, home), worker: workerOf(t)}
	open := 0
	for _, err := range r.try() {
		if err == nil {
			open++
		}
	}
	if open != 1 {
		t.Errorf("%d ways are open", open)
	}
}
