package jobdir

import (
	"errors"
	"io/fs"
	"strings"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

// Bounds of the file of known members of the cluster, which a driver that takes over reads: the
// number of members, and the size in bytes.
const (
	MaxMembers     = 16
	MaxMembersText = 16 << 10
)

// KnownMembers returns the members of the cluster that the previous driver recorded.
func (d *Dir) KnownMembers() ([]string, error) {
	text, err := safefile.OwnText(d.MembersPath(), MaxMembersText)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return strings.Fields(string(text)), err
}
