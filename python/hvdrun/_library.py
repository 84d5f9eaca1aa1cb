"""Calls libhvdrun.so, the collectives of hvdrun, by ctypes. hvdrun.h documents the functions."""
import atexit
import ctypes
import json
import os
import threading
import weakref

VERSION = 1
DONE, PENDING, FAILED, ABORTED, MISMATCH, TIMEOUT, INTERRUPTED = 0, 1, -1, -2, -3, -4, -5
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL, BARRIER, REDUCE_TREE, SEND, RECV = range(1, 10)
FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64 = range(1, 13)
SUM, AVERAGE, MIN, MAX, PRODUCT, ADASUM = range(1, 7)

_SLICE = 50  # milliseconds of one wait; Python runs signal handlers between two waits
_ORDER = 40  # tickets with different bits from this one on belong to different orders, which do not wait for each other
_NAME = "libhvdrun.so"


class Error(RuntimeError):
    """A call has failed. code is the code of hvdrun.h."""

    def __init__(self, text, code=FAILED):
        super().__init__("hvdrun: " + text)
        self.code = code


class Aborted(Error):
    """A rank died, left or aborted. The group is unusable."""


# The path of the library; None: the one beside this file, or that of the system.
path = None

_lock = threading.Lock()
_functions = None  # the loaded functions
_forked = False  # in a child of a process that has loaded the library
_open = weakref.WeakSet()  # groups to leave when the process exits


def load():
    """Returns the functions of the library, which a process loads once.

    In a forked child of a process that has loaded the library it raises Error, because the library's threads do not exist there.
    """
    global _functions
    with _lock:
        if _forked:
            raise Error("this process was forked from one that uses hvdrun's library, and cannot use it: use the start method spawn "
                        "or forkserver, or fork before the first process group is made")
        if _functions is None:
            _functions = _load()
            os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_poison)
            atexit.register(_leave)
        return _functions


def _poison():
    global _functions, _forked
    _functions, _forked = _Poisoned(), True
    for group in list(_open):
        group._functions = _functions
    _lock.release()


class _Poisoned:
    """Replaces the functions in a forked child."""

    def __getattr__(self, name):
        raise Error(f"{name} is called in a process forked from one that uses hvdrun's library: only the parent can use it")


def _leave():
    """Leaves all groups. Otherwise the exit of this process would abort the operations of ranks that still read its last result."""
    if not _forked:
        for group in list(_open):
            group.close()


def _candidates():
    if path or os.environ.get("HVD_LIBRARY"):
        return [path or os.environ["HVD_LIBRARY"]]
    here = os.path.dirname(os.path.abspath(__file__))
    return [os.path.join(here, _NAME), "/usr/lib/hvdrun/" + _NAME, _NAME]


def _load():
    tried = []
    for candidate in _candidates():
        try:
            library = ctypes.CDLL(candidate)
        except OSError as err:
            tried.append(str(err))
            continue
        return _declare(library, candidate)
    raise Error(f"{_NAME} is not found ({'; '.join(tried)}): make lib builds it, the wheel and the package hvdrun contain it, and "
                "HVD_LIBRARY names another one")


def _declare(library, name):
    number, size, pointer, text = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p
    call = [size, number, pointer, pointer, size, number, number, pointer]
    for function, result, arguments in (
        ("hvd_version", number, []),
        ("hvd_error", text, [text, size]),
        ("hvd_on_wait", None, [pointer]),
        ("hvd_listen", size, [text]),
        ("hvd_addresses", size, [size, text, size]),
        ("hvd_widen", number, [size]),
        ("hvd_connect", size, [size, text, size]),
        ("hvd_limit", number, [size, size]),
        ("hvd_run", number, call),
        ("hvd_start", size, call),
        ("hvd_wait", number, [size, size, size]),
        ("hvd_abort", number, [size, text]),
        ("hvd_close", number, [size]),
    ):
        try:
            f = getattr(library, function)
        except AttributeError:
            raise Error(f"{name} has no function {function}: it has another version") from None
        f.restype, f.argtypes = result, arguments
    if library.hvd_version() != VERSION:
        raise Error(f"{name} has version {library.hvd_version()}, not {VERSION}")
    return library


def _signals():
    """Runs the handlers of pending signals each time that a value is requested.

    Their exceptions are raised inside the generator, not in its caller, which is C and could only print them.
    """
    global _interrupted
    answer = 0
    while True:
        try:
            yield answer
            for _ in range(2):
                answer = 0
        except GeneratorExit:
            return
        except BaseException as err:
            _interrupted = err
            answer = 1


