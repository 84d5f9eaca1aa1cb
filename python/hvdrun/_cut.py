"""Ends the waits on a world's connections from another thread.

A collective that waits for a rank that is gone, or for one that itself waits, waits until its timeout; abort of gloo does not end
that. shutdown(2) does, on a duplicate of the descriptor: the number is never closed under its owner.
"""
import os
import socket
import threading


def sockets():
    """The open sockets of this process: pairs of descriptor and inode."""
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
    """Another descriptor of a connected TCP socket, if the descriptor still is that socket; None otherwise."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        if os.readlink(f"/proc/self/fd/{copy}") != inode:
            return None
        s = socket.socket(fileno=copy)
        copy = -1
        # An accept that fails ends the process, in gloo.
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
    """Shuts a connected TCP socket down, if the descriptor still is that socket. Returns whether it did."""
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
    """The connections of one world: the sockets that appear until settle.

    cut and hold may be called by any thread at any time; a world that is being connected (forming) loses what it has so far.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._before = sockets()
        self._own = set()
        self._held = {}
        self.forming = True

    def leave_out(self, others):
        """Some of the sockets are not of the world."""
        with self._lock:
            self._before |= others

    def settle(self):
        """What this process opens from here on is not of the world."""
        with self._lock:
            self._own |= sockets() - self._before
            self.forming = False

    def cut(self):
        """Shuts the connections down, unless they are held. Returns how many."""
        with self._lock:
            self._look()
            return sum(shut(fd, inode) for fd, inode in self._own - self._held.keys())

    def hold(self):
        """Does what cut does, where all ranks do it: shuts down only what this process reads. Returns how many.

        Gloo never wakes who waits for a send whose write has failed. Here no write fails: a connection stays open, also when gloo has
        closed it, until release.
        """
        with self._lock:
            self._look()
            held = {key: _duplicate(*key) for key in self._own - self._held.keys()}
            self._held.update((key, s) for key, s in held.items() if s is not None and _shutdown(s, socket.SHUT_RD))
            return len(self._held)

    def release(self):
        """Closes what hold has kept open, once all ranks have left the world."""
        with self._lock:
            for s in self._held.values():
                s.close()
            self._held = {}

    def _look(self):
        if self.forming:
            self._own |= sockets() - self._before
