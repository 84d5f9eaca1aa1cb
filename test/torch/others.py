#!/usr/bin/python3
"""Unchanged programs of other libraries, without hvdrun's package: others.py FOLDER NAME

They use the variables of torchrun. A rank with the right result prints the line "all right" at the end; a wrong result is an
AssertionError.
"""
import json
import os
import signal
import sys
import time

import torch

FOLDER, NAME = sys.argv[1:3]
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
X = torch.arange(64.0)[:, None]


def once(name):
    try:
        os.close(os.open(os.path.join(FOLDER, name), os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i]


def net():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


def process_group():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == dist.get_world_size() == SIZE > 1
    dist.destroy_process_group()


def accelerate():
    """Accumulates gradients, uses a scheduler and gathers metrics: the weight is minus the sum of rate times mean."""
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    acc = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")], gradient_accumulation_steps=2)
    assert (acc.num_processes, acc.process_index) == (SIZE, RANK) and SIZE > 1, acc.num_processes
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=8)
    model, opt, loader = acc.prepare(model, opt, loader)
    seen = []
    for x in loader:
        with acc.accumulate(model):
            acc.backward(model(x).mean())
            opt.step()
            opt.zero_grad()
        seen += acc.gather_for_metrics(x).flatten().tolist()
    assert sorted(seen) == X.flatten().tolist(), seen
    want = -1e-2 * sum(X.view(-1, 16 * SIZE).mean(1)).item()
    got = acc.unwrap_model(model).weight.item()
    assert abs(got / want - 1) < 1e-5, (got, want)
    acc.wait_for_everyone()
    acc.save_state(os.path.join(FOLDER, "state"))
    acc.end_training()


def ignite():
    import ignite.distributed as idist
    from ignite.engine import Engine

    def train(local_rank):
        model, loader = idist.auto_model(net()), idist.auto_dataloader(Numbers(), batch_size=8)
        opt = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=1e-2))

        def step(engine, x):
            opt.zero_grad()
            loss = model(x).mean()
            loss.backward()
            opt.step()
            return loss.item()

        Engine(step).run(loader, max_epochs=2)
        weight = next(model.parameters()).item()
        total = idist.all_reduce(torch.tensor(weight)).item()
        assert idist.get_world_size() == SIZE > 1 and abs(total / weight - SIZE) < 1e-5, (total, weight)

    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(train)


def xgboost():
    """Rank 0 runs the tracker and writes its address to a file for the others."""
    import numpy
    import xgboost
    from xgboost import collective
    from xgboost.tracker import RabitTracker

    path = os.path.join(FOLDER, "tracker")
    if RANK == 0:
        tracker = RabitTracker(n_workers=SIZE, host_ip="127.0.0.1", sortby="task")
        tracker.start()
        with open(path + ".new", "w") as f:
            json.dump(dict(tracker.worker_args()), f)
        os.rename(path + ".new", path)
    while not os.path.exists(path):
        time.sleep(0.05)
    with open(path) as f:
        args = json.load(f)
    rng = numpy.random.default_rng(0)
    x = rng.normal(size=(400, 4))
    y = (x.sum(1) > 0).astype(int)
    with collective.CommunicatorContext(**args, dmlc_task_id=f"{RANK:04d}"):
        data, told = xgboost.DMatrix(x[RANK::SIZE], y[RANK::SIZE]), {}
        xgboost.train({"objective": "binary:logistic", "nthread": 1}, data, 5, evals=[(data, "t")], evals_result=told, verbose_eval=False)
        assert collective.get_world_size() == SIZE > 1 and told["t"]["logloss"][-1] < 0.4, told
    if RANK == 0:
        tracker.wait_for()


def trainer(before=lambda: None):
    """A Trainer of transformers whose rank 1 is killed before the first restart."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Words(torch.utils.data.Dataset):
        def __len__(self):
            return 96

        def __getitem__(self, i):
            words = (torch.arange(8) * 3 + i) % 16
            return {"input_ids": words, "labels": words}

    class Dies(TrainerCallback):
        def on_step_end(self, args, state, control, **options):
            if RANK == 1 and state.global_step == 3 and os.environ.get("TORCHELASTIC_MAX_RESTARTS") == "1" and once("dead"):
                os.kill(os.getpid(), signal.SIGKILL)

    before()
    args = TrainingArguments(output_dir=os.path.join(FOLDER, "out"), max_steps=6, per_device_train_batch_size=8, use_cpu=True, report_to=[],
                             disable_tqdm=True, save_strategy="no", ddp_backend="gloo", dataloader_pin_memory=False)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    told = Trainer(model=model, args=args, train_dataset=Words(), callbacks=[Dies()]).train()
    assert told.global_step == 6 and args.world_size == SIZE > 1, (told, args.world_size)


def naive_trainer():
    """What a user tries first: hvd.init and an unchanged Trainer."""
    def before():
        import hvdrun.torch as hvd
        hvd.init("gloo")

    trainer(before)


if __name__ == "__main__":
    globals()[NAME]()
    print("all right", flush=True)
