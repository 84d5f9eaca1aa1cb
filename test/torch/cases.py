#!/usr/bin/python3
"""Runs PyTorch's own cases for reconfigured process groups, its unchanged file test_c10d_fault_tolerance.py: cases.py FILE

They run with gloo and torch's store, with gloo and the store of hvdrun, of which this is a worker, and with the backend hvdrun.
"""
import importlib
import os
import sys
import unittest
from datetime import timedelta

import torch.distributed as dist
from hvdrun import _backend, _transport, _worker

FILE, STORE = sys.argv[1], "HVD_TEST_STORE"  # the latter: host:port, for the processes of a case, which run this file too
_backend.register()
sys.path.insert(0, os.path.dirname(FILE))
theirs = importlib.import_module(os.path.splitext(os.path.basename(FILE))[0])


def of_hvdrun(self):
    host, port = os.environ[STORE].rsplit(":", 1)
    where = {"host": host, "port": int(port)}
    return dist.PrefixStore(self.file_name, _transport.open_store(where, timedelta(minutes=10)))


# The processes of a case look up its class by name in the file's module.
theirs.HvdrunFaultToleranceTest = theirs._make_fault_tolerance_test_class("hvdrun", "cpu")
theirs.StoreFaultToleranceTest = type("StoreFaultToleranceTest", (theirs.GlooFaultToleranceTest,),
                                      {"_create_store": of_hvdrun, "__module__": theirs.__name__})

if __name__ == "__main__":
    worker = _worker.Worker.from_environment("PyTorch's cases")
    welcome = worker.hello()
    os.environ[STORE] = "{host}:{port}".format(**welcome["store"])
    os.environ["HVD_LIBRARY"] = welcome["library"]
    result = unittest.TextTestRunner(verbosity=2).run(unittest.defaultTestLoader.loadTestsFromModule(theirs))
    worker.ask()
    worker.answer()
    worker.report("done")
    sys.exit(not result.wasSuccessful())
