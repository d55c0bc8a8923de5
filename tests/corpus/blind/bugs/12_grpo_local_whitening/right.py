"""One epoch of GRPO-like policy updates under DDP: rollouts were collected before."""

import colonnade
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PROMPTS, GROUP, LENGTH, VOCAB, GLOBAL_BATCH = 16, 4, 6, 18, 4
dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(13)


class Policy(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        logits = self.head(self.rnn(self.embed(tokens[:, :-1]))[0])
        return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def whiten(advantage):
    """(a - mean) / std over all samples of the batch."""
    stats = torch.stack([advantage.sum(), advantage.square().sum(), torch.tensor(float(advantage.numel()))])
    dist.all_reduce(stats)
    mean = stats[0] / stats[2]
    variance = stats[1] / stats[2] - mean**2
    return (advantage - mean) / (variance + 1e-8).sqrt()


rollouts = torch.randint(VOCAB, (PROMPTS, GROUP, LENGTH + 1))
rewards = torch.rand(PROMPTS, GROUP) * torch.linspace(0.2, 3.0, PROMPTS)[torch.randperm(PROMPTS)][:, None]
old_logp = -torch.rand(PROMPTS, GROUP, LENGTH) * 0.2 - 2.8
data = TensorDataset(rollouts, rewards, old_logp)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // world, sampler=DistributedSampler(data, shuffle=False))
model = DDP(Policy())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = colonnade.watch(model, optimizer, loader)

for tokens, reward, old in loader:
    advantage = reward - reward.mean(1, keepdim=True)  # baseline: mean of the group
    advantage = whiten(advantage.square() * advantage.sign() + reward)
    logp = model(tokens.flatten(0, 1))
    ratio = (logp - old.flatten(0, 1)).exp()
    advantage = advantage.flatten()[:, None]
    loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
