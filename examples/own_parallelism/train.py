"""Train with a custom parallelism, and compare with a single process on the global batch.

colonnade run --nproc 4 train.py     # data 2 x head_data 2
colonnade run --nproc 2 train.py     # head_data 2

The task: each position of a sequence finds the position with the largest first feature, and copies it. Prints the
ledger, loss and gradient norm, and the difference of the weights from the single process. Then loads the checkpoint
into the plain model.
"""

from pathlib import Path

import torch
from head_data import HeadDataAttention, HeadDataSequential
from plain_model import Attention, layers
from safetensors.torch import load_file
from torch import nn

import colonnade
from colonnade import ParallelMode
from colonnade.checkpoint import CheckpointManager, export_full
from colonnade.core import global_context as gpc
from colonnade.testing import compare, gather_weights

HERE = Path(__file__).parent


def batch(step, part, config):
    """The samples of data-parallel rank `part` in a step."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    x = torch.randn(
        config.BATCH_SIZE,
        config.PLACES,
        config.FEATURES,
        generator=generator,
        dtype=torch.float64,
    )
    largest = x[:, :, 0].argmax(dim=1)
    return x, x[torch.arange(len(x)), largest].unsqueeze(1).expand_as(x)


def build(sequential, attention, config):
    """Build a model whose weights depend only on the seed, not on the attention class."""
    torch.manual_seed(config.seed)
    return sequential(
        *layers(attention, config.FEATURES, config.WIDTH, config.HEADS, config.DEPTH)
    ).double()


def one_process(config, parts):
    """Train with plain torch on the global batches; returns the reference weights."""
    model = build(nn.Sequential, Attention, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.LEARNING_RATE, eps=1e-6)
    for step in range(config.STEPS):
        batches = [batch(step, part, config) for part in range(parts)]
        x, y = (torch.cat(column) for column in zip(*batches, strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad_norm)
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def say(text):
    """Print on rank 0."""
    if gpc.get_global_rank() == 0:
        print(text, flush=True)


def main():
    colonnade.get_default_parser().parse_args()
    colonnade.launch(HERE / "config.py", verbose=False)
    config = gpc.config
    model = build(HeadDataSequential, HeadDataAttention, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.LEARNING_RATE, eps=1e-6)
    engine, *_ = colonnade.initialize(model, optimizer, nn.MSELoss())
    say(f"{gpc.layout.describe()}\n\n{engine.ledger()}\n")

    for step in range(config.STEPS):
        x, y = batch(step, gpc.get_local_rank(ParallelMode.DATA), config)
        engine.zero_grad()
        loss = engine.criterion(engine(x.to(gpc.device)), y.to(gpc.device))
        engine.backward(loss)
        engine.step()
        if step % 10 == 0 or step == config.STEPS - 1:
            say(
                f"step {step:2d}  loss {loss.item():.4f}  gradient norm {engine.grad_norm.item():.4f}"
            )

    whole = gather_weights(model, gpc)
    with CheckpointManager(HERE / "output", gpc, keep=1) as checkpoints:
        checkpoints.save(
            config.STEPS, model, engine.optimizer, extra=engine.extra_state()
        )
    if gpc.get_global_rank() == 0:
        finish(config, whole, HERE / "output")
    gpc.destroy()


def finish(config, whole, folder):
    """Compare with the single process on one rank, and load the checkpoint into the plain model."""
    table = compare(one_process(config, gpc.data_parallel_size), whole, rtol=1e-10)
    worst = max(table.differences, key=lambda difference: difference.relative)
    say(
        f"parity: {len(table.differences)} parameters equal one process; the largest relative difference is"
    )
    say(
        f"        {worst.relative:.1e}, of {worst.name} after {config.STEPS} steps of AdamW"
    )
    plain = build(nn.Sequential, Attention, config)
    plain.load_state_dict(load_file(export_full(folder, folder / "model.safetensors")))
    equal = all(
        torch.equal(value, whole[name]) for name, value in plain.named_parameters()
    )
    say(
        f"checkpoint of {gpc.world_size} ranks in the plain model: equal to the bit: {equal}"
    )


if __name__ == "__main__":
    main()
