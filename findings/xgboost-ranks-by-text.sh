#!/bin/bash
# XGBoost 3.3.0, tracker with sortby="task": it sorts the ids as text, so of the workers 8 to 11, worker 10 is rank 0, and ranks get other
# data when a world grows past ten. Two workers with the same id become two ranks, although an id should name one worker.
# Guess: ids that are numbers are sorted as numbers; the second worker with an id is refused, or replaces the first.
. "$(dirname "$0")/debian.bash"
packages python3-xgboost
cat > t.py <<'PY'
import multiprocessing, sys
from xgboost import collective
from xgboost.tracker import RabitTracker
def work(args, task, said):
    with collective.CommunicatorContext(**args, dmlc_task_id=task):
        said.put((collective.get_rank(), task))
if __name__ == "__main__":
    tracker = RabitTracker(host_ip="127.0.0.1", n_workers=len(sys.argv) - 1, sortby="task")
    tracker.start()
    said = multiprocessing.Queue()
    workers = [multiprocessing.Process(target=work, args=(tracker.worker_args(), task, said)) for task in sys.argv[1:]]
    for w in workers: w.start()
    print("in the order of ranks:", *[task for rank, task in sorted(said.get(timeout=60) for w in workers)], flush=True)
    for w in workers: w.join()
    tracker.wait_for(60)
PY
for ids in "8 9 10 11" "08 09 10 11" "a a b"; do OMP_NUM_THREADS=1 sid timeout 120 python3 -W ignore t.py $ids 2> err | grep '^in' | sed "s/^/ids $ids, /"; done | tee out
[ "$(wc -l < out)" = 3 ] || { tail -n 3 err; exit 2; }
grep -q 'ranks: 10 11 8 9$' out && grep -q 'ranks: 08 09 10 11$' out && grep -q 'ranks: a a b$' out
