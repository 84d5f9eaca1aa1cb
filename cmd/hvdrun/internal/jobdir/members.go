package jobdir

import (
	"errors"
	"io/fs"
	"strings"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

// The file has so many members of a cluster, for the driver that may follow, and at most
// MaxMembersText bytes.
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
