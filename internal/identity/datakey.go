package identity

import (
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"io"
	"strconv"
)

// DataKey is a key of data connections: those within one generation, whose members alone have the
// key, or those of visits to these members. The zero value proves nothing and is never accepted.
// Formatting it shows no secret.
type DataKey struct{ key *[keyLen]byte }

// NewDataKey returns a random key, for workers in a world that no driver has published.
func NewDataKey() DataKey {
	k := DataKey{new([keyLen]byte)}
	rand.Read(k.key[:])
	return k
}

// DataKey returns the key of a generation. Every driver that has the authority of the job derives
// the same key. The authority of a cluster returns the zero value.
func (a *Authority) DataKey(generation uint64) DataKey {
	if a.jobKey == nil {
		return DataKey{}
	}
	return derived(a.jobKey[:], "hvdrun data connections of generation "+strconv.FormatUint(generation, 10))
}

// ForVisits returns the key of visits to the members of a generation, derived from the generation's
// key.
func (k DataKey) ForVisits() DataKey {
	if k.key == nil {
		return k
	}
	return derived(k.key[:], "hvdrun visits")
}

func derived(secret []byte, purpose string) DataKey {
	b, err := hkdf.Key(sha256.New, secret, nil, purpose, keyLen)
	if err != nil {
		panic("identity: " + err.Error()) // cannot happen: only for longer keys
	}
	return DataKey{(*[keyLen]byte)(b)}
}

// ParseDataKey parses the bytes that Bytes has returned.
func ParseDataKey(b []byte) (DataKey, error) {
	if len(b) != keyLen {
		return DataKey{}, fmt.Errorf("identity: the data key has %d bytes, not %d", len(b), keyLen)
	}
	return DataKey{(*[keyLen]byte)(append([]byte(nil), b...))}, nil
}

// Bytes returns a copy of the key; nil for the zero value. It is secret.
func (k DataKey) Bytes() []byte {
	if k.key == nil {
		return nil
	}
	return append([]byte(nil), k.key[:]...)
}

// Format prints no secret, for every verb.
func (k DataKey) Format(f fmt.State, _ rune) { io.WriteString(f, "data key(redacted)") }

// sum returns the MAC of a message.
func (k DataKey) sum(message []byte) []byte {
	m := hmac.New(sha256.New, k.key[:])
	m.Write(message)
	return m.Sum(nil)
}
