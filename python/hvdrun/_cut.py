"""Ends the waits on a world's connections from another thread.

A collective that waits for a lost rank, or for a rank that itself waits, would wait until its timeout. Gloo's abort does not end
the wait, but shutdown(2) does. It is called on a duplicate of the descriptor, so that the owner's descriptor stays open.
"""
import os
import socket
import threading


def sockets():
    """Returns the open sockets of this process as pairs of descriptor and inode."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink("/proc/self/fd/" + name)
        except OSError:
            continue
        if target.startswith("socket:"):
            found.add((int(name), target))
    return found


def _duplicate(fd, inode):
    """Returns a duplicate of a descriptor if it is still that socket, a TCP socket that does not listen; None otherwise."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        if os.readlink(f"/proc/self/fd/{copy}") != inode:
            return None
        s = socket.socket(fileno=copy)
        copy = -1
        # A failed accept makes gloo end the process.
        if s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM and \
                not s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return s
        s.close()
    except OSError:
        pass
    finally:
        if copy >= 0:
            os.close(copy)
    return None


def shut(fd, inode):
    """Shuts down a TCP connection if the descriptor is still that socket. Returns whether it has shut it down."""
    s = _duplicate(fd, inode)
    if s is None:
        return False
    with s:
        return _shutdown(s, socket.SHUT_RDWR)


def _shutdown(s, how):
    try:
        s.shutdown(how)
    except OSError:
        return False  # it is not connected
    return True


class Connections:
    """The connections of one world: the sockets that are opened between the construction and settle.

    Any thread may call cut and hold at any time. While the world is forming, they apply to the connections so far.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._before = sockets()
        self._own = set()
        self._held = {}
        self.forming = True

    def leave_out(self, others):
        """Excludes sockets that do not belong to the world."""
        with self._lock:
            self._before |= others

    def settle(self):
        """Marks the world as complete: sockets that the process opens later do not belong to it."""
        with self._lock:
            self._own |= sockets() - self._before
            self.forming = False

    def cut(self):
        """Shuts down the connections that are not held. Returns their number."""
        with self._lock:
            self._look()
            return sum(shut(fd, inode) for fd, inode in self._own - self._held.keys())

    def hold(self):
        """Shuts down only the reading side of the connections, which suffices if all ranks do it. Returns the number of held connections.

        Gloo never wakes a thread that waits for a send whose write has failed. With hold no write fails: a connection stays open until
        release, even if gloo has closed it.
        """
        with self._lock:
            self._look()
            held = {key: _duplicate(*key) for key in self._own - self._held.keys()}
            self._held.update((key, s) for key, s in held.items() if s is not None and _shutdown(s, socket.SHUT_RD))
            return len(self._held)

    def release(self):
        """Closes the connections that hold has kept open. It is called when all ranks have left the world."""
        with self._lock:
            for s in self._held.values():
                s.close()
            self._held = {}

    def _look(self):
        if self.forming:
            self._own |= sockets() - self._before
