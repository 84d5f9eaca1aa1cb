"""Debian builds torch without libuv. From torch 2.4 on, its client asks for libuv all the same where an agent has the store,
whatever USE_LIBUV says: Debian's own torchrun fails by that too.
"""
import functools
import importlib

rendezvous = importlib.import_module("torch.distributed.rendezvous")
rendezvous.TCPStore = functools.partial(rendezvous.TCPStore, use_libuv=False)
