"""Converts the values of a state to the tensors and the JSON of a checkpoint, and back."""
import collections
import ctypes
import json
import pathlib
import struct
import sys

import torch

from hvdrun import _checkpoint

_TYPES = {getattr(torch, torch_name): name for torch_name, name in (
    ("float64", "F64"), ("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16"), ("complex64", "C64"),
    ("int64", "I64"), ("int32", "I32"), ("int16", "I16"), ("int8", "I8"), ("uint64", "U64"), ("uint32", "U32"), ("uint16", "U16"),
    ("uint8", "U8"), ("bool", "BOOL"), ("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2"), ("float8_e8m0fnu", "F8_E8M0"),
) if hasattr(torch, torch_name)}
_TYPES_OF = {name: dtype for dtype, name in _TYPES.items()}
# The names of these types in Go, for the kinds of parts that Go reads.
_GO = {"F64": "float64", "F32": "float32", "F16": "collective.Float16", "BF16": "collective.BFloat16", "I64": "int64", "I32": "int32",
       "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool"}
_ARRAYS = {"f8": "F64", "f4": "F32", "f2": "F16", "c8": "C64", "i8": "I64", "i4": "I32", "i2": "I16", "i1": "I8", "u8": "U64",
           "u4": "U32", "u2": "U16", "u1": "U8", "b1": "BOOL"}  # the types of numpy
# Containers by the letters that stand for them.
_SEQUENCES = {"l": list, "t": tuple, "s": set, "z": frozenset}
_MAPPINGS = {"d": dict, "o": collections.OrderedDict, "k": collections.Counter}
_LETTERS = {kind: letter for letter, kind in (*_SEQUENCES.items(), *_MAPPINGS.items())} | {torch.Size: "t"}


def bytes_of(tensor):
    """Returns a tensor's elements as a vector of bytes, which shares the memory of a contiguous tensor."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _memory(tensor):
    """Returns the memory of a vector of bytes on the CPU without numpy and without a copy. It is valid as long as it is referenced."""
    memory = (ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())
    memory.tensor = tensor
    return memoryview(memory).cast("B")


def _pieces(tensor):
    flat = bytes_of(tensor)
    for at in range(0, flat.numel(), _checkpoint.PIECE):
        yield _memory(flat[at:at + _checkpoint.PIECE].cpu())


def _beside(name, value):
    """Returns a checkpoint's tensor for a tensor of PyTorch. Elements of types that checkpoints lack become bytes, in one more dimension."""
    wraps = type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # its memory is elsewhere, as with DTensor
    if wraps or value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
        raise TypeError(f"hvdrun: part {name!r} is a {type(value).__name__} ({value.layout}, {value.dtype}, {value.device.type}), which a "
                        "checkpoint cannot have: keep a dense torch.Tensor")
    dtype, shape = _TYPES.get(value.dtype), list(value.shape)
    if dtype is None:
        dtype, shape = "U8", [*shape, value.element_size()]
    return _checkpoint.Tensor(name, dtype, shape, value.numel() * value.element_size(), lambda: _pieces(value))


def _array(name, value):
    """Returns a checkpoint's tensor for an array or a number of numpy, and the numpy type."""
    if value.dtype.kind not in "biufc":
        raise TypeError(f"hvdrun: part {name!r} is an array of {value.dtype}, which a checkpoint cannot have: keep one of numbers")
    flat = value.astype(value.dtype.newbyteorder("<"), order="C")
    text, shape = flat.dtype.str, list(flat.shape)
    dtype = _ARRAYS.get(text[1:])
    if dtype is None:
        dtype, shape = "U8", [*shape, flat.itemsize]

    def pieces():
        raw = memoryview(flat.reshape(-1).view("u1"))
        return (raw[at:at + _checkpoint.PIECE] for at in range(0, len(raw), _checkpoint.PIECE))

    return _checkpoint.Tensor(name, dtype, shape, flat.nbytes, pieces), text


def _part(tensor):
    count = 1
    for side in tensor.shape:
        count *= side
    go = _GO.get(tensor.dtype, tensor.dtype.lower())
    return _checkpoint.Part(tensor.name, f'tensor "{tensor.name}": []{go} of {count}' if tensor.shape else f'value "{tensor.name}": {go}',
                            [tensor])


def encode(name, value):
    """Returns the parts of a checkpoint for a part of a state: one for each tensor, which programs in Go can read, and one for the rest.

    It copies nothing before the tensors' pieces are requested. It raises TypeError for a value that a checkpoint cannot have.
    """
    if type(value) is int and -1 << 63 <= value < 1 << 63:
        number = _checkpoint.Tensor.of(name, "I64", [], value.to_bytes(8, "little", signed=True))
        return [_checkpoint.Part(name, f'value "{name}": int64', [number], str(value))]
    if type(value) is float:
        number = _checkpoint.Tensor.of(name, "F64", [], struct.pack("<d", value))
        return [_checkpoint.Part(name, f'value "{name}": float64', [number], str(value))]
    tensors = []
    tree = _tree(name, value, tensors)
    parts = [_part(t) for t in tensors]
    if not isinstance(value, torch.Tensor) and not _plain(value):
        text, own = json.dumps(tree).encode(), name + ".python"
        parts.append(_checkpoint.Part(own, "python", [_checkpoint.Tensor.of(own, "U8", [len(text)], text)]))
    return parts


