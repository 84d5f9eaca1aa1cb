package enroll

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/cluster"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/enrollpb"
)

const (
	// askTimeout bounds a request.
	askTimeout = 20 * time.Second
	// refreshTimeout bounds the request of a starting agent that can do without an answer.
	refreshTimeout = 5 * time.Second
	// leastPause and mostPause bound the pause that a registrar may set.
	leastPause, mostPause = 50 * time.Millisecond, time.Hour

	credentialsFile = "agent.pem"
	ringFile        = "gossip.json"
	maxFile         = 64 << 10
)

// The backoffs after failed requests: before the agent has a certificate, and later.
var (
	enrollBackoff = retry.Backoff{First: time.Second, Most: DefaultPause}
	renewBackoff  = retry.Backoff{First: time.Second, Most: mostPause}
)

// Config configures the enrollment of an agent.
type Config struct {
	// Addr is the registrar's address, host:port.
	Addr string
	// TokenFile contains a token of the cluster. It is read only if the agent has no valid
	// certificate.
	TokenFile string
	// Host is the name of the host.
	Host string
	// Dir is the agent's folder, of mode 0700. It is created if it does not exist.
	Dir string
	// Log takes messages.
	Log logrus.FieldLogger
}

// Membership is an agent's membership in its cluster: a certificate, and the gossip keys.
type Membership struct {
	cfg   Config
	creds *identity.Credentials
	ring  ring
	pause time.Duration // between requests, as the registrar sets it
}

// ring holds the gossip keys.
type ring struct {
	Version uint64
	Keys    [][]byte
}

