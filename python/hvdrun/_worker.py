"""The worker's end of the socket that hvdrun gives each worker. Each line is a JSON object.

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
MOST_LINE = 1 << 20  # bytes of a line that is sent
MOST_READ = 16 << 20  # bytes of a received line, which can have the members of a large world
MOST_LOST = 64  # lost ranks in a join
SAME_REQUEST = 1.0  # seconds in which a second SIGTERM counts as the first one, received from another sender
BEAT = 0.1  # shortest time between two beats, in seconds
QUIET = 1.0  # seconds after which the thread looks at the main thread, and sends a beat that was held back
TOLD = 1.0  # seconds for which to wait for the message that a rank is lost, after an error that may be that of a connection
REST = 1.0  # longest wait of a program's exit for its threads, in seconds
STUCK = 10  # number of looks, a QUIET apart, that find the main thread waiting for others in the same lost world before it counts as stuck

# Modules in whose functions a rank waits for others if it does not compute.
_WAITING = ("torch.distributed.", "torch.autograd", "torch._tensor", "torch.nn.parallel.distributed", "hvdrun.")


class Error(RuntimeError):
    """hvdrun has refused a message, or has ended."""


class Dismissed(Exception):
    """The worker will not be in another world. why is "removed" or "finished"."""

    def __init__(self, why, last):
        super().__init__(why)
        self.why = why
        self.last = last


def keep_garbage_of_parent():
    """Makes forked processes ignore the garbage that they inherit: only this process collects it.

    A collection can begin right after the fork, in other registered functions, so collection is switched off before the fork.
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
    """Blocks until no other thread of this process runs, or for these seconds. As an atexit handler it leaves the GIL to them.

    A thread of gloo that releases a tensor last, just after its operation, needs the GIL for the tensor's Python object. Up to Python
    3.13, a thread that requests the GIL during finalization is terminated, here within a C++ destructor, which aborts the process.
    """
    own, still, end = threading.get_native_id(), 0, time.monotonic() + seconds
    # A thread that waits for the GIL seems to sleep at the first look; it gets the GIL during the next pause.
    while still < 2 and time.monotonic() < end:
        time.sleep(0.001)
        still = 0 if _running(own) else still + 1


def _running(own):
    """Reports whether a thread other than own is running or runnable."""
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
    """Tells hvdrun that this process is a worker, before the import of a package, which can take longer than --start-timeout."""
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
        os.environ[VARIABLE] = number  # a child of a worker has the variable, but not the socket


class Lines:
    """Assembles lines that arrive in pieces. A line longer than MOST_READ is an Error."""

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
            raise Error(f"hvdrun has sent a line of more than {MOST_READ} bytes")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError as err:
                raise Error(f"hvdrun has sent a line that is not JSON: {err}") from None
            if not isinstance(message, dict):
                raise Error("hvdrun has sent a line that is not a JSON object")
            messages.append(message)
        return messages


