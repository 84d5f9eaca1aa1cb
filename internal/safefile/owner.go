package safefile

import (
	"crypto/rand"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// ours reports whether a file at the path with that owner can belong to this user or to root.
func ours(uid uint32, path string) bool {
	if uid == 0 || int(uid) == os.Geteuid() {
		return true
	}
	// A file server may map all users, or root, to a single owner. In that case the owner
	// says nothing, and only the server's rules protect the file.
	dir := filepath.Dir(path)
	return networkName(dir) != "" && ownerOfNew(dir) == int(uid)
}

// writable reports whether users other than the owner may write to a file with these permissions. A
// group with the id of this user, which most systems create for each user, has no other member.
func writable(perm, gid uint32) bool {
	return perm&0o002 != 0 || perm&0o020 != 0 && int(gid) != os.Geteuid()
}

// ownerOfNew returns the owner of files that this process creates in a folder; -1 if it cannot
// create any.
var ownerOfNew = func(dir string) int { // tests have no such server
	f, err := createTemp(filepath.Join(dir, "owner"), Private)
	if err != nil {
		return -1
	}
	defer os.Remove(f.Name())
	defer f.Close()
	var st unix.Stat_t
	if unix.Fstat(int(f.Fd()), &st) != nil {
		return -1
	}
	return int(st.Uid)
}

// createTemp creates a file beside path with an unpredictable name.
func createTemp(path string, mode fs.FileMode) (*os.File, error) {
	return Create(filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+"."+rand.Text()), mode)
}

// unmapped returns the owner that files of users outside this user namespace appear to have; -1 if
// no user is outside it.
var unmapped = sync.OnceValue(func() int {
	text, err := os.ReadFile("/proc/self/uid_map")
	if fields := strings.Fields(string(text)); err != nil || len(fields) == 3 && fields[2] == "4294967295" {
		return -1
	}
	text, err = os.ReadFile("/proc/sys/kernel/overflowuid")
	uid, cerr := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || cerr != nil {
		return -1
	}
	return uid
})

// userName describes a user in an error.
func userName(uid uint32) string {
	id := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(id); err == nil {
		return fmt.Sprintf("user %s (%s)", id, u.Username)
	}
	return "user " + id
}

// networks are the file systems that may be shared with other machines, by the type that statfs
// returns. They include FUSE because most of its file systems are shared.
var networks = map[int64]string{
	0x6969: "NFS", 0x517B: "SMB", 0xFF534D42: "CIFS", 0xFE534D42: "SMB2", 0x0BD00BD0: "Lustre", 0x47504653: "GPFS",
	0x65735546: "FUSE", 0x00C36400: "Ceph", 0x5346414F: "AFS", 0x6B414653: "AFS", 0x01021997: "9P", 0x19830326: "BeeGFS",
	0x73757245: "Coda", 0x564C: "NCP", 0xAAD7AAEA: "PanFS", 0x7461636F: "OCFS2", 0x01161970: "GFS2", 0x786F4256: "vboxsf",
	0x20030528: "OrangeFS",
}

// Network returns the name of the network file system that contains the path, or "" if it is on a
// local one or the file system is unknown.
func Network(path string) string { return networkName(path) }

var networkName = func(path string) string { // tests have no such file system
	var st unix.Statfs_t
	if _, err := retry(func() (int, error) { return 0, unix.Statfs(path, &st) }); err != nil {
		return ""
	}
	return networks[int64(uint32(st.Type))]
}

// on reports whether fd is on a file system of that type.
func on(fd int, magic int64) bool {
	var st unix.Statfs_t
	_, err := retry(func() (int, error) { return 0, unix.Fstatfs(fd, &st) })
	return err == nil && int64(st.Type) == magic
}
