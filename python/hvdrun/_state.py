"""What the ranks of a job have in common: the parts of a state, how one rank sends them to others, and checkpoints."""
import io
import json
import pickle

import torch
import torch.distributed as dist

from hvdrun import _checkpoint

_BUCKET = 32 << 20  # bytes that are broadcast at a time
_ALIGN = 16
_TYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
          torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
_TYPES_OF = {name: dtype for dtype, name in _TYPES.items()}
# The names of these types in Go, for the kinds of parts that Go reads.
_GO = {"F64": "float64", "F32": "float32", "F16": "collective.Float16", "BF16": "collective.BFloat16", "I64": "int64", "I32": "int32",
       "I16": "int16", "I8": "int8", "U8": "uint8"}


def _bytes_of(tensor):
    """A tensor's elements as a vector of bytes, which shares its memory where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class _Pickler(pickle.Pickler):
    """Leaves tensors out, which go beside."""

    def __init__(self, file):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors = []

    def persistent_id(self, obj):
        if not isinstance(obj, torch.Tensor) or obj.layout != torch.strided or obj.is_quantized:
            return None
        self.tensors.append(obj)
        return len(self.tensors) - 1, obj.dtype, tuple(obj.shape), obj.device.type


class _Unpickler(pickle.Unpickler):
    def __init__(self, file, tensors):
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid):
        return self._tensors[pid[0]]


class _Scanner(pickle.Unpickler):
    """Collects what the tensors are that go beside."""

    def __init__(self, file):
        super().__init__(file)
        self.found = []

    def persistent_load(self, pid):
        self.found.append(pid)
        return None


def _buckets(sizes):
    """Ranges of tensors that go together, with the offset of each and the length of all."""
    begin, offsets, total = 0, [], 0
    for i, size in enumerate(sizes):
        if offsets and total + size > _BUCKET:
            yield begin, offsets, total
            begin, offsets, total = i, [], 0
        offsets.append(total)
        total += -(-size // _ALIGN) * _ALIGN
    if offsets:
        yield begin, offsets, total


def broadcast(values, root, rank, device, arrived):
    """Sends values from the root to all ranks: collective. Returns the root's, whose tensors on other ranks are new, on device.

    arrived() is called by all ranks, and raises if what was sent has not arrived.
    """
    text = torch.zeros(0, dtype=torch.uint8)
    tensors = []
    if rank == root:
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(values)
        text, tensors = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8), pickler.tensors
    length = torch.tensor([text.numel()], dtype=torch.int64, device=device)
    dist.broadcast(length, src=root)
    arrived()
    text = text.to(device) if rank == root else torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(text, src=root)
    arrived()
    if rank == root:
        flat = [_bytes_of(t) for t in tensors]
        sizes = [f.numel() for f in flat]
    else:
        raw = _raw(text)
        scanner = _Scanner(io.BytesIO(raw))
        scanner.load()
        found = [(dtype, shape) for _, dtype, shape, _ in scanner.found]
        sizes = [torch.empty(0, dtype=dtype).element_size() * _count(shape) for dtype, shape in found]
    received = []
    for begin, offsets, total in _buckets(sizes):
        bucket = torch.empty(total, dtype=torch.uint8, device=device)
        if rank == root:
            for i, offset in enumerate(offsets):
                bucket[offset:offset + sizes[begin + i]] = flat[begin + i]
        dist.broadcast(bucket, src=root)
        if rank != root:
            for i, offset in enumerate(offsets):
                dtype, shape = found[begin + i]
                received.append(bucket[offset:offset + sizes[begin + i]].view(dtype).reshape(shape))
    arrived()
    return values if rank == root else _Unpickler(io.BytesIO(raw), received).load()


def _raw(text):
    """The bytes of a tensor of bytes, without numpy."""
    text = text.cpu()
    raw = bytearray(text.numel())
    torch.frombuffer(raw, dtype=torch.uint8).copy_(text)
    return bytes(raw)


def _count(shape):
    n = 1
    for side in shape:
        n *= side
    return n


def _snapshot(value):
    """What is sent and saved of a part."""
    return value.state_dict() if hasattr(value, "state_dict") else value


class _Buffers:
    """Copies of the modules' buffers, which a forward pass changes, as of the beginning of a step."""

    def __init__(self, modules):
        self._modules, self._kept = modules, {}

    def save(self):
        now = {}
        for module in self._modules():
            for b in module.buffers():
                kept = self._kept.get(id(b))
                # A buffer that nobody has written to since is not copied again.
                fresh = kept is None or kept[0] is not b or kept[1] != b._version
                now[id(b)] = (b, b._version, b.detach().clone()) if fresh else kept
        self._kept = now

    def restore(self):
        with torch.no_grad():
            for b, version, copy in self._kept.values():
                if b._version != version:
                    b.copy_(copy)


