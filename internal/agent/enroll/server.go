// Package enroll makes the agent of a host a member of a cluster, and renews its membership.
//
//	hvdrun agent ── token ──────────────────────────→ hvdrun cluster serve
//	  a private key      request for a certificate      checks and marks the token, signs
//	  certificate  ←──── certificate, gossip keys       role agent, this host, some days
//	      └── again and again, by its certificate ────→ renews it, tells new gossip keys
//
// Server is for the holder of the cluster's authority, Membership for an agent. The token is never
// sent: a host proves by TLS that it has the token, and the server proves that it has the authority
// that the token names, before either sends anything else.
package enroll

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/internal/cluster"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/enrollpb"
)

const (
	// DefaultAgentLife is how long an agent's certificate is valid.
	DefaultAgentLife = 7 * 24 * time.Hour
	// DefaultPause is an agent's pause between two requests.
	DefaultPause = 30 * time.Second
	// registrarLife is how long the server's own certificate is valid. It is renewed at half of it.
	registrarLife = 24 * time.Hour
	// mostCertificates bounds the certificates of one applicant within certificateWindow.
	mostCertificates  = 60
	certificateWindow = time.Minute
)

// Server signs the requests of agents, and sends them the gossip keys.
type Server struct {
	// Dir is the cluster's folder.
	Dir *cluster.Dir
	// AgentLife is how long the certificates are valid.
	AgentLife time.Duration
	// Pause is an agent's pause between two requests.
	Pause time.Duration
	// Log takes a line for each certificate.
	Log logrus.FieldLogger
}

// Serve serves agents on ln until ctx ends, and closes ln. Only holders of a token of the cluster
// and the cluster's agents reach a handler; identity.Enrollment bounds the others.
func (s Server) Serve(ctx context.Context, ln *identity.Listener) error {
	creds, err := s.Dir.Authority().IssueFor(identity.Subject{Role: identity.Registrar}, time.Now(), registrarLife)
	if err != nil {
		return err
	}
	r := &registrar{Server: s, creds: creds, recent: map[string]int{}, seen: map[string]cluster.Seen{}, warned: map[string]time.Duration{}}
	r.audit = audit.NewRecorder(r.record)
	ln.OnRefused(func(from net.Addr, why error) {
		r.audit.Add(audit.Record{Who: audit.Who{From: from.String()}, What: "connect", Outcome: audit.Refused(why)})
	})
	side, cancel := context.WithCancel(ctx)
	var renewing sync.WaitGroup
	defer renewing.Wait()
	defer cancel()
	renewing.Go(func() { s.Dir.Follow(side, creds, 0, func([][]byte) error { return nil }, s.Log) })
	register := func(to grpc.ServiceRegistrar) { enrollpb.RegisterRegistrarServer(to, r) }
	err = wire.Serve(ctx, wire.MaxMessage, ln, creds.RegistrarTLS(r.knows), register)
	r.mu.Lock()
	r.writeSeen(time.Now())
	r.mu.Unlock()
	if err != nil {
		return fmt.Errorf("enroll: serving agents: %w", err)
	}
	return nil
}

// registrar is a running Server.
type registrar struct {
	enrollpb.UnimplementedRegistrarServer
	Server
	creds *identity.Credentials
	audit *audit.Recorder

	mu     sync.Mutex
	window time.Time               // when the counts in recent began
	recent map[string]int          // certificates by applicant
	seen   map[string]cluster.Seen // hosts with requests since the last writeSeen
	wrote  time.Time               // time of the last writeSeen
	// warned is, by host, how far its clock was ahead when the log last warned of it.
	warned map[string]time.Duration
}

// knows returns whether the cluster has a token.
func (r *registrar) knows(token ed25519.PublicKey) bool {
	state, err := r.Dir.View()
	if err != nil {
		r.Log.Error(err)
		return false
	}
	return state.KnowsToken(token)
}

