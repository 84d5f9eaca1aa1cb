// Package etcd keeps a copy of a job's journal, and of the files that another driver needs, in
// etcd, so that a driver on another machine can resume the job. One driver at a time has the claim
// to a job: a lease that it renews. Each of its writes is conditional on that claim, so a driver
// that has lost it changes nothing.
//
// All values are sealed with a key that the drivers' machines share (AES-256-GCM, with the name of
// the value as associated data). Someone who can only read etcd learns sizes and names. Someone who
// can only write to it can destroy a job's copy, or restore an older value under its name, but
// cannot forge a value. The keys below the prefix of a job are:
//
//	driver            the claim: who has it; ends with its lease
//	last              the id of the last claim
//	file/NAME         a file
//	current           the number of the current journal, and of its parts
//	journal/N/CHUNK   parts of journal N: records, each after its length
//	behind            exists while the journal lacks records
package etcd

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/url"
	"path"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/hvdrun/hvdrun/internal/etcd"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/retry"
)

const (
	// defaultLease is how long a claim lasts without renewal.
	defaultLease = 20 * time.Second
	// LeastLease is the shortest permitted lease.
	LeastLease = 5 * time.Second

	defaultPrefix = "/hvdrun"
	callBound     = 5 * time.Second // of one request
	// chunkBytes bounds a part of a journal; etcd refuses requests of more than 1.5 MiB.
	chunkBytes = 512 << 10
	// pageKeys is how many parts of a journal one request reads.
	pageKeys = 16
)

// ErrNoJob: etcd has no such job.
var ErrNoJob = errors.New("there is no such job in etcd")

// errBehind: the last driver could not write the job's last records.
var errBehind = errors.New("the job's last records are not in etcd")

// errKey: a value was not sealed with the key.
var errKey = errors.New("a value in etcd was not sealed with this key")

// HeldError: another driver has the claim.
type HeldError struct{ By string }

// Error names the holder of the claim.
func (e *HeldError) Error() string { return "its driver on " + e.By + " is running" }

// Config configures a Store.
type Config struct {
	// Endpoints are host:port each. Prefix precedes all names.
	Endpoints []string
	Prefix    string
	// CA, Cert and Key are the paths of PEM files for TLS, or empty.
	CA, Cert, Key string
	// Secret seals the values. It must have at least 16 bytes.
	Secret []byte
	// Lease is how long a claim lasts without renewal. Zero: defaultLease.
	Lease time.Duration
	// Log must not be nil.
	Log logrus.FieldLogger
}

// ParseURL parses etcd://HOST[:PORT][,HOST[:PORT]…][/PREFIX][?ca=F&cert=F&key=F]. Its errors
// complete a sentence.
func ParseURL(text string) (Config, error) {
	rest, found := strings.CutPrefix(text, "etcd://")
	if !found {
		return Config{}, fmt.Errorf("%q is not etcd://HOST:PORT", text)
	}
	rest, query, _ := strings.Cut(rest, "?")
	hosts, prefix, _ := strings.Cut(rest, "/")
	if strings.Contains(hosts, "@") {
		return Config{}, errors.New("a password does not belong in a URL, which other users see: use cert= and key=")
	}
	c := Config{Prefix: path.Clean("/" + prefix)}
	if c.Prefix == "/" {
		c.Prefix = defaultPrefix
	}
	for _, host := range strings.Split(hosts, ",") {
		if _, _, err := net.SplitHostPort(host); err != nil {
			host = net.JoinHostPort(strings.Trim(host, "[]"), etcd.DefaultPort)
		}
		if strings.HasPrefix(host, ":") {
			return Config{}, fmt.Errorf("%q names no host", text)
		}
		c.Endpoints = append(c.Endpoints, host)
	}
	values, err := url.ParseQuery(query)
	if err != nil {
		return Config{}, fmt.Errorf("%q: %w", text, err)
	}
	for name, value := range values {
		file := map[string]*string{"ca": &c.CA, "cert": &c.Cert, "key": &c.Key}[name]
		if file == nil || len(value) != 1 || value[0] == "" {
			return Config{}, fmt.Errorf("%q: %s is not one of ca, cert and key, once and with a file", text, name)
		}
		*file = value[0]
	}
	if (c.Cert == "") != (c.Key == "") {
		return Config{}, fmt.Errorf("%q: cert and key belong together", text)
	}
	return c, nil
}

