"""Tests how checkpoints store values of PyTorch and numpy. No rank runs."""
import collections
import datetime
import os
import pathlib
import random
import sys
import tempfile
import unittest

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from hvdrun import _checkpoint, _values  # noqa: E402

try:
    import numpy
except ImportError:
    numpy = None


def of_types(*names):
    """Returns a tensor for each of the types that this torch has."""
    return {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in names if hasattr(torch, name)}


class TestValues(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def write(self, **parts):
        _values.check(parts)
        encoded = [p for name, value in parts.items() for p in _values.encode(name, value)]
        return _checkpoint.File(_checkpoint.write(self.folder, 1, 1, encoded))

    def same(self, a, b, at=""):
        self.assertIs(type(a), type(b), at)
        if isinstance(a, torch.Tensor):
            self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape), at)
            self.assertTrue(torch.equal(_values.bytes_of(a), _values.bytes_of(b)), at)
        elif isinstance(a, dict):
            self.assertEqual(list(a), list(b), at)
            for k in a:
                self.same(a[k], b[k], f"{at}.{k}")
        elif isinstance(a, (list, tuple)):
            self.assertEqual(len(a), len(b), at)
            for i, (x, y) in enumerate(zip(a, b)):
                self.same(x, y, f"{at}.{i}")
        elif numpy and isinstance(a, numpy.ndarray):
            self.assertEqual((a.shape, a.dtype.newbyteorder("<")), (b.shape, b.dtype.newbyteorder("<")), at)
            self.assertTrue((a == b).all() and b.flags.writeable, at)
        else:
            self.assertEqual(a, b, at)

    def round(self, value):
        self.same(value, _values.decode(self.write(v=value), {"v": None})["v"])

    def test_types(self):
        """A tensor of any type is restored unchanged, as a part, in a module's state and within a value."""
        all_types = of_types("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128", "int64", "int32", "int16", "int8",
                             "uint64", "uint32", "uint16", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz")
        self.assertGreater(len(all_types), 12)
        for name, tensor in all_types.items():
            with self.subTest(name):
                for state in (tensor, {"a.weight": tensor, "a.bias": torch.zeros(2)}, {"a": tensor, "b": 1}):
                    live = torch.zeros_like(tensor) if state is tensor else {k: torch.zeros_like(v) if k != "b" else 0 for k, v in state.items()}
                    self.same(state, _values.decode(self.write(v=state), {"v": live})["v"])

    def test_memory(self):
        """Tensors can be not contiguous, lazily conjugated, empty, or larger than a piece."""
        self.round([torch.arange(10)[::3], torch.randn(4, 5).t(), torch.randn(3, dtype=torch.complex64).conj(), torch.zeros(0, 3), torch.tensor(2.5),
                    torch.nn.Parameter(torch.randn(2)).detach(), torch.arange(_checkpoint.PIECE // 4 + 100000)])

    def test_aliases(self):
        """A decoded value is a copy, which does not change the file."""
        file = self.write(v=[torch.arange(4)])
        got = _values.decode(file, {"v": None})["v"][0]
        got += 1
        self.same(_values.decode(file, {"v": None})["v"][0], torch.arange(4))

    def test_python(self):
        self.round({"path": pathlib.Path("/a/b"), "set": {1, 2, (3, "x")}, "frozen": frozenset([1]), "complex": complex(1, float("inf")),
                    "large": 1 << 70, "random": random.getstate(), "count": collections.Counter("hello"), "bytes": b"x", "array": bytearray(b"yz"),
                    "ordered": collections.OrderedDict(b=1, a=2), "inf": float("-inf"), "none": None, 5: True, (1, "a"): [], "text": "ä\ud800"})

    @unittest.skipUnless(numpy, "no numpy")
    def test_numpy(self):
        self.round([numpy.random.get_state(), numpy.float64(2.5), numpy.int64(3), numpy.bool_(True), numpy.array(3.5), numpy.arange(4, dtype=">i4"),
                    numpy.zeros((2, 2), numpy.clongdouble), numpy.ones(3, numpy.float16), numpy.arange(12).reshape(3, 4).T, numpy.zeros((0, 2))])

    def test_refused(self):
        """The error names the place of the value in the state, and its type."""
        class Pair(collections.namedtuple("Pair", "a b")):
            pass

        refused = {
            "v.at.1": ({"at": [1, datetime.date(2026, 1, 2)]}, "datetime.date"), "v.x": ({"x": collections.defaultdict(int)}, "defaultdict"),
            "v": (Pair(1, 2), "Pair"), "v.0": ([lambda: 1], "function"), "v.sparse": ({"sparse": torch.eye(2).to_sparse()}, "sparse"),
            "v.meta": ({"meta": torch.zeros(2, device="meta")}, "meta"),
        }
        for name, (value, kind) in refused.items():
            with self.assertRaisesRegex(TypeError, f"'{name}' is .*{kind}.*: keep "):
                _values.check({"v": value})
        if numpy:
            with self.assertRaisesRegex(TypeError, "'v' is an array of object"):
                _values.check({"v": numpy.array([None])})

    def test_same_names(self):
        with self.assertRaisesRegex(ValueError, "two tensors of the state are named 'a.b', the second in part 'a.b'"):
            _values.check({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)})


if __name__ == "__main__":
    unittest.main()
