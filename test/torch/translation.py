#!/usr/bin/python3
"""Translation like transformers' run_translation.py, with generated texts: translation.py FOLDER

It uses a Seq2SeqTrainer with its own compute_loss, an optimizer and a scheduler of the program, a callback that asks for
checkpoints, generation in evaluate and predict, and numbers of samples that do not fill the last batch. Rank 1 creates a file
FOLDER/died and kills itself, unless the file exists. The first rank writes the result to FOLDER/result, as one line of JSON.
"""
import json
import os
import random
import signal
import sys

from hvdrun.transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
import torch
from transformers import BartConfig, BartForConditionalGeneration, TrainerCallback, get_linear_schedule_with_warmup, set_seed

FOLDER = sys.argv[1]
torch.set_num_threads(1)
LENGTH, WORDS = 5, 12


class Pairs(torch.utils.data.Dataset):
    """Texts and their words in reverse order."""

    def __init__(self, n, first):
        self.n, self.first = n, first

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        rng = random.Random(self.first + i)
        words = [3 + rng.randrange(WORDS) for _ in range(LENGTH)]
        return {"input_ids": torch.tensor(words), "labels": torch.tensor(words[::-1] + [2])}


class Saves(TrainerCallback):
    """Asks for a checkpoint after each evaluation that is better than those before."""

    best = float("inf")

    def on_evaluate(self, args, state, control, metrics, **options):
        if metrics["eval_loss"] < self.best:
            self.best, control.should_save = metrics["eval_loss"], True

    def on_step_end(self, args, state, control, **options):
        if args.process_index == 1 and state.global_step == 5:
            try:
                os.close(os.open(os.path.join(FOLDER, "died"), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)


class Smoothed(Seq2SeqTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        logp = outputs.logits.log_softmax(-1)
        loss = -(0.9 * logp.gather(-1, inputs["labels"].unsqueeze(-1)).mean() + 0.1 * logp.mean())
        return (loss, outputs) if return_outputs else loss


def main():
    set_seed(7)
    model = BartForConditionalGeneration(BartConfig(
        vocab_size=WORDS + 3, max_position_embeddings=16, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.0, pad_token_id=1, bos_token_id=0, eos_token_id=2,
        decoder_start_token_id=2, forced_eos_token_id=None))
    model.generation_config.min_new_tokens = LENGTH
    args = Seq2SeqTrainingArguments(
        output_dir=os.path.join(FOLDER, "out"), num_train_epochs=2, per_device_train_batch_size=8, per_device_eval_batch_size=4, use_cpu=True,
        report_to=[], disable_tqdm=True, eval_strategy="steps", eval_steps=4, save_strategy="no", logging_steps=2, predict_with_generate=True,
        generation_max_length=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Smoothed(
        model=model, args=args, train_dataset=Pairs(90, 0), eval_dataset=Pairs(21, 1000), callbacks=[Saves()],
        compute_metrics=lambda p: {"samples": len(p.predictions), "right": float((p.predictions[:, 1:7] == p.label_ids[:, :6]).mean())},
        optimizers=(optimizer, get_linear_schedule_with_warmup(optimizer, 2, 12)))
    trainer.train()
    predicted = trainer.predict(Pairs(13, 2000))
    trainer.save_model()
    if trainer.is_world_process_zero():
        logs = trainer.state.log_history
        with open(os.path.join(FOLDER, "result"), "w") as f:
            f.write(json.dumps([
                predicted.metrics["test_samples"], predicted.metrics["test_right"], predicted.predictions.tolist(), predicted.label_ids.tolist(),
                [[log["step"], log["loss"], log["learning_rate"]] for log in logs if "loss" in log],
                [[log["step"], log["eval_samples"], log["eval_right"]] for log in logs if "eval_loss" in log],
                sum(p.double().abs().sum().item() for p in trainer.model.parameters()),
                sorted(os.listdir(args.output_dir))]) + "\n")


if __name__ == "__main__":
    main()
