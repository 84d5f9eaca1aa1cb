"""Tests the protocol of the socket without torch. The test is the other end."""
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import types
import unittest
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from hvdrun import _worker  # noqa: E402


class Peer:
    """The end of hvdrun, with the worker at the other end."""

    def __init__(self):
        self.sock, other = socket.socketpair()
        self.lines = self.sock.makefile("rb")
        self.worker = _worker.Worker(other, "test")

    def send(self, **message):
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def next(self):
        return json.loads(self.lines.readline())

    def welcome(self):
        said = []
        thread = threading.Thread(target=lambda: said.append(self.worker.hello()))
        thread.start()
        self.hello = self.next()
        self.send(**{"is": "hello", "version": 1, "store": {"host": "h", "port": 1}})
        thread.join()
        return said[0]

    def close(self):
        self.lines.close()
        self.sock.close()


class Fork(unittest.TestCase):
    def test_garbage_stays_with_the_parent(self):
        """A child never collects its parent's garbage, even if a collection is due in the child before the garbage is set apart."""
        program = """
import gc, os, sys
from hvdrun import _worker

class Group:
    def __init__(self):
        self.itself = self
    def __del__(self):
        os.write(1, b"collected by the child\\n" if os.getpid() != parent else b"collected by the parent\\n")

parent, kept = os.getpid(), []
# What was registered before runs first in the child.
os.register_at_fork(after_in_child=lambda: kept.extend([] for _ in range(200000)))
_worker.keep_garbage_of_parent()
kept.append([[] for _ in range(1000)])
Group()
if os.fork() == 0:
    kept.extend([] for _ in range(200000))
    gc.collect()
    os._exit(0 if gc.isenabled() else 1)
assert os.wait()[1] == 0
assert gc.isenabled()
gc.collect()
"""
        out = subprocess.run([sys.executable, "-c", program], cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
                             stdout=subprocess.PIPE, check=True).stdout
        self.assertEqual(out, b"collected by the parent\n")


class Rest(unittest.TestCase):
    def test_waits(self):
        """The interpreter waits for a thread that computes without its lock, and needs the lock afterwards."""
        program = """
import atexit, hashlib, os, threading
from hvdrun import _worker

def compute():
    begun.set()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 100000)
    os.write(1, b"it has the interpreter")

atexit.register(_worker.rest, 600)
begun = threading.Event()
threading.Thread(target=compute, daemon=True).start()
begun.wait()
"""
        out = subprocess.run([sys.executable, "-c", program], cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
                             stdout=subprocess.PIPE, check=True).stdout
        self.assertEqual(out, b"it has the interpreter")

    def test_gives_up(self):
        """A thread that runs for ever does not keep the program from ending."""
        stop = threading.Event()

        def run():
            while not stop.is_set():
                pass

        thread = threading.Thread(target=run)
        thread.start()
        _worker.rest(0.01)
        stop.set()
        thread.join()


