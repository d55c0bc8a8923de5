"""Double DQN with an engine: a target network that is copied every second step, epsilon-free replay."""

import torch
from torch import nn
from torch.nn import functional as F

import colonnade
import common
from colonnade.utils import get_dataloader
import copy
from torch.utils.data import TensorDataset

gpc = colonnade.launch(dict(clip_grad_norm=10.0), verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
target = copy.deepcopy(model).requires_grad_(False)
common.plant(model[0].weight)
engine, *_ = colonnade.initialize(model, torch.optim.Adam(model.parameters(), lr=1e-2))
states = common.draw(24, 4)
data = TensorDataset(states, common.ints(3, 24), common.draw(24, seed=5), states.roll(1, 0), common.ints(2, 24, seed=6))
for step, (state, action, reward, following, done) in enumerate(get_dataloader(data, batch_size=4)):
    with torch.no_grad():
        best = model(following).argmax(1, keepdim=True)
        value = target(following).gather(1, best).squeeze(1)
        goal = reward + 0.9 * (1 - done) * value
    engine.zero_grad()
    predicted = engine(state).gather(1, action.unsqueeze(1)).squeeze(1)
    engine.backward(F.smooth_l1_loss(predicted, goal))
    engine.step()
    if step % 2 == 1:
        target.load_state_dict(model.state_dict())
gpc.destroy()
