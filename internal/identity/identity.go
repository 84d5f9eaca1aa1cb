// Package identity says who is who in a job: a certificate authority that is born and dies with the
// job, the credentials it gives to the driver and to every worker, mutual TLS 1.3 for control
// connections, and a keyed proof for connections that carry tensors. Between a driver and the
// agents of a cluster, who have a key in common, ForCluster makes the same authority at both ends.
//
// Nobody outside the job holds a certificate of its authority or its key, so a stranger is refused
// before it has said anything that is listened to. Who a peer is (role, host, slot, incarnation)
// stands in its certificate, signed, and is never taken from a message.
package identity

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
)

// Role is what a party of the job may do.
type Role string

// The roles of a job, and of a cluster, which has drivers and agents.
const (
	Driver Role = "driver"
	Worker Role = "worker"
	Agent  Role = "agent"
)

// Subject is who a certificate was issued to. A driver has neither host, index nor incarnation; an
// agent has a host, and a cluster's belongs to no run.
type Subject struct {
	RunID string
	Role  Role
	// Host and Index name the worker's slot, as plan.SlotID does.
	Host  string
	Index int
	// Incarnation is the worker process.
	Incarnation string
}

// String returns "driver", "agent host" or "worker host/index (incarnation)", for logs.
func (s Subject) String() string {
	if s.Role == Agent {
		return string(s.Role) + " " + s.Host
	}
	if s.Host == "" && s.Incarnation == "" {
		return string(s.Role)
	}
	return fmt.Sprintf("%s %s/%d (%s)", s.Role, s.Host, s.Index, s.Incarnation)
}

// maxName bounds every string of a Subject, so that certificates and credentials stay small.
const maxName = 255

func (s Subject) validate() error {
	if s.RunID == "" && s.Role != Agent {
		return errors.New("identity: a subject needs a run id, unless it is a cluster's agent")
	}
	if s.Role == "" || strings.Trim(string(s.Role), "abcdefghijklmnopqrstuvwxyz") != "" {
		return fmt.Errorf("identity: %q is no role", s.Role)
	}
	for _, v := range []string{s.RunID, string(s.Role), s.Host, s.Incarnation} {
		if len(v) > maxName {
			return fmt.Errorf("identity: a name of %d bytes in a subject; at most %d", len(v), maxName)
		}
	}
	if s.Index < 0 {
		return fmt.Errorf("identity: slot index %d is negative", s.Index)
	}
	return nil
}

// uri is the subject as it stands in a certificate:
// hvdrun:///RUNID/ROLE?host=…&incarnation=…&index=…. The run id is a part of the path because the
// host of a URI could not hold every name.
func (s Subject) uri() (*url.URL, error) {
	q := url.Values{"host": {s.Host}, "index": {strconv.Itoa(s.Index)}, "incarnation": {s.Incarnation}}
	return url.Parse("hvdrun:///" + url.PathEscape(s.RunID) + "/" + url.PathEscape(string(s.Role)) + "?" + q.Encode())
}

func parseURI(u *url.URL) (Subject, error) {
	bad := errors.New("identity: the certificate's subject is malformed")
	path := strings.Split(u.EscapedPath(), "/")
	if u.Scheme != "hvdrun" || u.Host != "" || len(path) != 3 || path[0] != "" {
		return Subject{}, bad
	}
	runID, err1 := url.PathUnescape(path[1])
	role, err2 := url.PathUnescape(path[2])
	q, err3 := url.ParseQuery(u.RawQuery)
	index, err4 := strconv.Atoi(q.Get("index"))
	if errors.Join(err1, err2, err3, err4) != nil {
		return Subject{}, bad
	}
	s := Subject{RunID: runID, Role: Role(role), Host: q.Get("host"), Index: index, Incarnation: q.Get("incarnation")}
	if s.validate() != nil {
		return Subject{}, bad
	}
	return s, nil
}

// serverName is the DNS name in every certificate of the role. It is fixed, whatever host the party
// runs on, so that ordinary verification of a server's name also verifies its role.
func serverName(r Role) string { return string(r) + ".hvdrun.internal" }

// SubjectOf returns who is at the other end of a connection that one of the configurations of this
// package has verified; an error where nobody was verified.
func SubjectOf(cs tls.ConnectionState) (Subject, error) {
	if len(cs.PeerCertificates) == 0 || len(cs.VerifiedChains) == 0 {
		return Subject{}, errors.New("identity: the peer has shown no verified certificate")
	}
	leaf := cs.PeerCertificates[0]
	if len(leaf.URIs) != 1 {
		return Subject{}, errors.New("identity: the certificate names no subject")
	}
	return parseURI(leaf.URIs[0])
}

// ServerTLS returns a new configuration for a server whose clients must show a certificate of this
// job and of the role want. TLS 1.3 only; no session is ever resumed, so that every connection
// shows its certificate.
func (c *Credentials) ServerTLS(want Role) *tls.Config {
	cfg := c.baseTLS()
	cfg.ClientAuth = tls.RequireAndVerifyClientCert
	cfg.ClientCAs = c.pool
	cfg.VerifyConnection = c.verifier(Subject{Role: want})
	return cfg
}

// ClientTLS returns a new configuration for a client whose server must show a certificate of this
// job (or cluster) and of the role of want; where want names an incarnation, it must be that of
// want's host and index too, and where it names the host of an agent, that host's. TLS 1.3 only,
// without resumption.
func (c *Credentials) ClientTLS(want Subject) *tls.Config {
	cfg := c.baseTLS()
	cfg.RootCAs = c.pool
	cfg.ServerName = serverName(want.Role)
	cfg.VerifyConnection = c.verifier(want)
	return cfg
}

func (c *Credentials) baseTLS() *tls.Config {
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		MaxVersion:             tls.VersionTLS13,
		Certificates:           []tls.Certificate{{Certificate: [][]byte{c.leaf.Raw}, PrivateKey: c.key, Leaf: c.leaf}},
		SessionTicketsDisabled: true,
		// One write of the system for a message, instead of one for each 1,200 bytes.
		DynamicRecordSizingDisabled: true,
	}
}

// verifier checks what the chain to the authority does not say: run, role and, where asked for, the
// very process.
func (c *Credentials) verifier(want Subject) func(tls.ConnectionState) error {
	if want.RunID == "" {
		want.RunID = c.subject.RunID
	}
	runID := c.subject.RunID
	return func(cs tls.ConnectionState) error {
		got, err := SubjectOf(cs)
		if err != nil {
			return err
		}
		// An agent without a run serves all: between it and a driver only the cluster, which has
		// its own authority, is to be the same.
		anyRun := runID == "" || got.RunID == "" && got.Role == Agent
		if !anyRun && (got.RunID != runID || got.RunID != want.RunID) {
			return errors.New("identity: the peer is of another job")
		}
		if got.Role != want.Role {
			return fmt.Errorf("identity: the peer is a %s, not a %s", got.Role, want.Role)
		}
		if want.Role == Agent && want.Host != "" && got.Host != want.Host {
			return fmt.Errorf("identity: the peer is the agent of %s, not of %s", got.Host, want.Host)
		}
		if err := cs.PeerCertificates[0].VerifyHostname(serverName(want.Role)); err != nil {
			return fmt.Errorf("identity: the peer's certificate is not that of a %s", want.Role)
		}
		if want.Incarnation != "" && got != want {
			return fmt.Errorf("identity: the peer is %v, not %v", got, want)
		}
		return nil
	}
}