class State:
    """The parts that all ranks have in common, as attributes. Job.state makes it.

    A part is a module, which the attribute returns wrapped in DistributedDataParallel while it is in a world; a tensor; anything
    with state_dict and load_state_dict, such as an optimizer, a scheduler or a GradScaler; or a value, which may be assigned.
    step is the number of steps that are done.
    """

    def __init__(self, job, ddp, parts):
        parts.setdefault("step", 0)
        self.__dict__.update(_job=job, _ddp=ddp, _parts=parts, _wrapped={}, _holds=False, _torn=False)
        self.__dict__["_buffers"] = _Buffers(self._modules)

    def __getattr__(self, name):
        try:
            return self._wrapped.get(name) or self._parts[name]
        except KeyError:
            raise AttributeError(f"hvdrun: the state has no part {name!r}") from None

    def __setattr__(self, name, value):
        old = self._parts.get(name)
        if name not in self._parts or isinstance(old, torch.Tensor) or hasattr(old, "load_state_dict"):
            raise AttributeError(f"hvdrun: {name!r} is no value of the state that can be assigned")
        self._parts[name] = value

    def _modules(self):
        return [v for v in self._parts.values() if isinstance(v, torch.nn.Module)]

    def _of(self, kind):
        return [v for v in self._parts.values() if isinstance(v, kind)]

    # What a world does with it.

    def _unwrap(self):
        self._wrapped.clear()

    def _wrap(self):
        """Wraps the modules anew: collective. A wrapper of an earlier world divides by its size."""
        self._unwrap()
        if self._ddp is None:
            return
        options = dict(self._ddp)
        if "init_sync" in torch.nn.parallel.DistributedDataParallel.__init__.__code__.co_varnames:
            options.setdefault("init_sync", False)  # all ranks have the same state already
        for name, value in self._parts.items():
            if isinstance(value, torch.nn.Module) and any(p.requires_grad for p in value.parameters()):
                self._wrapped[name] = torch.nn.parallel.DistributedDataParallel(value, **options)

    def _settle(self):
        """Makes the state of all ranks that of the one that is furthest, the first of several: collective.

        Before anyone has trained, the furthest is the one that has restored the newest checkpoint.
        """
        job = self._job
        mine = torch.tensor([self._holds and not self._torn, self._parts["step"], self._torn, job._stopped], dtype=torch.int64,
                            device=job.device)
        all_of = [torch.empty_like(mine) for _ in range(job.size)]
        dist.all_gather(all_of, mine)
        job._arrived()
        *told, stopped = zip(*(t.tolist() for t in all_of))
        told = list(zip(*told))
        best = max(told)
        if not best[0] and any(torn for _, _, torn in told):
            raise StateLost(f"hvdrun: no rank has the whole state of step {best[1]}: each has failed while it applied it")
        if best[0] == 0 or min(told) != best:
            root = told.index(best)
            mine = {name: _snapshot(value) for name, value in self._parts.items()} if job.rank == root else None
            # A rank that dies while it sends much leaves gloo waiting for the rest, which nothing ends: the thread is abandoned.
            values = job._interruptible(lambda: broadcast(mine, root, job.rank, job.device, job._arrived))
            if job.rank != root and (best[0] == 0 or told[job.rank] != best):
                self._load(values)
        # Of ranks that have made the last step, some may have lost the world before they could agree that it was the last one.
        job._stopped = any(stop for at, stop in zip(told, stopped) if at == best)
        self.__dict__.update(_holds=True, _torn=False)

    def _load(self, values):
        if values.keys() != self._parts.keys():
            raise ValueError(f"hvdrun: the state of this rank has the parts {sorted(self._parts)}, "
                             f"that of another {sorted(values)}")
        self.__dict__["_torn"] = True
        with torch.no_grad():
            for name, value in values.items():
                part = self._parts[name]
                if isinstance(part, torch.Tensor):
                    part.copy_(value)
                elif hasattr(part, "load_state_dict"):
                    part.load_state_dict(value)
                else:
                    self._parts[name] = value
        self.__dict__["_torn"] = False

    def _update(self):
        """One step of all optimizers, then of all schedulers."""
        scalers = [v for v in self._parts.values() if hasattr(v, "unscale_") and hasattr(v, "get_scale")]
        for optimizer in self._of(torch.optim.Optimizer):
            scalers[0].step(optimizer) if scalers else optimizer.step()
        for scaler in scalers:
            scaler.update()
        for value in self._parts.values():
            # ReduceLROnPlateau needs a measure, which the program has.
            if hasattr(value, "get_last_lr") and hasattr(value, "step") and not hasattr(value, "is_better"):
                value.step()

    def _undo(self):
        """Forgets what a step that failed has left: gradients, buffers, what a GradScaler notes of the step."""
        for optimizer in self._of(torch.optim.Optimizer):
            optimizer.zero_grad(set_to_none=True)
        for module in self._modules():
            for p in module.parameters():
                p.grad = None
        for value in self._parts.values():
            if hasattr(value, "_per_optimizer_states"):
                value._per_optimizer_states.clear()
        self._buffers.restore()

    # Checkpoints.

    def save(self, folder, keep=3):
        """Writes the state into a folder, and removes older checkpoints there but for keep-1; returns the path.

        One rank calls it, after a commit, where all would write the same. The others go on: it holds them up only as long as it
        does not come to its next step. The file is the safetensors file of package
        elastic/checkpoint. A part that is neither tensors nor values of JSON is a TypeError.
        """
        parts = []
        for name, value in self._parts.items():
            parts += _encode(name, _snapshot(value))
        with self._job._saving(self.step) as progress:
            path = _checkpoint.write(folder, self.step, self._job.size, parts, sums, progress)
        _checkpoint.prune(folder, keep, self.step)
        return path

    def restore(self, folder):
        """Loads the newest checkpoint of a folder that is whole, before the loop; returns whether there was one.

        Every rank may call it, or rank 0 alone: the others get its state. Newer checkpoints that are damaged get another name. If
        all are damaged, that is an error.
        """
        return _checkpoint.restore(folder, lambda file: self._load(_decode(file, self._parts)))


