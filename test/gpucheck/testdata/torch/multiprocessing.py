import multiprocessing


def spawn(f, args, nprocs):
    context = multiprocessing.get_context("spawn")
    all = [context.Process(target=f, args=(i,) + args) for i in range(nprocs)]
    for p in all:
        p.start()
    for p in all:
        p.join()
        if p.exitcode:
            raise SystemExit("a rank has failed")
