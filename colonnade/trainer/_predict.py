"""Prediction: the outputs of all ranks, joined in the order of the samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from colonnade.checkpoint.collect import has_state
from colonnade.engine.schedule.executor import join
from colonnade.errors import ConfigError
from colonnade.trainer._lengths import read_lengths
from colonnade.trainer._reach import gather_values, speaks
from colonnade.trainer._test import batches_of, evaluating

if TYPE_CHECKING:
    from colonnade.trainer.trainer import Trainer


def predict(trainer: Trainer, loader: Iterable[Any]) -> Any:
    """The outputs on every rank, on the host. Collective."""
    lengths = read_lengths(loader, trainer.context)
    indices = _indices(loader)
    pieces: list[Any] = []
    with evaluating(trainer.engine):
        for batch in batches_of(trainer, loader, lengths):
            output, _, _ = trainer.engine.execute_schedule(iter((batch,)), forward_only=True, return_loss=False)
            if output is not None:
                pieces.append(tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), output))
    trainer.agree()
    mine = {"indices": indices, "output": join(pieces) if pieces else None}
    return _ordered(gather_values(mine, bool(pieces) and speaks(trainer.context), trainer.context))


def _indices(loader: Iterable[Any]) -> Tensor | None:
    """The samples that a loader is going to give, if it can be told beforehand."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return None
    if isinstance(loader.sampler, (RandomSampler, WeightedRandomSampler)):
        raise ConfigError("predict gives outputs in the order of the dataset: give it a loader with shuffle=False")
    before = loader.sampler.state_dict() if has_state(loader.sampler) else None  # type: ignore[attr-defined]
    flat = [index for batch in loader.batch_sampler for index in batch]
    if before is not None:
        loader.sampler.load_state_dict(before)  # type: ignore[attr-defined]
    return torch.tensor(flat) if all(isinstance(index, int) for index in flat) else None


def _ordered(found: list[dict[str, Any]]) -> Any:
    if not found:
        return None
    output = join([part["output"] for part in found])
    if any(part["indices"] is None for part in found):
        return output
    indices = torch.cat([part["indices"] for part in found])
    # Samplers repeat samples to give every rank equally many: the first output of each is taken.
    order = torch.argsort(indices, stable=True)
    first = torch.ones(len(order), dtype=torch.bool)
    first[1:] = indices[order][1:] != indices[order][:-1]
    return tree_map_only(
        Tensor, lambda tensor: tensor[order[first]] if tensor.shape[:1] == indices.shape else tensor, output
    )