// Store is a connection to etcd. Its methods may be called by many goroutines.
type Store struct {
	cfg    Config
	client *clientv3.Client
	seal   cipher.AEAD
}

// Open connects to etcd, and blocks until it has answered, for at most five seconds. The caller
// must call Close.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	if cfg.Lease == 0 {
		cfg.Lease = defaultLease
	}
	switch {
	case len(cfg.Secret) < 16:
		return nil, fmt.Errorf("etcd: a key of %d bytes to seal with; it must have at least 16", len(cfg.Secret))
	case cfg.Lease < LeastLease:
		return nil, fmt.Errorf("etcd: a lease of %v; it must be at least %v", cfg.Lease, LeastLease)
	}
	sum := sha256.Sum256(append([]byte("hvdrun journal in etcd\x00"), cfg.Secret...))
	block, err := aes.NewCipher(sum[:])
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	s := &Store{cfg: cfg}
	if s.seal, err = cipher.NewGCMWithRandomNonce(block); err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	if s.client, err = etcd.Open(etcd.Config{Endpoints: cfg.Endpoints, CA: cfg.CA, Cert: cfg.Cert, Key: cfg.Key}); err != nil {
		return nil, err
	}
	if _, err := s.get(ctx, s.cfg.Prefix+"/none"); err != nil {
		_ = s.client.Close()
		return nil, fmt.Errorf("etcd: %s: %w", strings.Join(cfg.Endpoints, ", "), err)
	}
	return s, nil
}

// Close closes the connection.
func (s *Store) Close() error { return s.client.Close() }

// names are the names of a job's values.
type names struct{ base string }

func (s *Store) names(run string) names { return names{s.cfg.Prefix + "/jobs/" + run + "/"} }

func (n names) driver() string          { return n.base + "driver" }
func (n names) last() string            { return n.base + "last" }
func (n names) current() string         { return n.base + "current" }
func (n names) behind() string          { return n.base + "behind" }
func (n names) file(name string) string { return n.base + "file/" + name }
func (n names) journals() string        { return n.base + "journal/" }
func (n names) journal(number uint64) string {
	return fmt.Sprintf("%s%016x/", n.journals(), number)
}
func (n names) chunk(number, chunk uint64) string {
	return fmt.Sprintf("%s%016x", n.journal(number), chunk)
}

func (s *Store) sealed(name string, value []byte) string {
	return string(s.seal.Seal(nil, nil, value, []byte(name)))
}

func (s *Store) opened(name string, value []byte) ([]byte, error) {
	plain, err := s.seal.Open(nil, nil, value, []byte(name))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, errKey)
	}
	return plain, nil
}

// get returns a value as stored, or nil if the key has no value.
func (s *Store) get(ctx context.Context, name string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, callBound)
	defer cancel()
	r, err := s.client.Get(ctx, name)
	if err != nil || len(r.Kvs) == 0 {
		return nil, err
	}
	return r.Kvs[0].Value, nil
}

// Jobs returns the run ids of all jobs, sorted.
func (s *Store) Jobs(ctx context.Context) (runs []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, callBound)
	defer cancel()
	prefix := s.cfg.Prefix + "/jobs/"
	r, err := s.client.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	for _, kv := range r.Kvs {
		run, rest, _ := strings.Cut(strings.TrimPrefix(string(kv.Key), prefix), "/")
		if rest == "last" {
			runs = append(runs, run)
		}
	}
	return runs, nil
}

// Await blocks until nobody has the claim to the job, or ctx ends.
func (s *Store) Await(ctx context.Context, run string) error {
	name := s.names(run).driver()
	failures := retry.Row{Least: tellEvery}
	for {
		began, cancel := context.WithTimeout(ctx, callBound)
		r, err := s.client.Get(began, name)
		cancel()
		if err == nil && len(r.Kvs) == 0 {
			return nil
		}
		if err == nil {
			err = s.awaitEnd(ctx, name, r.Header.Revision+1)
		}
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			failures.Warn(s.cfg.Log, time.Now(), "etcd is not reached", err)
			if err := retry.Pause(ctx, attemptPause); err != nil {
				return err
			}
		}
	}
}

