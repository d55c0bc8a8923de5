"""Gradient clipping by one line of config, for an artificial task whose data contains some bad batches.

python -m torch.distributed.launch --nproc_per_node 1 --master_addr localhost --master_port 29500  train_with_engine.py
colonnade run --nproc 4 train_with_engine.py     # the norm of the full gradient, on any number of ranks
python train_with_engine.py                      # one process is a world of one

Draws the gradient norm over time into output/gradient_norm.svg next to this file.
"""

from pathlib import Path

import torch
from picture import draw
from torch import nn

import colonnade
from colonnade.core import global_context as gpc
from colonnade.logging import get_dist_logger

HERE = Path(__file__).parent
LEARNING_RATE = 0.2


def make_batches(steps, batch_size, rank):
    """Points and the values of a smooth function; every 17th batch has 6 times the scale."""
    direction = nn.functional.normalize(torch.randn(8, generator=torch.Generator().manual_seed(0)), dim=0)
    generator = torch.Generator().manual_seed(1 + rank)
    for step in range(steps):
        points = torch.randn(batch_size, 8, generator=generator)
        values = torch.sin(points @ direction).unsqueeze(1)
        scale = 6.0 if step % 17 == 11 else 1.0
        yield points * scale, values * scale


def flat(model):
    """All weights in one flat tensor."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def main():
    parser = colonnade.get_default_parser()
    parser.parse_args()
    colonnade.launch(HERE / "config.py")
    logger = get_dist_logger()
    config = gpc.config

    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = colonnade.initialize(model, optimizer, nn.MSELoss())

    engine.train()
    before, after, losses = [], [], []
    for step, (points, values) in enumerate(make_batches(config.STEPS, config.BATCH_SIZE, gpc.get_global_rank())):
        weights = flat(model)
        engine.zero_grad()
        loss = engine.criterion(engine(points.to(gpc.device)), values.to(gpc.device))
        engine.backward(loss)
        engine.step()
        # Tensors on the device: nothing waits for them here. Plain SGD moves the weights by just the clipped gradient.
        before.append(engine.grad_norm)
        after.append((weights - flat(model)).norm() / LEARNING_RATE)
        losses.append(loss.detach())
        if step % 10 == 0 or step % 17 == 11:
            logger.info(
                f"step {step:3d}  loss {loss.item():8.4f}  gradient norm {before[-1].item():8.4f} before clipping, "
                f"{after[-1].item():.4f} after"
            )

    before, after = torch.stack(before).tolist(), torch.stack(after).tolist()
    clipped = sum(norm > config.clip_grad_norm for norm in before)
    logger.info(f"{clipped} of {config.STEPS} steps were clipped to {config.clip_grad_norm}")
    if gpc.get_global_rank() == 0:
        path = HERE / "output" / "gradient_norm.svg"
        path.parent.mkdir(exist_ok=True)
        path.write_text(draw(before, after, config.clip_grad_norm), encoding="utf-8")
        logger.info(f"wrote {path}")
    gpc.destroy()


if __name__ == "__main__":
    main()
