#!/usr/bin/python3
"""Runs a program of a page of the documentation: pages.py PAGE NUMBER FOLDER

NUMBER is the number of the Python block on the page, from 0. What the page omits is inserted before it, and in place of "...". Rank 1
kills itself once, before a commit, and creates a file in FOLDER to remember that; FOLDER becomes the current folder. A process that
has made all steps prints "all steps are made".
"""
import os
import re
import signal
import sys
import textwrap

import hvdrun.torch as hvd
import torch
import torch.distributed as dist

PAGE, NUMBER, FOLDER = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
os.chdir(FOLDER)
commit = hvd.State._commit


def dying(self, *args):
    if self.step == 3 and self._job.rank == 1 and self._job.size > 1 and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return commit(self, *args)


hvd.State._commit = dying

# Names that the programs of a page take from the user's program.
NAMES = """
class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(12, 5), torch.nn.LogSoftmax(1))

torch.manual_seed(1)
x, y = torch.randn(300, 1, 3, 4), torch.arange(300) % 5
test_x, test_y = x[:40], y[:40]
lossf = torch.nn.functional.nll_loss
data = dataset = torch.utils.data.TensorDataset(x, y)
collate = torch.utils.data.default_collate
epochs, folder = 2, "checkpoints"
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
"""
JOB = 'job = hvd.init("gloo")\n'
STATE = "state = job.state(model=net, optimizer=opt)\n"
STEPS = "for step in job.steps(state, total=300, batch=256, samples=len(x)):\n"
LOSS = "loss = step.mean(lossf(state.model(x[step.indices]), y[step.indices]))\nopt.zero_grad()\nloss.backward()\n"
# Additional code for some programs, by a word that occurs in them.
ALSO = {
    "F.nll_loss": """
import torch.nn.functional as F

class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(784, 10), torch.nn.LogSoftmax(1))

data = [(torch.randn(1, 28, 28), i % 10) for i in range(130)]
""",
    "d_loss": """
g, d = torch.nn.Linear(3, 12), torch.nn.Linear(12, 1)
g_opt, d_opt = torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())

def made(n):
    return state.generator(torch.randn(n, 3))

def d_loss(real):
    return (state.discriminator(made(len(real)).detach()) - state.discriminator(real.flatten(1))).mean()

def g_loss(n):
    return -d(made(n)).mean()
""",
    "texts": """
layers, width, words = 1, 5, torch.randint(0, 6, (1001, 2, 256))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = torch.nn.GRU(6, width), torch.nn.Linear(width, 6)

    def forward(self, words, hidden):
        out, hidden = self.rnn(torch.nn.functional.one_hot(words, 6).float(), hidden)
        return self.head(out), hidden

def lossf(out, words):
    return torch.nn.functional.cross_entropy(out.transpose(1, 2), words, reduction="none").mean(0)

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
""",
    "transformers": """
import transformers

class Words(torch.utils.data.Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        words = (torch.arange(8) * 3 + i) % 16
        return {"input_ids": words, "labels": words}

train, held = Words(96), Words(16)
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1))
""",
    "Accelerator": """
net, data = model, train
held = torch.utils.data.DataLoader(held, batch_size=8)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
""",
}


def blocks(page):
    with open(page, encoding="utf-8") as f:
        return re.findall(r"^```python\n(.*?)^```$", f.read(), re.M | re.S)


def whole(block):
    """Returns a block with what it omits."""
    head = [NAMES]
    head += [text for word, text in ALSO.items() if word in block or word == "transformers" and "Accelerator" in block]
    if "hvd.init(" not in block and "Trainer(" not in block:
        head.append(JOB)
    if "job.state(" not in block and "Trainer(" not in block:
        head.append(STATE)
    lines = block.splitlines()
    if lines[0].startswith(" "):
        head.append(STEPS)
    for i, line in enumerate(lines):
        if line.strip() != "...":
            continue
        if line == "...":  # all up to the commit
            text = STEPS + "    with step:\n" + textwrap.indent(LOSS, " " * 8)
        elif lines[i - 1].lstrip().startswith("for step in job.steps("):
            text = "with step:\n" + textwrap.indent(LOSS + "step.commit()\n", " " * 4)
        elif "data=loader" in block:
            text = LOSS.replace("x[step.indices]", "images").replace("y[step.indices]", "labels") + "step.commit()\n"
        else:
            text = LOSS
        lines[i] = textwrap.indent(text, line[:-3])
    return "".join(head) + "\n".join(lines) + "\n"


if __name__ == "__main__":
    block = blocks(PAGE)[NUMBER]
    text = whole(block)
    scope = dict(globals())
    exec(compile(text, f"{os.path.basename(PAGE)}, program {NUMBER}", "exec"), scope)
    if "trainer" in scope:
        made, want = scope["trainer"].state.global_step, 9  # of two processes
    else:
        total = re.search(r"total=(.*?), batch", text).group(1)
        made, want = scope["state"].step, eval(total, scope)
    assert made == want, (made, want)
    print("all steps are made", flush=True)
