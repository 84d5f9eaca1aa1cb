package jobdir

import (
	"errors"
	"io/fs"
	"strings"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

// Of the members of a cluster so many are written down for the driver that may follow; the file is
// not longer than MaxMembersText.
const (
	MaxMembers     = 16
	MaxMembersText = 16 << 10
)

// KnownMembers returns the members of the cluster that the driver before has written down.
func (d *Dir) KnownMembers() ([]string, error) {
	text, err := safefile.OwnText(d.MembersPath(), MaxMembersText)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return strings.Fields(string(text)), err
}
