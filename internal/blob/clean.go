package blob

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

// Clean removes the stores of a run on this machine that processes of a user have left behind,
// unless somebody has them open. It does not open them as stores. The user may have put anything in
// their place: called as root, it removes nothing that the user could not remove.
func Clean(run string, uid int) { clean(top("", uid), run, uid) }

func clean(top, run string, uid int) {
	all, err := openFolder(unix.AT_FDCWD, top, uid)
	if err != nil {
		return
	}
	defer all.Close()
	cleanRun(all, nameOf(run), uid, time.Time{})
}

// sweep removes what killed processes of other runs have left behind.
func sweep(top, own string, uid int) {
	all, err := openFolder(unix.AT_FDCWD, top, uid)
	if err != nil {
		return
	}
	defer all.Close()
	runs, _ := all.Readdirnames(-1)
	for _, r := range runs {
		if r != own {
			cleanRun(all, r, uid, time.Now().Add(-stale))
		}
	}
}

// cleanRun removes the stores of a run that nobody has open and that were last used before since; a
// zero since removes them whatever their age.
func cleanRun(all *os.File, run string, uid int, since time.Time) {
	of, err := openFolder(int(all.Fd()), run, uid)
	if err != nil {
		return
	}
	defer of.Close()
	hosts, _ := of.Readdirnames(-1)
	for _, h := range hosts {
		var st unix.Stat_t
		err := unix.Fstatat(int(of.Fd()), h, &st, unix.AT_SYMLINK_NOFOLLOW)
		if err == nil && (since.IsZero() || time.Unix(st.Mtim.Unix()).Before(since)) {
			removeUnused(of, h, uid)
		}
	}
	_ = unix.Unlinkat(int(all.Fd()), run, unix.AT_REMOVEDIR) // fails while there are others
}

// removeUnused removes the folder of a store that nobody has open. It removes the lock file last:
// until then, a process that opens the store waits for the lock, and then starts again.
func removeUnused(of *os.File, host string, uid int) {
	dir, err := openFolder(int(of.Fd()), host, uid)
	if err != nil {
		return
	}
	defer dir.Close()
	at := int(dir.Fd())
	live, err := lockUnused(at)
	if err == nil {
		defer live.Close()
		names, _ := dir.Readdirnames(-1)
		for _, n := range names {
			if n != liveName {
				_ = unix.Unlinkat(at, n, 0)
			}
		}
		_ = unix.Unlinkat(at, liveName, 0)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return
	}
	_ = unix.Unlinkat(int(of.Fd()), host, unix.AT_REMOVEDIR) // fails if somebody has begun to open it
}

// lockUnused locks the file that shows that a store is open, if nobody else holds its lock.
func lockUnused(dir int) (*os.File, error) {
	fd, err := unix.Openat(dir, liveName, unix.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	live := os.NewFile(uintptr(fd), liveName)
	var locked, named unix.Stat_t
	err = errors.Join(safefile.TryLock(live), unix.Fstat(fd, &locked), unix.Fstatat(dir, liveName, &named, unix.AT_SYMLINK_NOFOLLOW))
	if err == nil && (locked.Dev != named.Dev || locked.Ino != named.Ino) {
		err = errRemoved
	}
	if err != nil {
		return nil, errors.Join(err, live.Close())
	}
	return live, nil
}

// openFolder opens the folder with the name in another. It follows no link, and returns an error if
// the folder does not belong to the user.
func openFolder(in int, name string, uid int) (*os.File, error) {
	fd, err := unix.Openat(in, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	fi, err := f.Stat()
	if err == nil && fi.Sys().(*syscall.Stat_t).Uid != uint32(uid) {
		err = fmt.Errorf("%s is another user's", name)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