class TestWorker(unittest.TestCase):
    def setUp(self):
        self.peer = Peer()
        self.addCleanup(self.peer.close)
        self.welcome = self.peer.welcome()
        self.worker = self.peer.worker

    def test_hello(self):
        self.assertEqual(self.peer.hello, {"do": "hello", "version": 1, "program": "test"})
        self.assertEqual(self.welcome["store"], {"host": "h", "port": 1})

    def test_world(self):
        self.worker.ask(handle="x", commits=3)
        self.assertEqual(self.peer.next(), {"do": "join", "handle": "x", "commits": 3})
        self.peer.send(**{"is": "world", "generation": 2, "rank": 1, "size": 3, "seq": 5, "unknown": [1]})
        world = self.worker.answer()
        self.assertEqual((world["generation"], world["rank"]), (2, 1))
        self.assertFalse(self.worker.changed())

    def test_dismissed(self):
        self.worker.ask()
        self.peer.send(**{"is": "dismissed", "why": "finished", "last": True})
        with self.assertRaises(_worker.Dismissed) as caught:
            self.worker.answer()
        self.assertEqual((caught.exception.why, caught.exception.last), ("finished", True))

    def test_updates(self):
        """Only the newest update counts. One without a change withdraws earlier ones, and a world includes the updates up to its seq."""
        called = threading.Event()
        self.worker.on_lost = lambda *_: called.set()

        def settle():
            self.peer.send(**{"is": "lost", "generation": 99, "ranks": []})
            called.wait()
            called.clear()

        for seq, change, want in ((8, ["added"], True), (7, [], True), (9, [], False), (10, ["removed"], True)):
            self.peer.send(**{"is": "updated", "seq": seq, "change": change, "generation": 1})
            settle()
            self.assertEqual(self.worker.changed(), want, seq)
        self.worker.ask()
        self.peer.send(**{"is": "world", "generation": 2, "rank": 0, "size": 1, "seq": 10})
        self.worker.answer()
        self.assertFalse(self.worker.changed())
        self.peer.send(**{"is": "leave"})
        settle()
        self.assertTrue(self.worker.changed())

    def test_lost(self):
        told = []
        self.worker.on_lost = lambda *what: told.append(what)
        self.assertFalse(self.worker.lost(4))
        self.peer.send(**{"is": "lost", "generation": 4, "ranks": [1]})
        while not self.worker.lost(4, 60):
            pass
        self.assertEqual(self.worker.lost_ranks(4), [1])
        self.worker.ask()  # on_lost has been called once the thread has read the next message
        self.peer.send(**{"is": "world", "generation": 5, "rank": 0, "size": 1})
        self.worker.answer()
        self.assertEqual(told, [(4, [1])])
        self.assertFalse(self.worker.lost(5))

    def test_figures(self):
        self.peer.worker.figures({"loss": 0.5, "lr": float("nan")})
        self.assertEqual(self.peer.next(), {"do": "figures", "figures": {"loss": 0.5, "lr": None}})
        self.peer.worker.figures({"loss": 0.25})  # within 0.1 s, so it is not sent at once
        self.peer.worker.figures({"loss": 0.125})
        self.peer.worker._send_figures(1e9)
        self.assertEqual(self.peer.next(), {"do": "figures", "figures": {"loss": 0.125}})

    def test_stacks(self):
        self.peer.send(**{"is": "stacks", "id": 3, "most_bytes": 200})
        answer = self.peer.next()
        self.assertEqual((answer["do"], answer["id"]), ("stacks", 3))
        self.assertRegex(answer["text"], "(?i)^(current )?thread 0x")
        self.assertLessEqual(len(answer["text"]), 200)

    def test_no_stacks(self):
        """If stacks cannot be written to a file, the worker answers with the reason, and the connection stays."""
        refused = OSError("no memory")
        with mock.patch.object(_worker.os, "memfd_create", side_effect=refused):
            self.peer.send(**{"is": "stacks", "id": 3})
            self.assertEqual(self.peer.next()["text"], "no stacks: no memory")
        self.test_stacks()

    def test_many_lost(self):
        self.peer.send(**{"is": "lost", "generation": 4, "ranks": list(range(80))})
        self.assertTrue(self.worker.lost(4, 60))
        self.assertEqual(self.worker.lost_ranks(4), list(range(64)))

    def test_written(self):
        self.worker.beat("saving", 3, 1 << 20)
        self.assertEqual(self.peer.next(), {"do": "beat", "phase": "saving", "commits": 3, "written": 1 << 20})

    def test_beats(self):
        """Of many beats the last one is sent, and few others."""
        for i in range(1000):
            self.worker.beat("training", i)
        beats = [self.peer.next()]
        while beats[-1]["commits"] != 999:
            beats.append(self.peer.next())
        self.assertLess(len(beats), 100)

    def test_operations(self):
        """Beats report the program's position between two commits: in a function of torch that waits, or elsewhere."""
        self.worker.beat("joining", 6)
        self.assertEqual(self.peer.next(), {"do": "beat", "phase": "joining", "commits": 6})
        self.worker.beat("training", 7)
        self.assertEqual(self.peer.next()["operation"], {"number": 8, "what": "commit", "waiting": False})
        readable, writable = os.pipe()
        beats = []

        def hear():
            beats.append(self.peer.next())
            os.write(writable, b"x")

        thread = threading.Thread(target=hear)
        torch = {"__name__": "torch.distributed.distributed_c10d", "read": os.read}
        exec("def all_reduce(fd): _wait(fd)\ndef _wait(fd): read(fd, 1)", torch)
        thread.start()
        torch["all_reduce"](readable)
        thread.join()
        self.assertEqual(beats[0]["operation"], {"number": 9, "what": "all_reduce", "waiting": True})
        os.close(readable)
        os.close(writable)
        self.assertEqual(self.peer.next()["operation"]["waiting"], False)  # the test itself does not count as torch

    def test_stuck(self):
        """A program that waits for others in a lost world is found. One that waits for the next world is not."""
        quiet, _worker.QUIET = _worker.QUIET, 0.01
        self.addCleanup(setattr, _worker, "QUIET", quiet)
        readable, writable = os.pipe()
        looks, found = [], []
        look = self.worker._waits.look

        def looked(*at):
            looks.append(look(*at))
            if len(looks) == 2 * _worker.STUCK:
                os.write(writable, b"x")
            return looks[-1]

        self.worker._waits.look = looked
        self.worker.on_stuck = found.append
        torch = {"__name__": "torch.distributed.distributed_c10d", "read": os.read}
        exec("def all_reduce(fd): read(fd, 1)", torch)
        for phase, lost, want in (("training", 4, []), ("joining", 5, []), ("training", 5, ["all_reduce"])):
            self.worker.beat(phase, 7)
            self.worker.ask()
            self.peer.send(**{"is": "lost", "generation": lost, "ranks": [1]})
            self.peer.send(**{"is": "world", "generation": 5, "rank": 0, "size": 1})
            self.worker.answer()
            looks.clear()
            torch["all_reduce"](readable)
            self.assertEqual(found, want, phase)
        os.close(readable)
        os.close(writable)

    def test_busy(self):
        """A function of torch that computes does not count as waiting."""
        torch = {"__name__": "torch.autograd", "frame": sys._getframe}
        exec("def backward(): return _run()\ndef _run(): return frame()", torch)
        waits = _worker.Waits()
        told = [waits.look(torch["backward"](), now, used) for now, used in ((10, 9), (11, 9.1), (12, 9.9), (13, 9.9))]
        self.assertEqual(told, [None, "backward", None, "backward"])
        self.assertIsNone(waits.look(sys._getframe(), 14, 9.9))

    def test_end(self):
        self.worker.ask()
        self.peer.sock.shutdown(socket.SHUT_RDWR)
        with self.assertRaises(_worker.Error):
            self.worker.answer()

    def test_fatal(self):
        self.worker.ask()
        self.peer.send(**{"is": "error", "text": "version 1 is too old", "fatal": True})
        with self.assertRaisesRegex(_worker.Error, "version 1 is too old"):
            self.worker.answer()

    def test_fork(self):
        """A forked child does not keep the socket open, so the connection ends with the parent."""
        readable, writable = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(writable)
            os.read(readable, 1)
            os._exit(0)
        os.close(readable)
        self.peer.sock.setblocking(True)
        self.worker.close()
        self.worker._thread.join()
        self.worker._socket.close()
        self.assertEqual([line for line in self.peer.lines], [])
        os.close(writable)
        os.waitpid(pid, 0)


