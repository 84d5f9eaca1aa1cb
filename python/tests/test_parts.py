"""Tests the parts that need no torch: the samples of each rank, the files of checkpoints, and the cut of sockets."""
import contextlib
import fcntl
import io
import os
import socket
import stat
import sys
import tempfile
import threading
import unittest
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from hvdrun import _checkpoint, _cut  # noqa: E402
from hvdrun._indices import Plan  # noqa: E402


class TestPlan(unittest.TestCase):
    def test_each_once(self):
        """An epoch has each sample once, whatever the size of the world is in each step."""
        for samples, batch in ((1500, 256), (7, 3), (256, 256), (5, 8), (1, 1)):
            for shuffle in (False, True):
                plan = Plan(batch, samples, shuffle, seed=3)
                per_epoch = -(-samples // batch)
                for epoch in range(2):
                    seen = []
                    for k in range(per_epoch):
                        step = epoch * per_epoch + k
                        size = step % 5 + 1
                        parts = [plan.part(step, rank, size) for rank in range(size)]
                        self.assertEqual(plan.epoch(step), epoch)
                        self.assertEqual(sum(map(len, parts)), plan.count(step))
                        self.assertLessEqual(max(map(len, parts)) - min(map(len, parts)), 1)
                        seen += sum(parts, [])
                    self.assertEqual(sorted(seen), list(range(samples)))

    def test_order(self):
        orders = {tuple(Plan(100, 100, True, seed).part(step, 0, 1)) for seed in (1, 2) for step in (0, 1)}
        self.assertEqual(len(orders), 4)
        self.assertEqual(Plan(100, 100, True, 1).part(1, 0, 1), Plan(100, 100, True, 1).part(1, 0, 1))

    def test_endless(self):
        self.assertEqual(Plan(4).part(2, 1, 2), [10, 11])

    def test_bad(self):
        for args in ((0, 5), (1, 0)):
            with self.assertRaises(ValueError):
                Plan(*args)


class TestCheckpoint(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = os.path.join(folder.name, "checkpoints")
        data, chunk = bytes(range(256)) * 5000, _checkpoint.CHUNK
        self.parts = [
            _checkpoint.Part("a", "tensor", [_checkpoint.Tensor("a", "U8", [len(data)], len(data), lambda: [data[:chunk], data[chunk:]])]),
            _checkpoint.Part("b", "value", [_checkpoint.Tensor.of("b", "I64", [], (7).to_bytes(8, "little"))], "7"),
            _checkpoint.Part("c", "tensor", [_checkpoint.Tensor.of("c", "F32", [0, 3], b"")]),
        ]
        self.data = data

    def test_round(self):
        path = _checkpoint.write(self.folder, 12, 4, self.parts)
        self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), 0o600)
        file = _checkpoint.File(path)
        self.assertEqual(file.commits, 12)
        self.assertEqual([p["name"] for p in file.parts], ["a", "b", "c"])
        self.assertEqual(bytes(file.read("a")[2]), self.data)
        self.assertEqual(file.read("b")[:2], ("I64", []))
        self.assertEqual(file.read("c")[:2], ("F32", [0, 3]))

    def test_damaged(self):
        """A changed bit is detected anywhere in the file."""
        path = _checkpoint.write(self.folder, 1, 1, self.parts)
        with open(path, "rb") as f:
            good = f.read()
        for at in (0, 9, 300, len(good) // 2, len(good) - 1):
            bad = bytearray(good)
            bad[at] ^= 4
            with open(path, "wb") as f:
                f.write(bad)
            with self.assertRaises(_checkpoint.Damaged):
                _checkpoint.File(path)
        with open(path, "wb") as f:
            f.write(good[:-1])
        with self.assertRaises(_checkpoint.Damaged):
            _checkpoint.File(path)

    def test_prune(self):
        for commits in (3, 20, 100):
            _checkpoint.write(self.folder, commits, 1, [])
        self.assertEqual(_checkpoint.listed(self.folder), [100, 20, 3])
        _checkpoint.prune(self.folder, 2, 100)
        self.assertEqual(_checkpoint.listed(self.folder), [100, 20])
        self.assertEqual(_checkpoint.listed(self.folder + "/none"), [])

    def test_prune_keeps_what_was_written(self):
        """Files with higher numbers, which belong to another training or are damaged, do not count against the limit."""
        for commits in (800, 900, 5, 10):
            _checkpoint.write(self.folder, commits, 1, [])
        _checkpoint.prune(self.folder, 1, 10)
        self.assertEqual(_checkpoint.listed(self.folder), [900, 800, 10])

    def test_sweep(self):
        """An incomplete file is removed once its writer has ended."""
        os.makedirs(self.folder)
        ended, writing = (os.path.join(self.folder, f".commit-{name}.tmp") for name in ("ended", "writing"))
        for name in (ended, writing):
            with open(name, "wb") as f:
                f.write(b"half")
        os.symlink(ended, os.path.join(self.folder, ".commit-link.tmp"))
        with open(writing, "rb") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            _checkpoint.write(self.folder, 1, 1, [])
        self.assertEqual(sorted(os.listdir(self.folder)),
                         [".commit-link.tmp", ".commit-writing.tmp", os.path.basename(_checkpoint.path(self.folder, 1))])

    def test_restore(self):
        """A damaged checkpoint is set aside when an older one is loaded. If there is no other, it is an error."""
        self.assertFalse(_checkpoint.restore(self.folder, self.fail))
        for commits in (1, 2, 3):
            _checkpoint.write(self.folder, commits, 1, self.parts)
        loaded = []

        def load(file):
            loaded.append(file.commits)

        def damage(commits):
            with open(_checkpoint.path(self.folder, commits), "r+b") as f:
                f.truncate(1000)

        damage(3)
        with contextlib.redirect_stderr(io.StringIO()):
            self.assertTrue(_checkpoint.restore(self.folder, load))
            self.assertEqual((loaded, _checkpoint.listed(self.folder)), ([2], [2, 1]))
            damage(1)
            damage(2)
            with self.assertRaisesRegex(_checkpoint.Damaged, "0002.safetensors"):
                _checkpoint.restore(self.folder, load)
        self.assertEqual(_checkpoint.listed(self.folder), [2, 1])

    def test_progress(self):
        told = []
        with mock.patch.object(_checkpoint, "_SETTLE", 200000):
            path = _checkpoint.write(self.folder, 1, 1, self.parts, progress=told.append)
        self.assertEqual(len(told), 2)
        self.assertTrue(len(self.data) <= told[1] <= os.path.getsize(path))

    def test_names(self):
        with self.assertRaisesRegex(ValueError, "two tensors"):
            _checkpoint.write(self.folder, 1, 1, [self.parts[0], self.parts[0]])

    def test_said_size(self):
        """No file is written if a tensor has another size than it declares."""
        with self.assertRaisesRegex(ValueError, "'d' do not have its size of 4 bytes"):
            _checkpoint.write(self.folder, 1, 1, [_checkpoint.Part("d", "tensor", [_checkpoint.Tensor("d", "U8", [4], 4, lambda: [b"abc"])])])
        self.assertEqual(os.listdir(self.folder), [])

    def test_unknown_version(self):
        """A file of an unknown version does not count as damaged, so it keeps its name."""
        with mock.patch.object(_checkpoint, "VERSION", 3):
            _checkpoint.write(self.folder, 1, 1, [])
        with self.assertRaisesRegex(ValueError, "its format has version 3, this program reads version 2"):
            _checkpoint.restore(self.folder, self.fail)
        self.assertEqual(_checkpoint.listed(self.folder), [1])

    def test_sum(self):
        self.assertEqual(_checkpoint.crc32c(b"123456789"), 0xE3069283)


def connection():
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
        return here, there


class TestCut(unittest.TestCase):
    def connect(self):
        here, there = connection()
        self.addCleanup(here.close)
        self.addCleanup(there.close)
        return here, there

    def test_cut(self):
        """The connections of the world end, and with them a read in another thread. Earlier and later connections continue."""
        before, after_before = self.connect()
        world = _cut.Connections()
        here, there = self.connect()
        world.settle()
        later, after_later = self.connect()
        got = []
        thread = threading.Thread(target=lambda: got.append(here.recv(1)))
        thread.start()
        self.assertEqual(world.cut(), 2)
        thread.join()
        self.assertEqual((got, there.recv(1)), ([b""], b""))
        for one, other in ((before, after_before), (later, after_later)):
            one.sendall(b"x")
            self.assertEqual(other.recv(1), b"x")
        self.assertGreater(here.fileno(), -1)

    def test_hold(self):
        """Reads end, also in another thread. Writes succeed until release, even after the owner has closed the connection."""
        world = _cut.Connections()
        here, there = self.connect()
        world.settle()
        got = []
        thread = threading.Thread(target=lambda: got.append(here.recv(1)))
        thread.start()
        self.assertEqual(world.hold(), 2)
        thread.join()
        self.assertEqual((got, there.recv(1)), ([b""], b""))
        here.close()
        self.assertEqual(world.cut(), 0)
        for _ in range(100):
            there.sendall(b"x")
        world.release()
        with self.assertRaises(OSError):
            for _ in range(100):
                there.sendall(b"x")

    def test_listening(self):
        """A listener of the world continues."""
        world = _cut.Connections()
        with socket.create_server(("127.0.0.1", 0)) as server:
            world.settle()
            self.assertEqual(world.cut(), 0)
            with socket.create_connection(server.getsockname()):
                server.accept()[0].close()

    def test_forming(self):
        """A world that is still connecting loses its connections, and those that it opens later."""
        world = _cut.Connections()
        self.connect()
        self.assertEqual(world.cut(), 2)
        here, there = self.connect()
        world.cut()
        self.assertEqual((here.recv(1), there.recv(1)), (b"", b""))

    def test_reused(self):
        """A descriptor that was closed or is now another socket is left alone. So are sockets that are not TCP."""
        world = _cut.Connections()
        here, there = connection()
        pair = socket.socketpair()
        world.settle()
        fds = here.fileno(), there.fileno()
        here.close()
        there.close()
        other, end = self.connect()
        self.assertTrue(set(fds) & {other.fileno(), end.fileno()})
        self.assertEqual(world.cut(), 0)
        other.sendall(b"x")
        self.assertEqual(end.recv(1), b"x")
        pair[0].sendall(b"x")
        self.assertEqual(pair[1].recv(1), b"x")
        for s in pair:
            s.close()


if __name__ == "__main__":
    unittest.main()
