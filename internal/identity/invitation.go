package identity

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

// Invitation lets programs on other machines submit tasks to a job. It is secret.
type Invitation struct {
	// Addresses are the addresses (host:port) of the job's hvdrun tasks gateway, best first.
	Addresses []string `json:"addresses"`
	// Credentials are those of a Client, in the text of Encode.
	Credentials string `json:"credentials"`
}

const (
	// maxInvitation bounds the file in bytes, and maxAddresses the number of addresses.
	maxInvitation = 64 << 10
	maxAddresses  = 64
)

// WriteInvitation writes an invitation to a file that only its owner may read.
func WriteInvitation(path string, i Invitation) error {
	text, err := json.Marshal(i)
	if err != nil {
		return fmt.Errorf("identity: invitation: %w", err)
	}
	if err := safefile.Replace(path, append(text, '\n'), safefile.Private); err != nil {
		return fmt.Errorf("identity: invitation: %w", err)
	}
	return nil
}

// ReadInvitation returns the addresses and the credentials of the invitation in a file. It is an
// error if others than the file's owner can read it.
func ReadInvitation(path string) (addresses []string, creds *Credentials, err error) {
	bad := func(err error) ([]string, *Credentials, error) {
		return nil, nil, fmt.Errorf("identity: invitation %s: %w", path, err)
	}
	text, err := safefile.SecretText(path, maxInvitation)
	if err != nil {
		return bad(err)
	}
	var i Invitation
	if err := json.Unmarshal(text, &i); err != nil {
		return bad(errors.New("it is not an invitation of hvdrun tasks gateway"))
	}
	if len(i.Addresses) == 0 || len(i.Addresses) > maxAddresses {
		return bad(fmt.Errorf("it has %d addresses; 1 to %d", len(i.Addresses), maxAddresses))
	}
	for _, a := range i.Addresses {
		if _, _, err := net.SplitHostPort(a); err != nil {
			return bad(err)
		}
	}
	if creds, err = Decode(i.Credentials); err != nil {
		return bad(err)
	}
	if got := creds.Subject().Role; got != Client {
		return bad(fmt.Errorf("its credentials are those of a %s", got))
	}
	return i.Addresses, creds, nil
}
