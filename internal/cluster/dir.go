package cluster

import (
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

// The files of a Dir.
const (
	authorityFile = "authority.pem"
	stateFile     = "state.json"
	lockFile      = "lock"
	// TokenFile is the file of the token that Init creates.
	TokenFile = "token"
)

const (
	maxAuthorityFile = 16 << 10
	// maxStateFile bounds state.json, in bytes: a host takes about 100 of them, and a token 250.
	maxStateFile = 32 << 20
)

// Dir is the folder of a cluster. Its methods may be called by several goroutines and processes.
type Dir struct {
	path      string
	authority *identity.Authority

	mu    sync.Mutex
	seen  os.FileInfo // the file that state was read from
	state *State
}

// Init creates the folder of a new cluster, of mode 0700, with an authority, a gossip key, and a
// token in TokenFile. The folder may exist if it is empty.
func Init(path string, token Grant, now time.Time) (*Dir, error) {
	if there, err := os.ReadDir(path); err == nil && len(there) > 0 {
		return nil, fmt.Errorf("cluster: %s is not empty: it may have a cluster already", path)
	}
	if err := safefile.MakePrivateDir(path); err != nil {
		return nil, fmt.Errorf("cluster: %w", err)
	}
	authority, err := identity.NewClusterAuthority(now)
	if err != nil {
		return nil, err
	}
	text, err := authority.PEM()
	if err != nil {
		return nil, err
	}
	d := &Dir{path: path, authority: authority}
	if err := safefile.ReplaceSynced(d.file(authorityFile), text, safefile.Private); err != nil {
		return nil, fmt.Errorf("cluster: %w", err)
	}
	if err := d.write(newState(now)); err != nil {
		return nil, err
	}
	t, err := d.NewToken(token, now)
	if err != nil {
		return nil, err
	}
	return d, t.WriteFile(d.file(TokenFile))
}

// Open opens the folder of a cluster.
func Open(path string) (*Dir, error) {
	d := &Dir{path: path}
	text, err := safefile.SecretText(d.file(authorityFile), maxAuthorityFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("cluster: %s has no %s: `hvdrun cluster init %[1]s` makes a cluster", path, authorityFile)
	}
	if err != nil {
		return nil, fmt.Errorf("cluster: %w", err)
	}
	if d.authority, err = identity.ParseAuthority(text); err != nil {
		return nil, fmt.Errorf("cluster: %s: %w", d.file(authorityFile), err)
	}
	_, err = d.View()
	return d, err
}

// Authority returns the cluster's authority.
func (d *Dir) Authority() *identity.Authority { return d.authority }

func (d *Dir) file(name string) string { return filepath.Join(d.path, name) }

// View returns the current state. The caller must not change it.
func (d *Dir) View() (*State, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	fi, err := os.Stat(d.file(stateFile))
	if err != nil {
		return nil, fmt.Errorf("cluster: %w", err)
	}
	if d.seen != nil && os.SameFile(fi, d.seen) && fi.ModTime().Equal(d.seen.ModTime()) && fi.Size() == d.seen.Size() {
		return d.state, nil
	}
	s, err := d.read()
	if err != nil {
		return nil, err
	}
	d.seen, d.state = fi, s // if the file was replaced after the Stat, the next View reads it again
	return s, nil
}

func (d *Dir) read() (*State, error) {
	text, err := safefile.SecretText(d.file(stateFile), maxStateFile)
	if err != nil {
		return nil, fmt.Errorf("cluster: %w", err)
	}
	s, err := decodeState(text)
	if err != nil {
		return nil, fmt.Errorf("cluster: %s: %w", d.file(stateFile), err)
	}
	return s, nil
}

// Update calls change to change the state, while other processes are kept from changing it. If
// change returns an error, the state stays as it was.
func (d *Dir) Update(change func(*State) error) error {
	lock, err := safefile.Update(d.file(lockFile), safefile.Private, true)
	if err != nil {
		return fmt.Errorf("cluster: %w", err)
	}
	defer lock.Close()
	if err := safefile.LockRange(lock, true); err != nil {
		return fmt.Errorf("cluster: %w", err)
	}
	s, err := d.read()
	if err != nil {
		return err
	}
	if err := change(s); err != nil {
		return err
	}
	return d.write(s)
}

func (d *Dir) write(s *State) error {
	text, err := json.MarshalIndent(s, "", "\t")
	if err == nil {
		err = safefile.ReplaceSynced(d.file(stateFile), append(text, '\n'), safefile.Private)
	}
	if err != nil {
		return fmt.Errorf("cluster: %w", err)
	}
	return nil
}

// NewToken creates a token.
func (d *Dir) NewToken(g Grant, now time.Time) (Token, error) {
	t := newToken(d.authority.Fingerprint())
	return t, d.Update(func(s *State) error { return s.addToken(t.Key().Public().(ed25519.PublicKey), g, now) })
}
