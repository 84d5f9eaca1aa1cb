package gossip

import (
	"bytes"
	"crypto/hkdf"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"

	"github.com/hashicorp/memberlist"
)

// keyring returns the keys that encrypt and decrypt: derived from Key and OtherKeys.
func (c Config) keyring() (*memberlist.Keyring, error) {
	keys, err := c.derive(append([][]byte{c.Key}, c.OtherKeys...))
	if err != nil {
		return nil, err
	}
	ring, err := memberlist.NewKeyring(keys[1:], keys[0])
	if err != nil {
		return nil, fmt.Errorf("gossip: %w", err)
	}
	return ring, nil
}

func (c Config) derive(keys [][]byte) ([][]byte, error) {
	if len(keys) == 0 {
		return nil, errors.New("gossip: the cluster has no key")
	}
	derived := make([][]byte, len(keys))
	for i, key := range keys {
		if len(key) != keyLen {
			return nil, fmt.Errorf("gossip: a key of the cluster has %d bytes, not %d", len(key), keyLen)
		}
		var err error
		if derived[i], err = hkdf.Key(sha256.New, key, []byte(c.Label), "hvdrun cluster v1 gossip", keyLen); err != nil {
			return nil, fmt.Errorf("gossip: deriving from the cluster's key: %w", err)
		}
	}
	return derived, nil
}

// SetKeys replaces the keys of the cluster: the first key encrypts from now on, and all keys
// decrypt. All members must already be able to decrypt messages encrypted with the first key.
func (m *Member) SetKeys(keys [][]byte) error {
	derived, err := m.cfg.derive(keys)
	if err == nil {
		err = replaceKeys(m.keys, derived)
	}
	if err != nil {
		return err
	}
	m.log.WithField("keys", len(keys)).Info("gossip: the keys of the cluster were changed")
	return nil
}

// replaceKeys sets the keys of the ring. The first one encrypts.
//
// memberlist returns the slice of its keys to readers, and moves keys within it when it removes a
// key other than the last. replaceKeys therefore removes keys from the end.
func replaceKeys(ring *memberlist.Keyring, keys [][]byte) error {
	is := func(key []byte) func([]byte) bool { return func(k []byte) bool { return bytes.Equal(k, key) } }
	err := ring.AddKey(keys[0])
	if err == nil {
		err = ring.UseKey(keys[0])
	}
	held := slices.Clone(ring.GetKeys())
	unwanted := slices.IndexFunc(held, func(k []byte) bool { return !slices.ContainsFunc(keys, is(k)) })
	for i := len(held) - 1; err == nil && unwanted > 0 && i >= unwanted; i-- {
		err = ring.RemoveKey(held[i])
	}
	for _, key := range keys[1:] {
		if err == nil {
			err = ring.AddKey(key)
		}
	}
	if err != nil {
		return fmt.Errorf("gossip: %w", err)
	}
	return nil
}

// SetKeys calls Member.SetKeys of the observer, now or when it joins.
func (s *Source) SetKeys(keys [][]byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.cfg.derive(keys); err != nil {
		return err
	}
	s.cfg.Key, s.cfg.OtherKeys = keys[0], keys[1:]
	if s.member == nil {
		return nil
	}
	return s.member.SetKeys(keys)
}