// Join returns the membership in the agent's folder, refreshed if the registrar answers within
// refreshTimeout. If the registrar refuses it and TokenFile is set, Join enrolls with the token. If
// the folder has no valid certificate, Join enrolls with the token too: it blocks until the
// registrar can be reached, and returns an error if the registrar refuses.
func Join(ctx context.Context, cfg Config) (*Membership, error) {
	if err := safefile.MakePrivateDir(cfg.Dir); err != nil {
		return nil, fmt.Errorf("enroll: the agent's folder: %w", err)
	}
	m := &Membership{cfg: cfg, pause: DefaultPause}
	err := m.load(time.Now())
	if err != nil {
		if cfg.TokenFile == "" {
			return nil, fmt.Errorf("%w: a token is needed", err)
		}
		if !errors.Is(err, fs.ErrNotExist) {
			cfg.Log.Warnf("%v: enrolling again", err)
		}
		return m, m.enroll(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, refreshTimeout)
	defer cancel()
	_, err = m.refresh(ctx, nil, time.Now())
	if errors.Is(err, errRefused) && cfg.TokenFile != "" { // the host may have been removed, and may return
		cfg.Log.Warnf("%v: enrolling again with the token in %s", err, cfg.TokenFile)
		err = m.enroll(ctx)
	}
	if err != nil {
		cfg.Log.Warnf("enroll: continuing with the known keys: %v", err)
	}
	return m, nil
}

func (m *Membership) file(name string) string { return filepath.Join(m.cfg.Dir, name) }

// load reads the folder.
func (m *Membership) load(now time.Time) error {
	text, err := safefile.SecretText(m.file(credentialsFile), maxFile)
	if err != nil {
		return fmt.Errorf("enroll: the agent's certificate: %w", err)
	}
	creds, err := identity.ParsePEM(text)
	if err != nil {
		return fmt.Errorf("enroll: %s: %w", m.file(credentialsFile), err)
	}
	who := creds.Subject()
	switch _, until := creds.Valid(); {
	case who != identity.Subject{Role: identity.Agent, Host: m.cfg.Host}:
		return fmt.Errorf("enroll: %s is of %v, and this is host %q", m.file(credentialsFile), who, m.cfg.Host)
	case !now.Before(until):
		return fmt.Errorf("enroll: the certificate in %s ended at %s", m.file(credentialsFile), until.Format(time.RFC3339))
	}
	if err := m.loadRing(); err != nil {
		return err
	}
	m.creds = creds
	return nil
}

// loadRing reads the gossip keys.
func (m *Membership) loadRing() error {
	text, err := safefile.SecretText(m.file(ringFile), maxFile)
	if err != nil {
		return fmt.Errorf("enroll: the gossip keys: %w", err)
	}
	var r ring
	if err = json.Unmarshal(text, &r); err == nil {
		err = cluster.CheckKeys(r.Keys)
	}
	if err != nil {
		return fmt.Errorf("enroll: %s is damaged", m.file(ringFile))
	}
	m.ring = r
	return nil
}

// Credentials returns the agent's credentials, which Follow renews.
func (m *Membership) Credentials() *identity.Credentials { return m.creds }

// Keys returns the gossip keys at the time of Join; the first encrypts.
func (m *Membership) Keys() [][]byte { return m.ring.Keys }

// enroll obtains the first certificate, by the token.
func (m *Membership) enroll(ctx context.Context) error {
	token, err := cluster.ReadToken(m.cfg.TokenFile)
	if err != nil {
		return err
	}
	tlsConf, err := identity.TokenTLS(token.Key(), token.Authority())
	if err != nil {
		return err
	}
	key, err := identity.NewKey()
	if err != nil {
		return err
	}
	request, err := identity.NewRequest(key)
	if err != nil {
		return err
	}
	for tries := 1; ; tries++ {
		reply, err := ask(ctx, m.cfg.Addr, tlsConf, &enrollpb.EnrollRequest{Host: m.cfg.Host, Request: request})
		if err == nil {
			if m.creds, err = identity.Assemble(key, reply.GetCertificate(), reply.GetAuthority()); err != nil {
				return fmt.Errorf("enroll: the registrar's answer: %w", err)
			}
			return m.take(reply)
		}
		if ctx.Err() != nil {
			return fmt.Errorf("enroll: %w", context.Cause(ctx))
		}
		if errors.Is(err, errRefused) {
			return err
		}
		pause := enrollBackoff.After(tries)
		m.cfg.Log.Warnf("%v; trying again in %v", err, pause)
		_ = retry.Pause(ctx, pause)
	}
}

// take stores the registrar's reply: the ring first, so that a folder with a certificate always has
// both.
func (m *Membership) take(reply *enrollpb.EnrollReply) error {
	if err := cluster.CheckKeys(reply.GetKeys()); err != nil || reply.GetRing() == 0 {
		return errors.New("enroll: the registrar's answer has no usable gossip keys")
	}
	m.pause = max(leastPause, min(time.Duration(reply.GetPauseMs())*time.Millisecond, mostPause))
	if reply.GetRing() != m.ring.Version {
		next := ring{Version: reply.GetRing(), Keys: reply.GetKeys()}
		text, err := json.Marshal(next)
		if err == nil {
			err = safefile.ReplaceSynced(m.file(ringFile), text, safefile.Private)
		}
		if err != nil {
			return fmt.Errorf("enroll: saving the gossip keys: %w", err)
		}
		m.ring = next
	}
	if len(reply.GetCertificate()) == 0 {
		return nil
	}
	text, err := m.creds.PEM()
	if err == nil {
		err = safefile.ReplaceSynced(m.file(credentialsFile), text, safefile.Private)
	}
	if err != nil {
		return fmt.Errorf("enroll: saving the agent's certificate: %w", err)
	}
	return nil
}

// due returns whether a certificate should be renewed, from a third of its life on, and whether the
// renewal is late, from half of its life on.
func due(from, until, now time.Time) (renew, late bool) {
	life, age := until.Sub(from), now.Sub(from)
	return age > life/3, age > life/2
}

// refresh requests a new certificate and the keys from the registrar, reports which slots are used,
// and returns whether the keys have changed.
func (m *Membership) refresh(ctx context.Context, used map[string]uint32, now time.Time) (changed bool, err error) {
	q := &enrollpb.EnrollRequest{Host: m.cfg.Host, Ring: m.ring.Version, Used: used}
	from, until := m.creds.Valid()
	key, err := identity.NewKey()
	if err != nil {
		return false, err
	}
	if renew, _ := due(from, until, now); renew {
		if q.Request, err = identity.NewRequest(key); err != nil {
			return false, err
		}
	}
	reply, err := ask(ctx, m.cfg.Addr, m.creds.ClientTLS(identity.Subject{Role: identity.Registrar}), q)
	if err != nil {
		return false, err
	}
	if len(q.Request) > 0 {
		next, err := identity.Assemble(key, reply.GetCertificate(), m.creds.Authority())
		if err == nil {
			err = m.creds.Renew(next)
		}
		if err != nil {
			return false, fmt.Errorf("enroll: the renewed certificate: %w", err)
		}
		m.cfg.Log.Infof("enroll: the certificate was renewed")
	}
	before := m.ring.Version
	err = m.take(reply)
	return m.ring.Version != before, err
}

// Follow renews the certificate in time, reports to the registrar what used returns, the number of
// slots that have workers by run, and calls use with the gossip keys whenever they have changed. It
// retries while the registrar cannot be reached, and logs a warning after half of the certificate's
// life. It blocks until ctx ends.
func (m *Membership) Follow(ctx context.Context, used func() map[string]uint32, use func(keys [][]byte) error) {
	var warned time.Time
	failures := 0
	for ctx.Err() == nil {
		pause := m.pause
		changed, err := m.refresh(ctx, used(), time.Now())
		if err == nil && changed {
			err = use(m.ring.Keys)
		}
		switch {
		case err != nil && ctx.Err() == nil:
			failures++
			pause = min(renewBackoff.After(failures), max(m.pause, renewBackoff.First))
			warned = m.complain(err, warned, time.Now())
		case changed:
			pause = 0 // the registrar waits for the report that the keys are used
		default:
			failures = 0
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause - time.Duration(rand.Int64N(int64(pause/8)+1))):
		}
	}
}

