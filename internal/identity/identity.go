// Package identity authenticates the parties of a job by a certificate authority per job, the
// credentials that it issues to the driver and to every worker, mutual TLS 1.3 for control
// connections, and a keyed proof for connections that carry tensors.
//
// A cluster has its own authority (NewClusterAuthority). Those who start jobs have its key; an
// agent has only a certificate, which the authority has signed at the agent's request (SignRequest)
// and which is renewed while the agent lives. For a trial, a driver and agents may share one key
// instead, from which all derive the same authority (ForCluster).
//
// Only parties of the job have a certificate of its authority or its key, so other peers are
// refused before any of their data is interpreted. The identity of a peer (role, host, slot,
// incarnation) is in its signed certificate and never taken from a message.
package identity

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"

	"github.com/hvdrun/hvdrun/audit"
)

// Role is the role of a party of the job.
type Role string

// The roles of parties of a job or of a cluster, which has drivers and agents.
const (
	Driver Role = "driver"
	Worker Role = "worker"
	Agent  Role = "agent"
	// Registrar signs the requests of agents that join a cluster, and renews their certificates.
	Registrar Role = "registrar"
	// Client is a program on another machine that submits tasks to a job.
	Client Role = "client"
)

// Subject is the holder of a certificate. A driver has no host, index or incarnation; an agent has
// a host, and a cluster's agent has no run id. A cluster's registrar has only a role.
type Subject struct {
	RunID string
	Role  Role
	// Host and Index are the worker's slot, as in plan.SlotID.
	Host  string
	Index int
	// Incarnation identifies the worker process.
	Incarnation string
	// User and UID identify the person who started a cluster's driver, as stated by the holder of
	// the authority's key; UID is a decimal number. Empty: not stated.
	User, UID string
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
	if s.RunID == "" && s.Role != Agent && s.Role != Registrar {
		return errors.New("identity: a subject needs a run id, unless it is a cluster's agent")
	}
	if s.Role == "" || strings.Trim(string(s.Role), "abcdefghijklmnopqrstuvwxyz") != "" {
		return fmt.Errorf("identity: %q is not a role", s.Role)
	}
	for _, v := range []string{s.RunID, string(s.Role), s.Host, s.Incarnation, s.User} {
		if len(v) > maxName {
			return fmt.Errorf("identity: a name of %d bytes in a subject; at most %d", len(v), maxName)
		}
	}
	if len(s.UID) > 10 || strings.Trim(s.UID, "0123456789") != "" {
		return errors.New("identity: the user id in a subject is not a decimal number")
	}
	if s.Index < 0 {
		return fmt.Errorf("identity: slot index %d is negative", s.Index)
	}
	return nil
}

// uri returns the subject as encoded in a certificate:
// hvdrun:///RUNID/ROLE?host=…&incarnation=…&index=…. The run id is in the path because the host of
// a URI cannot contain every name.
func (s Subject) uri() (*url.URL, error) {
	q := url.Values{"host": {s.Host}, "index": {strconv.Itoa(s.Index)}, "incarnation": {s.Incarnation}}
	for name, value := range map[string]string{"user": s.User, "uid": s.UID} {
		if value != "" {
			q.Set(name, value)
		}
	}
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
	s := Subject{
		RunID: runID, Role: Role(role), Host: q.Get("host"), Index: index, Incarnation: q.Get("incarnation"),
		User: q.Get("user"), UID: q.Get("uid"),
	}
	if s.validate() != nil {
		return Subject{}, bad
	}
	return s, nil
}

// serverName returns the DNS name in every certificate of the role. It does not depend on the host,
// so that ordinary verification of a server's name also verifies its role.
func serverName(r Role) string { return string(r) + ".hvdrun.internal" }

// SubjectOf returns the subject of the peer of a connection that a configuration of this package
// has verified; an error if the peer was not verified.
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

// Who returns the peer of a connection like SubjectOf, for an audit record.
func Who(cs tls.ConnectionState) (audit.Who, error) {
	s, err := SubjectOf(cs)
	if err != nil {
		return audit.Who{}, err
	}
	return audit.Who{
		Role: string(s.Role), Run: s.RunID, Host: s.Host, Incarnation: s.Incarnation, User: s.User, UID: s.UID,
		Serial: cs.PeerCertificates[0].SerialNumber.Text(16),
	}, nil
}

// ServerTLS returns a new configuration for a server whose clients must present a certificate of
// this job with one of the roles. It requires TLS 1.3 and disables resumption, so that every
// connection presents its certificate.
func (c *Credentials) ServerTLS(want Role, others ...Role) *tls.Config {
	cfg := c.baseTLS()
	cfg.ClientAuth = tls.RequireAndVerifyClientCert
	cfg.ClientCAs = c.pool
	cfg.VerifyConnection = c.verifier(Subject{Role: want})
	for _, role := range others {
		first, next := cfg.VerifyConnection, c.verifier(Subject{Role: role})
		cfg.VerifyConnection = func(cs tls.ConnectionState) error {
			if err := next(cs); err == nil {
				return nil
			}
			return first(cs)
		}
	}
	return cfg
}

// ClientTLS returns a new configuration for a client whose server must present a certificate of
// this job (or cluster) with the role of want. If want has an incarnation, the certificate must
// also match its host and index; if want is an agent with a host, the certificate must be that
// host's. It requires TLS 1.3 and disables resumption.
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
		SessionTicketsDisabled: true,
		// Each handshake presents the current certificate (Renew).
		GetCertificate:       func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return c.certificate() },
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return c.certificate() },
		// One system call per message instead of one per 1,200 bytes.
		DynamicRecordSizingDisabled: true,
	}
}

func (c *Credentials) certificate() (*tls.Certificate, error) {
	own := c.own.Load()
	if err := own.check(); err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{own.leaf.Raw}, PrivateKey: own.key, Leaf: own.leaf}, nil
}

// verifier returns a function that checks what the certificate chain does not: the run, the role
// and, if want names it, the process.
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
		// An agent without a run id serves all runs: it and a driver share only the cluster, which
		// has its own authority.
		anyRun := runID == "" || got.RunID == "" && got.Role == Agent
		if !anyRun && (got.RunID != runID || got.RunID != want.RunID) {
			return errors.New("identity: the peer belongs to another job")
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
