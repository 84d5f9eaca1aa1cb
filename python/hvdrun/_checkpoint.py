"""Checkpoint files: safetensors with metadata, in the format of Go's package elastic/checkpoint. It needs no torch."""
import collections
import concurrent.futures
import contextlib
import datetime
import json
import mmap
import os
import re
import secrets
import stat
import struct
import sys
import zlib

try:
    import fcntl
except ImportError:  # Windows, where incomplete files are not removed
    fcntl = None

CHUNK = 1 << 20
PIECE = 8 * CHUNK  # bytes that one thread reads or writes at a time
VERSION = 2
_SETTLE = 64 << 20  # bytes of a file that are synced to disk while the next ones are written
_THREADS = 4  # for the verification of a file
_LARGEST_SUM = (1 << 32) - 1
_SEAL = "hvdrun.seal"
_MAGIC = b"hvdrseal"
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1,
          "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_MOST_HEADER = 256 << 20
_NAME = re.compile(r"commit-(\d{20})\.safetensors")
_TEMPORARY = re.compile(r"\.commit-[^/]*\.tmp")


class Damaged(ValueError):
    """The file is incomplete, corrupted or not a checkpoint of hvdrun."""


def _table():
    table = []
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ (0x82F63B78 if n & 1 else 0)
        table.append(n)
    return table


_TABLE = _table()


def crc32c(data):
    """Returns the CRC-32C (Castagnoli) of bytes, at a few MB/s. It is the checksum of headers."""
    crc, table = 0xFFFFFFFF, _TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _sums(data):
    """Returns the checksum of each chunk of the data."""
    return [zlib.crc32(data[i:i + CHUNK]) for i in range(0, len(data), CHUNK)]


class Tensor:
    """A named tensor: dtype of safetensors, shape, size in bytes.

    pieces() yields its bytes as objects with the buffer protocol, all but the last of whole chunks.
    """

    def __init__(self, name, dtype, shape, size, pieces):
        self.name, self.dtype, self.shape, self.size, self.pieces = name, dtype, list(shape), size, pieces

    @classmethod
    def of(cls, name, dtype, shape, data):
        """Returns a tensor whose bytes are data, in one piece."""
        return cls(name, dtype, shape, len(data), lambda: [data])


class Part:
    """A part of the state: its name, its kind, which must be the same when it is read, and its tensors."""

    def __init__(self, name, kind, tensors, text=""):
        self.name, self.kind, self.tensors, self.text = name, kind, tensors, text


def path(folder, commits):
    return os.path.join(folder, f"commit-{commits:020d}.safetensors")


