"""Forward pass of the full model compared with that of the sharded model, to find mistakes that no name check can see.

An operator without weights that mixes sharded features (a softmax over them), or a layer with the wrong `sections`, raises
nothing and computes wrong numbers. `record_unsharded` runs the full model and returns a function that compares the
sharded one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
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

_SHARDED_OUTPUT = ("colwise", "packed_colwise", "moe_identity_expert")
"""Styles whose output is a shard: it has nothing to be compared with, so only later layers are compared."""

Outputs = list[tuple[str, Tensor]]
"""(name, output) of layers in the order of their calls; the output of the model has the name ""."""


def record_unsharded(
    model: nn.Module, entries: Mapping[str, PlanEntry], sample: Any, context: ParallelContext
) -> Callable[[Sequence[nn.Module]], None]:
    """Run the full model on the sample; return a function that runs the sharded stages and compares their outputs.

    Does nothing without a sample, if no layer is sharded, or if the model cannot run here (meta device, another device,
    a split sequence). Otherwise the returned function is collective over the world.
    """
    names = [name for name, entry in entries.items() if entry.style is not None and entry.style not in _SHARDED_OUTPUT]
    is_sharded = size_of(ParallelMode.TENSOR, context) > 1 or size_of(ParallelMode.EXPERT, context) > 1
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    if sample is None or not is_sharded or is_meta or size_of(ParallelMode.SEQUENCE, context) > 1:
        return lambda stages: None
    if any(parameter.device.type != context.device.type for parameter in model.parameters()):
        get_dist_logger().warning(f"sample= is not compared: the model is not on {context.device}", ranks=[0])
        return lambda stages: None
    expected = _outputs([model], names, sample)

    def compare(stages: Sequence[nn.Module]) -> None:
        found = _outputs(stages, names, sample)
        with agreed_errors(context.device):
            last_equal = "the start"
            for (name, reference), (other, value) in zip(expected, found, strict=False):
                # With `sequence_split` outputs between blocks have another shape; the layers that gather them are compared.
                if name != other or reference.shape != value.shape or not reference.is_floating_point():
                    continue
                finite = reference[reference.isfinite()]
                size = finite.abs().max() if len(finite) else reference.new_zeros(())
                # Half of the digits: sums in another order differ less, wrong features differ more.
                tolerance = float(size * torch.finfo(reference.dtype).eps ** 0.5)
                if not torch.allclose(value, reference, rtol=0.0, atol=tolerance, equal_nan=True):
                    raise PlacementError(
                        f"with this TP plan the output of {repr(name) if name else 'the model'} for the sample differs from "
                        f"that in the full model (by {float((value - reference).abs().max()):.3g}, values up to "
                        f"{float(size):.3g}); up to {last_equal} outputs are equal. An operation in between treats sharded "
                        f"features as all features: around a softmax or a norm over features use 'colwise_gather_output' and "
                        f"'rowwise_split_input'; if the output of a layer is divided (chunk, split), 'packed_colwise' with its "
                        f"'sections'",
                        code="C060",
                    )
                last_equal = repr(name)

    return compare


def _outputs(stages: Sequence[nn.Module], names: Sequence[str], sample: Any) -> Outputs:
    """Outputs of the named layers, and of the last stage, in one forward pass in eval mode."""
    found: Outputs = []
    # By module: a module with several names, or on several stages, gets one hook.
    modules = {module: name for stage in stages for name, module in stage.named_modules() if name in names}

    def record(name: str) -> Any:
        return lambda module, args, output: found.extend(
            (name, leaf.detach().clone()) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)
        )

    with ExitStack() as cleanup, torch.random.fork_rng(), torch.no_grad(), evaluating(*stages):
        for module, name in modules.items():
            cleanup.callback(module.register_forward_hook(record(name)).remove)
        result = cloned(sample)
        for at, stage in enumerate(stages):
            result = call_layer(stage, result, at > 0 and getattr(stage, "takes_one_value", False))
        logits = result_of(result)
        logits = logits["logits"] if isinstance(logits, dict) and "logits" in logits else logits
        found += [("", leaf) for leaf in tree_leaves(logits) if isinstance(leaf, Tensor)]
    return found