// Enroll answers an agent or an applicant. Requests that change nothing leave no record, since
// agents poll for new gossip keys.
func (r *registrar) Enroll(ctx context.Context, q *enrollpb.EnrollRequest) (*enrollpb.EnrollReply, error) {
	var serial string
	who, err := wire.Caller(ctx, func(cs tls.ConnectionState) (identity.Applicant, error) {
		a, err := r.creds.Applicant(cs)
		if err == nil && a.Token == nil {
			serial = cs.PeerCertificates[0].SerialNumber.Text(16)
		}
		return a, err
	})
	if err != nil {
		return nil, err
	}
	_, far := wire.PeerAddrs(ctx)
	entry := audit.Record{
		Who:  audit.Who{Role: string(identity.Agent), Host: who.Agent.Host, Serial: serial, From: far.String()},
		What: "renew", Host: q.GetHost(), Outcome: audit.Done,
	}
	if who.Token != nil {
		key := sha256.Sum256(who.Token)
		entry.What, entry.Who.Role, entry.How = "enroll", "token", "token "+hex.EncodeToString(key[:8])
	}
	log := r.Log.WithFields(logrus.Fields{"host": q.GetHost(), "from": far})
	reply, err := r.answer(who, q, time.Now())
	if err != nil {
		log.Warnf("enroll: refused: %v", err)
		entry.Outcome = audit.Refused(errors.New(status.Convert(err).Message()))
		r.audit.Add(entry)
		return nil, err
	}
	if who.Token == nil {
		r.see(q, time.Now())
	}
	switch {
	case len(reply.GetCertificate()) > 0:
		by := "by its certificate"
		if who.Token != nil {
			by = "by a token"
		}
		log.Infof("enroll: signed a certificate, asked for %s", by)
		r.audit.Add(entry)
	case reply.GetRing() != q.GetRing():
		entry.What = "keys"
		r.audit.Add(entry)
	}
	return reply, nil
}

// mostRuns bounds the runs by which a host reports its used slots.
const mostRuns = 256

// see records that the agent of a host has sent a request, which slots are used there, and how far
// its clock is ahead. For those who list the hosts, see writes this to the folder at most ten times
// per pause.
func (r *registrar) see(q *enrollpb.EnrollRequest, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	seen := cluster.Seen{At: now, Used: q.GetUsed()}
	if len(seen.Used) > mostRuns {
		seen.Used = nil
	}
	if q.GetUnixNano() != 0 {
		ahead := time.Unix(0, q.GetUnixNano()).Sub(now)
		seen.Ahead = &ahead
		r.warnOfClock(q.GetHost(), ahead)
	}
	r.seen[q.GetHost()] = seen
	if now.Sub(r.wrote) < r.Pause/10 {
		return
	}
	r.writeSeen(now)
}

// warnOfClock logs a clock that is far ahead or behind, and logs it again when the difference has
// changed by as much; the lock is held.
func (r *registrar) warnOfClock(host string, ahead time.Duration) {
	if ahead.Abs() <= cluster.ClocksApart {
		delete(r.warned, host)
		return
	}
	if was, warned := r.warned[host]; warned && (ahead-was).Abs() <= cluster.ClocksApart {
		return
	}
	r.warned[host] = ahead
	r.Log.Warnf("enroll: the clock of host %q is %s that of this machine", host, cluster.ClockWords(ahead))
}

// writeSeen writes the hosts in seen to the folder; the lock is held.
func (r *registrar) writeSeen(now time.Time) {
	if err := r.Dir.AddSeen(r.seen); err != nil {
		r.Log.Warn(err)
	}
	r.wrote = now
	clear(r.seen)
}

// record writes a record to the log and to the folder.
func (r *registrar) record(entry audit.Record) {
	r.Log.WithField(audit.Name, entry).Info("enroll: " + audit.Name)
	if err := r.Dir.Record(entry); err != nil {
		r.Log.Error(err)
	}
}

