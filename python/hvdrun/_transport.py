"""How the ranks of a world are connected: what a Job asks of gloo, NCCL or a backend of hvdrun."""
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
    """The connections of one worker, world after world. cut is called by any thread, the others by the main thread.

    In a world's life: handle, leave (of the world before), connect, enter, and cut if it breaks. connect may run in a thread that is
    abandoned when a rank is lost meanwhile: it changes nothing that another connect needs. So may a collective that follows.
    """

    # The addresses of the data listener, for a backend that has one.
    addresses = ()
    # Where the ranks exchange numbers.
    device = torch.device("cpu")
    # Whether an operation that is cut ends without an error, and with any result.
    silent = False

    def handle(self):
        """A text that all ranks of the next world are given."""
        return ""

    def widen(self):
        """Listens at the addresses of other interfaces too: workers on other hosts come."""

    def leave(self):
        """Drops the process group of the last world, if there is one."""

    def prepare(self, world):
        """Begins a world, before connect."""

    def connect(self, world):
        """Connects the ranks of the world, and returns what enter needs. Blocks until all are there; RuntimeError: one is lost."""

    def enter(self, world, connected):
        """Makes the world the default process group."""

    def settle(self):
        """The world is complete: connections that appear from here on are the program's own."""

    def address(self):
        """Numbers that all ranks of the world are told, for meet."""
        return 0, 0, 0

    def meet(self, generation, addresses):
        """The ranks of the world have these addresses, in the order of ranks."""

    def agree(self, numbers, generation, size, bits):
        """The sums of the ranks' numbers; where they are bits, any number above 0 may stand for a sum that is: collective.

        It raises if not all ranks have come, or what they have sent has not arrived.
        """
        # An operation of NCCL that is aborted ends without an error, and its result is anything: a number of the world tells.
        number = (generation + 1) * 0x9E3779B1 % (1 << 40)
        sums = torch.tensor([*numbers, number], dtype=torch.int64, device=self.device)
        dist.all_reduce(sums)
        *sums, total = sums.tolist()
        if total != size * number:
            raise Broken(f"hvdrun: not all ranks of world {generation} have come to an agreement")
        return sums

    def finish(self):
        """Blocks until the operations of the world that the program has begun have ended, also those of a device."""

    def cut(self, told=False):
        """Ends all waits of the world, with errors where the backend has them. told: hvdrun has all ranks do that."""

    def abandon(self):
        """A call for the ranks of the world has not ended after a cut, and may never do."""


def own_gpu():
    """Makes the worker's GPU the current one, and returns it. With --bind-gpus each worker sees that of its slot alone."""
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def open_store(where, timeout):
    """A client of the store. Torch that is built without libuv asks for it all the same."""
    host, port = where["host"], where["port"]
    try:
        return dist.TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as err:
        if "libuv" not in str(err):
            raise
        return dist.TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False, use_libuv=False)


def initialize(**arguments):
    """init_process_group, which adds to sys.excepthook, and destroy_process_group leaves that there: it is once what it was."""
    hook = sys.excepthook
    sys.excepthook = getattr(hook, "hvdrun_before", hook)
    before = sys.excepthook
    dist.init_process_group(**arguments)
    if sys.excepthook is not before:
        sys.excepthook.hvdrun_before = before


def destroy(*groups):
    """destroy_process_group of the groups, or of all."""
    kept = _backends()
    for group in groups or [None]:
        dist.destroy_process_group(group)
    # ProcessGroup's destructor waits for gloo's threads, and keeps the interpreter, which such a thread may need to let go of a
    # tensor: torch 2.6 then waits for ever. That of a backend gives the interpreter away.
    kept.clear()


def _backends():
    """The backends of all groups for tensors of CPUs, where torch tells them: from 2.0 on."""
    kept = []
    for group in getattr(getattr(c10d, "_world", None), "pg_map", ()):
        try:
            kept.append(group._get_backend(torch.device("cpu")))
        except (AttributeError, RuntimeError):
            pass  # it has none
    return kept


def groups_made():
    """What changes when the program makes a process group."""
    names = getattr(c10d, "_world", None)
    return (names.group_count, len(names.pg_map)) if names is not None else (c10d._group_count, len(c10d._pg_map))