class StateLost(RuntimeError):
    """No rank has a whole state any more."""


def _kind(name, dtype, count, scalar):
    go = _GO.get(dtype, "bool")
    return f'value "{name}": {go}' if scalar else f'tensor "{name}": []{go} of {count}'


def _host(name, tensor):
    if tensor.dtype not in _TYPES:
        raise TypeError(f"hvdrun: part {name!r} has elements of type {tensor.dtype}, which a checkpoint has not")
    dtype = _TYPES[tensor.dtype]
    raw = bytearray(tensor.numel() * tensor.element_size())
    if raw:
        torch.frombuffer(raw, dtype=torch.uint8).copy_(_bytes_of(tensor).cpu())
    return _checkpoint.Tensor(name, dtype, tensor.shape, raw)


def _encode(name, value):
    """The parts of a checkpoint of a part: each tensor is one, which programs in Go read, and what is not a tensor another."""
    tensors = []
    if isinstance(value, int) and not isinstance(value, bool) and -1 << 63 <= value < 1 << 63:
        number = _checkpoint.Tensor(name, "I64", [], bytearray(value.to_bytes(8, "little", signed=True)))
        return [_checkpoint.Part(name, _kind(name, "I64", 1, True), [number], str(value))]
    if isinstance(value, float):
        number = _host(name, torch.tensor(value, dtype=torch.float64))
        return [_checkpoint.Part(name, _kind(name, "F64", 1, True), [number], str(value))]
    tree = _tree(name, value, tensors)
    parts = [_checkpoint.Part(t.name, _kind(t.name, t.dtype, _count(t.shape), not t.shape), [t]) for t in tensors]
    if not isinstance(value, torch.Tensor) and not _plain(value):
        text = json.dumps(tree).encode()
        own = name + ".python"
        parts.append(_checkpoint.Part(own, "python", [_checkpoint.Tensor(own, "U8", [len(text)], bytearray(text))]))
    return parts


def _plain(value):
    """Whether the names of tensors tell all of a value, as of the state of most modules."""
    return isinstance(value, dict) and len(value) > 0 and all(isinstance(v, torch.Tensor) for v in value.values())


def _tree(name, value, tensors):
    """The JSON of a value: tensors are left out, containers are [letter, …]."""
    if isinstance(value, torch.Tensor):
        tensors.append(_host(name, value))
        return ["T", name, str(value.device.type)]
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else ["f", repr(value)]
    if isinstance(value, (list, tuple)):
        return ["l" if isinstance(value, list) else "t", [_tree(f"{name}.{i}", v, tensors) for i, v in enumerate(value)]]
    if isinstance(value, dict):
        return ["d", [[_tree(name, k, tensors), _tree(f"{name}.{k}", v, tensors)] for k, v in value.items()]]
    if isinstance(value, (bytes, bytearray)):
        return ["b", value.hex()]
    raise TypeError(f"hvdrun: part {name!r} has a {type(value).__name__}, which a checkpoint cannot have")


def _value(tree, tensor):
    if not isinstance(tree, list):
        return tree
    letter, content = tree[0], tree[1]
    if letter == "T":
        return tensor(content)
    if letter == "f":
        return float(content)
    if letter == "b":
        return bytes.fromhex(content)
    if letter == "d":
        return {_key(k, tensor): _value(v, tensor) for k, v in content}
    items = [_value(v, tensor) for v in content]
    return tuple(items) if letter == "t" else items


