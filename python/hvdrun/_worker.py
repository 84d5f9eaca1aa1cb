"""The worker's end of the socket that hvdrun gives each worker: one JSON object a line.

It needs no torch. docs/reference/worker-protocol.md describes the messages.
"""
import collections
import faulthandler
import gc
import json
import math
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from importlib import metadata

VARIABLE = "HVD_WORKER_SOCKET"
CREDENTIALS = "HVD_CREDENTIALS"
VERSION = 1
MOST_LINE = 1 << 20  # bytes of a line to hvdrun
MOST_READ = 16 << 20  # bytes of one from it, which may have the members of a large world
MOST_LOST = 64  # ranks of a join
SAME_REQUEST = 1.0  # seconds in which a second SIGTERM is the first one, by another way
BEAT = 0.1  # seconds between two beats, at least
QUIET = 1.0  # seconds after which the thread looks where the program is, and sends a beat that was held back
TOLD = 1.0  # seconds in which hvdrun says that a rank is lost, after an error that is not known to be of a connection
REST = 1.0  # seconds that the end of a program waits at most for its threads
STUCK = 10  # looks, a QUIET apart, that find the program in the same world, lost, waiting for others: nothing will end that

# Modules in whose functions a rank waits for others, unless they compute.
_WAITING = ("torch.distributed.", "torch.autograd", "torch._tensor", "torch.nn.parallel.distributed", "hvdrun.")


class Error(RuntimeError):
    """hvdrun refuses a message, or has ended."""


class Dismissed(Exception):
    """The worker is in no further world. why is "removed" or "finished"."""

    def __init__(self, why, last):
        super().__init__(why)
        self.why = why
        self.last = last


def keep_garbage_of_parent():
    """Makes forked processes leave to this one what is garbage here: they never collect it.

    A collection may begin as soon as the fork is done, in functions that others have registered for that moment: collection is off before the fork.
    """
    enabled = []

    def before():
        enabled.append(gc.isenabled())
        gc.disable()

    def parent():
        if enabled.pop():
            gc.enable()

    def child():
        gc.freeze()
        parent()

    os.register_at_fork(before=before, after_in_parent=parent, after_in_child=child)


def rest(seconds=REST):
    """Blocks until no other thread of this process runs, or so many seconds; an atexit handler, by which they have the interpreter.

    A thread of gloo that is the last to let go of a tensor, just after its operation, needs the interpreter for the tensor's Python
    object. Up to Python 3.13, who asks for it once it ends is ended by it, within a destructor of C++: that aborts the process.
    """
    own, still, end = threading.get_native_id(), 0, time.monotonic() + seconds
    # A thread that waits for the interpreter seems to sleep in the first look; it has it during the next pause.
    while still < 2 and time.monotonic() < end:
        time.sleep(0.001)
        still = 0 if _running(own) else still + 1


def _running(own):
    """Whether a thread other than own runs, or would if there were a processor."""
    if not os.path.isdir("/proc/self/task"):
        return False  # another system, or no /proc
    for number in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{number}/stat") as f:
                state = f.read().rpartition(")")[2].split()[0]
        except OSError:
            continue  # it has ended
        if int(number) != own and state in "RD":
            return True
    return False


_early = None  # the worker that has greeted, until the program asks for it


def greet(package):
    """Tells hvdrun that this process is a worker, before it imports a package, which may take longer than --start-timeout."""
    global _early
    number = os.environ.get(VARIABLE)
    if not number:
        return
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        version = ""
    try:
        _early = Worker.from_environment(f"{package} {version}".strip())
        _early.greet()
    except Error:
        _early = None
        os.environ[VARIABLE] = number  # a child has the variable without the socket


class Lines:
    """The lines that arrive in pieces. A line that is longer than MOST_READ is an Error."""

    def __init__(self):
        self._rest = bytearray()

    def feed(self, data):
        """Returns the objects of the lines that data completes."""
        first, *others = data.split(b"\n")
        self._rest += first
        lines = []
        for piece in others:
            lines.append(bytes(self._rest))
            self._rest = bytearray(piece)
        if any(len(line) > MOST_READ for line in (*lines, self._rest)):
            raise Error(f"hvdrun: a line of more than {MOST_READ} bytes")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError as err:
                raise Error(f"hvdrun: a line that is not JSON: {err}") from None
            if not isinstance(message, dict):
                raise Error("hvdrun: a line that is not a JSON object")
            messages.append(message)
        return messages