class TestFailures(unittest.TestCase):
    """An exception that ends a process is reported to hvdrun, and can add a hint to the output."""

    def setUp(self):
        self.peer = Peer()
        self.addCleanup(self.peer.close)
        self.peer.welcome()
        hook = sys.excepthook
        self.addCleanup(setattr, sys, "excepthook", hook)
        sys.excepthook = lambda *_: None
        _worker.tell_failures(self.peer.worker, ("too early", "begin with the loop"))

    def end(self, err):
        with mock.patch("sys.stderr", new_callable=io.StringIO) as printed:
            try:
                raise err
            except type(err):
                sys.excepthook(*sys.exc_info())
        return printed.getvalue()

    def test_told(self):
        self.assertEqual(self.end(ValueError("two\nlines")), "")
        said = self.peer.next()
        self.assertEqual((said["do"], said["what"], said["error"]), ("report", "failed", "ValueError: two lines"))
        self.assertRegex(said["where"], r"test_worker\.py:[0-9]+$")
        self.assertTrue(self.peer.worker.failed)

    def test_too_early(self):
        self.assertIn("begin with the loop", self.end(ValueError("too early for that")))

    def test_lost(self):
        """The hint for a collective between steps that has lost a rank names evaluate."""
        self.peer.worker.generation = 4
        self.peer.send(**{"is": "lost", "generation": 4, "ranks": [1]})
        self.assertTrue(self.peer.worker.lost(4, 60))
        self.assertIn("evaluate=", self.end(RuntimeError("Connection closed by peer")))


class TestSigterm(unittest.TestCase):
    def test_again(self):
        """A second signal within a second is the first one, forwarded by hvdrun. A later one ends the process."""
        left = threading.Semaphore(0)
        worker = types.SimpleNamespace(leave=left.release)
        self.addCleanup(signal.signal, signal.SIGTERM, signal.SIG_DFL)
        _worker.on_sigterm(worker)
        handle = signal.getsignal(signal.SIGTERM)
        now, ended = [5.0], []
        clock = mock.patch.object(_worker.time, "monotonic", lambda: now[0])
        with clock, mock.patch.object(_worker.os, "kill", lambda *killed: ended.append(killed)):
            handle(signal.SIGTERM, None)
            left.acquire()
            now[0] = 5.9
            handle(signal.SIGTERM, None)
            self.assertEqual(ended, [])
            now[0] = 6.1
            handle(signal.SIGTERM, None)
        self.assertEqual(ended, [(os.getpid(), signal.SIGTERM)])
        self.assertEqual(signal.getsignal(signal.SIGTERM), signal.SIG_DFL)
        self.assertFalse(left.acquire(blocking=False))


