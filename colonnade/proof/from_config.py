"""The script of `colonnade verify config.py --model MODULE:FUNCTION` on each rank: train that model with the config.

Batches come from the user's function, or are random and fit the first layer. They depend only on the step and the data rank.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.config import Config
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.engine.engine import Engine
from colonnade.errors import ConfigError
from colonnade.hf.model_loss import criterion_of
from colonnade.nn.layer.arrangement import arrange
from colonnade.parallel.split import Split
from colonnade.proof.record import first_tensor, micro_batches
from colonnade.proof.user_functions import call_given, function_named, import_named
from colonnade.registry import LOSSES, OPTIMIZERS, Registry

_LENGTH = 8
"""The length of random sequences and the size of random images."""


@dataclass(frozen=True)
class Given:
    """The command-line options that the command passes to each rank."""

    config: str
    model: str
    batch: str | None = None
    criterion: str | None = None
    imports: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return Path(self.config).parent

    def as_argument(self) -> str:
        """Serialize the options for the command line of a rank. Raises if a module or function cannot be found."""
        for name in self.imports:
            import_named(name, self.folder)
        for option in ("model", "batch", "criterion"):
            if getattr(self, option) is not None:
                function_named(getattr(self, option), self.folder, f"--{option}")
        return json.dumps(asdict(self))


def train(given: Given) -> None:
    """Train the model on one rank, until `verify` has recorded enough steps and ends the process."""
    for name in given.imports:
        import_named(name, given.folder)
    gpc = launch(given.config, verbose=False)
    offered = {"config": gpc.config, "context": gpc}
    built = call_given(function_named(given.model, given.folder, "--model"), offered, "the model's function")
    whole: Any = built.whole if isinstance(built, Split) else built
    criterion = _criterion(given, whole, gpc)
    engine, *_ = initialize(built, _optimizer(gpc.config), criterion)
    labels = criterion is not _mean_of_squares
    batch = None if given.batch is None else function_named(given.batch, given.folder, "--batch")
    step = 0
    while True:
        for _ in range(engine.accumulation):
            mine = (
                _drawn(whole, engine, step, labels)
                if batch is None
                else call_given(batch, {"step": step, **offered}, "the function of --batch")
            )
            engine.zero_grad()
            engine.execute_schedule(iter([mine]), return_output_label=False)
            engine.step()
            step += 1


def _optimizer(config: Config) -> Any:
    """The optimizer that the config names, or AdamW."""
    kind, options = _named(config.get("optimizer") or "AdamW", OPTIMIZERS)
    return lambda parameters: kind(parameters, **(options or {"lr": 1e-3}))


def _criterion(given: Given, model: Any, context: ParallelContext) -> Any:
    """The criterion of the command, of the config or of the model; else the mean of the squares of the model's output."""
    if given.criterion is not None:
        named = function_named(given.criterion, given.folder, "--criterion")
        return named() if isinstance(named, type) else named
    if context.config.get("loss"):
        kind, options = _named(context.config.get("loss"), LOSSES)
        return kind(**options)
    own = getattr(model, "criterion", None)
    if callable(own) and not isinstance(own, nn.Module):
        return own()
    if criterion_of(model) is not None:
        return None
    if arrange(context).is_split("outer"):
        raise ConfigError(
            "the output is sharded over the tensor ranks, and no criterion can compute a loss from shards. Pass "
            "--criterion MODULE:FUNCTION. The function takes the output, and also the label if batches have one."
        )
    return _mean_of_squares


def _mean_of_squares(*outputs: Any) -> Tensor:
    value = first_tensor(outputs)
    if value is None:
        raise ConfigError(
            "the output of the model has no floating point tensor from which to compute a loss. Pass --criterion "
            "MODULE:FUNCTION."
        )
    return value.square().mean()


def _named(entry: Any, registry: Registry) -> tuple[Any, dict[str, Any]]:
    options = {"type": entry} if isinstance(entry, str) else dict(entry)
    return registry.get_module(options.pop("type", "")), options


def _drawn(model: nn.Module, engine: Engine, step: int, labels: bool) -> Any:
    """A random batch for the model's first layer, equal on ranks of one data rank and different in each step."""
    context = engine.context
    rank = context.layout.coordinates(context.get_global_rank())["data"]
    random = torch.Generator().manual_seed(1000 * step + rank)
    rows = 2 * micro_batches(engine) * context.tensor_parallel_size
    first: Any = next(
        (module for module in model.modules() if next(module.parameters(recurse=False), None) is not None), None
    )
    if vocabulary := getattr(first, "num_embeddings", None):
        tokens = torch.randint(0, int(vocabulary), (rows, _LENGTH + 1), generator=random)
        data, label = tokens[:, :-1], tokens[:, 1:]
        if criterion_of(model) is not None:
            return {"input_ids": data, "labels": data}
        return (data, label) if labels else data
    sizes: tuple[int, ...] | None = None
    if isinstance(first, nn.modules.conv._ConvNd):
        sizes = (first.in_channels, *([_LENGTH] * len(first.kernel_size)))
    elif hasattr(first, "in_features"):
        sizes = (int(first.in_features),)
    if sizes is None or labels:
        why = "the labels of its loss are unknown" if labels else f"its first layer is a {type(first).__name__}"
        raise ConfigError(
            f"cannot make random batches for {type(model).__name__}: {why}. Pass --batch MODULE:FUNCTION, which returns the "
            f"batch of a rank: (data, label), a dict or a tensor. It may take `step`, `config` and `context`"
        )
    return torch.randn(rows, *sizes, generator=random)


if __name__ == "__main__":
    train(Given(**json.loads(sys.argv[1])))
