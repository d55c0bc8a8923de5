"""Word vectors with the engine; frequent words get smaller updates by a gradient handler."""

import colonnade
import torch
from colonnade.engine.gradient_handler import BaseGradientHandler
from colonnade.registry import GRADIENT_HANDLER
from colonnade.utils import get_dataloader
from torch import nn
from torch.utils.data import TensorDataset

VOCAB, WIDTH, GLOBAL_BATCH = 15, 12, 8


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        self.seen = tokens
        return self.head(torch.tanh(self.mix(self.embed(tokens).mean(1))))


@GRADIENT_HANDLER.register_module
class ByFrequency(BaseGradientHandler):
    """Divides the gradient of each word by its number of occurrences in the batch."""

    def covers(self):
        return []  # the built-in handlers have reduced the gradients

    def handle_gradient(self):
        counts = torch.bincount(self._model.seen.flatten(), minlength=VOCAB)
        grad = self._model.embed.weight.grad
        grad /= counts.clamp(min=1)[:, None].to(grad)


gpc = colonnade.launch(dict(gradient_handler=["ByFrequency"]), verbose=False)
torch.manual_seed(19)
model = Bag()
data = TensorDataset(torch.randint(VOCAB, (64, 5)), torch.randint(VOCAB, (64,)))
loader = get_dataloader(data, batch_size=GLOBAL_BATCH // gpc.data_parallel_size)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
engine, *_ = colonnade.initialize(model, optimizer, nn.CrossEntropyLoss())

for step, (x, y) in enumerate(loader):
    if step == 4:
        break
    engine.zero_grad()
    loss = engine.criterion(engine(x.to(gpc.device)), y.to(gpc.device))
    engine.backward(loss)
    engine.step()
gpc.destroy()