class Meeting:
    """The store where ranks meet, and one connection to it, world after world: to make one takes 10 ms."""

    def __init__(self, where, timeout):
        self._where, self._timeout = where, timeout
        self._lock = threading.Lock()
        self._store = None
        self._turn = 0  # grows with each world and each cut
        self.sockets = set()
        self.forming = False
        self._made = None

    def prepare(self, where):
        """A world begins, whose store is there."""
        self.forming = True
        with self._lock:
            self._turn += 1
            if where and where != self._where:
                self._where, self._store = where, None

    def open(self):
        """The store, connected. It may be called in a thread that is abandoned, and raises if it ends in a later world."""
        with self._lock:
            store, turn, where = self._store, self._turn, self._where
        if store is None:
            before = sockets()
            store = open_store(where, self._timeout) if where else dist.HashStore()
            with self._lock:
                # Who waits in a store keeps all others from using it.
                if turn != self._turn:
                    raise Broken("hvdrun: the world was given up before this rank had reached the store")
                self._store, self.sockets = store, sockets() - before
        return store

    def made(self):
        """The process groups are those of the world; those that are made from here on are the program's own."""
        self._made = groups_made()

    def settle(self):
        """All ranks of the world have met."""
        self.forming = False

    @property
    def waited_at(self):
        """Whether this rank may wait there for a rank that is lost."""
        return self.forming or groups_made() != self._made

    def cut(self):
        """Ends what waits there for a rank that is lost."""
        with self._lock:
            self._turn += 1
            self._store = None
            found = self.sockets
        for fd, inode in found:
            shut(fd, inode)


class Anew(Transport):
    """A new process group in each world, which any torch can do. Ranks meet in the store, under the generation."""

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
        # In one step: an abandoned connect that ends late does not change what a later one has made.
        return store, gloo

    def enter(self, world, connected):
        store, gloo = connected
        made = c10d.ProcessGroupGloo if gloo is not None else None
        if made is not None:
            # init_process_group makes the group, and would connect once more.
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
            self._near = found == size  # from here on all ranks agree by their pages
            return sums
        flags = self._pages.agree(sum(bit << i for i, bit in enumerate(numbers)))
        if flags is None:
            raise Broken(f"hvdrun: not all ranks of world {generation} have come to an agreement")
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
    """Ends the operations of NCCL, whose waits are not on sockets."""
    try:
        group = c10d._get_default_group()
        backend = group._get_backend(device) if hasattr(group, "_get_backend") else group
        (getattr(backend, "abort", None) or backend._abort)()
    except (RuntimeError, ValueError, AttributeError):
        pass  # there is no group, or one that cannot be aborted: its timeout ends its waits


class Reconfigured(Anew):
    """One process group that is connected anew in each world: torch 2.14 and newer, with gloo."""

    @staticmethod
    def possible():
        return "enable_reconfigure" in inspect.signature(dist.init_process_group).parameters and hasattr(dist, "_reconfigure")

    def __init__(self, backend, store, timeout):
        super().__init__(backend, store, timeout)
        self._fit = False  # there is a group, and its store can be reached

    def handle(self):
        if not self._fit:
            super().leave()
            self._connections.settle()  # what is opened from here on is not of the world that is left
            try:
                store = self._meeting.open()
            except (RuntimeError, OSError):
                return ""  # the store was that of another driver: the next world tells the new one
            # The handle has this number until the first world, and must be unlike that of any other member. It is small, because
            # Python makes a list of all ranks.
            number = store.add("hvdrun/members", 1)
            initialize(backend=self._backend, store=dist.PrefixStore("hvdrun/reconfigure", store), rank=number,
                       world_size=number + 1, timeout=self._timeout, enable_reconfigure=True)
            sys.excepthook = getattr(sys.excepthook, "hvdrun_before", sys.excepthook)  # it would tell that number as the rank
            self._fit = True
        return dist._get_reconfigure_handle()

    def leave(self):
        self._connections.cut()
        if dist.is_initialized():
            own = [g for g in c10d._world.pg_map if g is not c10d._get_default_group()]
            if own:
                destroy(*own)  # the program makes them anew

    def connect(self, world):
        if "" in world["handles"]:
            return super().connect(world)
        try:
            dist._reconfigure(world["generation"], world["handles"], timeout=self._timeout).wait()
        except RuntimeError:
            self._fit = False  # the store may be that of another driver
            self._meeting.cut()
            raise

    def enter(self, world, connected):
        if connected is not None:
            self._destroy()
            super().enter(world, connected)
            self._fit = False
            return
        # Groups that the program makes besides meet in the store by their numbers, which are the same on all ranks.
        c10d._world.group_count = world["generation"] << 20
        # Whoever translates ranks, as broadcast does with src, asks the tables of Python.
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
    """What stands for a class, and whose call returns the group."""

    class Stands(type):
        def __call__(cls, *args, **kwargs):
            return group

        def __instancecheck__(cls, instance):
            return isinstance(instance, kind)

        def __subclasscheck__(cls, subclass):
            return issubclass(subclass, kind)

    return Stands(kind.__name__, (), {})
