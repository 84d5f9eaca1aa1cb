"""Debian builds torch without libuv. From torch 2.4 on, its client requests libuv nevertheless if an agent runs the store,
whatever USE_LIBUV says: Debian's own torchrun fails because of that too.
"""
import functools
import importlib

rendezvous = importlib.import_module("torch.distributed.rendezvous")
rendezvous.TCPStore = functools.partial(rendezvous.TCPStore, use_libuv=False)
