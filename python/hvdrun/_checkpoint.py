"""Checkpoints as files: safetensors with the metadata of Go's elastic/checkpoint, which reads them and is read. It needs no torch."""
import datetime
import fcntl
import json
import mmap
import os
import re
import secrets
import stat
import struct
import sys

CHUNK = 1 << 20
VERSION = 1
_SETTLE = 64 << 20  # bytes that are written before they are waited for
_SEAL = "hvdrun.seal"
_MAGIC = b"hvdrseal"
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1,
          "BOOL": 1}
_MOST_HEADER = 256 << 20
_NAME = re.compile(r"commit-(\d{20})\.safetensors")
_TEMPORARY = re.compile(r"\.commit-[^/]*\.tmp")


class Damaged(ValueError):
    """The file is incomplete, corrupted or no checkpoint of hvdrun."""


def _table():
    table = []
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ (0x82F63B78 if n & 1 else 0)
        table.append(n)
    return table


TABLE = _table()


def crc32c(data):
    """The CRC-32C (Castagnoli) of bytes."""
    crc, table = 0xFFFFFFFF, TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def sums(data):
    """The CRC-32C of each chunk of 1 MiB."""
    return [crc32c(data[i:i + CHUNK]) for i in range(0, len(data), CHUNK)]


class Tensor:
    """A named tensor: dtype of safetensors, shape, and its bytes as an object with the buffer protocol."""

    def __init__(self, name, dtype, shape, data):
        self.name, self.dtype, self.shape = name, dtype, list(shape)
        self.data = memoryview(data).cast("B")


class Part:
    """A part of the state: its name, its kind, which must be the same where it is read, and its tensors."""

    def __init__(self, name, kind, tensors, text=""):
        self.name, self.kind, self.tensors, self.text = name, kind, tensors, text


def path(folder, commits):
    return os.path.join(folder, f"commit-{commits:020d}.safetensors")


def listed(folder):
    """The numbers of the commits that have a checkpoint in the folder, newest first."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted((int(m[1]) for m in map(_NAME.fullmatch, names) if m), reverse=True)


def _sweep(folder):
    """Removes incomplete files whose writer has ended: one that writes holds a lock."""
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


def write(folder, commits, size, parts, sums=sums, progress=lambda written: None):
    """Writes a checkpoint, which gets its name after all of it is on disk, and returns its path.

    sums(bytes) are the checksums. progress(bytes) is told how much of it is on disk. Incomplete files of writers that have ended are
    removed.
    """
    os.makedirs(folder, mode=0o700, exist_ok=True)
    _sweep(folder)
    own = {"version": VERSION, "commits": commits, "size": size,
           "time": datetime.datetime.now(datetime.timezone.utc).isoformat().replace("+00:00", "Z"), "parts": []}
    for part in parts:
        about = {"name": part.name, "kind": part.kind, "tensors": [t.name for t in part.tensors],
                 "sums": [sums(t.data) for t in part.tensors]}
        if part.text:
            about["text"] = part.text
        own["parts"].append(about)
    # Sorting by the size of elements aligns all elements, which some readers require.
    tensors = sorted((t for part in parts for t in part.tensors), key=lambda t: -_SIZES[t.dtype])
    header, offset = {"__metadata__": {"hvdrun": json.dumps(own)}}, 0
    for t in tensors:
        if t.name in header or t.name == _SEAL:
            raise ValueError(f"hvdrun: two tensors of the state are named {t.name!r}")
        header[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [offset, offset + t.data.nbytes]}
        offset += t.data.nbytes
    header[_SEAL] = {"dtype": "U8", "shape": [12], "data_offsets": [offset, offset + 12]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    temporary = os.path.join(folder, f".commit-{secrets.token_hex(12)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb", buffering=0) as f:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                pass  # a file system without locks, where nothing is swept
            written = begun = 0
            for piece in (head, *(t.data for t in tensors), _MAGIC + struct.pack("<I", crc32c(head))):
                rest = memoryview(piece)
                while len(rest):
                    n = f.write(rest[:_SETTLE])
                    rest, written = rest[n:], written + n
                    if written - begun >= _SETTLE:
                        os.fdatasync(f.fileno())
                        begun = written
                        progress(written)
            os.fsync(f.fileno())
        os.rename(temporary, path(folder, commits))
    except BaseException:
        os.unlink(temporary)
        raise
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return path(folder, commits)


def prune(folder, keep, written):
    """Removes the checkpoints that are older than the one of commit written, except the newest keep-1.

    Those with a higher number stay: they are damaged, or another training's.
    """
    for commits in [n for n in listed(folder) if n <= written][max(keep, 1):]:
        try:
            os.unlink(path(folder, commits))
        except FileNotFoundError:
            pass


def restore(folder, load):
    """Calls load(File) with the newest checkpoint that is whole, and returns whether there is one.

    Newer ones, which are damaged, get another name then, and are no checkpoints any more. Where all are damaged, Damaged is raised.
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
                pass  # another rank has done it, or the folder cannot be written to
        return True
    if damaged:
        raise damaged[0][1]
    return False


class File:
    """A checkpoint that is open. Tensors are read from the mapped file."""

    def __init__(self, name):
        with open(name, "rb") as f:
            info = os.fstat(f.fileno())
            if info.st_uid not in (os.geteuid(), 0) or info.st_mode & 0o022:
                raise PermissionError(f"hvdrun: {name}: training cannot go on from it: others can write it")
            if info.st_size < 8 + 12:
                raise Damaged(f"hvdrun: {name}: it has {info.st_size} bytes")
            self._map = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
        self.name = name
        (length,) = struct.unpack("<Q", self._map[:8])
        if length > min(_MOST_HEADER, info.st_size - 20):
            raise Damaged(f"hvdrun: {name}: its header is of {length} bytes, the file of {info.st_size}")
        head = self._map[:8 + length]
        if self._map[-12:] != _MAGIC + struct.pack("<I", crc32c(head)):
            raise Damaged(f"hvdrun: {name}: its seal does not match its header")
        header = json.loads(head[8:])
        own = json.loads(header.pop("__metadata__")["hvdrun"])
        if own["version"] != VERSION:
            raise ValueError(f"hvdrun: {name}: its format has version {own['version']}, this program knows version {VERSION}")
        self.commits, self.parts = own["commits"], own["parts"]
        self._sums = {t: s for p in self.parts for t, s in zip(p["tensors"], p["sums"])}
        self._entries, self._data = header, 8 + length

    def tensors(self):
        return self._sums.keys()

    def read(self, name, sums=sums):
        """The dtype, shape and verified bytes of a tensor; the bytes are valid as long as someone holds them."""
        entry = self._entries[name]
        first, end = entry["data_offsets"]
        if not 0 <= first <= end <= len(self._map) - self._data:
            raise Damaged(f"hvdrun: {self.name}: tensor {name!r} is not in the file")
        data = memoryview(self._map)[self._data + first:self._data + end]
        if sums(data) != self._sums[name]:
            raise Damaged(f"hvdrun: {self.name}: tensor {name!r} has changed since it was written")
        return entry["dtype"], entry["shape"], data