class Worker:
    """The connection to hvdrun. A thread reads; methods may be called by any thread.

    on_lost(generation, ranks) is called by that thread when a world cannot continue, and on_stuck(function) when the main thread has
    waited there for others for long since: by default the process ends then, so that another takes its place.
    """

    def __init__(self, sock, program):
        self.on_lost = lambda generation, ranks: None
        self.on_stuck = end_stuck
        self.generation = 0  # of the world that was told last
        self._socket = sock
        self._program = program
        self._sending = threading.Lock()
        self._state = threading.Condition()
        self._welcome = None
        self._answers = collections.deque()
        self._lost = {}  # generation: ranks; the newest only
        self._update = {}  # the newest message "updated"
        self._seq = 0  # of the world that was told last
        self._leaving = False
        self._ended = None  # why no more messages arrive
        self._beat = self._beaten = None
        self._beat_at = 0.0
        self._waits = Waits()
        self._stuck = 0
        self._figures, self._figures_at = {}, 0.0
        self.failed = False  # an error ends the process
        self.done = False  # hvdrun was told that training is done
        self._greeted = False
        self._thread = threading.Thread(target=self._read, name="hvdrun", daemon=True)

    @classmethod
    def from_environment(cls, program):
        """Returns None in a process that hvdrun has not started, or whose hvdrun has no such socket."""
        global _early
        if _early is not None:
            early, _early = _early, None
            return early
        number = os.environ.pop(VARIABLE, "")
        if not number:
            return None
        try:
            sock = socket.socket(fileno=int(number))
            sock.set_inheritable(False)
        except (ValueError, OSError) as err:
            raise Error(f"hvdrun: {VARIABLE}={number}: {err}") from None
        os.environ.pop(CREDENTIALS, None)  # hvdrun acts for this process, and what this starts has no part in the job
        return cls(sock, program)

    def greet(self):
        """Sends the first message, unless that was done. It does not block."""
        if not self._greeted:
            self._greeted = True
            os.register_at_fork(after_in_child=self._forget)
            self.send(do="hello", version=VERSION, program=self._program)

    def hello(self):
        """Starts the thread, and returns the answer to the first message."""
        self.greet()
        self._thread.start()
        with self._state:
            self._wait(lambda: self._welcome is not None)
            return self._welcome

    def _forget(self):
        """A forked child is no worker: the process that hvdrun has started is its parent."""
        self._socket.close()
        self._sending = threading.Lock()
        self._state = threading.Condition()
        self._ended = "this process is a child of the worker"

    def send(self, **message):
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if len(line) > MOST_LINE:
            raise Error(f"hvdrun: a message of {len(line)} bytes")
        try:
            with self._sending:
                self._socket.sendall(line)
        except OSError as err:
            raise Error(f"hvdrun has ended: {err}") from None

    def ask(self, **fields):
        """Sends a join, whose answer Worker.answer returns."""
        with self._state:
            self._answers.clear()
        self.send(do="join", **fields)

    def answer(self):
        """Blocks until the world is there; Dismissed and Error are raised instead. {"is": "widen"} is returned too."""
        with self._state:
            self._wait(lambda: self._answers)
            message = self._answers.popleft()
        if message["is"] == "dismissed":
            raise Dismissed(message.get("why", "removed"), bool(message.get("last")))
        return message

    def _wait(self, ready):
        # In slices, so that Python runs the handlers of signals also where a wait cannot be interrupted.
        while not ready():
            if self._ended:
                raise Error(f"hvdrun has ended: {self._ended}")
            self._state.wait(1)

    def report(self, what, commits=0, **more):
        self.send(do="report", what=what, commits=commits, **more)

    def beat(self, phase, commits, written=0):
        """Tells what the main thread, which calls it, does. At most ten a second are sent, and the last one always.

        written are the bytes of the last checkpoint that are on disk.
        """
        now = time.monotonic()
        self._beat = (phase, commits, written)
        if now - self._beat_at >= BEAT:
            self._send_beat(now, None)

    def _send_beat(self, now, waits):
        """waits is the function in which the main thread waits for other ranks; None: in none."""
        with self._state:
            beat = self._beat and (*self._beat, waits)
            if beat is None or beat == self._beaten:
                return
            self._beaten, self._beat_at = beat, now
            phase, commits, written, _ = beat
        more = {"written": written} if written else {}
        if phase in ("syncing", "training"):
            # What is between two commits is one operation, so that operations have the same numbers on all ranks.
            done = commits + 1 if phase == "training" else 0
            more["operation"] = {"number": done + 1, "what": waits, "waiting": True} if waits else {
                "number": done, "what": "commit", "waiting": False}
        try:
            self.send(do="beat", phase=phase, commits=commits, **more)
        except Error:
            pass  # whoever needs hvdrun learns it by the next join

    def figures(self, numbers):
        """Tells numbers of the program, by name; what is no finite number as null. At most ten messages a second are sent: of what comes
        between, the newest numbers go with the next one, or with a beat that was held back."""
        now = time.monotonic()
        with self._state:
            self._figures.update((name, value if math.isfinite(value) else None) for name, value in numbers.items())
            if now - self._figures_at < BEAT:
                return
        self._send_figures(now)

    def _send_figures(self, now):
        with self._state:
            figures, self._figures = self._figures, {}
            self._figures_at = now
        if figures:
            self.send(do="figures", figures=figures)

    def tell_failure(self, error, where):
        """Tells hvdrun what ends this process, for its log and the last line of the job, and the program's line, or an empty string."""
        self.failed = True
        try:
            self.report("failed", self.commits(), error=" ".join(error.split())[:512], where=where)
        except Error:
            pass  # hvdrun is gone

    def commits(self):
        """The number of the last commit that a beat has told."""
        with self._state:
            return self._beat[1] if self._beat else 0

    def changed(self):
        """Whether the hosts have changed since the world was told, or this worker is to leave."""
        update = self._update  # without the lock: each commit asks
        return self._leaving or bool(update.get("change")) and update.get("seq", 0) > self._seq

    def leave(self):
        """Asks to leave at the next boundary of steps, as a handler of SIGTERM."""
        if not self._leaving:
            self._leaving = True
            self.report("draining")

    def lost(self, generation, seconds=0.0):
        """Whether that world cannot continue; waits so long for the message."""
        if seconds:
            with self._state:
                self._state.wait_for(lambda: generation in self._lost or self._ended, timeout=seconds)
        return generation in self._lost

    def lost_ranks(self, generation):
        """Ranks with which that world cannot go on, of which a join may have MOST_LOST."""
        with self._state:
            return self._lost.get(generation, [])[:MOST_LOST]

    def close(self):
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def _read(self):
        lines = Lines()
        try:
            while True:
                if not select.select([self._socket], [], [], QUIET)[0]:
                    main, now = threading.main_thread().ident, time.monotonic()
                    used = time.clock_gettime(time.pthread_getcpuclockid(main))
                    waits = self._waits.look(sys._current_frames().get(main), now, used)
                    self._send_beat(now, waits)
                    self._send_figures(now)
                    self._watch(waits)
                    continue
                data = self._socket.recv(1 << 16)
                if not data:
                    raise Error("its end of the socket is closed")
                for message in lines.feed(data):
                    self._take(message)
        except (OSError, ValueError, Error) as err:
            with self._state:
                self._ended = str(err)
                self._state.notify_all()

    def _watch(self, waits):
        with self._state:
            phase = self._beat and self._beat[0]
            lost = self.generation in self._lost and phase in ("syncing", "training")
        self._stuck = self._stuck + 1 if waits and lost else 0
        if self._stuck == STUCK:
            self.on_stuck(waits)

    def _take(self, message):
        kind = message.get("is")
        lost = None
        with self._state:
            if kind == "hello":
                self._welcome = message
            elif kind in ("world", "dismissed", "widen"):
                if kind == "world":
                    self.generation, self._seq = message["generation"], message.get("seq", 0)
                self._answers.append(message)
            elif kind == "updated":
                if message.get("seq", 0) >= self._update.get("seq", 0):
                    self._update = message
            elif kind == "lost":
                lost = message.get("generation", 0), message.get("ranks") or []
                self._lost = {lost[0]: lost[1]}
            elif kind == "leave":
                self._leaving = True
            elif kind == "error":
                if message.get("fatal"):
                    raise Error(message.get("text", ""))
                print(f"hvdrun: {message.get('text', '')}", file=sys.stderr, flush=True)
            self._state.notify_all()
        if lost:
            self.on_lost(*lost)
        elif kind == "stacks":
            text = stacks()[:message.get("most_bytes", 1 << 16)]
            self.send(do="stacks", id=message.get("id", 0), text=text)


