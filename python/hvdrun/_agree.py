"""Agreement among the ranks of one host: each rank writes to its own page of memory, which the others read.

An all-reduce of a few numbers by gloo wakes threads of all ranks several times. With four ranks on two processors this takes longer
than a step of a small model.
"""
import mmap
import os
import secrets
import time

_NAME = "hvdrun-agree"
_MOST = 64  # ranks: each maps the pages of all others
_YIELDS = 100  # number of looks that only yield the processor; each later one sleeps first
_SLEEP = 0.0002  # seconds
# Indices of the numbers in a page.
_TOKEN, _CUT, _TURN = 0, 8, 16  # _TURN: for even and odd turns, each in its own cache line, because a rank can be one turn ahead


class Pages:
    """The pages of the ranks of a world. Any thread may call cut; only the main thread calls the other methods.

    A rank writes only to its own page: one word with the number of its turn and its flags.
    """

    def __init__(self, timeout):
        self._timeout = timeout  # seconds of an agreement
        self._fd = os.memfd_create(_NAME)
        os.ftruncate(self._fd, mmap.PAGESIZE)
        self._own = memoryview(mmap.mmap(self._fd, mmap.PAGESIZE)).cast("Q")
        self._own[_TOKEN] = secrets.randbits(62) | 1
        self._others = {}  # address: page
        self._pages = []
        self._generation = self._turn = 0

    def address(self):
        """Returns the numbers by which other processes of this user on this host find this rank's page."""
        return os.getpid(), self._fd, self._own[_TOKEN]

    def open(self, generation, addresses):
        """Opens the pages of a world's ranks. Returns False if some cannot be found, for example because ranks are on other hosts."""
        if generation != self._generation:
            self._generation, self._turn = generation, 0
        if len(addresses) > _MOST:
            return False
        found = {}
        for address in addresses:
            if address != self.address():
                page = self._others.get(address) or _page(*address)
                if page is None:
                    return False
                found[address] = page
        self._others, self._pages = found, list(found.values())
        return True

    def agree(self, flags):
        """Blocks until all ranks have reached this turn. Returns the bitwise or of the flags of all ranks, which have 8 bits each.

        Returns None if the world was given up meanwhile.
        """
        self._turn += 1
        expected, at = (self._generation & 0xffffff) << 32 | self._turn, _TURN + self._turn % 2 * 8
        self._own[at] = expected << 8 | flags
        waiting, looks, since = self._pages, 0, 0.0
        while True:
            late = []
            for page in waiting:
                word = page[at]
                if word >> 8 == expected:
                    flags |= word & 0xff
                else:
                    late.append(page)
            if not late:
                return flags
            if self._own[_CUT] >= self._generation or any(page[_CUT] >= self._generation for page in late):
                return None
            waiting, looks = late, looks + 1
            if looks < _YIELDS:
                os.sched_yield()
                continue
            since = since or time.monotonic()
            if time.monotonic() - since > self._timeout:
                return None
            time.sleep(_SLEEP)

    def cut(self):
        """Ends the waits of all other ranks for this rank."""
        self._own[_CUT] = self._generation


def _page(pid, fd, token):
    """Returns the page of another process; None: it cannot be found, for example because the process is on another host or in a container."""
    path = f"/proc/{pid}/fd/{fd}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            page = memoryview(mmap.mmap(file, mmap.PAGESIZE, prot=mmap.PROT_READ)).cast("Q")
        finally:
            os.close(file)
    except (OSError, ValueError):
        return None
    return page if page[_TOKEN] == token else None
