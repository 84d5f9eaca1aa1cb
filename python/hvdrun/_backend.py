"""The backend hvdrun of torch.distributed: hvdrun's collectives on CPU tensors, without copies.

    torch.distributed.init_process_group("hvdrun")

Torch finds it by the entry point of the wheel, or after register(). Ranks meet in torch's store, or in the worlds of hvdrun's
driver (Transport, for hvdrun.torch). A collective that blocks runs on the calling thread. The others run in the background, in
order; Python threads only complete their futures.
"""
import ctypes
import hashlib
import json
import os
import queue
import re
import secrets
import socket
import threading
from collections import defaultdict, deque
from datetime import timedelta

import torch
import torch.distributed as dist

from hvdrun import _library as lib
from hvdrun import _transport

NAME = "hvdrun"

_TYPES = {
    torch.float32: lib.FLOAT32, torch.float64: lib.FLOAT64, torch.float16: lib.FLOAT16, torch.bfloat16: lib.BFLOAT16,
    torch.int8: lib.INT8, torch.int16: lib.INT16, torch.int32: lib.INT32, torch.int64: lib.INT64, torch.uint8: lib.UINT8,
}
for _name, _kind in (("uint16", lib.UINT16), ("uint32", lib.UINT32), ("uint64", lib.UINT64)):
    if hasattr(torch, _name):
        _TYPES[getattr(torch, _name)] = _kind


def _reductions():
    """Returns the library's number of each reduction, or a function that computes it, by the hash of torch's ReduceOp (torch's number)."""
    numbers = {}
    for name, number in (("SUM", lib.SUM), ("AVG", lib.AVERAGE), ("MIN", lib.MIN), ("MAX", lib.MAX), ("PRODUCT", lib.PRODUCT),
                         ("BAND", torch.bitwise_and), ("BOR", torch.bitwise_or), ("BXOR", torch.bitwise_xor)):
        if hasattr(dist.ReduceOp, name):
            options = dist.AllreduceOptions()
            options.reduceOp = getattr(dist.ReduceOp, name)
            numbers[hash(options.reduceOp)] = number
    return numbers


_REDUCTIONS = _reductions()
# The reductions of logical values, which are bytes 0 and 1.
_OF_BOOL = {lib.SUM: lib.MAX, lib.MAX: lib.MAX, lib.PRODUCT: lib.MIN, lib.MIN: lib.MIN}
_POLL_KEPT = 64
# Before 2.7, torch's C++ code does not keep a work's Python object, without which Work.wait of C++ never returns. So the group keeps
# the newest works until the program has waited for them.
_HOLDS_WORKS = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2]) < (2, 7)
_HELD = 256
# Whether torch.distributed accepts None as the work of a blocking operation: its options then have asyncOp.
_NO_WORK = hasattr(getattr(dist, "AllreduceOptions", None), "asyncOp")


class Work(dist.Work):
    """A started collective."""

    def __init__(self, process_group, group, ticket, outputs, finish):
        super().__init__()
        self._process_group, self._group, self._ticket = process_group, group, ticket
        self._outputs, self._finish = outputs, finish
        self._finishing = threading.Lock()
        self._error = None
        self._future = None
        self._taken = False
        if _HOLDS_WORKS:
            process_group._hold(self)

    def _end(self, seconds=None):
        """Waits for the collective and copies the result to its place. Returns False if that takes longer than these seconds."""
        try:
            if self._group is not None and not self._group.wait(self._ticket, seconds):
                return False
        except lib.Error as err:
            self._error = err
            self._taken = True
            raise
        self._taken = True
        with self._finishing:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()
        return True

    def wait(self, timeout=None):
        seconds = timeout.total_seconds() if timeout is not None else 0
        if not self._end(seconds if seconds > 0 else None):
            raise lib.Error(f"the collective has not ended after {seconds} seconds", lib.TIMEOUT)
        return True

    synchronize = wait

    def is_completed(self):
        try:
            return self._end(0)
        except lib.Error:
            return True

    def is_success(self):
        return self.is_completed() and self._error is None

    def exception(self):
        return self._error

    def result(self):
        return self._outputs

    def source_rank(self):
        return self._process_group.rank()

    def get_future(self):
        if self._future is None:
            self._ended = torch.futures.Future()
            # Callers in C++, such as DDP's, see an exception of a callback as an error of the future, and one of set_exception as a
            # value.
            self._future = self._ended.then(lambda _: self._end() and self._outputs)
            if self._group is None:
                self._ended.set_result(None)
            else:
                self._process_group._complete(self)
        return self._future


