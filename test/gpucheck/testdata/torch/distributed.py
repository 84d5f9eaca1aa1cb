import os

ranks = 0


def is_nccl_available():
    return True


def init_process_group(backend, init_method, rank, world_size):
    global ranks
    assert backend == "nccl" and init_method.startswith("file://") and 0 <= rank < world_size
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    ranks = world_size


def all_reduce(v):
    v.value *= ranks


def destroy_process_group():
    assert ranks