// complain logs a failed request, and returns the time of the last warning.
func (m *Membership) complain(err error, warned, now time.Time) time.Time {
	from, until := m.creds.Valid()
	_, late := due(from, until, now)
	pause := max(until.Sub(from)/100, time.Minute)
	switch {
	case errors.Is(err, errRefused) && now.Sub(warned) > pause:
		m.cfg.Log.Error(err)
	case late && now.Sub(warned) > pause:
		m.cfg.Log.Warnf("the certificate ends at %s and cannot be renewed: %v", until.Format(time.RFC3339), err)
	default:
		m.cfg.Log.Debug(err)
		return warned
	}
	return now
}

var errRefused = errors.New("the registrar refuses")

// refusals are the texts by which errors of TLS and gRPC show that one peer has refused the other.
var refusals = []string{
	"remote error: tls: bad certificate", "identity: the server is not of the cluster", "remote error: tls: expired certificate",
	"x509: certificate", "identity: the certificate of", "remote error: tls: unknown certificate authority",
}

// ask sends one request to the registrar. A retry after an error that wraps errRefused is useless.
func ask(ctx context.Context, addr string, tlsConf *tls.Config, q *enrollpb.EnrollRequest) (*enrollpb.EnrollReply, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	q.UnixNano = time.Now().UnixNano()
	conn, err := wire.NewClient(addr, tlsConf)
	if err != nil {
		return nil, fmt.Errorf("enroll: %s: %w", addr, err)
	}
	defer conn.Close()
	reply, err := enrollpb.NewRegistrarClient(conn).Enroll(ctx, q)
	if err == nil {
		return reply, nil
	}
	said := status.Convert(err)
	switch said.Code() {
	case codes.PermissionDenied, codes.InvalidArgument, codes.Unimplemented, codes.Unauthenticated:
		return nil, fmt.Errorf("enroll: %w, at %s: %s", errRefused, addr, said.Message())
	}
	for _, text := range refusals {
		if strings.Contains(said.Message(), text) {
			return nil, fmt.Errorf("enroll: %w, at %s: the token or the certificate is not of its cluster, or has ended: %s", errRefused, addr, said.Message())
		}
	}
	return nil, fmt.Errorf("enroll: the registrar at %s: %s", addr, said.Message())
}
