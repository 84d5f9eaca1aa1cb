"""Puts the numbers of the world into the environment of this process and of the processes that it starts."""
import multiprocessing.context
import multiprocessing.reduction
import os

_numbers = {}


def tell(world):
    """Puts the numbers of a world into the environment."""
    rank, size = world["rank"], world["size"]
    local, locals_ = world.get("local_rank", 0), world.get("local_size", 1)
    cross, crosses = world.get("cross_rank", 0), world.get("cross_size", 1)
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": locals_, "GROUP_RANK": cross,
               "GROUP_WORLD_SIZE": crosses, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": size, "HOROVOD_RANK": rank,
               "HOROVOD_SIZE": size, "HOROVOD_LOCAL_RANK": local, "HOROVOD_LOCAL_SIZE": locals_, "HOROVOD_CROSS_RANK": cross,
               "HOROVOD_CROSS_SIZE": crosses}
    _numbers.update((name, str(value)) for name, value in numbers.items())
    os.environ.update(_numbers)
    # A fork server gives its processes the environment from its own start, so the numbers are sent along with each process.
    for name in "Process", "ForkServerProcess":
        kind = getattr(multiprocessing.context, name, None)  # missing on systems without fork
        if kind is not None:
            multiprocessing.reduction.register(kind, _reduce)


def _reduce(process):
    return _process, (type(process), dict(_numbers)), process.__dict__


def _process(kind, numbers):
    os.environ.update(numbers)
    return kind.__new__(kind)
