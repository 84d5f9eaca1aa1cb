"""Tests how a Job handles the outcomes of operations, and a store that answers late. No rank runs."""
import inspect
import os
import subprocess
import sys
import threading
import unittest
import weakref
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import hvdrun.torch as hvd  # noqa: E402
from hvdrun._state import broadcast  # noqa: E402
from hvdrun import _state, _transport, _worker  # noqa: E402
from hvdrun._transport import Transport  # noqa: E402

SIZE = 3


class Silent(Transport):
    silent = True

    def __init__(self):
        self.finished = 0

    def finish(self):
        self.finished += 1


class Worker:
    """The worker of a Job. From its call number lost_at on, lost reports that the world has lost a rank."""

    def __init__(self, lost_at=None):
        self.lost_at, self.calls, self.on_lost = lost_at, 0, None

    def lost(self, generation, seconds=0.0):
        self.calls += 1
        return self.lost_at is not None and self.calls >= self.lost_at


def job(lost_at=None):
    made = hvd.Job(Worker(lost_at), Silent())
    made._world = {"generation": 7, "rank": 0, "size": SIZE}
    return made


def all_reduce(left):
    """Replaces the operation, so that its result is left(tensor)."""
    return mock.patch.object(dist, "all_reduce", lambda t, op=None: t.copy_(left(t.clone())))


ELSEWHERE = """
import os, sys, tempfile
sys.modules["fcntl"] = None
import torch
for name in ("geteuid", "register_at_fork", "fdatasync", "O_DIRECTORY", "memfd_create"):
    delattr(os, name)
isdir = os.path.isdir
os.path.isdir = lambda path: not str(path).startswith("/proc") and isdir(path)
import hvdrun.torch as hvd
job = hvd.init("gloo")
net = torch.nn.Linear(2, 1)
state = job.state(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
for step in job.steps(state, total=2, batch=4):
    with step:
        step.mean(state.model(torch.ones(len(step.indices), 2))).backward()
        step.commit()
with tempfile.TemporaryDirectory() as folder:
    state.save(folder)
    assert state.restore(folder) and state.step == 2
print("done")
"""


