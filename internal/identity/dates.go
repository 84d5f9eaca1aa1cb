package identity

import (
	"crypto/x509"
	"errors"
	"fmt"
	"time"
)

// datesError says that a certificate was refused because of its dates and this machine's clock, and
// by how much the clocks differ.
type datesError struct {
	of    string // the owner of the certificate
	why   string
	cause error // of the handshake
}

func (e *datesError) Error() string {
	return fmt.Sprintf("identity: the certificate of %s %s", e.of, e.why)
}

func (e *datesError) Unwrap() error { return e.cause }

// Explain wraps the error of a handshake that failed because a certificate is not valid at the time
// now: the text of the result says by how much the clocks differ instead. It returns other errors
// unchanged.
func Explain(err error, now time.Time) error {
	invalid, ok := errors.AsType[x509.CertificateInvalidError](err)
	if !ok || invalid.Reason != x509.Expired {
		return err
	}
	cert, e := invalid.Cert, &datesError{of: "the peer", cause: err}
	if cert.IsCA {
		e.of = "the peer's authority"
	} else if len(cert.URIs) == 1 {
		if s, err := parseURI(cert.URIs[0]); err == nil {
			e.of = s.String()
		}
	}
	if now.After(cert.NotAfter) {
		e.why = fmt.Sprintf("ended %v ago, at %s: it was not renewed, or the clock of this machine is that much ahead",
			now.Sub(cert.NotAfter).Round(time.Minute), cert.NotAfter.Format(time.RFC3339))
		return e
	}
	e.why = fmt.Sprintf("is not yet valid: the clock of this machine is at least %v behind that of the machine which has signed it",
		cert.NotBefore.Add(backdate).Sub(now).Round(time.Minute))
	return e
}
