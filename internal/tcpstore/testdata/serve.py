"""Serves a store of PyTorch until its input ends. Prints its port, and at the end a value.

PyTorch puts "/" before the keys of its callers.
"""
import sys
from datetime import timedelta

import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=20))
print(store.port, flush=True)
sys.stdin.read()
print(store.get("from-go").decode(), flush=True)
