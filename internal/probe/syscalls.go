package probe

import "golang.org/x/sys/unix"

// fileCalls and otherCalls name the system calls in which threads wait. Those in fileCalls wait for
// the file of their first argument. Other calls are shown by their numbers.
var (
	fileCalls = map[int]string{
		unix.SYS_READ: "read", unix.SYS_READV: "readv", unix.SYS_PREAD64: "pread64", unix.SYS_PREADV: "preadv", unix.SYS_PREADV2: "preadv2",
		unix.SYS_WRITE: "write", unix.SYS_WRITEV: "writev", unix.SYS_PWRITE64: "pwrite64", unix.SYS_PWRITEV: "pwritev",
		unix.SYS_PWRITEV2: "pwritev2", unix.SYS_FSYNC: "fsync", unix.SYS_FDATASYNC: "fdatasync", unix.SYS_SYNC_FILE_RANGE: "sync_file_range",
		unix.SYS_SYNCFS: "syncfs", unix.SYS_FTRUNCATE: "ftruncate", unix.SYS_FALLOCATE: "fallocate", unix.SYS_FSTAT: "fstat",
		unix.SYS_GETDENTS64: "getdents64", unix.SYS_IOCTL: "ioctl", unix.SYS_FLOCK: "flock", unix.SYS_FCNTL: "fcntl", unix.SYS_LSEEK: "lseek",
		unix.SYS_CLOSE: "close", unix.SYS_CONNECT: "connect", unix.SYS_ACCEPT: "accept", unix.SYS_ACCEPT4: "accept4",
		unix.SYS_RECVFROM: "recvfrom", unix.SYS_RECVMSG: "recvmsg", unix.SYS_RECVMMSG: "recvmmsg", unix.SYS_SENDTO: "sendto",
		unix.SYS_SENDMSG: "sendmsg", unix.SYS_SENDMMSG: "sendmmsg",
	}
	otherCalls = map[int]string{
		unix.SYS_FUTEX: "futex", unix.SYS_FUTEX_WAITV: "futex_waitv", unix.SYS_NANOSLEEP: "nanosleep", unix.SYS_CLOCK_NANOSLEEP: "clock_nanosleep",
		unix.SYS_RESTART_SYSCALL: "restart_syscall", unix.SYS_PPOLL: "ppoll", unix.SYS_PSELECT6: "pselect6", unix.SYS_EPOLL_PWAIT: "epoll_pwait",
		unix.SYS_EPOLL_PWAIT2: "epoll_pwait2", unix.SYS_WAIT4: "wait4", unix.SYS_WAITID: "waitid", unix.SYS_RT_SIGSUSPEND: "rt_sigsuspend",
		unix.SYS_RT_SIGTIMEDWAIT: "rt_sigtimedwait", unix.SYS_IO_GETEVENTS: "io_getevents", unix.SYS_IO_URING_ENTER: "io_uring_enter",
		unix.SYS_SEMOP: "semop", unix.SYS_SEMTIMEDOP: "semtimedop", unix.SYS_MSGRCV: "msgrcv", unix.SYS_MQ_TIMEDRECEIVE: "mq_timedreceive",
		unix.SYS_SPLICE: "splice", unix.SYS_SENDFILE: "sendfile", unix.SYS_COPY_FILE_RANGE: "copy_file_range", unix.SYS_SYNC: "sync",
		unix.SYS_OPENAT: "openat", unix.SYS_STATX: "statx", unix.SYS_NEWFSTATAT: "newfstatat", unix.SYS_STATFS: "statfs",
		unix.SYS_FACCESSAT: "faccessat", unix.SYS_READLINKAT: "readlinkat", unix.SYS_MKDIRAT: "mkdirat", unix.SYS_LINKAT: "linkat",
		unix.SYS_UNLINKAT: "unlinkat", unix.SYS_RENAMEAT: "renameat", unix.SYS_RENAMEAT2: "renameat2", unix.SYS_EXECVE: "execve",
		unix.SYS_CLONE: "clone", unix.SYS_CLONE3: "clone3", unix.SYS_EXIT: "exit", unix.SYS_EXIT_GROUP: "exit_group",
		unix.SYS_MMAP: "mmap", unix.SYS_MUNMAP: "munmap", unix.SYS_MREMAP: "mremap", unix.SYS_MPROTECT: "mprotect", unix.SYS_MADVISE: "madvise",
		unix.SYS_MSYNC: "msync", unix.SYS_MLOCK: "mlock", unix.SYS_MEMBARRIER: "membarrier", unix.SYS_SCHED_YIELD: "sched_yield",
	}
)
