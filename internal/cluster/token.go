package cluster

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/plan"
)

const (
	// tokenMark begins the text of a token, so that secret scanners and people recognize it.
	tokenMark = "hvdrun-token-1-"
	// maxTokenFile bounds the file of a token, in bytes.
	maxTokenFile = 1 << 10
	// tokenMemory is how long an expired token is remembered, so that its holder gets an error that
	// says that the token has expired.
	tokenMemory = 24 * time.Hour
	// maxTokens bounds the tokens of a cluster.
	maxTokens = 10_000
)

// Token lets a host join a cluster. It is a secret, but is never sent: its holder proves
// possession, and the cluster knows only its public key. It also identifies the cluster's
// authority, so that its holder knows to which peer it may give the proof.
type Token struct{ *token }

// token is behind a pointer, and the seed behind a second one: package fmt follows one pointer, if
// it does not call Format, but never two.
type token struct {
	seed      *[ed25519.SeedSize]byte
	authority [sha256.Size]byte
}

// newToken returns a new token for the cluster whose authority has the fingerprint.
func newToken(authority [sha256.Size]byte) Token {
	t := Token{&token{seed: new([ed25519.SeedSize]byte), authority: authority}}
	rand.Read(t.seed[:])
	return t
}

// Key returns the key that proves possession of the token.
func (t Token) Key() ed25519.PrivateKey { return ed25519.NewKeyFromSeed(t.seed[:]) }

// Authority returns the fingerprint of the cluster's authority.
func (t Token) Authority() [sha256.Size]byte { return t.authority }

// Format prints no secret, whatever the verb.
func (t Token) Format(f fmt.State, _ rune) { io.WriteString(f, "token(redacted)") }

// Encode returns the token as one word, for parseToken. It is the secret.
func (t Token) Encode() string {
	return tokenMark + base64.RawURLEncoding.EncodeToString(append(t.seed[:], t.authority[:]...))
}

// parseToken parses the text of Encode, which spaces may surround. Errors reveal nothing about it.
func parseToken(text string) (Token, error) {
	body, ok := strings.CutPrefix(strings.TrimSpace(text), tokenMark)
	b, err := base64.RawURLEncoding.Strict().DecodeString(body)
	if !ok || err != nil || len(b) != ed25519.SeedSize+sha256.Size || strings.ContainsAny(body, "\r\n") {
		return Token{}, errors.New("is not a token of `hvdrun cluster token`")
	}
	return Token{&token{(*[ed25519.SeedSize]byte)(b), [sha256.Size]byte(b[ed25519.SeedSize:])}}, nil
}

// ReadToken reads a token from a file, which only its owner may be able to access.
func ReadToken(file string) (Token, error) {
	text, err := safefile.SecretText(file, maxTokenFile)
	if err != nil {
		return Token{}, fmt.Errorf("cluster: the token: %w", err)
	}
	t, err := parseToken(string(text))
	if err != nil {
		return Token{}, fmt.Errorf("cluster: the token: %s %w", file, err)
	}
	return t, nil
}

// Grant is what a token permits.
type Grant struct {
	// Expires is when the token expires.
	Expires time.Time
	// Hosts is a pattern of path.Match for the names of hosts that may join. Empty: any.
	Hosts string `json:",omitempty"`
	// Reusable says that any number of hosts may join with the token until it expires; otherwise
	// one may.
	Reusable bool `json:",omitempty"`
}

// tokenRecord is the cluster's record of a token.
type tokenRecord struct {
	Public []byte
	Grant
	// UsedBy is the host that has used it, UsedFor the hash of the key that was certified.
	UsedBy  string    `json:",omitempty"`
	UsedFor []byte    `json:",omitempty"`
	UsedAt  time.Time `json:",omitzero"`
}

// addToken records a token, and removes those that expired long ago.
func (s *State) addToken(public ed25519.PublicKey, g Grant, now time.Time) error {
	if _, err := path.Match(g.Hosts, ""); err != nil {
		return fmt.Errorf("cluster: %q is not a pattern of host names", g.Hosts)
	}
	s.Tokens = slices.DeleteFunc(s.Tokens, func(t tokenRecord) bool { return now.Sub(t.Expires) >= tokenMemory })
	if len(s.Tokens) >= maxTokens {
		return fmt.Errorf("cluster: there are %d tokens already; make reusable ones, or shorter-lived", maxTokens)
	}
	s.Tokens = append(s.Tokens, tokenRecord{Public: public, Grant: g})
	return nil
}

// KnowsToken returns whether the cluster has, or recently had, the token of the public key.
func (s *State) KnowsToken(public ed25519.PublicKey) bool { return s.token(public) != nil }

func (s *State) token(public ed25519.PublicKey) *tokenRecord {
	for i := range s.Tokens {
		if public.Equal(ed25519.PublicKey(s.Tokens[i].Public)) {
			return &s.Tokens[i]
		}
	}
	return nil
}

// Admit decides whether the holder of the token may join as the host, with a key of that hash, and
// records it. The same key may be admitted again, since an answer may be lost. Errors are meant for
// the holder.
func (s *State) Admit(public ed25519.PublicKey, host string, key [sha256.Size]byte, now time.Time) error {
	t := s.token(public)
	if t == nil {
		return errors.New("the token is unknown")
	}
	if err := checkHost(host); err != nil {
		return err
	}
	switch match, _ := path.Match(t.Hosts, host); { // the pattern was checked
	case now.After(t.Expires):
		return fmt.Errorf("the token expired at %s; `hvdrun cluster token` makes another", t.Expires.Format(time.RFC3339))
	case t.Hosts != "" && !match:
		return fmt.Errorf("the token is for hosts of the pattern %q, and this is %q", t.Hosts, host)
	case !t.Reusable && t.UsedBy != "" && (t.UsedBy != host || string(t.UsedFor) != string(key[:])):
		return fmt.Errorf("the token was used by host %q at %s; `hvdrun cluster token` makes another",
			t.UsedBy, t.UsedAt.Format(time.RFC3339))
	}
	t.UsedBy, t.UsedFor, t.UsedAt = host, key[:], now
	delete(s.Hosts, host) // a removed host may return
	return nil
}

func checkHost(host string) error {
	if err := plan.CheckHosts([]plan.Host{{Name: host, Slots: 1}}); err != nil || len(host) > 255 {
		return fmt.Errorf("%q cannot be the name of a host", host[:min(len(host), 255)])
	}
	return nil
}

// WriteFile writes the token to a new file of mode 0600.
func (t Token) WriteFile(file string) error {
	if err := safefile.CreateText(file, []byte(t.Encode()+"\n"), safefile.Private); err != nil {
		return fmt.Errorf("cluster: the token: %w", err)
	}
	return nil
}
