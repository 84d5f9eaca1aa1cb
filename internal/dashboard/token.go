package dashboard

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
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

// admission is what a server gives to browsers for tokens. It ends with the server: a later
// listener at its port gets nothing of worth.
type admission struct {
	// cookie names the cookie, which permits to watch. Browsers send it to all ports of the host.
	cookie, session string
	// proof permits to steer. Browsers keep it for the page alone, and send it with commands.
	proof string
}

func newAdmission(port int) admission {
	return admission{"hvdrun-" + strconv.Itoa(port), rand.Text(), rand.Text()}
}

// granted returns what a request may do.
func (a admission) granted(r *http.Request) right {
	best := nothing
	for _, c := range r.CookiesNamed(a.cookie) {
		if same(c.Value, a.session) {
			best = watch
		}
	}
	if best == watch && same(r.Header.Get(proofHeader), a.proof) {
		best = steer
	}
	return best
}

// proofHeader has the proof.
const proofHeader = "X-Hvdrun-Proof"
