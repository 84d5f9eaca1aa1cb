package identity

import (
	"bytes"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"math/big"
	"time"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

// ClusterKeyLen is the length of a cluster's key in bytes.
const ClusterKeyLen = 32

// ForCluster returns the authority of a cluster, derived from its key and its label, which may be
// empty. Every process that has both derives the same authority and issues its own credentials: an
// agent with the name of its host, a driver with its run id. Certificates of another key or label
// are refused.
func ForCluster(key []byte, label string) (*Authority, error) {
	if len(key) != ClusterKeyLen {
		return nil, fmt.Errorf("identity: the cluster's key has %d bytes, not %d", len(key), ClusterKeyLen)
	}
	if len(label) > maxName {
		return nil, fmt.Errorf("identity: the cluster's label has %d bytes; at most %d", len(label), maxName)
	}
	derive := func(purpose string, n int) ([]byte, error) {
		return hkdf.Key(sha256.New, key, []byte(label), "hvdrun cluster v1 "+purpose, n)
	}
	seed, err1 := derive("authority", ed25519.SeedSize)
	serial, err2 := derive("serial", 16)
	if err := errors.Join(err1, err2); err != nil {
		return nil, fmt.Errorf("identity: deriving from the cluster's key: %w", err)
	}
	serial[0] &= 0x7f
	a := &authority{key: ed25519.NewKeyFromSeed(seed)}
	// The certificate is valid as long as the key is used. The dates are fixed so that every
	// process derives the same certificate.
	from, to := time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)
	if err := a.sign("hvdrun cluster authority", new(big.Int).SetBytes(serial), from, to); err != nil {
		return nil, err
	}
	return &Authority{a}, nil
}

// GenerateClusterKey writes a new key to a new file with mode 0600. An existing file is an error.
func GenerateClusterKey(path string) error {
	var key [ClusterKeyLen]byte
	rand.Read(key[:])
	if err := safefile.CreateText(path, []byte(hex.EncodeToString(key[:])+"\n"), safefile.Private); err != nil {
		return fmt.Errorf("identity: the cluster's key: %w", err)
	}
	return nil
}

// maxKeyFile bounds the file of a cluster's key, in bytes.
const maxKeyFile = 16 << 10

// ReadClusterKey reads a cluster's key from a file: 32 bytes, encoded as 64 hexadecimal digits or
// in base64. The file must belong to this user or root, and others must not be able to read or
// write it. A pipe is permitted, because shells pass secrets as <(…). Errors reveal nothing about
// the key.
func ReadClusterKey(path string) ([]byte, error) {
	// SecretText follows links of this user and of root: Kubernetes mounts secrets as links.
	text, err := safefile.SecretText(path, maxKeyFile)
	if err != nil {
		return nil, fmt.Errorf("identity: the cluster's key: %w", err)
	}
	key, err := parseClusterKey(text)
	if err != nil {
		return nil, fmt.Errorf("identity: the cluster's key: %s %w", path, err)
	}
	return key, nil
}

func parseClusterKey(text []byte) ([]byte, error) {
	text = bytes.TrimSpace(text)
	if len(text) == 2*ClusterKeyLen {
		if key, err := hex.DecodeString(string(text)); err == nil {
			return key, nil
		}
	}
	for _, enc := range []*base64.Encoding{base64.StdEncoding, base64.RawStdEncoding, base64.URLEncoding, base64.RawURLEncoding} {
		if key, err := enc.DecodeString(string(text)); err == nil && len(key) == ClusterKeyLen {
			return key, nil
		}
	}
	return nil, fmt.Errorf("does not hold %d bytes as %d hexadecimal digits or in base64", ClusterKeyLen, 2*ClusterKeyLen)
}
