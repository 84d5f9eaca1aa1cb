package calls

import "golang.org/x/sys/unix"

// call is a system call that a job works without, or whose absence it must report.
type call struct {
	name string
	nr   uint32
	of   *Argument // the calls that are refused, by an argument; nil: all
	// errs are the errors that the call can plausibly return, from old kernels, filters of
	// containers, file systems and limits of a user.
	errs []unix.Errno
	// workers: the call is refused only to the workers.
	workers bool
	// refused is a part of the error with which the job then ends; empty: the job succeeds.
	refused string
}

const (
	perm, nosys, inval, notsup = unix.EPERM, unix.ENOSYS, unix.EINVAL, unix.EOPNOTSUPP
	af                         = 0 // the index of the address family among socket's arguments
)

func errs(all ...unix.Errno) []unix.Errno { return all }

func is(index, value uint32) *Argument { return &Argument{index, value, value} }

// all is the table of calls.
var all = []call{
	// Files.
	{"flock", unix.SYS_FLOCK, nil, errs(nosys, unix.ENOLCK, notsup, perm, inval, unix.EIO), false, ""},
	{"fcntl of OFD locks", unix.SYS_FCNTL, &Argument{1, unix.F_OFD_GETLK, unix.F_OFD_SETLKW}, errs(nosys, unix.ENOLCK, notsup, inval), false, "has no locks"},
	{"fsync", unix.SYS_FSYNC, nil, errs(nosys, notsup, perm, inval), false, ""},
	{"fdatasync", unix.SYS_FDATASYNC, nil, errs(nosys, notsup, perm, inval), false, ""},
	{"fsync with an error", unix.SYS_FSYNC, nil, errs(unix.EIO, unix.ENOSPC), false, "sync"},
	{"fdatasync with an error", unix.SYS_FDATASYNC, nil, errs(unix.EIO, unix.ENOSPC), false, "sync"},
	{"fsync with an error, in workers", unix.SYS_FSYNC, nil, errs(unix.EIO, unix.ENOSPC), true, "sync"},
	{"flock, in workers", unix.SYS_FLOCK, nil, errs(nosys, unix.ENOLCK), true, ""},
	{"sync_file_range", unix.SYS_SYNC_FILE_RANGE, nil, errs(nosys, unix.ESPIPE, inval, perm), false, ""},
	{"fallocate", unix.SYS_FALLOCATE, nil, errs(nosys, notsup, perm), false, ""},
	{"renameat2", unix.SYS_RENAMEAT2, nil, errs(nosys, inval, perm), false, ""},
	{"linkat", unix.SYS_LINKAT, nil, errs(nosys, perm, notsup, unix.EXDEV, unix.EMLINK), false, ""},
	{"symlinkat", unix.SYS_SYMLINKAT, nil, errs(nosys, perm, notsup), false, ""},
	{"mknodat", unix.SYS_MKNODAT, nil, errs(nosys, perm, notsup), false, ""},
	{"fchmod", unix.SYS_FCHMOD, nil, errs(nosys, perm, notsup), false, ""},
	{"fchmodat", unix.SYS_FCHMODAT, nil, errs(nosys, perm, notsup), false, ""},
	{"fchown", unix.SYS_FCHOWN, nil, errs(nosys, perm), false, ""},
	{"fchownat", unix.SYS_FCHOWNAT, nil, errs(nosys, perm), false, ""},
	{"statx", unix.SYS_STATX, nil, errs(nosys, perm), false, ""},
	{"statfs", unix.SYS_STATFS, nil, errs(nosys, perm), false, ""},
	{"fstatfs", unix.SYS_FSTATFS, nil, errs(nosys, perm), false, ""},
	{"faccessat2", unix.SYS_FACCESSAT2, nil, errs(nosys, perm), false, ""},
	{"openat2", unix.SYS_OPENAT2, nil, errs(nosys, perm), false, ""},
	{"copy_file_range", unix.SYS_COPY_FILE_RANGE, nil, errs(nosys, perm, notsup, unix.EXDEV, inval, unix.EIO), false, ""},
	{"sendfile", unix.SYS_SENDFILE, nil, errs(nosys, perm, inval), false, ""},
	{"splice", unix.SYS_SPLICE, nil, errs(nosys, perm, inval), false, ""},
	{"inotify_init1", unix.SYS_INOTIFY_INIT1, nil, errs(nosys, perm, unix.EMFILE), false, ""},
	{"inotify_add_watch", unix.SYS_INOTIFY_ADD_WATCH, nil, errs(nosys, perm, unix.ENOSPC), false, ""},

	// Memory.
	{"memfd_create", unix.SYS_MEMFD_CREATE, nil, errs(nosys, perm, unix.EMFILE), false, ""},
	{"madvise", unix.SYS_MADVISE, nil, errs(nosys, perm, inval), false, ""},
	{"mbind", unix.SYS_MBIND, nil, errs(nosys, perm), false, ""},
	{"mincore", unix.SYS_MINCORE, nil, errs(nosys, perm), false, ""},
	{"mlock", unix.SYS_MLOCK, nil, errs(nosys, perm, unix.ENOMEM), false, ""},
	{"membarrier", unix.SYS_MEMBARRIER, nil, errs(nosys, perm), false, ""},
	{"userfaultfd", unix.SYS_USERFAULTFD, nil, errs(nosys, perm), false, ""},
	{"process_vm_readv", unix.SYS_PROCESS_VM_READV, nil, errs(nosys, perm), false, ""},
	{"process_vm_writev", unix.SYS_PROCESS_VM_WRITEV, nil, errs(nosys, perm), false, ""},

	// Processes.
	{"clone3", unix.SYS_CLONE3, nil, errs(nosys), false, ""},
	{"clone3, forbidden", unix.SYS_CLONE3, nil, errs(perm), false, "pthread_create failed"}, // by glibc, of any program with threads
	{"pidfd_open", unix.SYS_PIDFD_OPEN, nil, errs(nosys, perm, unix.EMFILE), false, ""},
	{"pidfd_send_signal", unix.SYS_PIDFD_SEND_SIGNAL, nil, errs(nosys, perm), false, ""},
	{"waitid of a descriptor", unix.SYS_WAITID, is(0, unix.P_PIDFD), errs(nosys, inval), false, ""},
	{"ptrace", unix.SYS_PTRACE, nil, errs(nosys, perm), false, ""},
	{"prctl, end with the parent", unix.SYS_PRCTL, is(0, unix.PR_SET_PDEATHSIG), errs(nosys, perm, inval), false, "prctl(PR_SET_PDEATHSIG)"},
	{"prctl, adopt orphans", unix.SYS_PRCTL, is(0, unix.PR_SET_CHILD_SUBREAPER), errs(nosys, perm, inval), false, ""},
	{"prctl, dumpable", unix.SYS_PRCTL, is(0, unix.PR_SET_DUMPABLE), errs(nosys, perm), false, ""},
	{"prctl, others", unix.SYS_PRCTL, &Argument{0, 40, ^uint32(0)}, errs(nosys, perm, inval), false, ""},
	{"prlimit64", unix.SYS_PRLIMIT64, nil, errs(nosys, perm), false, "prlimit"},
	{"setrlimit", unix.SYS_SETRLIMIT, nil, errs(nosys, perm), false, ""},
	{"setpriority", unix.SYS_SETPRIORITY, nil, errs(nosys, perm), false, ""},
	{"sched_setaffinity", unix.SYS_SCHED_SETAFFINITY, nil, errs(nosys, perm, inval), false, ""},
	{"sched_setattr", unix.SYS_SCHED_SETATTR, nil, errs(nosys, perm), false, ""},
	{"sched_getattr", unix.SYS_SCHED_GETATTR, nil, errs(nosys, perm), false, ""},
	{"getcpu", unix.SYS_GETCPU, nil, errs(nosys, perm), false, ""},
	{"sysinfo", unix.SYS_SYSINFO, nil, errs(nosys, perm), false, ""},
	{"close_range", unix.SYS_CLOSE_RANGE, nil, errs(nosys, perm), false, ""},
	{"unshare", unix.SYS_UNSHARE, nil, errs(nosys, perm), false, ""},
	{"mount", unix.SYS_MOUNT, nil, errs(nosys, perm), false, ""},

	// Waits and randomness.
	{"futex_waitv", unix.SYS_FUTEX_WAITV, nil, errs(nosys, perm), false, ""},
	{"set_robust_list", unix.SYS_SET_ROBUST_LIST, nil, errs(nosys, perm), false, ""},
	{"get_robust_list", unix.SYS_GET_ROBUST_LIST, nil, errs(nosys, perm), false, ""},
	{"io_uring_setup", unix.SYS_IO_URING_SETUP, nil, errs(nosys, perm, unix.ENOMEM), false, ""},
	{"eventfd2", unix.SYS_EVENTFD2, nil, errs(nosys, perm), false, "eventfd failed"},
	{"getrandom", unix.SYS_GETRANDOM, nil, errs(nosys), false, ""},
	{"getrandom, forbidden", unix.SYS_GETRANDOM, nil, errs(perm), false, "crypto/rand: failed"},

	// Sockets and terminals.
	{"socket of netlink", unix.SYS_SOCKET, is(af, unix.AF_NETLINK), errs(unix.EAFNOSUPPORT, perm), false, ""},
	{"socket of IPv6", unix.SYS_SOCKET, is(af, unix.AF_INET6), errs(unix.EAFNOSUPPORT, perm), false, ""},
	{"socket of Unix", unix.SYS_SOCKET, is(af, unix.AF_UNIX), errs(unix.EAFNOSUPPORT, perm), false, ""},
	{"socketpair", unix.SYS_SOCKETPAIR, nil, errs(nosys, perm), false, ""},
	{"setsockopt of TCP", unix.SYS_SETSOCKOPT, is(1, unix.IPPROTO_TCP), errs(unix.ENOPROTOOPT, perm), false, ""},
	{"setsockopt of sockets", unix.SYS_SETSOCKOPT, is(1, unix.SOL_SOCKET), errs(unix.ENOPROTOOPT, perm), false, "setsockopt"},
	{"getsockopt of TCP", unix.SYS_GETSOCKOPT, is(1, unix.IPPROTO_TCP), errs(unix.ENOPROTOOPT, perm), false, ""},
	{"getsockopt of a peer", unix.SYS_GETSOCKOPT, is(2, unix.SO_PEERCRED), errs(unix.ENOPROTOOPT, perm), false, ""},
	{"ioctl", unix.SYS_IOCTL, nil, errs(nosys, perm, unix.ENOTTY), false, ""},
}
