package dashboard

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"net/http"
	"strconv"
)

// Tokens give access to the page: Read to watch, Write to steer as well. The zero Tokens give none.
type Tokens struct {
	Read  string `json:"read"`
	Write string `json:"write"`
}

// NewTokens returns random tokens.
func NewTokens() Tokens { return Tokens{Read: rand.Text(), Write: rand.Text()} }

// Valid reports whether the tokens are long enough to be secrets, and differ.
func (t Tokens) Valid() bool { return len(t.Read) >= 20 && len(t.Write) >= 20 && t.Read != t.Write }

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

// same compares two texts in a time that does not depend on where they differ.
func same(a, b string) bool {
	x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
	return b != "" && subtle.ConstantTimeCompare(x[:], y[:]) == 1
}

// admission holds the secrets that a server gives to browsers in return for tokens. They are valid
// only for this server: they are useless to a later listener at its port.
type admission struct {
	// cookie is the name of the cookie, which permits watching. Browsers send it to all ports of
	// the host.
	cookie, session string
	// proof permits steering. Browsers keep it for the page alone, and send it with commands.
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

// proofHeader is the header with the proof.
const proofHeader = "X-Hvdrun-Proof"
