"""The common parts of the programs of transformers and accelerate: a tiny model, samples, deaths, and a ledger, the file sys.argv[1]."""
import json
import os
import signal
import sys
import time

import torch
import transformers

WAYS = sys.argv[3:]
LEDGER, STEPS = sys.argv[1], int(sys.argv[2])
SAMPLES, LENGTH, WORDS = 500 if "odd" in WAYS else 480, 12, 64
_OUT = os.open(LEDGER, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
torch.set_num_threads(1)


where = None  # what has process_index and num_processes, or world_size
job = None  # of hvdrun.torch


def tell(event, **more):
    size = where.world_size if hasattr(where, "world_size") else where.num_processes
    os.write(_OUT, (json.dumps(dict(more, event=event, time=time.time(), pid=os.getpid(), rank=where.process_index, size=size,
                                 generation=job.generation if job else 0))
                    + "\n").encode())


def gate(step):
    if f"gate:{step}" in WAYS:
        tell("gate", step=step)
        while not os.path.exists(f"{LEDGER}.{step}"):
            time.sleep(0.01)


def dies(place, step):
    mark = f"die:{place}:{where.process_index}:{step}"
    if mark in WAYS:
        try:
            os.close(os.open(f"{LEDGER}.{mark}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        tell("dies", place=place, step=step)
        os.kill(os.getpid(), signal.SIGKILL)


def sample(i):
    """Samples of words that can be learnt; the first two are the number of the sample."""
    words = [i // WORDS, i % WORDS, i * 7 % 5]
    while len(words) < LENGTH:
        words.append((words[-1] * 3 + i % 4 + 1) % WORDS)
    words = torch.tensor(words)
    return {"input_ids": words, "labels": words[2] % 3 if "mean" in WAYS else words}


class Samples(torch.utils.data.Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return sample(i)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return (sample(i) for i in range(info.id if info else 0, SAMPLES, info.num_workers if info else 1))


def model():
    torch.manual_seed(1)
    if "mean" in WAYS:
        return transformers.BertForSequenceClassification(transformers.BertConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, max_position_embeddings=LENGTH,
            hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=3, problem_type="single_label_classification"))
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0,
        eos_token_id=0))
