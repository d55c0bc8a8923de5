"""`colossalai.nn`: layers with its names and signatures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.context.parallel_mode import ParallelMode
from colonnade.core import global_context as gpc
from colonnade.errors import ConfigError, PlacementError
from colonnade.nn.layer import Linear
from colonnade.parallel.placement import Tied, place, placement_of
from colonnade.utils import checkpoint


class Linear1D_Col(Linear):
    """`colonnade.nn.Linear(split="column")`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        **initializers: Any,
    ) -> None:
        _refuse(skip_bias_add, initializers)
        super().__init__(in_features, out_features, bias, split="column", gather_output=gather_output, dtype=dtype)


class Linear1D_Row(Linear):
    """`colonnade.nn.Linear(split="row")`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        parallel_input: bool = True,
        skip_bias_add: bool = False,
        **initializers: Any,
    ) -> None:
        _refuse(skip_bias_add, initializers)
        super().__init__(in_features, out_features, bias, split="row", input_is_parallel=parallel_input, dtype=dtype)


def _refuse(skip_bias_add: bool, initializers: dict[str, Any]) -> None:
    if skip_bias_add:
        raise ConfigError("skip_bias_add=True: the layer adds its bias itself. Leave it out, and add none afterwards.")
    if initializers:
        raise ConfigError(
            f"{', '.join(initializers)}: initialise a whole torch.nn.Linear, the same on every rank, and give it to "
            f"colonnade.nn.Linear.from_module(linear, split=...)."
        )


class CheckpointModule(nn.Module):
    """Override `_forward`; while training, its activations are computed again in the backward pass."""

    def __init__(self, checkpoint: bool = True, offload: bool = False) -> None:
        super().__init__()
        self.checkpoint, self._offload = checkpoint, offload

    def _forward(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define _forward")

    def forward(self, *args: Any, **options: Any) -> Any:
        if not (self.training and self.checkpoint):
            return self._forward(*args, **options)
        return checkpoint(partial(self._forward, **options), self._offload, *args)


class PipelineSharedModuleWrapper:
    """Ties parameters of several pipeline stages. Make it on every rank; register on the ranks of `pipeline_ranks`.

    Parameters are tied in the order in which they are registered, which must be the same on each of the stages.
    """

    _made = count()

    def __init__(self, pipeline_ranks: Sequence[int]) -> None:
        self.pipeline_ranks = tuple(pipeline_ranks)
        self._name = f"shared{next(self._made)}"
        self._registered = count()

    def register_module(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            self.register_parameter(parameter)

    def register_parameter(self, param: Tensor) -> None:
        stage = gpc.get_local_rank(ParallelMode.PIPELINE)
        if stage not in self.pipeline_ranks:
            raise PlacementError(
                f"stage {stage} is none of pipeline_ranks={self.pipeline_ranks}, which share the module"
            )
        tied = Tied(self.pipeline_ranks, f"{self._name}.{next(self._registered)}")
        known = placement_of(param)
        place(param, {**known.modes, ParallelMode.PIPELINE: tied}, known.shape)
