#!/bin/bash
# Ignite 0.5.1: an Engine that resumes keeps the epoch_length of its checkpoint. In half as many processes, where a loader has twice as
# many batches, an epoch is half of the data, and the run ends early; in twice as many, each epoch has all samples twice.
# Guess: an epoch is a pass over the loader given to run, or an error says that the lengths differ.
. "$(dirname "$0")/debian.bash"
packages python3-torch python3-torch-ignite
cat > t.py <<'PY'
from ignite.engine import Engine, Events
first = Engine(lambda engine, batch: None)
first.add_event_handler(Events.EPOCH_COMPLETED(once=2), first.terminate)
first.run(range(10), max_epochs=4)
for batches in 10, 20, 5:
    seen, engine = [], Engine(lambda engine, batch: seen.append(batch))
    engine.load_state_dict(first.state_dict())
    ends = []
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: ends.append(len(seen)))
    engine.run(range(batches))
    print(f"saved with 10 batches an epoch, resumed with {batches}: epochs {engine.state.epoch - len(ends) + 1} to {engine.state.epoch} have {ends[0] / batches} and {(ends[1] - ends[0]) / batches} of the data", flush=True)
PY
sid env OMP_NUM_THREADS=1 python3 -W ignore t.py 2> err | tee out
[ "$(wc -l < out)" = 3 ] || { tail -3 err; exit 2; }
grep -q 'with 10: epochs 3 to 4 have 1.0 and 1.0 ' out && grep -q 'with 20: epochs 3 to 4 have 0.5 and 0.5 ' out && grep -q 'with 5: epochs 3 to 4 have 2.0 and 2.0 ' out
