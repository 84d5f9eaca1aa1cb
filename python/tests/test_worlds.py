"""Reconfigures one process group for successive worlds by torch's functions, with gloo and with the backend hvdrun. It needs HVD_LIBRARY."""
import os
import signal
import unittest
from datetime import timedelta

import torch
import torch.distributed as dist

from test_backend import lib, ranks

ErrorType = getattr(torch._C._distributed_c10d, "ErrorType", None)
TIMEOUT = timedelta(minutes=10)
ALL = [0, 1, 2]


class Member:
    """A process that enters worlds. place is its number among the processes, which find each other by the store."""

    def __init__(self, backend, place, store):
        self.place, self.store = place, store
        # Before the first world the rank is a number that no other process has, as in hvdrun.torch.
        dist.init_process_group(backend, store=store, rank=place, world_size=place + 1, timeout=TIMEOUT, enable_reconfigure=True)
        assert dist._supports_reconfigure()

    def enter(self, world, places):
        """Enters the world with this number, whose ranks are the processes at the given places, in that order."""
        self.store.set(f"handles/{world}/{self.place}", dist._get_reconfigure_handle())
        handles = [self.store.get(f"handles/{world}/{p}").decode() for p in places]
        dist._reconfigure(world, handles, timeout=TIMEOUT).wait()
        assert (dist.get_rank(), dist.get_world_size()) == (places.index(self.place), len(places))

    def total(self):
        """Checks a sum over all ranks of the world."""
        size = dist.get_world_size()
        t = torch.full((1000,), float(dist.get_rank() + 1))
        dist.all_reduce(t)
        assert torch.equal(t, torch.full((1000,), size * (size + 1) / 2)), t

    def until_all(self, name):
        """Waits until all processes have called it, in whatever world they are."""
        self.store.set(f"{name}/{self.place}", "")
        self.store.wait([f"{name}/{p}" for p in ALL], TIMEOUT)


class Worlds:
    """The cases of torch's own tests, and a death."""

    def members(self, body, size=3, killed=()):
        ranks(size, lambda place, store: body(Member(self.backend, place, store)), killed)

    def test_basic(self):
        self.members(lambda m: m.enter(1, ALL))

    def test_all_reduce(self):
        self.members(lambda m: (m.enter(1, ALL), m.total()))

    def test_send_recv(self):
        def body(m):
            m.enter(1, ALL)
            got = torch.zeros(4)
            works = [dist.isend(torch.full((4,), m.place + 1.0), (m.place + 1) % 3), dist.irecv(got, (m.place + 2) % 3)]
            for work in works:
                work.wait()
            assert torch.equal(got, torch.full((4,), (m.place + 2) % 3 + 1.0)), got
            m.until_all("received")
        self.members(body)

    def shrink(self, without):
        def body(m):
            m.enter(1, ALL)
            if m.place != without:
                m.enter(2, [p for p in ALL if p != without])
                m.total()
                t = torch.full((4,), 42.0 if dist.get_rank() == 0 else 0.0)
                dist.broadcast(t, group_src=0)
                assert torch.equal(t, torch.full((4,), 42.0)), t
            m.until_all("shrunk")
        self.members(body)

    def test_shrink_last(self):
        self.shrink(2)

    def test_shrink_middle(self):
        self.shrink(1)

    def test_shrink_first(self):
        self.shrink(0)

    def test_down_up(self):
        def body(m):
            m.enter(10 + m.place, [m.place])
            m.enter(1, ALL)
            m.total()
            m.enter(20 + m.place, [m.place])
            m.total()
            m.until_all("alone")
        self.members(body)

    def test_single_to_all(self):
        self.members(lambda m: (m.enter(10 + m.place, [m.place]), m.enter(1, ALL), m.total()))

    def test_identity(self):
        self.members(lambda m: (m.enter(1, ALL), m.enter(2, ALL), m.total()))

    def test_late_join(self):
        def body(m):
            if m.place == 0:
                m.enter(1, [0])
                m.total()
            m.enter(2, ALL)
            m.total()
        self.members(body)

    def test_merge_split(self):
        def body(m):
            m.enter(*((1, [0]) if m.place == 0 else (2, [1, 2])))
            m.total()
            m.enter(3, ALL)
            m.total()
            m.enter(*((5, [2]) if m.place == 2 else (4, [1, 0])))
            m.total()
            m.until_all("split")
        self.members(body)

    def test_after_abort(self):
        def body(m):
            m.enter(1, ALL)
            m.until_all("before")  # because an abort would end an operation in which others still wait
            backend = dist.get_backend_impl(dist.group.WORLD, torch.device("cpu"))
            backend.abort()
            assert backend.supports_reconfigure and backend.get_error() == ErrorType.SUCCESS  # no call has failed
            m.enter(2, ALL)
            m.total()
        self.members(body)

    def test_reused_number(self):
        def body(m):
            m.enter(10 + m.place, [m.place])
            with self.assertRaisesRegex(RuntimeError, "was (already )?used"):
                dist._reconfigure(10 + m.place, [dist._get_reconfigure_handle()], timeout=TIMEOUT)
            m.enter(1, ALL)
            m.total()
        self.members(body)

    def test_death(self):
        """After a death the world shrinks and has another order. Then a newcomer joins."""
        def body(m):
            if m.place == 3:
                m.store.get("handles/3/0")
                m.enter(3, [0, 2, 3])
                m.total()
                return
            m.enter(1, ALL)
            m.total()
            if m.place == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            self.broken(m)
            m.enter(2, [2, 0])
            m.total()
            m.enter(3, [0, 2, 3])
            m.total()
        self.members(body, size=4, killed={1})


@unittest.skipUnless(hasattr(dist, "_reconfigure"), "this torch has no _reconfigure")
class Gloo(Worlds, unittest.TestCase):
    backend = "gloo"

    def broken(self, m):
        """Does nothing: with gloo, a rank that has kept its connections would wait until the timeout."""


@unittest.skipUnless(hasattr(dist, "_reconfigure"), "this torch has no _reconfigure")
class Hvdrun(Worlds, unittest.TestCase):
    backend = "hvdrun"

    def broken(self, m):
        with self.assertRaises(lib.Aborted):
            m.total()
        assert dist.group.WORLD.get_error() == ErrorType.COMM_ERROR

    def test_handles(self):
        def body(m):
            with self.assertRaisesRegex(RuntimeError, "no world yet"):
                dist.barrier()
            with self.assertRaisesRegex(RuntimeError, "include that of this process"):
                dist._reconfigure(99, ["hvdrun:{}"])
            m.enter(1, ALL)
        self.members(body)


if __name__ == "__main__":
    unittest.main(verbosity=2)
