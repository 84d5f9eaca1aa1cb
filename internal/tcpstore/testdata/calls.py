"""Makes every call of torch.distributed.TCPStore, as a client of the store at HOST PORT."""
import sys
from datetime import timedelta

import torch.distributed as dist

store = dist.TCPStore(sys.argv[1], int(sys.argv[2]), 1, False, timeout=timedelta(seconds=30))
assert store.host == sys.argv[1] and store.port == int(sys.argv[2])
before = store.num_keys()

store.set("a", "one")
assert store.get("a") == b"one", store.get("a")
store.set("a", "")
assert store.get("a") == b""
store.set("large", "x" * (1 << 20))
assert store.get("large") == b"x" * (1 << 20)
assert store.num_keys() == before + 2, store.num_keys()

assert store.add("n", 5) == 5
assert store.add("n", -7) == -2
assert store.get("n") == b"-2"

assert store.compare_set("c", "", "first") == b"first"
assert store.compare_set("c", "other", "second") == b"first"
assert store.compare_set("c", "first", "second") == b"second"
assert store.get("c") == b"second"
assert store.compare_set("none", "expected", "new") == b"expected"

assert store.delete_key("a") is True
assert store.delete_key("a") is False

store.wait(["n", "c"])
try:
    store.wait(["n", "missing"], timedelta(milliseconds=300))
    raise SystemExit("a wait for what is missing ended")
except RuntimeError:
    pass

# Another connection, to which the first one's wait means nothing.
other = dist.TCPStore(sys.argv[1], int(sys.argv[2]), 1, False, timeout=timedelta(seconds=30))
other.set_timeout(timedelta(seconds=20))
assert other.timeout == timedelta(seconds=20)
other.set("missing", "there")
other.wait(["n", "missing"], timedelta(seconds=10))

prefixed = dist.PrefixStore("p", other)
prefixed.set("k", "v")
assert other.get("p/k") == b"v"
print("all calls answered")
