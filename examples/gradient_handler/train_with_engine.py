"""Data parallelism by a gradient handler, without DistributedDataParallel.

python -m torch.distributed.launch --nproc_per_node 4 --master_addr localhost --master_port 29500 train_with_engine.py
colonnade run --nproc 4 train_with_engine.py
python train_with_engine.py                      # one process is a world of one
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import colonnade
from colonnade.core import global_context as gpc
from colonnade.logging import get_dist_logger

HERE = Path(__file__).parent


def make_batches(steps, batch_size, rank):
    """This rank's own samples of a fixed task: find the nearest of ten random directions for each point."""
    directions = torch.randn(10, 16, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + rank)
    for _ in range(steps):
        points = torch.randn(batch_size, 16, generator=generator)
        yield points, (points @ directions.T).argmax(dim=1)


def replicas_are_equal(model):
    """Whether all ranks have bitwise equal weights."""
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    low, high = flat.clone(), flat.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return torch.equal(low, high)


def main():
    parser = colonnade.get_default_parser()
    parser.parse_args()
    colonnade.launch(HERE / "config.py")
    logger = get_dist_logger()

    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    engine, *_ = colonnade.initialize(model, optimizer, nn.CrossEntropyLoss())
    logger.info("\n" + str(engine.ledger()))

    engine.train()
    for step, (points, labels) in enumerate(
        make_batches(gpc.config.STEPS, gpc.config.BATCH_SIZE, gpc.get_global_rank())
    ):
        engine.zero_grad()
        loss = engine.criterion(engine(points.to(gpc.device)), labels.to(gpc.device))
        engine.backward(loss)
        engine.step()
        if step % 5 == 0 or step == gpc.config.STEPS - 1:
            logger.info(f"step {step:2d}  loss on rank 0: {loss.item():.4f}")

    equal = replicas_are_equal(engine.model)
    logger.info(f"replicas on {gpc.world_size} ranks are equal: {equal}")
    gpc.destroy()
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
