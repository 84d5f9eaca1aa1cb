package identity

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"strings"
)

// keepVersion is the version of the format of Authority.Encode.
const keepVersion = 1

// Encode returns the authority of a job as one line of text without spaces, for DecodeAuthority.
// Its holder can issue credentials for every party of the job: store it only in a file that only
// its owner may read. The authority of a cluster cannot be encoded, because it is derived from the
// cluster's key.
func (a *Authority) Encode() (string, error) {
	key, ok := a.key.(*ecdsa.PrivateKey)
	if !ok || a.runID == "" {
		return "", errors.New("identity: this is not the authority of a job")
	}
	raw, err := key.Bytes()
	if err != nil {
		return "", errors.New("identity: the key of the authority cannot be encoded")
	}
	b := appendParts([]byte{keepVersion}, []byte(a.runID), a.cert.Raw, raw, a.jobKey[:])
	return base64.RawURLEncoding.EncodeToString(b), nil
}

// AuthorityOf returns of if it is an *Authority, else the authority in the text that its Encode
// returns.
func AuthorityOf(of interface{ Encode() (string, error) }) (*Authority, error) {
	if a, is := of.(*Authority); is {
		return a, nil
	}
	text, err := of.Encode()
	if err != nil {
		return nil, err
	}
	return DecodeAuthority(text)
}

// DecodeAuthority parses the text of Authority.Encode. Errors reveal nothing about the text.
func DecodeAuthority(text string) (*Authority, error) {
	bad := errors.New("identity: the text is not an authority of a version that this program can read")
	if len(text) > maxEncoded || strings.ContainsAny(text, "\r\n") {
		return nil, bad
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(text)
	if err != nil || len(b) == 0 || b[0] != keepVersion {
		return nil, bad
	}
	var parts [4][]byte
	if cutParts(b[1:], parts[:]) != nil {
		return nil, bad
	}
	run := string(parts[0])
	if len(parts[3]) != keyLen || run == "" || (Subject{RunID: run, Role: Driver}).validate() != nil {
		return nil, bad
	}
	cert, err := x509.ParseCertificate(parts[1])
	if err != nil {
		return nil, bad
	}
	key, err := ecdsa.ParseRawPrivateKey(elliptic.P256(), parts[2])
	if err != nil || !key.PublicKey.Equal(cert.PublicKey) {
		return nil, bad
	}
	return &Authority{&authority{runID: run, cert: cert, key: key, jobKey: (*[keyLen]byte)(parts[3])}}, nil
}
