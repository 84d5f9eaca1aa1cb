#!/bin/bash
# transformers 5.12.1: a Seq2SeqTrainer with predict_with_generate and compute_metrics evaluates with the model's loss, and does not call an
# overridden compute_loss. So early stopping and the best model follow another loss than the one with which it trains. Guess: eval_loss
# comes from compute_loss, as without predict_with_generate.
. "$(dirname "$0")/debian.bash"
packages python3-torch python3-transformers python3-accelerate
cat > t.py <<'PY'
import torch, transformers
class Pairs(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return dict(input_ids=torch.tensor([3 + i, 4, 5]), labels=torch.tensor([5, 4, 2]))
class Mine(transformers.Seq2SeqTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **more):
        loss, out = super().compute_loss(model, inputs, return_outputs=True, **more)
        return (100 * loss, out) if return_outputs else 100 * loss
size = dict(d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=1, decoder_attention_heads=1, encoder_ffn_dim=8, decoder_ffn_dim=8)
model = transformers.BartForConditionalGeneration(transformers.BartConfig(vocab_size=32, max_position_embeddings=16, **size))
for generates in False, True:
    args = transformers.Seq2SeqTrainingArguments(output_dir="model", use_cpu=True, report_to=[], disable_tqdm=True, predict_with_generate=generates)
    loss = Mine(model=model, args=args, compute_metrics=lambda p: {}).evaluate(Pairs())["eval_loss"]
    print(f"predict_with_generate={generates}: eval_loss {loss:.1f}", flush=True)
PY
OMP_NUM_THREADS=1 sid python3 -W ignore t.py 2>err | grep '^predict' | tee out
[ "$(wc -l < out)" = 2 ] || { tail -3 err; exit 2; }
[ "$(awk '/False/ {a = $NF} /True/ {b = $NF} END {print int(a / b + 0.5)}' out)" = 100 ]
