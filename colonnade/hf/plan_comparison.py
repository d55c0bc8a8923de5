"""One pass of the whole model beside one of the model that was cut: what names cannot tell, values do.

An operator without weights that mixes features which are split (a softmax over them), or a layer whose sections are other ones,
gives no error, but other numbers. `compared` runs the model before it is cut, and returns what compares it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colonnade.comm.messages import agreed_errors
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import PlacementError
from colonnade.hf.match import PlanEntry
from colonnade.logging import get_dist_logger
from colonnade.nn.layer.spread import size_of
from colonnade.parallel.own_forward import result_of
from colonnade.parallel.split import call_layer, cloned, evaluating

_PARTS = ("colwise", "packed_colwise", "moe_identity_expert")
"""Styles of layers that give parts: what they give is not compared, but what comes of it."""

Values = list[tuple[str, Tensor]]
"""What layers gave, in the order in which they were done; the result of the model has no name."""


def compared(
    model: nn.Module, entries: Mapping[str, PlanEntry], sample: Any, context: ParallelContext
) -> Callable[[Sequence[nn.Module]], None]:
    """Run the whole model on the sample; returns a function that compares its stages, once they are cut, with that.

    Collective over the world. It does nothing where nothing is cut, and where nothing can be run.
    """
    names = [name for name, entry in entries.items() if entry.style is not None and entry.style not in _PARTS]
    cut = size_of(ParallelMode.TENSOR, context) > 1 or size_of(ParallelMode.EXPERT, context) > 1
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    if sample is None or not cut or is_meta or size_of(ParallelMode.SEQUENCE, context) > 1:
        return lambda stages: None
    if any(parameter.device.type != context.device.type for parameter in model.parameters()):
        get_dist_logger().warning(f"sample= is not compared: the model is not on {context.device}", ranks=[0])
        return lambda stages: None
    expected = _values([model], names, sample)

    def compare(stages: Sequence[nn.Module]) -> None:
        found = _values(stages, names, sample)
        with agreed_errors(context.device):
            _check(expected, found)

    return compare


def _values(stages: Sequence[nn.Module], names: Sequence[str], sample: Any) -> Values:
    with torch.random.fork_rng(), torch.no_grad(), evaluating(*stages), _watched(stages, names) as values:
        result = cloned(sample)
        for at, stage in enumerate(stages):
            result = call_layer(stage, result, at > 0 and getattr(stage, "takes_one_value", False))
        logits = result_of(result)
        logits = logits["logits"] if isinstance(logits, dict) and "logits" in logits else logits
        values += [("", leaf) for leaf in tree_leaves(logits) if isinstance(leaf, Tensor)]
    return values


@contextmanager
def _watched(stages: Sequence[nn.Module], names: Sequence[str]) -> Iterator[Values]:
    """What the layers of these names give, as they give it."""
    values: Values = []
    # A module of several names, or on several stages, is watched wherever it stands.
    modules = {module: name for stage in stages for name, module in stage.named_modules() if name in names}

    def keep(name: str) -> Any:
        return lambda module, args, output: values.extend(
            (name, leaf.detach().clone()) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)
        )

    handles = [module.register_forward_hook(keep(name)) for module, name in modules.items()]
    try:
        yield values
    finally:
        for handle in handles:
            handle.remove()


def _check(expected: Values, found: Values) -> None:
    """Refuse, at the first layer that gives something else. Parts of a sequence have another shape, and are passed over."""
    right = "the beginning"
    for (name, whole), (other, value) in zip(expected, found, strict=False):
        if name != other or whole.shape != value.shape or not whole.is_floating_point():
            continue
        size = whole[whole.isfinite()].abs().max() if whole.isfinite().any() else whole.new_zeros(())
        close = float(size * torch.finfo(whole.dtype).eps ** 0.5)
        if not torch.allclose(value, whole, rtol=0.0, atol=close, equal_nan=True):
            raise PlacementError(
                f"with this plan {repr(name) if name else 'the model'} gives something else for the sample than in the whole "
                f"model (by {float((value - whole).abs().max()):.3g}, of values up to {float(size):.3g}); up to {right} all is the "
                f"same. What is between takes parts of features for all of them: around a softmax or a norm over features write "
                f"'colwise_gather_output' and 'rowwise_split_input'; where a layer's output is divided (chunk, split), "
                f"'packed_colwise' with its 'sections'",
                code="C060",
            )
        right = repr(name)
