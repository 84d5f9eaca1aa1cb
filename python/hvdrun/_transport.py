"""Connects the ranks of a world by gloo, NCCL or the backend hvdrun, for class Job."""
import inspect
import os
import sys
import threading

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hvdrun._agree import Pages
from hvdrun._cut import Connections, shut, sockets


class Broken(RuntimeError):
    """The world cannot continue."""


class Transport:
    """The connections of one worker in one world after the other. Any thread may call cut; only the main thread calls the other methods.

    The calls for a world are handle, leave (for the last world), prepare, connect and enter, and cut if the world breaks. connect may
    run in a thread that is abandoned when a rank is lost: it changes nothing that a later connect needs. A collective that follows may
    run in such a thread too.
    """

    # The addresses of the data listener, if the backend has one.
    addresses = ()
    # The device of the numbers that ranks exchange.
    device = torch.device("cpu")
    # Whether an operation that is cut ends without an error and with an undefined result.
    silent = False

    def handle(self):
        """Returns a text that is sent to all ranks of the next world."""
        return ""

    def widen(self):
        """Also listens at the addresses of other interfaces, because workers on other hosts take part."""

    def leave(self):
        """Drops the process group of the last world, if there is one."""

    def prepare(self, world):
        """Prepares for a world. It is called before connect."""

    def connect(self, world):
        """Connects the ranks of the world, and returns what enter needs. It blocks until all are connected. RuntimeError: a rank is lost."""

    def enter(self, world, connected):
        """Makes the world the default process group of torch."""

    def settle(self):
        """Marks the world as complete: later connections belong to the program."""

    def address(self):
        """Returns numbers that are sent to all ranks of the world, for meet."""
        return 0, 0, 0

    def meet(self, generation, addresses):
        """Takes the numbers of address of all ranks of the world, by rank."""

    def agree(self, numbers, generation, size, bits):
        """Returns the sums of the ranks' numbers: collective. If the numbers are bits, any positive number may replace a positive sum.

        It raises if some rank has not called it, or its numbers have not arrived.
        """
        # An aborted operation of NCCL ends without an error and with an undefined result, which the sum of a known number reveals.
        number = (generation + 1) * 0x9E3779B1 % (1 << 40)
        sums = torch.tensor([*numbers, number], dtype=torch.int64, device=self.device)
        dist.all_reduce(sums)
        *sums, total = sums.tolist()
        if total != size * number:
            raise Broken(f"hvdrun: not all ranks of world {generation} have reached the agreement")
        return sums

    def finish(self):
        """Blocks until the program's operations in the world have ended, including those on a device."""

    def cut(self, told=False):
        """Ends all waits in the world, with errors if the backend raises them. told: all ranks do this, because hvdrun says so."""

    def abandon(self):
        """Drops what a call uses that has not ended after a cut, and may never end."""


def own_gpu():
    """Makes the worker's GPU the current device, and returns it. With --bind-gpus each worker sees only the GPU of its slot."""
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def open_store(where, timeout):
    """Returns a client of the store. A torch without libuv requests libuv by default and fails; the second try does without it."""
    host, port = where["host"], where["port"]
    try:
        return dist.TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as err:
        if "libuv" not in str(err):
            raise
        return dist.TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False, use_libuv=False)


def initialize(**arguments):
    """Calls init_process_group, which wraps sys.excepthook, after it has removed the wrapper that destroy_process_group leaves."""
    hook = sys.excepthook
    sys.excepthook = getattr(hook, "hvdrun_before", hook)
    before = sys.excepthook
    dist.init_process_group(**arguments)
    if sys.excepthook is not before:
        sys.excepthook.hvdrun_before = before


def destroy(*groups):
    """Calls destroy_process_group for the groups, or for all."""
    kept = _backends()
    for group in groups or [None]:
        dist.destroy_process_group(group)
    # ProcessGroup's destructor waits for gloo's threads and holds the GIL, which such a thread may need to release a tensor: with
    # torch 2.6 this is a deadlock. The destructor of a backend releases the GIL.
    kept.clear()