// answer decides on a request. Its errors are gRPC statuses.
func (r *registrar) answer(who identity.Applicant, q *enrollpb.EnrollRequest, now time.Time) (*enrollpb.EnrollReply, error) {
	if who.Token == nil && who.Agent.Host != q.GetHost() {
		return nil, status.Errorf(codes.PermissionDenied, "the agent of host %q asks as host %.255q", who.Agent.Host, q.GetHost())
	}
	reply := &enrollpb.EnrollReply{Authority: r.Dir.Authority().Certificate(), PauseMs: uint32(r.Pause.Milliseconds())}
	var key [sha256.Size]byte
	if len(q.GetRequest()) > 0 || who.Token != nil {
		if err := r.ration(who, now); err != nil {
			return nil, err
		}
		public, err := identity.ParseRequest(q.GetRequest())
		if err != nil {
			return nil, status.Error(codes.InvalidArgument, err.Error())
		}
		der, err := public.Bytes()
		if err != nil {
			return nil, status.Error(codes.InvalidArgument, "the key of the request is malformed")
		}
		key = sha256.Sum256(der)
	}
	if err := r.note(who, q, key, now); err != nil {
		return nil, err
	}
	if len(q.GetRequest()) > 0 {
		var err error
		subject := identity.Subject{Role: identity.Agent, Host: q.GetHost()}
		if reply.Certificate, err = r.Dir.Authority().SignRequest(q.GetRequest(), subject, now, r.AgentLife); err != nil {
			return nil, status.Error(codes.InvalidArgument, err.Error())
		}
	}
	state, err := r.Dir.View()
	if err != nil {
		return nil, r.unavailable(err)
	}
	reply.Ring, reply.Keys = state.Ring.Version, state.Ring.Keys
	return reply, nil
}

// ration returns an error if the applicant has received too many certificates lately.
func (r *registrar) ration(who identity.Applicant, now time.Time) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now.Sub(r.window) > certificateWindow {
		r.window = now
		clear(r.recent)
	}
	name := "agent " + who.Agent.Host
	if who.Token != nil {
		name = "token " + string(who.Token)
	}
	most := mostCertificates
	if who.Token != nil {
		most *= 100 // thousands of hosts may join with one token at a time
	}
	if r.recent[name]++; r.recent[name] > most {
		return status.Error(codes.ResourceExhausted, "too many certificates within a minute")
	}
	return nil
}

// note checks whether the applicant may have what it requests, and records the certificate before
// it is issued. It writes nothing if nothing is new.
func (r *registrar) note(who identity.Applicant, q *enrollpb.EnrollRequest, key [sha256.Size]byte, now time.Time) error {
	state, err := r.Dir.View()
	if err != nil {
		return r.unavailable(err)
	}
	host := q.GetHost()
	known, is := state.Hosts[host]
	if is && who.Token == nil && known.Removed {
		return status.Errorf(codes.PermissionDenied, "host %q was removed from the cluster; it may join again with a token", host)
	}
	if len(q.GetRequest()) == 0 && is && known.Ring == q.GetRing() {
		return nil
	}
	var refused error
	err = r.Dir.Update(func(s *cluster.State) error {
		if who.Token != nil {
			if refused = s.Admit(who.Token, host, key, now); refused != nil {
				return refused
			}
		}
		if len(q.GetRequest()) > 0 || !is { // its record was lost, and its certificate is not older than that
			s.Issued(host, now.Add(r.AgentLife), now)
		}
		s.Heard(host, q.GetRing())
		return nil
	})
	switch {
	case refused != nil:
		return status.Error(codes.PermissionDenied, refused.Error())
	case err != nil:
		return r.unavailable(err)
	}
	return nil
}

// unavailable returns the status of an internal failure, whose reason is logged but not sent.
func (r *registrar) unavailable(err error) error {
	r.Log.Error(err)
	return status.Error(codes.Unavailable, "the registrar cannot use its folder")
}
