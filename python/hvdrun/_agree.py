"""How the ranks of one host agree: by a page of memory each, which the others read.

An all-reduce of a few numbers by gloo wakes threads of all ranks several times. Where four ranks have two processors, that takes longer
than the step of a small model.
"""
import mmap
import os
import secrets
import time

_NAME = "hvdrun-agree"
_MOST = 64  # ranks: each maps the pages of all others
_YIELDS = 100  # looks that give the processor away, before the first that sleeps
_SLEEP = 0.0002  # seconds
# Numbers of a page.
_TOKEN, _CUT, _TURN = 0, 8, 16  # _TURN: two of them, 8 apart, each in a cache line of its own; a rank is at most one turn ahead


class Pages:
    """The pages of the ranks of a world. cut is called by any thread, the others by the main thread.

    A rank writes its own page alone: the number of the turn to which it has come, with its flags, in one word.
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
        """Numbers by which another process of this user and host finds the page."""
        return os.getpid(), self._fd, self._own[_TOKEN]

    def open(self, generation, addresses):
        """Finds the pages of the ranks of a world. Returns whether all were found: they may be on other hosts."""
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
        """Blocks until all ranks have come to this turn, and returns the flags of all, by or; None: the world was given up meanwhile.

        flags are 8 bits.
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
        """Ends the waits of all ranks for this one."""
        self._own[_CUT] = self._generation


def _page(pid, fd, token):
    """The page of another process; None: it cannot be found, as that of another host, or of a container."""
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