class TestLines(unittest.TestCase):
    def test_pieces(self):
        text = b'{"is":"hello"}\n{"is":"lost","ranks":[1]}\n'
        for cut in range(len(text)):
            lines = _worker.Lines()
            self.assertEqual(lines.feed(text[:cut]) + lines.feed(text[cut:]), [{"is": "hello"}, {"is": "lost", "ranks": [1]}])

    def test_long(self):
        text = json.dumps({"is": "world", "handles": ["x" * (_worker.MOST_LINE + 1)]}).encode() + b"\n"
        lines, read = _worker.Lines(), []
        for at in range(0, len(text), 1 << 16):
            read += lines.feed(text[at:at + (1 << 16)])
        self.assertEqual([len(message["handles"][0]) for message in read], [_worker.MOST_LINE + 1])

    def test_bad(self):
        for bad in (b"nonsense\n", b"[]\n", b"1\n", b"\xff\n", b"x" * (_worker.MOST_READ + 1), b'"' + b"x" * _worker.MOST_READ + b'"\n'):
            with self.assertRaises((_worker.Error, ValueError)):
                _worker.Lines().feed(bad)


# A program that exits as soon as a slow package is imported.
SLOW = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers", "accelerate"):
            print("imports", name, os.environ.get("HVD_WORKER_SOCKET"), flush=True)
            sys.exit()

sys.meta_path.insert(0, Finder())
"""


class TestGreeting(unittest.TestCase):
    def test_before_imports(self):
        """The worker has sent hello before it begins to import a slow package."""
        for module, imports in ("torch", "torch"), ("transformers", "torch"), ("accelerate", "accelerate"):
            with self.subTest(module):
                ours, other = socket.socketpair()
                with ours, other:
                    out = subprocess.check_output(
                        [sys.executable, "-c", f"{SLOW}import hvdrun.{module}"], pass_fds=[other.fileno()], text=True,
                        env={**os.environ, _worker.VARIABLE: str(other.fileno()),
                             "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(_worker.__file__)))})
                    self.assertEqual(out, f"imports {imports} None\n")
                    other.close()
                    with ours.makefile("rb") as lines:
                        said = [json.loads(line) for line in lines]
                self.assertEqual([(line["do"], line["version"]) for line in said], [("hello", 1)])

    def test_once(self):
        """A later call returns the same worker, which does not send hello again."""
        ours, other = socket.socketpair()
        os.environ[_worker.VARIABLE] = str(other.detach())
        _worker.greet("hvdrun-nothing")
        worker = _worker.Worker.from_environment("test")
        self.assertIsNone(_worker.Worker.from_environment("test"))
        ours.sendall(b'{"is": "hello", "version": 1}\n')
        self.assertEqual(worker.hello(), {"is": "hello", "version": 1})
        worker.close()
        with ours, ours.makefile("rb") as lines:
            self.assertEqual([json.loads(line)["program"] for line in lines], ["hvdrun-nothing"])

    def test_child(self):
        """A child process that has the variable but not the socket can import the package."""
        reads, writes = os.pipe()
        self.addCleanup(os.close, reads)
        self.addCleanup(os.close, writes)
        for value in ("9999", "x", str(writes)):
            os.environ[_worker.VARIABLE] = value
            _worker.greet("torch")
            self.assertEqual(os.environ.pop(_worker.VARIABLE), value)
            self.assertIsNone(_worker.Worker.from_environment("test"))


class TestEnvironment(unittest.TestCase):
    def test_none(self):
        self.assertIsNone(_worker.Worker.from_environment("test"))

    def test_secrets(self):
        """Processes that the program starts inherit neither the socket nor the credentials."""
        ours, other = socket.socketpair()
        os.environ.update({_worker.VARIABLE: str(other.detach()), _worker.CREDENTIALS: "secret"})
        worker = _worker.Worker.from_environment("test")
        self.assertFalse(worker._socket.get_inheritable())
        seen = subprocess.check_output(["env"]).decode()
        self.assertNotIn(_worker.VARIABLE, seen)
        self.assertNotIn(_worker.CREDENTIALS, seen)
        worker._socket.close()
        ours.close()

    def test_bad(self):
        for value in ("x", "9999"):
            os.environ[_worker.VARIABLE] = value
            with self.assertRaisesRegex(_worker.Error, _worker.VARIABLE):
                _worker.Worker.from_environment("test")


if __name__ == "__main__":
    unittest.main()
