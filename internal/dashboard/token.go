package dashboard

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
)

// Tokens let people see the page: Read to watch, Write to steer too. The zero Tokens let nobody in.
type Tokens struct {
	Read  string `json:"read"`
	Write string `json:"write"`
}

// NewTokens returns tokens that nobody can guess.
func NewTokens() Tokens { return Tokens{Read: rand.Text(), Write: rand.Text()} }

// ParseTokens reads what json.Marshal writes of Tokens.
func ParseTokens(text []byte) (t Tokens, err error) {
	if err := json.Unmarshal(text, &t); err != nil {
		return Tokens{}, fmt.Errorf("dashboard: tokens: %w", err)
	}
	if len(t.Read) < 20 || len(t.Write) < 20 || t.Read == t.Write {
		return Tokens{}, errors.New("dashboard: tokens: they are too short")
	}
	return t, nil
}

// right is what a request may do.
type right int

const (
	nothing right = iota
	watch
	steer
)

// grants returns what a token permits.
func (t Tokens) grants(token string) right {
	read, write := same(token, t.Read), same(token, t.Write)
	switch {
	case write:
		return steer
	case read:
		return watch
	}
	return nothing
}

// same compares in a time that does not depend on where the texts differ.
func same(a, b string) bool {
	x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
	return b != "" && subtle.ConstantTimeCompare(x[:], y[:]) == 1
}

// proof is what a page that steers sends with each command. Pages of other origins cannot read it.
func (t Tokens) proof() string {
	m := hmac.New(sha256.New, []byte(t.Write))
	m.Write([]byte("hvdrun dashboard: commands"))
	return base64.RawURLEncoding.EncodeToString(m.Sum(nil))
}
