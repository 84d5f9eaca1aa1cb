# The part of PyTorch that torch.py uses, without devices: a vector is a list of one number, the same on every rank.
import importlib
import os

float32 = "float32"


class Vector:
    def __init__(self, n):
        self.n, self.value = n, 1.0

    def fill_(self, value):
        self.value = value

    def __getitem__(self, i):
        assert -self.n <= i < self.n
        return self.value


def ones(n, dtype, device):
    assert dtype == "float32" and device == "cuda"
    return Vector(n)


class nccl:
    @staticmethod
    def version():
        return tuple(int(n) for n in os.environ.get("FAKE_NCCL", "2.30.7").split("."))


class cuda:
    nccl = nccl

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def device_count():
        return 1

    @staticmethod
    def set_device(i):
        assert i == 0

    @staticmethod
    def synchronize():
        pass


distributed = importlib.import_module("torch.distributed")
multiprocessing = importlib.import_module("torch.multiprocessing")