def listed(folder):
    """Returns the numbers of the commits with a checkpoint in the folder, newest first."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted((int(m[1]) for m in map(_NAME.fullmatch, names) if m), reverse=True)


def _sweep(folder):
    """Removes incomplete files whose writer has ended. A writer holds a lock on its file."""
    for name in filter(_TEMPORARY.fullmatch, os.listdir(folder)):
        try:
            fd = os.open(os.path.join(folder, name), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            info = os.fstat(fd)
            if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(os.path.join(folder, name))
        except OSError:
            pass  # it is being written, or has been removed, or its file system has no locks
        finally:
            os.close(fd)


def write(folder, commits, size, parts, progress=lambda written: None):
    """Writes a checkpoint and returns its path. The file gets its name when all of it is on disk.

    Each piece of a tensor is requested once, written and released. progress(bytes) is called with the number of bytes on disk. Incomplete
    files of writers that have ended are removed.
    """
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if fcntl:
        _sweep(folder)
    own = {"version": VERSION, "commits": commits, "size": size,
           "time": datetime.datetime.now(datetime.timezone.utc).isoformat().replace("+00:00", "Z"), "parts": parts}
    # Sorting by the size of elements aligns all elements, which some readers require.
    tensors = sorted((t for part in parts for t in part.tensors), key=lambda t: -_SIZES[t.dtype])
    # The sums are known once the tensors are written. So the header is written last, into the room of a header with the longest sums.
    sums = {t.name: [_LARGEST_SUM] * -(-t.size // CHUNK) for t in tensors}
    head = _head(own, tensors, sums)
    temporary = os.path.join(folder, f".commit-{secrets.token_hex(12)}.tmp")
    try:
        with open(temporary, "xb", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600)) as f:
            if fcntl:
                try:
                    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    pass  # a file system without locks, where incomplete files are not removed
            _write(f, head)
            with concurrent.futures.ThreadPoolExecutor(2, "hvdrun") as pool:
                sums = _write_tensors(f, len(head), tensors, pool, progress)
            room, head = len(head), _head(own, tensors, sums)
            head = _sized(head[8:], room - 8)
            _write(f, _MAGIC + struct.pack("<I", crc32c(head)))
            f.seek(0)
            _write(f, head)
            os.fsync(f.fileno())
        os.replace(temporary, path(folder, commits))
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if hasattr(os, "O_DIRECTORY"):
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    return path(folder, commits)


def _head(own, tensors, sums):
    """Returns the beginning of a file, up to its tensors."""
    parts = []
    for part in own["parts"]:
        about = {"name": part.name, "kind": part.kind, "tensors": [t.name for t in part.tensors], "sums": [sums[t.name] for t in part.tensors]}
        if part.text:
            about["text"] = part.text
        parts.append(about)
    header, offset = {"__metadata__": {"hvdrun": json.dumps({**own, "parts": parts})}}, 0
    for t in tensors:
        if t.name in header or t.name == _SEAL:
            raise ValueError(f"hvdrun: two tensors of the state are named {t.name!r}")
        header[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [offset, offset + t.size]}
        offset += t.size
    header[_SEAL] = {"dtype": "U8", "shape": [12], "data_offsets": [offset, offset + 12]}
    text = json.dumps(header).encode()
    return _sized(text, len(text) + -len(text) % 8)


def _sized(text, size):
    return struct.pack("<Q", size) + text.ljust(size)


def _write(f, data):
    rest = memoryview(data).cast("B")
    while len(rest):
        rest = rest[f.write(rest):]


def _write_tensors(f, written, tensors, pool, progress):
    """Writes the tensors and returns their sums by name. Meanwhile the pool computes the sums and syncs written bytes to disk."""
    synchronize = getattr(os, "fdatasync", os.fsync)
    begun, settling, summing, sums = written, None, collections.deque(), {t.name: [] for t in tensors}

    def settled():
        if settling:
            settling[0].result()
            progress(settling[1])

    for t in tensors:
        end = written + t.size
        for piece in t.pieces():
            summing.append((t.name, pool.submit(_sums, piece)))
            _write(f, piece)
            written += len(piece)
            if len(summing) > 2:  # bounds the pieces in memory
                name, of = summing.popleft()
                sums[name] += of.result()
            if written - begun >= _SETTLE:
                settled()
                settling, begun = (pool.submit(synchronize, f.fileno()), written), written
        if written != end:
            raise ValueError(f"hvdrun: the pieces of tensor {t.name!r} do not have its size of {t.size} bytes")
    for name, of in summing:
        sums[name] += of.result()
    settled()
    return sums


def prune(folder, keep, written):
    """Removes the checkpoints older than that of commit written, except the newest keep-1.

    Checkpoints with a higher number stay: they are damaged, or belong to another training.
    """
    for commits in [n for n in listed(folder) if n <= written][max(keep, 1):]:
        try:
            os.unlink(path(folder, commits))
        except FileNotFoundError:
            pass


def restore(folder, load):
    """Calls load(File) with the newest undamaged checkpoint, and returns whether there is one.

    It renames newer checkpoints, which are damaged, so that they no longer count. If all are damaged, it raises Damaged.
    """
    damaged = []
    for commits in listed(folder):
        try:
            load(File(path(folder, commits)))
        except Damaged as err:
            print(err, file=sys.stderr, flush=True)
            damaged.append((commits, err))
            continue
        for newer, _ in damaged:
            try:
                os.rename(path(folder, newer), path(folder, newer) + ".damaged")
            except OSError:
                pass  # another rank has renamed it, or the folder is not writable
        return True
    if damaged:
        raise damaged[0][1]
    return False


class File:
    """An open checkpoint with verified tensors, which are in the mapped file."""

    def __init__(self, name):
        with open(name, "rb") as f:
            info = os.fstat(f.fileno())
            if hasattr(os, "geteuid") and (info.st_uid not in (os.geteuid(), 0) or info.st_mode & 0o022):
                raise PermissionError(f"hvdrun: {name}: training cannot go on from it: others can write it")
            if info.st_size < 8 + 12:
                raise Damaged(f"hvdrun: {name}: it has {info.st_size} bytes")
            self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        self.name = name
        (length,) = struct.unpack("<Q", self._map[:8])
        if length > min(_MOST_HEADER, info.st_size - 20):
            raise Damaged(f"hvdrun: {name}: its header has {length} bytes, but the whole file only {info.st_size}")
        head = self._map[:8 + length]
        if self._map[-12:] != _MAGIC + struct.pack("<I", crc32c(head)):
            raise Damaged(f"hvdrun: {name}: its seal does not match its header")
        header = json.loads(head[8:])
        own = json.loads(header.pop("__metadata__")["hvdrun"])
        if own["version"] != VERSION:
            raise ValueError(f"hvdrun: {name}: its format has version {own['version']}, this program reads version {VERSION}")
        self.commits, self.parts = own["commits"], own["parts"]
        self._entries, self._data = header, memoryview(self._map)[8 + length:]
        sums = {t: s for p in self.parts for t, s in zip(p["tensors"], p["sums"])}
        self._verify(sums)
        self.tensors = sums.keys()

    def _verify(self, sums):
        def check(name, at, data):
            begin = at // CHUNK
            return name if _sums(data) != sums[name][begin:begin - (-len(data) // CHUNK)] else None

        with concurrent.futures.ThreadPoolExecutor(_THREADS, "hvdrun") as pool:
            checks = []
            for name, found in sums.items():
                *_, data = self.read(name)
                if len(found) != -(-len(data) // CHUNK):
                    raise Damaged(f"hvdrun: {self.name}: tensor {name!r} has {len(found)} checksums, not one for each chunk")
                checks += [pool.submit(check, name, at, data[at:at + PIECE]) for at in range(0, len(data), PIECE)]
            for bad in filter(None, (c.result() for c in checks)):
                raise Damaged(f"hvdrun: {self.name}: tensor {bad!r} has changed since it was written")

    def read(self, name):
        """Returns the dtype, shape and bytes of a tensor. The bytes are valid as long as they are referenced."""
        entry = self._entries.get(name)
        if entry is None:
            raise Damaged(f"hvdrun: {self.name}: it has no tensor {name!r}")
        first, end = entry["data_offsets"]
        if not 0 <= first <= end <= len(self._data):
            raise Damaged(f"hvdrun: {self.name}: tensor {name!r} is not in the file")
        return entry["dtype"], entry["shape"], self._data[first:end]