def _backends():
    """Returns the backends of all groups for CPU tensors, as far as torch gives access to them (2.0 and newer)."""
    kept = []
    for group in getattr(getattr(c10d, "_world", None), "pg_map", ()):
        try:
            kept.append(group._get_backend(torch.device("cpu")))
        except (AttributeError, RuntimeError):
            pass  # a group without such a backend
    return kept


def groups_made():
    """Returns a value that changes when the program creates a process group."""
    names = getattr(c10d, "_world", None)
    return (names.group_count, len(names.pg_map)) if names is not None else (c10d._group_count, len(c10d._pg_map))


class Meeting:
    """The store in which ranks meet, and a connection to it, which is kept for later worlds because connecting takes 10 ms."""

    def __init__(self, where, timeout):
        self._where, self._timeout = where, timeout
        self._lock = threading.Lock()
        self._store = None
        self._turn = 0  # grows with each world and each cut
        self.sockets = set()
        self.forming = False
        self._made = None

    def prepare(self, where):
        """Begins a world whose store is at this address."""
        self.forming = True
        with self._lock:
            self._turn += 1
            if where and where != self._where:
                self._where, self._store = where, None

    def open(self):
        """Returns the connected store. It may run in a thread that is abandoned, and raises if the next world has begun when it ends."""
        with self._lock:
            store, turn, where = self._store, self._turn, self._where
        if store is None:
            before = sockets()
            store = open_store(where, self._timeout) if where else dist.HashStore()
            with self._lock:
                # A wait in a store blocks all its other uses, so a later world must not get the store of an abandoned call.
                if turn != self._turn:
                    raise Broken("hvdrun: the world was given up before this rank had reached the store")
                self._store, self.sockets = store, sockets() - before
        return store

    def made(self):
        """Marks the process groups of the world as complete: later ones belong to the program."""
        self._made = groups_made()

    def settle(self):
        """Marks the world as complete: all ranks have met."""
        self.forming = False

    @property
    def waited_at(self):
        """Whether this rank may be waiting in the store for a lost rank."""
        return self.forming or groups_made() != self._made

    def cut(self):
        """Ends the waits in the store for a lost rank."""
        with self._lock:
            self._turn += 1
            self._store = None
            found = self.sockets
        for fd, inode in found:
            shut(fd, inode)


class Anew(Transport):
    """Creates a new process group in each world, with any version of torch. Ranks meet in the store, under the generation."""

    def __init__(self, backend, store, timeout):
        self._backend, self._timeout = backend, timeout
        self._meeting = Meeting(store, timeout)
        self._connections = Connections()
        self._connections.settle()
        self._pages = self._found = self._near = None
        if "nccl" in backend:
            self.device, self.silent = own_gpu(), True
        elif hasattr(os, "memfd_create"):
            self._pages = Pages(timeout.total_seconds())

    def leave(self):
        self._connections.cut()
        self._destroy()
        self._meeting.made()

    def _destroy(self):
        if dist.is_initialized():
            destroy()

    def prepare(self, world):
        self._meeting.prepare(world.get("store"))
        self._connections.release()
        self._connections = Connections()

    def connect(self, world):
        store = dist.PrefixStore(f"g{world['generation']}", self._meeting.open())
        self._connections.leave_out(self._meeting.sockets)
        gloo = None
        if self._backend == "gloo":
            gloo = c10d.ProcessGroupGloo(dist.PrefixStore("gloo", store), world["rank"], world["size"], timeout=self._timeout)
        # They are returned, not stored, so that an abandoned connect that ends late does not affect a later one.
        return store, gloo

    def enter(self, world, connected):
        store, gloo = connected
        made = c10d.ProcessGroupGloo if gloo is not None else None
        if made is not None:
            # init_process_group would create the group, and connect, again.
            c10d.ProcessGroupGloo = _ready(made, gloo)
        try:
            initialize(backend=self._backend, store=store, rank=world["rank"], world_size=world["size"], timeout=self._timeout)
        finally:
            if made is not None:
                c10d.ProcessGroupGloo = made
        self._meeting.made()

    def settle(self):
        self._connections.settle()
        self._meeting.settle()

    def address(self):
        return self._pages.address() if self._pages else super().address()

    def meet(self, generation, addresses):
        self._found, self._near = self._pages is not None and self._pages.open(generation, addresses), False

    def agree(self, numbers, generation, size, bits):
        if not self._near or not bits:
            *sums, found = super().agree([*numbers, self._found], generation, size, bits)
            self._near = found == size  # all ranks agree by their pages from the next time on
            return sums
        flags = self._pages.agree(sum(bit << i for i, bit in enumerate(numbers)))
        if flags is None:
            raise Broken(f"hvdrun: not all ranks of world {generation} have reached the agreement")
        return [flags >> i & 1 for i in range(len(numbers))]

    def finish(self):
        if self.silent:
            torch.cuda.current_stream(self.device).synchronize()

    def _may_wait(self):
        return self._meeting.waited_at

    def cut(self, told=False):
        if self._pages:
            self._pages.cut()
        if self.silent:
            _abort(self.device)
        if self._may_wait():
            self._meeting.cut()
        if told and self._backend == "gloo":
            self._connections.hold()
        else:
            self._connections.cut()