def check(parts):
    """Raises TypeError or ValueError if a checkpoint cannot have these parts."""
    seen = set()
    for name, value in parts.items():
        for part in encode(name, value):
            if part.name in seen:
                raise ValueError(f"hvdrun: two tensors of the state are named {part.name!r}, the second in part {name!r}: rename the part")
            seen.add(part.name)


def _plain(value):
    """Reports whether a value consists only of named tensors, like the state of most modules."""
    return isinstance(value, dict) and len(value) > 0 and all(isinstance(v, torch.Tensor) and v.dtype in _TYPES for v in value.values())


def _tree(name, value, tensors):
    """Returns a value as JSON: tensors are left out, and types that JSON lacks become [letter, …]."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        tensors.append(_beside(name, value))
        return ["T", name, str(value.device.type), str(value.dtype).rpartition(".")[2]]
    if value is None or kind in (bool, str, int):
        return value
    if kind is float:
        return value if value - value == 0 else ["f", repr(value)]
    if kind is complex:
        return ["c", repr(value)]
    if kind in (bytes, bytearray):
        return ["b" if kind is bytes else "B", value.hex()]
    if isinstance(value, pathlib.Path):
        return ["p", str(value)]
    numpy = sys.modules.get("numpy")
    if numpy and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
        array, of = _array(name, value)
        tensors.append(array)
        return ["N" if kind is numpy.ndarray else "n", name, of]
    letter = _LETTERS.get(kind)
    if letter in _MAPPINGS:
        return [letter, [[_tree(name, k, tensors), _tree(f"{name}.{k}", v, tensors)] for k, v in value.items()]]
    if letter:
        return [letter, [_tree(f"{name}.{i}", v, tensors) for i, v in enumerate(value)]]
    raise TypeError(f"hvdrun: part {name!r} is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot have: keep numbers, "
                    "text, bytes, paths, tensors, arrays, or lists, tuples, sets and dicts of these, or an object that has state_dict and "
                    "load_state_dict")


def _value(tree, tensor, array):
    if not isinstance(tree, list):
        return tree
    letter, content = tree[0], tree[1]
    if letter == "T":
        return tensor(content, getattr(torch, tree[3]) if len(tree) > 3 else None)
    if letter in "Nn":
        value = array(content, tree[2])
        return value if letter == "N" else value[()]
    if letter in _SEQUENCES:
        return _SEQUENCES[letter](_value(v, tensor, array) for v in content)
    if letter in _MAPPINGS:
        return _MAPPINGS[letter]({_value(k, tensor, array): _value(v, tensor, array) for k, v in content})
    return _SIMPLE[letter](content)


_SIMPLE = {"f": float, "c": complex, "b": bytes.fromhex, "B": bytearray.fromhex, "p": pathlib.Path}


def decode(file, parts):
    """Returns the values of the parts in a checkpoint of this package, or of tensors with these names in one that Go has written.

    parts are the current values. Tensors for modules and tensors of the state are views of the file; others are copies.
    """
    def elements(name):
        dtype, shape, data = file.read(name)
        if dtype not in _TYPES_OF:
            raise ValueError(f"hvdrun: {file.name}: tensor {name!r} is of type {dtype}, which torch {torch.__version__} does not have")
        if not len(data):
            return torch.empty(shape, dtype=_TYPES_OF[dtype])
        return torch.frombuffer(data, dtype=_TYPES_OF[dtype]).reshape(shape)

    def copy(name, dtype):
        found = elements(name)
        if dtype is None or dtype == found.dtype:
            return found.clone()
        whole = torch.empty(found.shape[:-1], dtype=dtype)
        bytes_of(whole).copy_(found.reshape(-1))
        return whole

    def array(name, of):
        import numpy

        _, shape, data = file.read(name)
        of = numpy.dtype(of)
        return numpy.frombuffer(data, dtype=of).reshape(shape if of.str[1:] in _ARRAYS else shape[:-1]).copy()

    def like(name, live):
        if name not in file.tensors:
            raise ValueError(f"hvdrun: {file.name} has no tensor {name!r} of the state")
        if live.dtype not in _TYPES:
            return copy(name, live.dtype)
        found = elements(name)
        return found.reshape(live.shape) if found.numel() == live.numel() else found

    values = {}
    for name, part in parts.items():
        own = name + ".python"
        if own in file.tensors:
            values[name] = _value(json.loads(bytes(file.read(own)[2])), copy, array)
        elif isinstance(part, torch.Tensor):
            values[name] = like(name, part)
        elif _plain(part):
            values[name] = {key: like(f"{name}.{key}", live) for key, live in part.items()}
        elif name in file.tensors:
            values[name] = elements(name).item()
        else:
            raise ValueError(f"hvdrun: {file.name} has no part {name!r} of the state")
    return values