class Worker:
    """The connection to hvdrun. Its thread reads messages; any thread may call its methods.

    The thread calls on_lost(generation, ranks) when a world cannot continue, and on_stuck(function) when the main thread still waits
    for others in that world long after. By default the process then ends, and another one takes its place.
    """

    def __init__(self, sock, program):
        self.on_lost = lambda generation, ranks: None
        self.on_stuck = end_stuck
        self.generation = 0  # of the newest world
        self._socket = sock
        self._program = program
        self._sending = threading.Lock()
        self._state = threading.Condition()
        self._welcome = None
        self._answers = collections.deque()
        self._lost = {}  # generation: ranks; only the newest generation
        self._update = {}  # the newest message "updated"
        self._seq = 0  # of the newest world
        self._leaving = False
        self._ended = None  # why no more messages arrive
        self._beat = self._beaten = None
        self._beat_at = 0.0
        self._waits = Waits()
        self._stuck = 0
        self._figures, self._figures_at = {}, 0.0
        self.failed = False  # an error ends the process
        self.done = False  # the worker has reported that training is done
        self._greeted = False
        self._thread = threading.Thread(target=self._read, name="hvdrun", daemon=True)

    @classmethod
    def from_environment(cls, program):
        """Returns the worker of this process, or None if hvdrun has not started the process or has given it no socket."""
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
        os.environ.pop(CREDENTIALS, None)  # this process does not need them, and its children must not act for the job
        return cls(sock, program)

    def greet(self):
        """Sends the first message, unless it was sent already. It does not block."""
        if not self._greeted:
            self._greeted = True
            os.register_at_fork(after_in_child=self._forget)
            self.send(do="hello", version=VERSION, program=self._program)

    def hello(self):
        """Starts the thread and returns the answer to the first message."""
        self.greet()
        self._thread.start()
        with self._state:
            self._wait(lambda: self._welcome is not None)
            return self._welcome

    def _forget(self):
        """Makes a forked child forget the connection: the worker is its parent."""
        self._socket.close()
        self._sending = threading.Lock()
        self._state = threading.Condition()
        self._ended = "this process is a child of the worker"

    def send(self, **message):
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if len(line) > MOST_LINE:
            raise Error(f"hvdrun: a message of {len(line)} bytes; at most {MOST_LINE} are allowed")
        try:
            with self._sending:
                self._socket.sendall(line)
        except OSError as err:
            raise Error(f"hvdrun has ended: {err}") from None

    def ask(self, **fields):
        """Sends a join. Worker.answer returns the answer."""
        with self._state:
            self._answers.clear()
        self.send(do="join", **fields)

    def answer(self):
        """Blocks until the answer to a join arrives, and returns it: the world, or {"is": "widen"}. Raises Dismissed, or Error."""
        with self._state:
            self._wait(lambda: self._answers)
            message = self._answers.popleft()
        if message["is"] == "dismissed":
            raise Dismissed(message.get("why", "removed"), bool(message.get("last")))
        return message

    def _wait(self, ready):
        # It waits in slices, so that Python runs signal handlers even if a wait cannot be interrupted.
        while not ready():
            if self._ended:
                raise Error(f"hvdrun has ended: {self._ended}")
            self._state.wait(1)

    def report(self, what, commits=0, **more):
        self.send(do="report", what=what, commits=commits, **more)

    def beat(self, phase, commits, written=0):
        """Reports what the calling main thread does. At most ten beats a second are sent; the last one is always sent.

        written is the number of bytes of the last checkpoint that are on disk.
        """
        now = time.monotonic()
        self._beat = (phase, commits, written)
        if now - self._beat_at >= BEAT:
            self._send_beat(now, None)

    def _send_beat(self, now, waits):
        """Sends the newest beat. waits is the function in which the main thread waits for other ranks; None: it does not wait."""
        with self._state:
            beat = self._beat and (*self._beat, waits)
            if beat is None or beat == self._beaten:
                return
            self._beaten, self._beat_at = beat, now
            phase, commits, written, _ = beat
        more = {"written": written} if written else {}
        if phase in ("syncing", "training"):
            # Everything between two commits counts as one operation, so that operations have the same numbers on all ranks.
            done = commits + 1 if phase == "training" else 0
            more["operation"] = {"number": done + 1, "what": waits, "waiting": True} if waits else {
                "number": done, "what": "commit", "waiting": False}
        try:
            self.send(do="beat", phase=phase, commits=commits, **more)
        except Error:
            pass  # the next join will report it

    def figures(self, numbers):
        """Reports numbers of the program by name. Numbers that are not finite become null.

        At most ten messages a second are sent. The newest of the numbers in between are sent with the next message, or with a beat that
        was held back.
        """
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
        """Reports the error that ends this process, for hvdrun's log and the last line of the job. where is the program's line, or empty."""
        self.failed = True
        try:
            self.report("failed", self.commits(), error=" ".join(error.split())[:512], where=where)
        except Error:
            pass  # hvdrun is gone

    def commits(self):
        """Returns the number of commits in the last beat."""
        with self._state:
            return self._beat[1] if self._beat else 0

    def changed(self):
        """Reports whether the hosts have changed since the newest world, or this worker has to leave."""
        update = self._update  # without the lock, because each commit calls it
        return self._leaving or bool(update.get("change")) and update.get("seq", 0) > self._seq

    def leave(self):
        """Asks hvdrun to let this worker leave after a step, for a handler of SIGTERM."""
        if not self._leaving:
            self._leaving = True
            self.report("draining")

    def lost(self, generation, seconds=0.0):
        """Reports whether a world cannot continue. It waits up to these seconds for the message that says so."""
        if seconds:
            with self._state:
                self._state.wait_for(lambda: generation in self._lost or self._ended, timeout=seconds)
        return generation in self._lost

    def lost_ranks(self, generation):
        """Returns the lost ranks of a world, at most MOST_LOST."""
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
    """Determines whether a thread waits for other ranks."""

    def __init__(self):
        self._at = self._used = 0.0

    def look(self, frame, now, used):
        """Returns the function of torch or hvdrun in which the thread waits; None: it is elsewhere, or has computed since the last look.

        frame is the thread's innermost frame, now the time, and used the thread's processor time, both in seconds.
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
    """Returns the stacks of all threads as faulthandler writes them, or the reason why it cannot."""
    try:
        # The file is in memory, because this process may have no writable folder.
        in_memory = hasattr(os, "memfd_create")
        with open(os.memfd_create("hvdrun-stacks"), "w+b") if in_memory else tempfile.TemporaryFile() as f:
            faulthandler.dump_traceback(f, all_threads=True)
            f.seek(0)
            return f.read().decode(errors="replace")
    except OSError as err:
        return f"no stacks: {err}"


def on_sigterm(worker):
    """Makes SIGTERM a request to leave, unless the program has its own handler.

    A second SIGTERM, more than a second later, ends the process. One within the first second is ignored: a signal to all processes of a
    job also reaches hvdrun, which passes it on.
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
            # The handler can interrupt a send of the main thread, which holds the lock, so another thread sends the request.
            threading.Thread(target=worker.leave, daemon=True).start()
        except RuntimeError:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, handle)