class _Completer:
    """A thread that completes the futures of works in order."""

    def __init__(self):
        self._works = queue.SimpleQueue()
        threading.Thread(target=self._run, name="hvdrun futures", daemon=True).start()

    def add(self, work):
        self._works.put(work)

    def _run(self):
        while True:
            work = self._works.get()
            if work is None:
                return
            try:
                work._group.wait(work._ticket)
            except lib.Error:
                pass  # the callback raises it too
            work._ended.set_result(None)
            del work


def _options():
    """Returns the options of an endpoint from variables that hvdrun or the user has set."""
    options = {"run": "torch"}
    if os.environ.get("HVD_ENCRYPT_DATA") == "1":
        raise lib.Error("the backend hvdrun does not encrypt tensors: use gloo, or omit --encrypt-data")
    if os.environ.get("HVD_NETWORK_INTERFACES"):
        options["interfaces"] = os.environ["HVD_NETWORK_INTERFACES"].split(",")
    if os.environ.get("HVD_LISTEN"):
        options["listen"] = os.environ["HVD_LISTEN"] + ":0"
    if os.environ.get("HVD_PORT_RANGE"):
        options["ports"] = os.environ["HVD_PORT_RANGE"]
    if os.environ.get("HVD_ONLY_SOCKETS") == "1":
        options["only_sockets"] = True
    if os.environ.get("HVD_COLLECTIVE_ALGORITHM"):
        options["algorithm"] = os.environ["HVD_COLLECTIVE_ALGORITHM"]
    if os.environ.get("HVD_CONNECTIONS"):
        options["connections"] = int(os.environ["HVD_CONNECTIONS"])
    return options


def _host():
    """Returns the name of this machine among the members of a world. Ranks with the same name share memory."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            return socket.gethostname() + " " + f.read().strip()
    except OSError:
        return socket.gethostname()


def _alone_on_host(size):
    """Reports whether all ranks are on this machine, according to torchrun's variables."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    if local and os.environ.get("WORLD_SIZE"):
        return local == os.environ["WORLD_SIZE"]
    return size == 1 or os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1")


def _listen(size):
    options = _options()
    if _alone_on_host(size):
        options.setdefault("listen", "127.0.0.1:0")
    return lib.Endpoint(**options)


def _meet(store, rank, size):
    """Exchanges the ranks' addresses through the store. Returns this rank's endpoint and the world."""
    endpoint = _listen(size)
    store.set(f"member/{rank}", json.dumps({"host": _host(), "addresses": endpoint.addresses}))
    if rank == 0:
        members = [json.loads(store.get(f"member/{r}")) for r in range(size)]
        store.set("world", json.dumps({"generation": 1, "members": members, "data_key": secrets.token_hex(32)}))
    world = json.loads(store.get("world"))
    world["rank"] = rank
    return endpoint, world


