#!/bin/bash
# transformers 5.12.1, accelerate 1.14.0, two processes: Seq2SeqTrainer.predict returns more predictions than the data set has samples,
# and evaluate computes its metrics with the samples that fill the last batch counted twice. Guess: 13 samples, as Trainer has.
. "$(dirname "$0")/debian.bash"
packages python3-torch python3-transformers python3-accelerate
cat > t.py <<'PY'
import torch, transformers
class Pairs(torch.utils.data.Dataset):
    def __len__(self): return 13
    def __getitem__(self, i): return dict(input_ids=torch.tensor([3 + i, 4, 5]), labels=torch.tensor([5, 4, 2]))
size = dict(d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=1, decoder_attention_heads=1, encoder_ffn_dim=8, decoder_ffn_dim=8)
model = transformers.BartForConditionalGeneration(transformers.BartConfig(vocab_size=32, max_position_embeddings=16, **size))
for name in "Trainer", "Seq2SeqTrainer":
    args = getattr(transformers, name.replace("Trainer", "TrainingArguments"))(
        output_dir="model", per_device_eval_batch_size=4, use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True)
    trainer = getattr(transformers, name)(model=model, args=args, compute_metrics=lambda p: dict(samples=len(p.label_ids)))
    predicted = trainer.predict(Pairs())
    counted = trainer.evaluate(Pairs())["eval_samples"]
    if args.process_index == 0:
        print(f"{name}: of 13 samples, predict returns {len(predicted.label_ids)}, and evaluate counts {counted}", flush=True)
PY
export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 USE_LIBUV=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29471
RANK=1 LOCAL_RANK=1 sid python3 -W ignore t.py > /dev/null 2>&1 & RANK=0 LOCAL_RANK=0 sid python3 -W ignore t.py 2>err | grep '^[ST]' > out; wait
cat out; [ "$(wc -l < out)" = 2 ] || { tail -3 err; exit 2; }
grep -q '^Trainer: .* 13, .* 13$' out && grep -q '^Seq2SeqTrainer: .* 16, .* 16$' out
