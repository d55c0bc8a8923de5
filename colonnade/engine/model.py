"""Model families: the interface by which a kind of model adds its own loss, checks, a check of the first step, and a weight format.

The engine imports no family. A family is a `ModelFamily` in a module above the engine, registered by module name together with
the attributes by which its models are recognised (`register_family`). The module is imported when such a model is passed to
`initialize`; a plain model imports none.

This package registers two families in `colonnade/__init__.py`: colonnade.hf (models of transformers and peft) and
colonnade.nn (layers that shard activations).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from colonnade.context.parallel_context import ParallelContext


class TrainingLoss(Protocol):
    """The model's own loss, for `initialize` without a criterion.

    `run` is the model's forward pass; its loss carries the number of labels. In a pipeline, the object is the criterion of the last
    stage: called with (output, labels), it returns the same loss as (sum, count).
    """

    def run(self, *args: Any, **kwargs: Any) -> Any: ...

    def __call__(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]: ...

    def unpack_batch(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Split a batch dict into (data for the first stage, labels for the last stage)."""
        ...

    def require_pipeline(self) -> None:
        """Raise if the loss cannot be computed from the output of the last stage."""
        ...

    def predictions(self, output: Any) -> Any:
        """The predictions (logits) in a model output, without its other tensors."""
        ...

    def compared(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, labels), with one row for each prediction that has a label."""
        ...


class FirstStepWatch(Protocol):
    """A check of a model's forward passes during the first step; `close` ends it."""

    def close(self) -> None: ...


class ModelFamily:
    """Base class of model families. The methods default to the behaviour of a plain model."""

    def refuse(self, model: nn.Module) -> None:
        """Raise if the model cannot be trained correctly. Called with the model of this rank, before any communication."""

    def training_loss(self, model: nn.Module) -> TrainingLoss | None:
        """The model's own loss; None if it has none."""
        return None

    def watch_first_step(self, model: nn.Module, context: ParallelContext) -> FirstStepWatch | None:
        """Start a check of the model that ends with its first step; None for no check."""
        return None

    def has_own_format(self, model: nn.Module) -> bool:
        """Whether `export` replaces the usual format of `engine.save_pretrained`."""
        return False

    def export(self, model: nn.Module, folder: str | Path, context: ParallelContext, dtype: torch.dtype | None) -> Path:
        """Write the folder of `engine.save_pretrained` in the family's format.

        Collective over the world, also for ranks without files to write.
        """
        raise NotImplementedError


_homes: dict[str, tuple[str, ...]] = {}
_loaded: dict[str, ModelFamily] = {}


def register_family(home: str, signs: Sequence[str]) -> None:
    """Register a family, the attribute `FAMILY` of the module `home`, for models in which a module has one of the attributes
    `signs`."""
    _homes[home] = tuple(signs)


def family(home: str) -> ModelFamily:
    """The family registered with the module `home`, which is imported on first use."""
    if home not in _loaded:
        _loaded[home] = importlib.import_module(home).FAMILY
    return _loaded[home]


def families_of(model: nn.Module) -> list[tuple[str, ModelFamily]]:
    """The families of a model and of all its submodules, as (home, family)."""
    modules = list(model.modules())

    def has(module: nn.Module, name: str) -> bool:
        # Not `hasattr(module, name)`: it would evaluate properties, and some of transformers warn.
        return name in vars(module) or name in module._modules or hasattr(type(module), name)

    return [
        (home, family(home))
        for home, signs in _homes.items()
        if any(has(module, sign) for module in modules for sign in signs)
    ]


def training_loss_of(model: nn.Module) -> TrainingLoss | None:
    """The model's own loss; None if no family of the model has one."""
    found = (member.training_loss(model) for _, member in families_of(model))
    return next((loss for loss in found if loss is not None), None)


def refuse_unfit(model: nn.Module) -> None:
    """Raise if a family of the model finds that the model cannot be trained correctly (`ModelFamily.refuse`)."""
    for _, member in families_of(model):
        member.refuse(model)


def own_format_of(model: nn.Module) -> str | None:
    """The home module of the family that has its own format for the model's weights; None for the usual format."""
    return next((home for home, member in families_of(model) if member.has_own_format(model)), None)


def layer_kind(module: nn.Module) -> str | None:
    """The kind of a layer of colonnade.nn, from its class attribute `layer_kind` ("linear", "classifier", ...); None for other
    modules."""
    return getattr(type(module), "layer_kind", None)


# A TP plan (colonnade.parallelize) marks the modules that it shards. The engine compares the gradients of such models once, since a
# plan may leave a parameter replicated although its gradient is partial on each rank.


def mark_parallelized(model: nn.Module) -> None:
    """Mark a model, or a pipeline stage, as sharded by a TP plan."""
    model._colonnade_plan = True  # type: ignore[assignment]


def is_parallelized(model: nn.Module) -> bool:
    """Whether the module itself was marked by `mark_parallelized`."""
    return "_colonnade_plan" in vars(model)


def is_sharded_by_plan(model: nn.Module) -> bool:
    """Whether the model or one of its submodules was marked by `mark_parallelized`."""
    return any(map(is_parallelized, model.modules()))
