"""Trains a small language model with dropout; the main process prints a sample now and then."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH, VOCAB, WIDTH = 8, 24, 16
accelerator = Accelerator(cpu=True)
set_seed(41)


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return self.head(self.drop(F.gelu(self.mix(x))))


@torch.no_grad()
def sample(net, length=6):
    net.eval()
    text = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(length):
        text = torch.cat([text, net(text)[:, -1:].argmax(-1)], 1)
    return text[0].tolist()


text = torch.randint(VOCAB, (64, 11))
loader = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=GLOBAL_BATCH // accelerator.num_processes)
net = LanguageModel()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)

for step, (x, y) in enumerate(loader):
    if step == 4:
        break
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    accelerator.backward(loss)
    optimizer.step()
    if step % 2 == 0 and accelerator.is_main_process:
        print(f"step {step} loss {loss.item():.3f} sample {sample(accelerator.unwrap_model(model))}")
accelerator.end_training()
