#!/usr/bin/python3
"""Checks that hvdrun's Trainer and Accelerator refuse by name what they do not support: hf_refuses.py, run alone, without hvdrun."""
import os
import sys
import tempfile

REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(REPOSITORY, "python"))

import accelerate  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

import hvdrun.torch as hvd  # noqa: E402
from hvdrun.accelerate import Accelerator, adopt  # noqa: E402
from hvdrun.transformers import Seq2SeqTrainingArguments, Trainer, TrainingArguments  # noqa: E402

OUT = tempfile.mkdtemp()
wrong = 0


def refused(what, error, words, call):
    global wrong
    try:
        call()
        said = "nothing"
    except error as err:
        said = str(err)
        if said.startswith("hvdrun: ") and all(word in said for word in words):
            print("ok:", said)
            return
    wrong += 1
    print(f"{what}: said {said!r}, want {words}")


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return {"input_ids": torch.arange(4), "labels": torch.arange(4)}


def model():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=1))


for kind in (TrainingArguments, Seq2SeqTrainingArguments):
    for name, value in dict(
            deepspeed={"zero_optimization": {"stage": 2}}, fsdp="full_shard", torch_compile=True, auto_find_batch_size=True,
            ignore_data_skip=True, average_tokens_across_devices=False, optim="lomo", accelerator_config={"split_batches": True},
            enable_jit_checkpoint=True).items():
        refused(name, ValueError, [name], lambda: kind(output_dir=OUT, use_cpu=True, **{name: value}))
state = accelerate.PartialState(cpu=True)
job = hvd.init("gloo")
refused("another world", RuntimeError, ["already", "alone"], lambda: adopt(job))
state._reset_state()
for name in ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config"):
    refused(name, ValueError, [name], lambda: Accelerator(job, **{name: object()}))
refused("accumulation", ValueError, ["gradient_accumulation_steps"], lambda: Accelerator(job, gradient_accumulation_steps=2))
os.environ["ACCELERATE_USE_FSDP"] = "true"
refused("the environment", ValueError, ["ACCELERATE_USE_FSDP"], lambda: adopt(job))
del os.environ["ACCELERATE_USE_FSDP"]
adopt(job)
args = TrainingArguments(output_dir=OUT, use_cpu=True, max_steps=1, report_to=[], save_strategy="no")


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(self.train_dataset)


refused("a loader", TypeError, ["get_train_dataloader"], lambda: OwnLoader(model=model(), args=args, train_dataset=Data()).train())
trainer = Trainer(model=model(), args=args, train_dataset=Data())
refused("no search", NotImplementedError, ["hyperparameter_search"], trainer.hyperparameter_search)
refused("too little", ValueError, ["8 samples", "16"], lambda: Trainer(model=model(), args=TrainingArguments(
    output_dir=OUT, use_cpu=True, max_steps=1, per_device_train_batch_size=16, dataloader_drop_last=True), train_dataset=Data()).train())
for first in (args.main_process_first, Accelerator(job).main_process_first, Accelerator(job).local_main_process_first):
    with first():
        pass
trainer.train()
trainer.train()  # a second time
accelerator, layer = Accelerator(job), torch.nn.Linear(2, 1)
accelerator.scaler = torch.amp.GradScaler("cpu")  # as with mixed_precision="fp16" on a GPU
optimizer = accelerator.prepare(torch.optim.SGD(layer.parameters(), lr=0.1))
refused("a scaler", ValueError, ["optimizer", "scaler=accelerator.scaler"], lambda: job.state(model=layer, optimizer=optimizer))
refused("no arguments", TypeError, ["hvdrun.transformers.TrainingArguments"], lambda: Trainer(model=model()))
plain = transformers.TrainingArguments.__new__(transformers.TrainingArguments)
plain.__dict__.update(vars(args))
refused("plain arguments", TypeError, ["hvdrun.transformers.TrainingArguments"], lambda: Trainer(model=model(), args=plain))
print("trained", trainer.state.global_step)
sys.exit(wrong > 0 or trainer.state.global_step != 1)