def end_stuck(function):
    print(f"hvdrun: {function} still waits for a rank that is lost: this process ends, and another takes its place", file=sys.stderr,
          flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


class Waits:
    """Finds out whether a thread waits for other ranks."""

    def __init__(self):
        self._at = self._used = 0.0

    def look(self, frame, now, used):
        """The function of torch or hvdrun in which the thread is, if it has hardly run since the last look; None: it is elsewhere.

        frame is its innermost one, and used the time, in seconds as now, for which it has run.
        """
        busy = used - self._used > (now - self._at) / 2
        self._at, self._used = now, used
        names = []
        while frame is not None and frame.f_globals.get("__name__", "").startswith(_WAITING):
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        if busy or not names:
            return None
        return next((name for name in reversed(names) if name != "wrapper" and not name.startswith("_")), names[0])


def stacks():
    """The stacks of all threads, as faulthandler writes them, or why it cannot."""
    try:
        # A file in memory: there may be no folder that this process can write to.
        in_memory = hasattr(os, "memfd_create")
        with open(os.memfd_create("hvdrun-stacks"), "w+b") if in_memory else tempfile.TemporaryFile() as f:
            faulthandler.dump_traceback(f, all_threads=True)
            f.seek(0)
            return f.read().decode(errors="replace")
    except OSError as err:
        return f"no stacks: {err}"


def on_sigterm(worker):
    """Makes SIGTERM a request to leave, unless the program has a handler of its own.

    Another one ends the process, but for those of the first second: who signals all processes of a job signals hvdrun too, which
    passes the signal on.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return

    first = None

    def handle(number, frame):
        nonlocal first
        now = time.monotonic()
        if first is not None:
            if now - first >= SAME_REQUEST:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)
            return
        first = now
        try:
            # The handler may interrupt a send of the main thread, whose lock is held: another thread sends.
            threading.Thread(target=worker.leave, daemon=True).start()
        except RuntimeError:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, handle)


def tell_failures(worker, hint):
    """Has hvdrun told of the exception that ends the process, for its log and the last line of the job.

    hint is a pair: what the text of an exception begins with, and a line that is printed for it.
    """
    before = sys.excepthook

    def hook(kind, err, trace):
        before(kind, err, trace)
        worker.failed = True
        if str(err).startswith(hint[0]):
            print(hint[1], file=sys.stderr, flush=True)
        if isinstance(err, KeyboardInterrupt):
            return
        where = _program_line(trace)[:256]
        # A connection may break before hvdrun has told why.
        if worker.lost(worker.generation, TOLD if isinstance(err, RuntimeError) else 0):
            print(f"hvdrun: {where}: world {worker.generation} has lost a rank, and this line is outside of `with step`, where nothing takes "
                  "the error: give collectives between steps to job.steps as evaluate=, and those after the loop to job.together",
                  file=sys.stderr, flush=True)
        elif worker.done and isinstance(err, RuntimeError) and _in_distributed(trace):
            print(f"hvdrun: {where}: a collective after the loop has failed, where hvdrun counts the training as done: "
                  "job.steps(…, more=True) and job.together call it again when a rank is lost", file=sys.stderr, flush=True)
        worker.tell_failure(f"{kind.__name__}: {err}", where)

    sys.excepthook = hook


def _in_distributed(trace):
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith("torch.distributed."):
            return True
        trace = trace.tb_next
    return False


def _program_line(trace):
    """The innermost line of a traceback that is the program's own."""
    here, libraries = os.path.dirname(os.path.abspath(__file__)), (os.path.dirname(os.__file__), "site-packages", "dist-packages")
    where = ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not where or not name.startswith(here) and not any(of in name for of in libraries) and not name.startswith("<"):
            where = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return where
