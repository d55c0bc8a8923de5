"""What a model may bring to its engine: a loss of its own, refusals, a watch of its first step, a format of its weights.

The engine knows no family of models. A family is a `ModelFamily` in a module of its own, which stands above the engine and is
registered by name with the attributes that give its models away (`register_family`). It is imported when a model that has
one of these attributes comes to `initialize`, so a plain model imports nothing.

colonnade.hf (models of transformers and peft) and colonnade.nn (layers that split activations) are the families that come with
this package; they are registered in `colonnade/__init__.py`.
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
    """The loss that a model makes itself, for `initialize` without a criterion.

    `run` is the model's forward pass with a loss that knows its count. Called as a criterion with (output, labels), it gives
    (sum, count): the same loss at the end of a pipeline.
    """

    def run(self, *args: Any, **kwargs: Any) -> Any: ...

    def __call__(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]: ...

    def take_apart(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """(data for the first stage, labels for the last stage) of a batch that is a dict."""
        ...

    def require_pipeline(self) -> None:
        """Raise where the loss cannot be made of the last stage's output alone."""
        ...

    def predictions(self, output: Any) -> Any:
        """The tensors of an output that are predictions."""
        ...

    def compared(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, label) of each prediction that has a label, one a row."""
        ...


class FirstStepWatch(Protocol):
    """Something that looks at a model's passes before its first step."""

    def close(self) -> None: ...


class ModelFamily:
    """What models of one family bring. Each method's default is what holds for a plain model."""

    def refuse(self, model: nn.Module) -> None:
        """Raise where the model cannot be trained rightly. Called on each rank with its part, before ranks talk."""

    def training_loss(self, model: nn.Module) -> TrainingLoss | None:
        """The loss that the model makes itself, if it makes one."""
        return None

    def watch_first_step(self, model: nn.Module, context: ParallelContext) -> FirstStepWatch | None:
        """A watch of the model until its first step has been made."""
        return None

    def has_own_format(self, model: nn.Module) -> bool:
        """Whether `export` writes the model's weights in place of the usual folder."""
        return False

    def export(self, model: nn.Module, folder: str | Path, context: ParallelContext, dtype: torch.dtype | None) -> Path:
        """Write `engine.save_pretrained(folder)`. Collective over the world; this rank's part may have nothing to write."""
        raise NotImplementedError


_homes: dict[str, tuple[str, ...]] = {}
_loaded: dict[str, ModelFamily] = {}


def register_family(home: str, signs: Sequence[str]) -> None:
    """Register the family `FAMILY` of the module `home`, for models in which a module has an attribute of `signs`."""
    _homes[home] = tuple(signs)


def family(home: str) -> ModelFamily:
    """The family of a module, which is imported if it was not yet."""
    if home not in _loaded:
        _loaded[home] = importlib.import_module(home).FAMILY
    return _loaded[home]


def families_of(model: nn.Module) -> list[tuple[str, ModelFamily]]:
    """The families that a model, or anything inside it, belongs to, each with its home."""
    modules = list(model.modules())
    return [
        (home, family(home))
        for home, signs in _homes.items()
        if any(_has(module, sign) for module in modules for sign in signs)
    ]


def _has(module: nn.Module, name: str) -> bool:
    """Whether a module or its class has the attribute; no property is evaluated, as those of transformers may warn."""
    return name in vars(module) or name in module._modules or hasattr(type(module), name)


def training_loss_of(model: nn.Module) -> TrainingLoss | None:
    """The loss that a model makes itself; None for one that makes none."""
    found = (each.training_loss(model) for _, each in families_of(model))
    return next((loss for loss in found if loss is not None), None)


def refuse_unfit(model: nn.Module) -> None:
    """Raise what the model's families say against training it."""
    for _, each in families_of(model):
        each.refuse(model)


def own_format_of(model: nn.Module) -> str | None:
    """The home of the family that writes the model's weights in a format of its own, if there is one."""
    return next((home for home, each in families_of(model) if each.has_own_format(model)), None)


def layer_kind(module: nn.Module) -> str | None:
    """ "linear", "classifier", "embedding" or "cross_entropy" of a layer of colonnade.nn, which says it by a class attribute."""
    return getattr(type(module), "layer_kind", None)


# A plan (colonnade.parallelize) marks the modules that it has cut. The engine compares gradients of such models once, since a
# plan may leave a parameter whole whose gradient is a part on each rank.


def note_plan(model: nn.Module) -> None:
    """Remember that a plan has cut the model, or a stage of it."""
    model._colonnade_plan = True  # type: ignore[assignment]


def has_plan(model: nn.Module) -> bool:
    """Whether `note_plan` was told of the model itself."""
    return "_colonnade_plan" in vars(model)


def is_cut_by_plan(model: nn.Module) -> bool:
    """Whether the model has in it what `note_plan` was told of."""
    return any(map(has_plan, model.modules()))