def _abort(device):
    """Aborts the operations of NCCL, which do not wait on sockets."""
    try:
        group = c10d._get_default_group()
        backend = group._get_backend(device) if hasattr(group, "_get_backend") else group
        (getattr(backend, "abort", None) or backend._abort)()
    except (RuntimeError, ValueError, AttributeError):
        pass  # there is no group, or it cannot be aborted: its timeout ends the waits


class Reconfigured(Anew):
    """Reconnects one process group in each world: torch 2.14 and newer, with gloo."""

    @staticmethod
    def possible():
        return "enable_reconfigure" in inspect.signature(dist.init_process_group).parameters and hasattr(dist, "_reconfigure")

    def __init__(self, backend, store, timeout):
        super().__init__(backend, store, timeout)
        self._fit = False  # there is a group whose store can be reached

    def handle(self):
        if not self._fit:
            super().leave()
            self._connections.settle()  # sockets opened from here on do not belong to the last world
            try:
                store = self._meeting.open()
            except (RuntimeError, OSError):
                return ""  # the store was that of an earlier driver: the next world has the new address
            # The handle contains this number until the first world, so it must differ from that of any other member. It is small,
            # because torch makes a list of all ranks.
            number = store.add("hvdrun/members", 1)
            initialize(backend=self._backend, store=dist.PrefixStore("hvdrun/reconfigure", store), rank=number,
                       world_size=number + 1, timeout=self._timeout, enable_reconfigure=True)
            sys.excepthook = getattr(sys.excepthook, "hvdrun_before", sys.excepthook)  # torch's hook would print that number as the rank
            self._fit = True
        return dist._get_reconfigure_handle()

    def leave(self):
        self._connections.cut()
        if dist.is_initialized():
            own = [g for g in c10d._world.pg_map if g is not c10d._get_default_group()]
            if own:
                destroy(*own)  # the program creates them again

    def connect(self, world):
        if "" in world["handles"]:
            return super().connect(world)
        try:
            dist._reconfigure(world["generation"], world["handles"], timeout=self._timeout).wait()
        except RuntimeError:
            self._fit = False  # the store may be that of an earlier driver
            self._meeting.cut()
            raise

    def enter(self, world, connected):
        if connected is not None:
            self._destroy()
            super().enter(world, connected)
            self._fit = False
            return
        # The program's further groups meet in the store by their numbers, which must be the same on all ranks.
        c10d._world.group_count = world["generation"] << 20
        # Functions that translate ranks, such as broadcast with src, use these tables.
        c10d._world.pg_group_ranks[c10d._get_default_group()] = {rank: rank for rank in range(world["size"])}

    def _may_wait(self):
        return self._meeting.forming

    def cut(self, told=False):
        if self._may_wait():
            self._fit = False  # its store is cut
        super().cut(told)

    def abandon(self):
        self._fit = False


def _ready(kind, group):
    """Returns a stand-in for a class. Calling it returns the group."""

    class Stands(type):
        def __call__(cls, *args, **kwargs):
            return group

        def __instancecheck__(cls, instance):
            return isinstance(instance, kind)

        def __subclasscheck__(cls, subclass):
            return issubclass(subclass, kind)

    return Stands(kind.__name__, (), {})