// awaitEnd blocks until the value is deleted, then returns nil.
func (s *Store) awaitEnd(ctx context.Context, name string, from int64) error {
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	for r := range s.client.Watch(ctx, name, clientv3.WithRev(from)) {
		if err := r.Err(); err != nil {
			return err
		}
		for _, e := range r.Events {
			if e.Type == clientv3.EventTypeDelete {
				return nil
			}
		}
	}
	return errors.New("the watch has ended")
}

// tellEvery is the shortest time between two log lines about equal failures.
const tellEvery = 10 * time.Second

// attemptPause is the pause before the next attempt.
const attemptPause = 200 * time.Millisecond

// Copy is the copy of a job in etcd.
type Copy struct {
	Files   map[string][]byte
	Records [][]byte
}

// position is where a journal ends.
type position struct {
	number uint64 // of the journal
	chunks uint64 // its number of parts
}

func (p position) String() string { return fmt.Sprintf("%d %d", p.number, p.chunks) }

// position returns the position of the current journal from the value of current.
func (s *Store) position(n names, value []byte) (p position, err error) {
	text, err := s.opened(n.current(), value)
	if err != nil {
		return p, err
	}
	if _, err := fmt.Sscanf(string(text), "%d %d", &p.number, &p.chunks); err != nil {
		return p, fmt.Errorf("%s: %w", n.current(), err)
	}
	return p, nil
}

// Read returns the copy of a job. Only the holder of the claim reads a consistent copy; others may
// see a mixture of states.
func (s *Store) Read(ctx context.Context, run string) (Copy, error) {
	n, c := s.names(run), Copy{Files: map[string][]byte{}}
	if behind, err := s.get(ctx, n.behind()); err != nil {
		return c, fmt.Errorf("etcd: %w", err)
	} else if behind != nil {
		return c, fmt.Errorf("etcd: %w", errBehind)
	}
	err := s.each(ctx, n.file(""), func(name string, value []byte) error {
		c.Files[strings.TrimPrefix(name, n.file(""))] = value
		return nil
	})
	if err != nil {
		return c, err
	}
	current, err := s.get(ctx, n.current())
	if err != nil {
		return c, fmt.Errorf("etcd: %w", err)
	}
	if current == nil {
		return c, fmt.Errorf("etcd: %s: %w", run, ErrNoJob)
	}
	at, err := s.position(n, current)
	if err != nil {
		return c, fmt.Errorf("etcd: %w", err)
	}
	var stream []byte
	next := uint64(0)
	err = s.each(ctx, n.journal(at.number), func(name string, value []byte) error {
		if name != n.chunk(at.number, next) {
			return fmt.Errorf("%s is missing", n.chunk(at.number, next))
		}
		next++
		stream = append(stream, value...)
		for len(stream) >= 4 {
			length := binary.LittleEndian.Uint32(stream)
			if length > journal.MaxRecord {
				return fmt.Errorf("%s: a record is longer than allowed, %d bytes", name, length)
			}
			if uint32(len(stream)-4) < length {
				break
			}
			c.Records = append(c.Records, bytes.Clone(stream[4:4+length]))
			stream = stream[4+length:]
		}
		return nil
	})
	if err == nil && next < at.chunks {
		err = fmt.Errorf("etcd: %s is missing", n.chunk(at.number, next))
	}
	return c, err
}

// each passes all values below a prefix to visit, in the order of their names.
func (s *Store) each(ctx context.Context, prefix string, visit func(name string, value []byte) error) error {
	from, end := prefix, clientv3.GetPrefixRangeEnd(prefix)
	for {
		page, cancel := context.WithTimeout(ctx, callBound)
		r, err := s.client.Get(page, from, clientv3.WithRange(end), clientv3.WithLimit(pageKeys))
		cancel()
		if err != nil {
			return fmt.Errorf("etcd: %w", err)
		}
		for _, kv := range r.Kvs {
			value, err := s.opened(string(kv.Key), kv.Value)
			if err == nil {
				err = visit(string(kv.Key), value)
			}
			if err != nil {
				return fmt.Errorf("etcd: %w", err)
			}
			from = string(kv.Key) + "\x00"
		}
		if !r.More {
			return nil
		}
	}
}