class ProcessGroup(dist.ProcessGroup):
    """A group of ranks. It begins without a world, and enters one world after the other."""

    supports_reconfigure = True
    supports_splitting = False
    supports_coalescing = False

    def __init__(self, rank, size, timeout, store=None):
        super().__init__(rank, size)
        self._rank, self._size, self._timeout, self._store = rank, size, timeout, store
        self._group = self._endpoint = None
        self._kept = defaultdict(deque)  # objects that hold the memory of calls in flight, by operation and rank
        self._held = []  # works, for torch before 2.7
        self._completer = None
        self._generation = 0
        self._used = set()  # ids of worlds that were used
        self._name = self._description = ""

    # Worlds.

    def enter(self, group, generation=0):
        """Leaves the current world and enters that of the group."""
        self._drop()
        group.limit(self._timeout.total_seconds())
        self._group, self._rank, self._size, self._generation = group, group.rank, group.size, generation

    def meet(self):
        """Enters a world with the ranks that share the store."""
        self._endpoint, world = _meet(self._store, self._rank, self._size)
        self.enter(self._endpoint.connect(world, self._timeout.total_seconds()), world["generation"])

    def _drop(self):
        if self._group is not None:
            self._group.close()
            self._group = None
            self._kept.clear()

    def get_reconfigure_handle(self):
        """Returns a text from which the other ranks of the next world learn this rank's addresses."""
        if self._endpoint is None:
            self._endpoint = _listen(0)
        return "hvdrun:" + json.dumps({"host": _host(), "addresses": self._endpoint.addresses, "after": self._generation})

    def reconfigure(self, options):
        """Connects to the ranks of the handles, in their order, or in sorted order if the handles are a set."""
        handles = list(options.handles) if isinstance(options.handles, (list, tuple)) else sorted(options.handles)
        own = self.get_reconfigure_handle()
        if handles.count(own) != 1 or len(set(handles)) != len(handles):
            raise lib.Error("the handles of a world must differ and include that of this process")
        if options.uuid in self._used:
            raise lib.Error(f"the number {options.uuid} was used for an earlier world")
        members = [json.loads(h.partition(":")[2]) for h in handles]
        timeout = options.timeout if options.timeout and options.timeout > timedelta() else self._timeout
        world = {
            "generation": 1 + max(m["after"] for m in members),
            "rank": handles.index(own),
            "members": members,
            "data_key": hashlib.sha256("\n".join([self._secret(), str(options.uuid), *handles]).encode()).hexdigest(),
        }
        self._drop()
        group = self._endpoint.connect(world, timeout.total_seconds())
        self._used.add(options.uuid)
        self.enter(group, world["generation"])
        return self._done([])

    def _secret(self):
        """Returns a secret that only the ranks that share the store know."""
        if not hasattr(self, "_shared"):
            mine = secrets.token_hex(32)
            self._shared = self._store.compare_set("secret", "", mine).decode()
        return self._shared

    def abort(self):
        """Makes the collectives of all ranks fail."""
        if self._group is not None:
            self._group.abort("the process group was aborted")

    def get_error(self):
        """Returns the type of the first failure in this world, for versions of torch that have such a type."""
        kinds = torch._C._distributed_c10d.ErrorType
        code = self._group.code if self._group is not None else lib.DONE
        return {lib.DONE: kinds.SUCCESS, lib.TIMEOUT: kinds.TIMEOUT}.get(code, kinds.COMM_ERROR)

    def shutdown(self):
        self._drop()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
        if self._completer is not None:
            self._completer.add(None)
            self._completer = None

    # Properties of the group, for torch.

    def rank(self):
        return self._rank

    def size(self):
        return self._size

    getRank, getSize = rank, size

    def name(self):
        return NAME

    getBackendName = name

    def _get_backend(self, device):
        return self

    def _get_backend_name(self):
        return NAME

    def set_timeout(self, timeout):
        self._timeout = timeout
        if self._group is not None:
            self._group.limit(timeout.total_seconds())

    _set_default_timeout = set_timeout

    def _set_group_name(self, name):
        self._name = name

    setGroupName = _set_group_name

    def getGroupName(self):
        return self._name

    @property
    def group_name(self):
        return self._name

    def _set_group_desc(self, description):
        self._description = description

    setGroupDesc = _set_group_desc

    def getGroupDesc(self):
        return self._description

    @property
    def group_desc(self):
        return self._description

    def _start_coalescing(self, device=None):
        pass

    def _end_coalescing(self, device=None):
        return self._done([])

    # Calls.

    def _done(self, outputs):
        return Work(self, None, 0, outputs, None)

    def _hold(self, work):
        self._held = [w for w in self._held if not w._taken][1 - _HELD:] + [work]

    def _complete(self, work):
        if self._completer is None:
            self._completer = _Completer()
        self._completer.add(work)

    def _call(self, opts, outputs, keep, finish, *call):
        """Performs a call, or starts it if opts require a work. keep holds the memory of the call; finish copies the result to its place."""
        group = self._group
        if group is None:
            raise lib.Error("the process group has no world yet")
        if _NO_WORK and not getattr(opts, "asyncOp", True):
            group.run(*call)
            if finish is not None:
                finish()
            return None
        work = Work(self, group, group.start(*call), outputs, finish)
        kept = self._kept[call[0], call[5] if call[0] >= lib.SEND else 0]
        while kept and group.has_ended(kept[0][0]):
            kept.popleft()
        if len(kept) >= _POLL_KEPT:
            group.wait(kept[0][0], 0)
        kept.append((work._ticket, keep))
        return work

    def allreduce(self, tensors, opts=None):
        if len(tensors) != 1:
            return self.allreduce_coalesced(tensors, opts)
        tensor = tensors[0]
        kind = _TYPES.get(tensor.dtype)
        reduction = _REDUCTIONS.get(hash(opts.reduceOp)) if opts is not None else lib.SUM
        if (kind is None or reduction.__class__ is not int or tensor.is_sparse or not tensor.is_contiguous() or not tensor.is_cpu):
            return self._allreduce_other(tensor, tensors, reduction, opts)
        return self._call(opts, tensors, tensor, None, lib.ALL_REDUCE, tensor.data_ptr(), None, tensor.numel(), kind, reduction)

    def _allreduce_other(self, tensor, tensors, reduction, opts):
        if reduction.__class__ is not int:
            return self._bitwise(tensor, tensors, reduction, opts)
        flat, kind, reduction = _reduced(tensor, reduction)
        return self._call(opts, tensors, flat, _copy_back(flat, tensor), lib.ALL_REDUCE, flat.data_ptr(), None, flat.numel(), kind,
                          reduction)

    def _bitwise(self, tensor, tensors, combine, opts):
        if combine is None:
            raise lib.Error(f"the backend hvdrun has no reduction {opts.reduceOp}")
        flat, kind = _memory(tensor)
        everyone = flat.new_empty((self._size, *flat.shape))

        def finish():
            result = everyone[0]
            for other in everyone[1:]:
                result = combine(result, other)
            tensor.detach().copy_(_like(result, tensor))

        return self._call(opts, tensors, (flat, everyone), finish, lib.ALL_GATHER, flat.data_ptr(), everyone.data_ptr(), flat.numel(),
                          kind, 0)

    def _each(self, works, outputs):
        """Returns one work that stands for several started ones."""
        works = [w for w in works if w is not None]
        if not works:
            return None
        last = works[-1]
        return Work(self, last._group, last._ticket, outputs, lambda: [w._end() for w in works])

    def allreduce_coalesced(self, tensors, opts=None):
        return self._each([self.allreduce([t], opts) for t in tensors], tensors)

    def reduce(self, tensors, opts):
        tensor = tensors[0]
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        work = self.allreduce([copy], opts)
        if opts.rootRank != self._rank:
            return work
        return self._then(work, tensors, lambda: tensor.detach().copy_(copy))

    def _then(self, work, outputs, finish):
        """Returns a work that calls finish when another work has ended."""
        if work is None:
            finish()
            return None

        def both():
            work._end()
            finish()

        return Work(self, work._group, work._ticket, outputs, both)

    def broadcast(self, tensors, opts):
        tensor = tensors[0]
        flat, kind = _memory(tensor)
        back = _copy_back(flat, tensor) if opts.rootRank != self._rank else None
        return self._call(opts, tensors, flat, back, lib.BROADCAST, flat.data_ptr(), None, flat.numel(), kind, opts.rootRank)

    def allgather(self, outputs, inputs, opts=None):
        if len(inputs) != 1:
            return self._each([self.allgather([o], [i], opts) for o, i in zip(outputs, inputs)], outputs)
        flat, kind = _memory(inputs[0])
        results = outputs[0]
        _same_sizes(results, flat, self._size)
        everyone = flat.new_empty((self._size, flat.numel()))

        def finish():
            for result, part in zip(results, everyone):
                result.detach().copy_(_like(part, result))

        return self._call(opts, outputs, (flat, everyone), finish, lib.ALL_GATHER, flat.data_ptr(), everyone.data_ptr(), flat.numel(),
                          kind, 0)

    def all_gather_single(self, output, tensor, opts=None):
        flat, kind = _memory(tensor)
        everyone, _ = _memory(output)
        if everyone.numel() != flat.numel() * self._size:
            raise lib.Error(f"the output has {everyone.numel()} elements, but {self._size} ranks send {flat.numel()} each")
        return self._call(opts, [output], (flat, everyone), _copy_back(everyone, output), lib.ALL_GATHER, flat.data_ptr(),
                          everyone.data_ptr(), flat.numel(), kind, 0)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        return self._each([self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs)], outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs, inputs, opts=None):
        return self._each([self.allgather([[each[i] for each in outputs]], [t], opts) for i, t in enumerate(inputs)], outputs)

    def reduce_scatter_single(self, output, tensor, opts):
        if tensor.numel() != output.numel() * self._size:
            raise lib.Error(f"the input has {tensor.numel()} elements, but {self._size} ranks receive {output.numel()} each")
        reduction = _REDUCTIONS.get(hash(opts.reduceOp))
        if reduction.__class__ is not int:
            copy = tensor.detach().reshape(self._size, -1).clone()
            return self._then(self.allreduce([copy], opts), [output], lambda: output.detach().copy_(copy[self._rank].view_as(output)))
        flat, kind, reduction = _reduced(tensor, reduction)
        part, _ = _memory(output)
        return self._call(opts, [output], (flat, part), _copy_back(part, output), lib.REDUCE_SCATTER, flat.data_ptr(), part.data_ptr(),
                          flat.numel(), kind, reduction)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        return self._each([self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs)], outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs, inputs, opts):
        works = []
        for output, parts in zip(outputs, inputs):
            _same_sizes(parts, output, self._size)
            works.append(self.reduce_scatter_single(output, torch.cat([p.detach().reshape(-1) for p in parts]), opts))
        return self._each(works, outputs)

    def all_to_all_single(self, output, tensor, output_sizes, input_sizes, opts=None):
        if not output_sizes and not input_sizes:
            sent, kind = _memory(tensor)
            received, _ = _memory(output)
            if sent.numel() != received.numel() or sent.numel() % self._size:
                raise lib.Error(f"{sent.numel()} elements to send and {received.numel()} to receive cannot be divided equally among "
                                f"{self._size} ranks")
            return self._call(opts, [output], (sent, received), _copy_back(received, output), lib.ALL_TO_ALL, sent.data_ptr(),
                              received.data_ptr(), sent.numel() // self._size, kind, 0)
        return self._exchange([output], output, tensor, _rows(output, output_sizes, self._size), _rows(tensor, input_sizes, self._size),
                              opts)

    alltoall_base = all_to_all_single

    def _exchange(self, outputs, output, tensor, received_sizes, sent_sizes, opts, finish=None):
        """Performs an all-to-all whose parts have these numbers of elements."""
        sent, kind = _memory(tensor)
        received, _ = _memory(output)
        counts = (ctypes.c_int64 * (2 * self._size))(*sent_sizes, *received_sizes)
        back = _copy_back(received, output)

        def both():
            if back is not None:
                back()
            if finish is not None:
                finish()

        return self._call(opts, outputs, (sent, received, counts), both, lib.ALL_TO_ALL, sent.data_ptr(), received.data_ptr(), 0, kind,
                          0, ctypes.addressof(counts))

    def alltoall(self, outputs, inputs, opts=None):
        tensor = torch.cat([t.detach().reshape(-1) for t in inputs])
        flat = tensor.new_empty(sum(t.numel() for t in outputs))
        return self._exchange(outputs, flat, tensor, [t.numel() for t in outputs], [t.numel() for t in inputs], opts,
                              lambda: _split(flat, outputs))

    def gather(self, outputs, inputs, opts):
        tensor, root = inputs[0].detach(), opts.rootRank
        here = self._rank == root
        results = outputs[0] if here else []
        flat = tensor.new_empty(sum(t.numel() for t in results))
        received = [t.numel() for t in results] if here else [0] * self._size
        sent = [tensor.numel() if r == root else 0 for r in range(self._size)]
        return self._exchange(outputs, flat, tensor, received, sent, opts, lambda: _split(flat, results))

    def scatter(self, outputs, inputs, opts):
        output, root = outputs[0], opts.rootRank
        parts = [t.detach().reshape(-1) for t in inputs[0]] if self._rank == root else []
        tensor = torch.cat(parts) if parts else output.new_empty(0)
        sent = [p.numel() for p in parts] or [0] * self._size
        received = [output.numel() if r == root else 0 for r in range(self._size)]
        return self._exchange(outputs, output, tensor, received, sent, opts)

    def barrier(self, opts=None):
        return self._call(opts, [], None, None, lib.BARRIER, None, None, 0, lib.UINT8, 0)

    def send(self, tensors, rank, tag=0):
        """Sends a message. Messages from one rank to another arrive in order; tags are ignored, as with NCCL."""
        flat, kind = _memory(tensors[0])
        return self._call(None, tensors, flat, None, lib.SEND, flat.data_ptr(), None, flat.numel(), kind, rank)

    def recv(self, tensors, rank, tag=0):
        flat, kind = _memory(tensors[0])
        return self._call(None, tensors, flat, _copy_back(flat, tensors[0]), lib.RECV, flat.data_ptr(), None, flat.numel(), kind, rank)

    def recv_anysource(self, tensors, tag=0):
        raise lib.Error("the backend hvdrun cannot receive from just any rank: give recv a src")

    def reduce_tree(self, tensor, nodes, firsts):
        """Adds the tensors of numbered leaves, in an order that depends only on the number of leaves, and puts the sum into tensor.

        firsts has the first leaf of each rank, ascending from 0, and then the number of leaves. nodes are this rank's sums of its leaves
        over the fewest aligned ranges of 2^k leaves, as class Leaves computes them.
        """
        counts = (ctypes.c_int64 * len(firsts))(*firsts)
        flat, kind = _memory(tensor)
        parts = torch.stack([n.detach().reshape(-1) for n in nodes]) if nodes else flat.new_empty(0)
        self._group.run(lib.REDUCE_TREE, parts.data_ptr(), flat.data_ptr(), flat.numel(), kind, lib.SUM, ctypes.addressof(counts))
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(_like(flat, tensor))


def _memory(tensor):
    """Returns a contiguous tensor with the elements, if possible the tensor itself, and the library's type in which they are copied."""
    if tensor.device.type != "cpu":
        raise lib.Error(f"the backend hvdrun supports CPU tensors, and this one is on {tensor.device}")
    if tensor.layout != torch.strided:
        raise lib.Error(f"the backend hvdrun supports dense tensors, and this one is {tensor.layout}")
    flat = tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj())
    flat = flat.resolve_neg() if hasattr(flat, "resolve_neg") else flat
    flat = flat.contiguous()
    kind = _TYPES.get(flat.dtype)
    if kind is None:
        flat, kind = (flat.reshape(1) if flat.dim() == 0 else flat).view(torch.uint8), lib.UINT8
    return flat, kind