def _key(tree, tensor):
    key = _value(tree, tensor)
    return tuple(key) if isinstance(key, list) else key


def _decode(file, parts):
    """The values of the parts in a checkpoint of this package, or of tensors of these names in one that Go has written."""
    names = set(file.tensors())

    def tensor(name):
        dtype, shape, data = file.read(name, sums)
        if not len(data):
            return torch.empty(shape, dtype=_TYPES_OF[dtype])
        return torch.frombuffer(data, dtype=_TYPES_OF[dtype]).reshape(shape)

    def like(name, live):
        if name not in names:
            raise ValueError(f"hvdrun: {file.name} has no tensor {name!r} of the state")
        found = tensor(name)
        return found.reshape(live.shape) if found.numel() == live.numel() else found

    values = {}
    for name, part in parts.items():
        own = name + ".python"
        if own in names:
            values[name] = _value(json.loads(bytes(file.read(own, sums)[2])), tensor)
        elif isinstance(part, torch.Tensor):
            values[name] = like(name, part)
        elif _plain(_snapshot(part)):
            values[name] = {key: like(f"{name}.{key}", live) for key, live in _snapshot(part).items()}
        elif name in names:
            values[name] = tensor(name).item()
        else:
            raise ValueError(f"hvdrun: {file.name} has no part {name!r} of the state")
    return values


# CRC-32C by vectors: a chunk is divided into lanes, whose sums are joined two by two. A sum is linear in what precedes it: _shift[k]
# has four tables of 256 for the effect of 2**k lanes of zeros.
_LANE = 1024
_table = torch.tensor(_checkpoint.TABLE, dtype=torch.int64)
_shifts = []


def _zeros(crc, count):
    for _ in range(count):
        crc = _table[crc & 0xFF] ^ crc >> 8
    return crc


def _shift(level):
    """The tables by which a sum is carried over 2**level lanes of zeros."""
    while len(_shifts) <= level:
        bytes_of = torch.arange(256, dtype=torch.int64)
        tables = torch.stack([bytes_of << 8 * i for i in range(4)])
        _shifts.append(_carry(_carry(tables, _shifts[-1]), _shifts[-1]) if _shifts else _zeros(tables, _LANE))
    return _shifts[level]


def _carry(crc, tables):
    return tables[0][crc & 0xFF] ^ tables[1][crc >> 8 & 0xFF] ^ tables[2][crc >> 16 & 0xFF] ^ tables[3][crc >> 24 & 0xFF]


def sums(data):
    """As _checkpoint.sums, about a hundred times as fast."""
    whole = len(data) // _checkpoint.CHUNK * _checkpoint.CHUNK
    found = []
    for begin in range(0, whole, 16 * _checkpoint.CHUNK):
        end = min(whole, begin + 16 * _checkpoint.CHUNK)
        raw = torch.frombuffer(data[begin:end], dtype=torch.uint8)
        found += _many(raw.reshape(-1, _checkpoint.CHUNK // _LANE, _LANE))
    rest = data[whole:]
    if len(rest):
        lanes = len(rest) // _LANE if len(rest) > 1 << 16 else 0  # few bytes are quicker one by one
        found.append(_tail(rest, lanes))
    return found


def _many(chunks):
    """The sums of chunks of 2**k lanes each."""
    columns = chunks.permute(2, 0, 1).to(torch.int64)
    crc = torch.zeros(columns.shape[1:], dtype=torch.int64)
    crc[:, 0] = 0xFFFFFFFF
    for column in columns:
        crc = _table[(crc ^ column) & 0xFF] ^ crc >> 8
    level = 0
    while crc.shape[1] > 1:
        crc = _carry(crc[:, 0::2], _shift(level)) ^ crc[:, 1::2]
        level += 1
    return (crc[:, 0] ^ 0xFFFFFFFF).tolist()


def _tail(rest, lanes):
    """The sum of less than a chunk: lanes by vectors, joined one after the other, and the last bytes one by one."""
    crc = 0xFFFFFFFF
    if lanes:
        columns = torch.frombuffer(rest[:lanes * _LANE], dtype=torch.uint8).reshape(lanes, _LANE).t().to(torch.int64)
        each = torch.zeros(lanes, dtype=torch.int64)
        each[0] = 0xFFFFFFFF
        for column in columns:
            each = _table[(each ^ column) & 0xFF] ^ each >> 8
        tables = _shift(0).tolist()
        crc = 0
        for lane in each.tolist():
            crc = tables[0][crc & 0xFF] ^ tables[1][crc >> 8 & 0xFF] ^ tables[2][crc >> 16 & 0xFF] ^ tables[3][crc >> 24] ^ lane
    for byte in rest[lanes * _LANE:]:
        crc = _checkpoint.TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF
