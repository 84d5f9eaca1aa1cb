#!/usr/bin/python3
"""Text classification like transformers' run_glue.py, with generated texts: glue.py FOLDER

It uses command-line arguments, the configuration of a small BERT, CSV files, compute_metrics, its own callback,
EarlyStoppingCallback, load_best_model_at_end, evaluate, predict, save_model and save_state. Rank 1 creates a file FOLDER/died
and kills itself, unless the file exists. The first rank writes the result of the training to FOLDER/result, as one line of JSON.
"""
import csv
import json
import os
import signal
import sys
from dataclasses import dataclass, field

from hvdrun.transformers import Trainer, TrainingArguments
import numpy as np
import torch
from transformers import (BertConfig, BertForSequenceClassification, EarlyStoppingCallback, EvalPrediction, HfArgumentParser, TrainerCallback,
                          default_data_collator, set_seed)

FOLDER = sys.argv[1]
torch.set_num_threads(1)
LENGTH, WORDS = 8, 20


@dataclass
class DataTrainingArguments:
    train_file: str = field(metadata={"help": "A csv file containing the training data."})
    validation_file: str = field(metadata={"help": "A csv file containing the validation data."})
    test_file: str = field(metadata={"help": "A csv file containing the test data."})
    max_seq_length: int = LENGTH


def make(name, n, seed):
    """A text belongs to the first class if more of its words are in the first half of the vocabulary."""
    rng = np.random.default_rng(seed)
    path = os.path.join(FOLDER, f"{name}-{os.getpid()}.csv")
    with open(path, "w", newline="") as f:
        out = csv.writer(f)
        out.writerow(["sentence", "label"])
        for _ in range(n):
            words = rng.integers(0, WORDS, rng.integers(3, LENGTH))
            out.writerow([" ".join(f"w{w}" for w in words), int((words < WORDS // 2).mean() > 0.5)])
    return path


class Sentences(torch.utils.data.Dataset):
    """Like the result of load_dataset("csv").map(preprocess_function)."""

    def __init__(self, path, length):
        with open(path, newline="") as f:
            self.rows = [self.encode(row["sentence"], int(row["label"]), length) for row in csv.DictReader(f)]

    @staticmethod
    def encode(text, label, length):
        ids = [int(w[1:]) + 1 for w in text.split()][:length]
        return {"input_ids": ids + [0] * (length - len(ids)), "attention_mask": [1] * len(ids) + [0] * (length - len(ids)), "label": label}

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Dies(TrainerCallback):
    def on_step_end(self, args, state, control, **options):
        if args.process_index == 1 and state.global_step == 5:
            try:
                os.close(os.open(os.path.join(FOLDER, "died"), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)


def compute_metrics(p: EvalPrediction):
    predictions = np.argmax(p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions, axis=1)
    return {"accuracy": float((predictions == p.label_ids).mean()), "samples": len(p.label_ids)}


def main():
    files = {"train": make("train", 112, 1), "validation": make("validation", 48, 2), "test": make("test", 33, 3)}
    data_args, training_args = HfArgumentParser((DataTrainingArguments, TrainingArguments)).parse_args_into_dataclasses([
        *(word for name, path in files.items() for word in (f"--{name}_file", path)),
        "--output_dir", os.path.join(FOLDER, "out"), "--do_train", "--do_eval", "--do_predict", "--max_seq_length", str(LENGTH),
        "--per_device_train_batch_size", "8", "--learning_rate", "1e-2", "--num_train_epochs", "3", "--eval_strategy", "epoch",
        "--save_strategy", "epoch", "--logging_strategy", "epoch", "--load_best_model_at_end", "--metric_for_best_model", "accuracy",
        "--report_to", "none", "--use_cpu", "--seed", "7", "--disable_tqdm", "true", "--warmup_steps", "2", "--weight_decay", "0.01"])
    set_seed(training_args.seed)
    config = BertConfig(vocab_size=WORDS + 1, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                        max_position_embeddings=LENGTH, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForSequenceClassification(config)
    train, held, test = (Sentences(path, data_args.max_seq_length)
                         for path in (data_args.train_file, data_args.validation_file, data_args.test_file))
    trainer = Trainer(model=model, args=training_args, train_dataset=train if training_args.do_train else None,
                      eval_dataset=held if training_args.do_eval else None, compute_metrics=compute_metrics, data_collator=default_data_collator,
                      callbacks=[Dies(), EarlyStoppingCallback(early_stopping_patience=2)])
    result = trainer.train()
    metrics = result.metrics
    metrics["train_samples"] = len(train)
    trainer.save_model()
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    evaluated = trainer.evaluate(eval_dataset=held)
    trainer.log_metrics("eval", evaluated)
    trainer.save_metrics("eval", evaluated)
    predicted = trainer.predict(test, metric_key_prefix="predict")
    if trainer.is_world_process_zero():
        with open(os.path.join(FOLDER, "result"), "w") as f:
            f.write(json.dumps([
                predicted.metrics["predict_samples"], result.global_step, result.training_loss, [evaluated[f"eval_{name}"] for name in ("loss", "accuracy", "samples")],
                predicted.metrics["predict_accuracy"], predicted.predictions.tolist(), predicted.label_ids.tolist(),
                [log["loss"] for log in trainer.state.log_history if "loss" in log], trainer.state.best_metric,
                sum(p.double().abs().sum().item() for p in trainer.model.parameters()),
                sorted(os.listdir(training_args.output_dir))]) + "\n")


if __name__ == "__main__":
    main()