def _reduced(tensor, reduction):
    """Like _memory, and also returns the number of the reduction for that type."""
    if tensor.dtype == torch.bool:
        if reduction not in _OF_BOOL:
            raise lib.Error("logical values have no average")
        return (*_memory(tensor), _OF_BOOL[reduction])
    if tensor.dtype not in _TYPES and not tensor.is_complex() or tensor.is_complex() and reduction not in (lib.SUM, lib.AVERAGE):
        raise lib.Error(f"the backend hvdrun has no such reduction of {tensor.dtype}")
    return (*_memory(tensor), reduction)


def _like(flat, tensor):
    """Returns the elements of a tensor from _memory with the type and shape of the original tensor."""
    if tensor.is_complex():
        return torch.view_as_complex(flat.reshape(*tensor.shape, 2))
    if flat.dtype != tensor.dtype:
        flat = flat.view(tensor.dtype)
    return flat.reshape(tensor.shape)


def _copy_back(flat, tensor):
    """Returns a function that copies a result to its place; None: it is there already."""
    if flat.data_ptr() == tensor.data_ptr() or flat.numel() == 0:
        return None
    return lambda: tensor.detach().copy_(_like(flat, tensor))


def _split(flat, tensors):
    offset = 0
    for t in tensors:
        t.detach().copy_(flat[offset:offset + t.numel()].view(t.shape))
        offset += t.numel()


