package driver

import (
	"fmt"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// Authority issues the credentials of all parties of a job: anyone who has it can impersonate any
// of them. NewAuthority makes one.
type Authority interface {
	// Encode returns the authority as one line of text for DecodeAuthority. Store the text only in
	// a file that nobody but its owner can read.
	Encode() (string, error)
}

// NewAuthority returns a new authority for the job with the run id.
func NewAuthority(runID string) (Authority, error) {
	a, err := identity.NewAuthority(runID)
	if err != nil {
		return nil, fmt.Errorf("driver: %w", err)
	}
	return a, nil
}

// DecodeAuthority returns the authority that Encode encoded as text. Errors reveal nothing about
// the text.
func DecodeAuthority(text string) (Authority, error) {
	a, err := identity.DecodeAuthority(text)
	if err != nil {
		return nil, fmt.Errorf("driver: %w", err)
	}
	return a, nil
}
