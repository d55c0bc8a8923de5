"""Language model training with a mean over all tokens of the global batch (as Accelerate's guide does it)."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH, VOCAB, WIDTH, LENGTH = 8, 30, 16, 12
accelerator = Accelerator(cpu=True)
set_seed(26)


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


tokens = torch.randint(VOCAB, (64, LENGTH + 1))
length = torch.randint(3, LENGTH + 1, (64, 1))
labels = tokens[:, 1:].masked_fill(torch.arange(LENGTH) >= length, -100)
data = TensorDataset(tokens[:, :-1], labels)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // accelerator.num_processes)
net = LanguageModel()
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)

for step, (x, y) in enumerate(loader):
    if step == 4:
        break
    count = accelerator.gather((y != -100).sum().reshape(1)).sum()
    total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
    loss = total * accelerator.num_processes / count
    optimizer.zero_grad()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 0.4)
    optimizer.step()
accelerator.end_training()