def _rows(tensor, sizes, ranks):
    """Returns the numbers of elements for these numbers of rows, or those of equal parts if sizes is empty."""
    row = tensor[0].numel() if tensor.dim() and tensor.shape[0] else 0
    if not sizes:
        if tensor.shape[0] % ranks:
            raise lib.Error(f"{tensor.shape[0]} rows cannot be divided equally among {ranks} ranks")
        sizes = [tensor.shape[0] // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != tensor.shape[0]:
        raise lib.Error(f"the sizes {list(sizes)} do not divide {tensor.shape[0]} rows among {ranks} ranks")
    return [n * row for n in sizes]


def _same_sizes(parts, whole, ranks):
    if len(parts) != ranks or any(p.numel() * p.element_size() != whole.numel() * whole.element_size() for p in parts):
        raise lib.Error(f"the tensors have {[p.numel() for p in parts]} elements, but {ranks} ranks need {whole.numel()} each")


class Leaves:
    """Sums of the tensors of a rank's leaves, for ProcessGroup.reduce_tree.

    first is the number of the rank's first leaf, and leaves the number of all leaves. Tensors are added by the nodes of a binary tree, so
    the order does not depend on which rank has which leaves.
    """

    def __init__(self, first, leaves):
        self._next, self._leaves = first, leaves
        self._nodes = []  # level, number in the level, tensor

    def add(self, tensor):
        """Adds the tensor of the next leaf. The tensor is kept and may be changed."""
        level, number, self._next = 0, self._next, self._next + 1
        while True:
            if number & 1:
                if not self._nodes or self._nodes[-1][:2] != (level, number - 1):
                    break
                tensor = self._nodes.pop()[2].add_(tensor)
            elif number == 0 and 1 << level >= self._leaves or (number + 1) << level < self._leaves:
                break  # it is the root, or waits for its other half; a half without leaves adds nothing
            level, number = level + 1, number >> 1
        self._nodes.append((level, number, tensor))

    @property
    def nodes(self):
        return [tensor for _, _, tensor in self._nodes]


# A connected group for the next process group that this thread creates.
_connected = threading.local()


def _create(options, backend_options=None):
    """Creates the process group that torch requests."""
    group = ProcessGroup(options.group_rank, options.group_size, options.timeout, options.store)
    ready, _connected.group = getattr(_connected, "group", None), None
    if ready is not None:
        group.enter(*ready)
    elif not getattr(options, "enable_reconfigure", False):
        group.meet()
    return group


def register():
    """Registers the backend with torch.distributed. Torch calls it through the entry point of the wheel."""
    plugins = getattr(dist.Backend, "_plugins", {})
    if NAME.upper() in plugins:
        return
    try:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    except TypeError:  # before 2.0
        dist.Backend.register_backend(NAME, _create_early)


def _create_early(store, rank, size, timeout):
    class Options:
        pass

    options = Options()
    options.store, options.group_rank, options.group_size, options.timeout = store, rank, size, timeout
    return _create(options)


class Transport(_transport.Transport):
    """The worlds of hvdrun's driver. Each is a new process group on the process's endpoint."""

    def __init__(self, welcome, timeout):
        register()
        if welcome.get("library"):
            lib.path = welcome["library"]
        options = _options()
        if "listen" not in options and os.environ.get("HVD_LAUNCHER_ADDR", "").startswith(("127.", "[::1]", "localhost")):
            options["listen"] = "127.0.0.1:0"  # the driver calls for widen once another machine takes part
        options["run"] = welcome["run"]
        self._endpoint = lib.Endpoint(**options)
        self._meeting, self._timeout = _transport.Meeting(welcome.get("store"), timeout), timeout
        self._group = None

    @property
    def addresses(self):
        return self._endpoint.addresses

    def widen(self):
        self._endpoint.widen()

    def leave(self):
        self._group = None
        if dist.is_initialized():
            _transport.destroy()
        self._meeting.made()

    def prepare(self, world):
        self._meeting.prepare(world.get("store"))

    def connect(self, world):
        # The ranks of further groups that the program creates meet in the store.
        store = self._meeting.open()
        return self._endpoint.connect(world, self._timeout.total_seconds()), store

    def enter(self, world, connected):
        self._group, store = connected
        _connected.group = (self._group, world["generation"])
        _transport.initialize(backend=NAME, store=dist.PrefixStore(f"g{world['generation']}", store), rank=world["rank"],
                              world_size=world["size"], timeout=self._timeout)
        self._meeting.made()

    def settle(self):
        self._meeting.settle()

    def cut(self, told=False):
        group = self._group
        if group is not None:
            group.abort("hvdrun says that a rank is lost")
        if self._meeting.waited_at:
            self._meeting.cut()
