"""A script for two hosts: `job.py FOLDER STEPS` trains, saves every 2 steps, goes on from the newest checkpoint, and leaves digests of all ranks."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import colonnade
from colonnade.trainer import Trainer, hooks
from colonnade.utils import get_dataloader


class Progress(hooks.BaseHook):
    """Rank 0 notes each step in a file; a step takes 50 ms at least, so that it can be interrupted."""

    def __init__(self, file: Path) -> None:
        super().__init__(priority=50)
        self._file = file

    def after_train_iter(self, trainer: Trainer, *args: Any) -> None:
        time.sleep(0.05)
        if os.environ["RANK"] == "0":
            with self._file.open("a") as log:
                log.write(f"{trainer.cur_step}\n")


def digest(value: Any) -> str:
    """Of the bits of all tensors of a state."""
    whole = hashlib.sha256()
    for name, tensor in sorted(value.items()):
        whole.update(name.encode() + tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def main(folder: Path, steps: int) -> None:
    """Data 2 x pipeline 2, clipped, with dropout and momentum."""
    config = {"parallel": {"data": 2, "pipeline": 2}, "clip_grad_norm": 0.05, "num_microbatches": 2, "seed": 11}
    gpc = colonnade.launch(config, verbose=False)
    with (folder / "counts").open("a") as log:
        log.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']}\n")
    torch.manual_seed(5)
    model: Any = nn.Sequential(nn.Linear(24, 24), nn.Dropout(0.3), nn.Tanh(), nn.Linear(24, 24), nn.Linear(24, 3))
    engine = colonnade.initialize(
        colonnade.split(model, at=["3"]), lambda p: torch.optim.AdamW(p, lr=0.02), nn.CrossEntropyLoss(), verbose=False
    )[0]
    data = TensorDataset(torch.randn(400, 24), torch.randint(0, 3, (400,)))
    Trainer(engine).fit(
        get_dataloader(data, shuffle=True, batch_size=4, drop_last=True, context=gpc),
        max_steps=steps,
        hooks=[
            hooks.LoadCheckpointHook(folder / "run"),
            hooks.SaveCheckpointHook(2, folder / "run", by_epoch=False),
            Progress(folder / "steps"),
        ],
    )
    state = {name: value for name, value in engine.model.state_dict().items() if isinstance(value, torch.Tensor)}
    (folder / f"rank{gpc.get_global_rank()}.json").write_text(json.dumps(digest(state)))
    engine.close()
    gpc.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