class TestElsewhere(unittest.TestCase):
    def test_alone(self):
        """A program can run alone without the features of Linux, for development on other systems."""
        path = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        run = subprocess.run([sys.executable, "-W", "ignore", "-c", ELSEWHERE], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        self.assertEqual((run.returncode, run.stdout), (0, "done\n"), run.stderr)
        self.assertNotIn("Exception ignored", run.stderr)


class TestPublic(unittest.TestCase):
    def test_names(self):
        """dir has only names for users, and each of these documents and types its arguments and its result."""
        self.assertEqual(set(dir(hvd)), set(hvd.__all__))
        shown = [getattr(hvd, name) for name in hvd.__all__]
        for kind in (hvd.Job, hvd.State, hvd.Step, hvd.Micro, hvd.Plan, hvd.Plan.__mro__[1]):
            shown += [value.fget if isinstance(value, property) else value for name, value in vars(kind).items() if name[0] != "_"]
        for thing in shown:
            with self.subTest(thing):
                self.assertTrue(thing.__doc__)
                if not inspect.isclass(thing):
                    signature = inspect.signature(thing)
                    self.assertIsNot(signature.return_annotation, inspect.Signature.empty)
                    named = [n for n, p in signature.parameters.items() if n != "self"]
                    self.assertFalse([n for n in named if signature.parameters[n].annotation is inspect.Signature.empty])
                    if named:
                        said = thing.__doc__.partition("Args:")[2]
                        self.assertFalse([n for n in named if f"{n}: " not in said])

    def test_repr(self):
        state = hvd.State(job(), None, {"w": torch.zeros(2), "step": 4})
        self.assertEqual(repr(state._job), "<hvdrun.torch.Job: rank 0 of 3, generation 7>")
        self.assertEqual(repr(state), "<hvdrun.torch.State at step 4: w, step>")
        self.assertEqual(repr(hvd.Step(state._job, state, hvd.Plan(8), 9, None)), "<hvdrun.torch.Step 4: 2 of 8 samples, not committed>")
        self.assertEqual(dir(state), ["begin", "commit", "restore", "save", "step", "undo", "w"])

    def test_part_names(self):
        for name in ("save", "_x", "restore"):
            with self.assertRaisesRegex(ValueError, f"cannot have a part named '{name}'"):
                hvd.State(job(), None, {name: 1})
        with self.assertRaisesRegex(TypeError, "part 'call' is of type builtins.function"):
            hvd.State(job(), None, {"call": lambda: 1})


class TestInit(unittest.TestCase):
    def test_end(self):
        """init registers rest, so that torch's threads drop their tensors before the interpreter ends."""
        self.addCleanup(dist.destroy_process_group)
        with mock.patch("atexit.register") as register:
            hvd.init("gloo")
        register.assert_any_call(_worker.rest)


class TestDestroy(unittest.TestCase):
    """A backend is destroyed after its process group, by its own destructor."""

    class Backend:
        pass

    def test_order(self):
        backend = self.Backend()
        ends = weakref.ref(backend)
        groups = [mock.Mock(**{"_get_backend.side_effect": RuntimeError}), SimpleNamespace(_get_backend=lambda device: owned.pop())]
        owned, seen = [backend], []
        del backend
        world = SimpleNamespace(pg_map=groups)
        destroyed = mock.patch.object(dist, "destroy_process_group", lambda group: seen.append((group, ends() is not None)))
        with mock.patch.object(_transport.c10d, "_world", world, create=True), destroyed:
            _transport.destroy()
        self.assertEqual(seen, [(None, True)])
        self.assertIsNone(ends())

    def test_some(self):
        with mock.patch.object(dist, "destroy_process_group") as destroyed:
            _transport.destroy("one", "two")
        self.assertEqual(destroyed.call_args_list, [mock.call("one"), mock.call("two")])


class TestAgree(unittest.TestCase):
    """A step counts only if all ranks agree, because an operation of NCCL that was cut ends without an error and with any result."""

    def test_all(self):
        """A flag that only another rank has set counts."""
        with all_reduce(lambda t: t * SIZE + torch.tensor([0, 1, 0])):
            j = job()
            self.assertEqual(j._agree(True, False), [True, True])
            self.assertEqual(j._transport.finished, 2)

    def test_cut(self):
        """The result of an operation that was cut is recognized, whatever it contains."""
        for name, left in {
            "untouched": lambda t: t,
            "of two": lambda t: t * 2,
            "zero": torch.zeros_like,
            "anything": lambda t: torch.randint_like(t, 1 << 62),
            "of another world": lambda t: t * SIZE + torch.tensor([0] * (len(t) - 1) + [SIZE]),
        }.items():
            with self.subTest(name), all_reduce(left), self.assertRaises(hvd.Broken):
                job()._agree(True, False)

    def test_lost(self):
        """There is no agreement if a rank is lost before the operation, or while this rank waits for its result."""
        for lost_at in (1, 2):
            with all_reduce(lambda t: t * SIZE), self.assertRaises(hvd.Broken):
                job(lost_at)._agree()

    def test_steps(self):
        """The numbers of steps that a cut operation leaves in its result do not count as those of the other ranks."""
        with mock.patch.object(dist, "all_gather", lambda all_of, mine: all_of[0].copy_(mine)), all_reduce(lambda t: t), \
                self.assertRaises(hvd.Broken):
            job().state(step=0)._settle()

    def test_stopped(self):
        """All ranks learn that no step follows if the rank whose state they get knows it. Another rank's knowledge does not count."""
        plan = [0] * _state.PLAN + list(_transport.Transport.address(None))
        for others, stopped in (((1, 5, 0, 0, 1, *plan), True), ((1, 5, 0, 0, 0, *plan), False), ((1, 4, 0, 0, 1, *plan), False)):
            with self.subTest(others), mock.patch.object(_state, "broadcast", lambda values, *_: values), \
                    mock.patch.object(dist, "all_gather", lambda all_of, mine: [t.copy_(v) for t, v in zip(
                        all_of, (mine, torch.tensor(others), torch.tensor(others)))]):
                j = job()
                j._arrived = lambda: None
                state = j.state(step=5)
                state.__dict__["_holds"] = True
                state._settle()
                self.assertEqual(j._stopped, stopped)

    def test_errors(self):
        """Every error of a program means a broken world if the world has lost a rank, and none does otherwise."""
        for lost_at, broken in ((1, True), (None, False)):
            for err in (IndexError("received invalid bucket_size, was abort called?"), AssertionError(), RuntimeError("connection lost")):
                for silent in (True, False):
                    j = job(lost_at)
                    j._transport.silent = silent
                    self.assertEqual(j._broken(err, None), broken)

    def test_own(self):
        """In a world without a loss, an error of torch.distributed that occurs again is the program's. The peers, whose connections were
        closed, continue."""
        def raised(text):
            scope = {"__name__": "torch.distributed.fake"}
            exec("def fail(text): raise RuntimeError(text)", scope)
            try:
                scope["fail"](text)
            except RuntimeError as err:
                return err

        state = SimpleNamespace(step=5)
        first, peer = job(), job()
        with mock.patch("builtins.print"):
            self.assertTrue(first._broken(raised("invalid tensor list"), state))
            self.assertFalse(first._broken(raised("invalid tensor list"), state))
            for _ in range(hvd._VAIN - 1):
                self.assertTrue(peer._broken(raised("Connection closed by peer"), state))
            self.assertFalse(peer._broken(raised("Connection closed by peer"), state))
            peer._clean()
            self.assertTrue(peer._broken(raised("Connection closed by peer"), state))

    def test_wrapped(self):
        """An error that the program has raised from the error of a broken world also means a broken world."""
        try:
            try:
                raise hvd.Broken("a rank is lost")
            except hvd.Broken as err:
                raise ValueError("the pass has failed") from err
        except ValueError as err:
            self.assertTrue(job()._broken(err, SimpleNamespace(step=5)))

    def test_state(self):
        """A state that has not arrived is not used."""
        def arrived():
            raise hvd.Broken("it has not")

        with mock.patch.object(dist, "broadcast", lambda t, src: t.fill_(-1)), self.assertRaises(hvd.Broken):
            broadcast(None, 1, 0, torch.device("cpu"), arrived)


class TestMeeting(unittest.TestCase):
    def test_late(self):
        """A thread that still opens the store for an abandoned world does not pass that store to the next world."""
        for give_up in (_transport.Meeting.cut, lambda meeting: meeting.prepare("store")):
            meeting = _transport.Meeting("store", None)
            meeting.prepare("store")
            late, ends, outcome = threading.Event(), threading.Event(), []

            def slow(where, timeout):
                late.set()
                ends.wait()
                return "late"

            def first():
                try:
                    outcome.append(meeting.open())
                except hvd.Broken as err:
                    outcome.append(err)

            with mock.patch.object(_transport, "open_store", slow):
                thread = threading.Thread(target=first)
                thread.start()
                late.wait()
            give_up(meeting)
            with mock.patch.object(_transport, "open_store", lambda where, timeout: "in time"):
                self.assertEqual(meeting.open(), "in time")
                ends.set()
                thread.join()
                self.assertIsInstance(outcome[0], hvd.Broken)
                self.assertEqual(meeting.open(), "in time")


if __name__ == "__main__":
    unittest.main(verbosity=2)