_interrupted = None  # the exception that has ended a wait
_handling = _signals()
next(_handling)  # it is at its yield from here on
_check = ctypes.CFUNCTYPE(ctypes.c_int32)(_handling.__next__)


def fail(functions, code):
    """Raises the error of the last call of this thread."""
    global _interrupted
    if code == INTERRUPTED and _interrupted is not None:
        err, _interrupted = _interrupted, None
        raise err
    text = functions.hvd_error(ctypes.create_string_buffer(4096), 4096).decode(errors="replace")
    raise (Aborted if code == ABORTED else Error)(text, code)


class Endpoint:
    """The listener at which other ranks reach this process. options are those of hvd_listen."""

    def __init__(self, **options):
        self._functions = load()
        if threading.current_thread() is threading.main_thread():
            self._functions.hvd_on_wait(ctypes.cast(_check, ctypes.c_void_p))
        self._number = self._functions.hvd_listen(json.dumps(options).encode())
        if self._number < 0:
            fail(self._functions, self._number)

    @property
    def addresses(self):
        """A list of host:port."""
        text = ctypes.create_string_buffer(1 << 16)
        code = self._functions.hvd_addresses(self._number, text, len(text))
        if code < 0:
            fail(self._functions, code)
        return text.value.decode().split("\n")

    def widen(self):
        """Also listens at the addresses of all interfaces."""
        code = self._functions.hvd_widen(self._number)
        if code < 0:
            fail(self._functions, code)

    def connect(self, world, timeout=None):
        """Connects to a world, the message "world" of the worker's protocol. timeout is in seconds."""
        number = self._functions.hvd_connect(self._number, json.dumps(world).encode(), -1 if timeout is None else max(1, int(timeout * 1000)))
        if number < 0:
            fail(self._functions, number)
        return Group(self._functions, number, world["rank"], len(world["members"]))

    def close(self):
        self._functions.hvd_close(self._number)


class Group:
    """The ranks of one world. All ranks make the same calls, which are performed in the order in which they are made.

    data and result are addresses of memory that must stay valid and unchanged until the call has ended.
    """

    def __init__(self, functions, number, rank, size):
        self._functions = functions
        self._number = number
        self._closed = False
        self.code = DONE  # of the first failed call
        self.rank = rank
        self.size = size
        self._ended = {}  # by order, the newest ticket that is known to have succeeded
        _open.add(self)

    def run(self, operation, data, result, count, kind, arg, counts=None):
        """Performs a call. It blocks until the call has ended."""
        code = self._functions.hvd_run(self._number, operation, data, result, count, kind, arg, counts)
        if code:
            self._fail(code)

    def _fail(self, code):
        self.code = self.code or code
        fail(self._functions, code)

    def start(self, operation, data, result, count, kind, arg, counts=None):
        """Starts a call and returns its ticket."""
        ticket = self._functions.hvd_start(self._number, operation, data, result, count, kind, arg, counts)
        if ticket < 0:
            self._fail(ticket)
        return ticket

    def has_ended(self, ticket):
        """Reports whether the call of a ticket is known to have succeeded."""
        return self._ended.get(ticket >> _ORDER, 0) >= ticket

    def wait(self, ticket, seconds=None):
        """Waits for the call of a ticket. Returns False if it has not ended after these seconds; None: no limit."""
        left = None if seconds is None else int(seconds * 1000)
        while not self.has_ended(ticket):
            now = _SLICE if left is None else min(_SLICE, left)
            code = self._functions.hvd_wait(self._number, ticket, now)
            if code == DONE:
                order = ticket >> _ORDER
                self._ended[order] = max(self._ended.get(order, 0), ticket)
            elif code != PENDING:
                self._fail(code)
            elif left is not None:
                left -= now
                if left <= 0:
                    return False
        return True

    def limit(self, seconds):
        """Limits the time of a call; 0: no limit."""
        code = self._functions.hvd_limit(self._number, int(seconds * 1000))
        if code:
            fail(self._functions, code)

    def abort(self, cause):
        """Aborts the calls of all ranks. Any thread may call it."""
        if not self._closed:
            self._functions.hvd_abort(self._number, cause.encode())

    def close(self):
        """Leaves the group. An unreferenced group is left too."""
        if not self._closed and not _forked:
            self._closed = True
            self._functions.hvd_close(self._number)

    __del__ = close
