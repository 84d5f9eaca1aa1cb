package enroll

import (
	"crypto/ed25519"
	"crypto/x509"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/cluster"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire/enrollpb"
)

func encoded(f *testing.F, m proto.Message) []byte {
	f.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		f.Fatal(err)
	}
	return b
}

func newRequest(f *testing.F) []byte {
	f.Helper()
	key, err := identity.NewKey()
	if err != nil {
		f.Fatal(err)
	}
	request, err := identity.NewRequest(key)
	if err != nil {
		f.Fatal(err)
	}
	return request
}

// FuzzEnroll: whatever the holder of a token or an agent requests, it gets only an agent's
// certificate for a host that it may have, and the cluster's state remains readable.
func FuzzEnroll(f *testing.F) {
	f.Add(encoded(f, &enrollpb.EnrollRequest{Host: "node1", Request: newRequest(f)}), false)
	f.Add(encoded(f, &enrollpb.EnrollRequest{Host: "a", Request: newRequest(f), Ring: 1}), true)
	f.Add(encoded(f, &enrollpb.EnrollRequest{Host: "a", Ring: 1 << 60}), true)
	f.Add(encoded(f, &enrollpb.EnrollRequest{Host: "node\x1b[2J", Request: []byte{0x30}}), false)
	const pattern = "node*"
	dir, err := cluster.Init(filepath.Join(f.TempDir(), "c"), cluster.Grant{Expires: time.Now().Add(time.Hour)}, time.Now())
	if err != nil {
		f.Fatal(err)
	}
	token, err := dir.NewToken(cluster.Grant{Expires: time.Now().Add(24 * time.Hour), Hosts: pattern, Reusable: true}, time.Now())
	if err != nil {
		f.Fatal(err)
	}
	public := token.Key().Public().(ed25519.PublicKey)
	f.Fuzz(func(t *testing.T, b []byte, isAgent bool) {
		var q enrollpb.EnrollRequest
		if proto.Unmarshal(b, &q) != nil {
			return
		}
		who := identity.Applicant{Token: public}
		if isAgent {
			who = identity.Applicant{Agent: identity.Subject{Role: identity.Agent, Host: "a"}}
		}
		r := &registrar{Server: Server{Dir: dir, AgentLife: time.Hour, Log: quiet()}, recent: map[string]int{}}
		reply, err := r.answer(who, &q, time.Now())
		if err != nil {
			if code := status.Code(err); reply != nil || code != codes.PermissionDenied && code != codes.InvalidArgument {
				t.Errorf("%v, with %v", err, reply)
			}
			return
		}
		if may, _ := path.Match(pattern, q.GetHost()); !isAgent && !may || isAgent && q.GetHost() != "a" {
			t.Errorf("host %q was answered", q.GetHost())
		}
		if (len(reply.GetCertificate()) > 0) != (len(q.GetRequest()) > 0) || cluster.CheckKeys(reply.GetKeys()) != nil {
			t.Errorf("answered: %v", reply)
		}
		if len(reply.GetCertificate()) > 0 {
			leaf, err := x509.ParseCertificate(reply.GetCertificate())
			want := []string{string(identity.Agent) + ".hvdrun.internal"}
			if err != nil || leaf.IsCA || len(leaf.URIs) != 1 || len(leaf.DNSNames) != 1 || leaf.DNSNames[0] != want[0] {
				t.Errorf("a certificate of %+v, %v", leaf, err)
			}
		}
		err = dir.Update(func(s *cluster.State) error {
			delete(s.Hosts, q.GetHost())
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
}

// FuzzReply: an agent either accepts all of a registrar's answer, or continues with what it had.
func FuzzReply(f *testing.F) {
	key := make([]byte, cluster.GossipKeyLen)
	f.Add(encoded(f, &enrollpb.EnrollReply{Ring: 2, Keys: [][]byte{key}, PauseMs: 1 << 31}))
	f.Add(encoded(f, &enrollpb.EnrollReply{Ring: 2, Keys: [][]byte{key, key, key}}))
	f.Add(encoded(f, &enrollpb.EnrollReply{Ring: 1, Keys: [][]byte{key[1:]}}))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, b []byte) {
		var reply enrollpb.EnrollReply
		if proto.Unmarshal(b, &reply) != nil {
			return
		}
		reply.Certificate = nil // it is checked elsewhere: see identity.FuzzAssemble
		m := &Membership{cfg: Config{Dir: dir, Log: quiet()}, ring: ring{Version: 1, Keys: [][]byte{key}}, pause: time.Second}
		err := m.take(&reply)
		if cluster.CheckKeys(m.ring.Keys) != nil || m.ring.Version == 0 || m.pause < leastPause || m.pause > mostPause {
			t.Errorf("%v: %+v, %v", &reply, m.ring, m.pause)
		}
		if err != nil && m.ring.Version != 1 {
			t.Errorf("refused (%v), and kept", err)
		}
		_, kept := os.Stat(m.file(ringFile))
		if kept != nil && !os.IsNotExist(kept) || (m.ring.Version == 1) != os.IsNotExist(kept) {
			t.Errorf("version %d is kept, the file: %v", m.ring.Version, kept)
		}
		if err := os.Remove(m.file(ringFile)); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
	})
}

// FuzzFolder: the contents of an agent's folder are accepted only if its keys can be used.
func FuzzFolder(f *testing.F) {
	f.Add([]byte(`{"Version":1,"Keys":["AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="]}`))
	f.Add([]byte(`{"Version":1,"Keys":[]}`))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, text []byte) {
		m := &Membership{cfg: Config{Dir: dir, Log: quiet()}}
		if err := os.WriteFile(m.file(ringFile), text, fs.FileMode(0o600)); err != nil {
			t.Fatal(err)
		}
		if err := m.loadRing(); (err == nil) != (cluster.CheckKeys(m.ring.Keys) == nil) {
			t.Errorf("%q: %v, %+v", text, err, m.ring)
		}
	})
}
