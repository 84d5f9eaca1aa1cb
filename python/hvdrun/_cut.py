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


def shut(fd, inode):
    """Shuts a connected TCP socket down, if the descriptor still is that socket. Returns whether it did."""
    try:
        copy = os.dup(fd)
    except OSError:
        return False
    try:
        if os.readlink(f"/proc/self/fd/{copy}") != inode:
            return False
        with socket.socket(fileno=copy) as s:
            copy = -1
            if s.family not in (socket.AF_INET, socket.AF_INET6) or s.type != socket.SOCK_STREAM:
                return False
            if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False  # an accept that fails ends the process, in gloo
            s.shutdown(socket.SHUT_RDWR)  # an error where it is not connected
            return True
    except OSError:
        return False
    finally:
        if copy >= 0:
            os.close(copy)


class Connections:
    """The connections of one world: the sockets that appear until settle.

    cut may be called by any thread at any time; a world that is being connected (forming) loses what it has so far.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._before = sockets()
        self._own = set()
        self.forming = True

    def settle(self):
        """What this process opens from here on is not of the world."""
        with self._lock:
            self._own |= sockets() - self._before
            self.forming = False

    def cut(self):
        """Shuts the connections down. Returns how many."""
        with self._lock:
            if self.forming:
                self._own |= sockets() - self._before
            return sum(shut(fd, inode) for fd, inode in self._own)