def tell_failures(worker, hint):
    """Reports the exception that ends the process to hvdrun, for its log and the last line of the job.

    hint is a pair: the beginning of an exception's text, and a line that is printed for such an exception.
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
        # A connection can break before hvdrun says why.
        if worker.lost(worker.generation, TOLD if isinstance(err, RuntimeError) else 0):
            print(f"hvdrun: {where}: world {worker.generation} has lost a rank, and this line is outside of `with step`, where hvdrun does "
                  "not catch the error: pass collectives between steps to job.steps as evaluate=, and those after the loop to job.together",
                  file=sys.stderr, flush=True)
        elif worker.done and isinstance(err, RuntimeError) and _in_distributed(trace):
            print(f"hvdrun: {where}: a collective after the loop has failed, when hvdrun already counted the training as "
                  "done: with job.steps(…, more=True), job.together calls it again when a rank is lost", file=sys.stderr, flush=True)
        worker.tell_failure(f"{kind.__name__}: {err}", where)

    sys.excepthook = hook


def _in_distributed(trace):
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith("torch.distributed."):
            return True
        trace = trace.tb_next
    return False


def _program_line(trace):
    """Returns the innermost line of a traceback that belongs to the program."""
    here, libraries = os.path.dirname(os.path.abspath(__file__)), (os.path.dirname(os.__file__), "site-packages", "dist-packages")
    where = ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not where or not name.startswith(here) and not any(of in name for of in libraries) and not name.startswith("<"):
            where = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return where
