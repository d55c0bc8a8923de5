"""A rank's own stages out of a split model, under the names of the whole model, with ties placed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ScheduleError
from colonnade.parallel.own_forward.stage import no_generate
from colonnade.parallel.placement import Tied, place, placement_of
from colonnade.parallel.split import Split


class Chunks(nn.ModuleList):
    """The stages of one rank. Unlike a plain list, it puts no number before names: they stay the whole model's."""

    generate = no_generate

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Every module of every stage, under its name in the whole model."""
        memo = set() if memo is None else memo
        for module in self:
            yield from module.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """The module of this name in the whole model."""
        for module in self if target else ():
            with contextlib.suppress(AttributeError):
                return module.get_submodule(target)
        return super().get_submodule(target)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The state of all stages together."""
        destination = {} if destination is None else destination
        for module in self:
            module.state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Give each stage what is its own; unexpected keys are an error if `strict`."""
        known = [set(module.state_dict()) for module in self]
        extra = sorted(set(state_dict).difference(*known))
        if strict and extra:
            raise RuntimeError(f"unexpected keys for the stages here: {', '.join(extra)}")
        found = [
            module.load_state_dict({key: value for key, value in state_dict.items() if key in keys}, strict, assign)
            for module, keys in zip(self, known, strict=True)
        ]
        first, *_ = found
        return first._replace(missing_keys=[key for each in found for key in each.missing_keys], unexpected_keys=extra)


def take_stages(split: Split, stage_ranks: Sequence[int], rank: int) -> nn.Module:
    """The stages of pipeline rank `rank`, where `stage_ranks` says which rank has each stage.

    A parameter that stages of several ranks hold is placed as `Tied` on these ranks, so that its gradients are
    summed, it is counted once, and its copies start equal; between stages of one rank it stays one parameter.
    """
    if len(split) != len(stage_ranks):
        raise ScheduleError(
            f"the model was split into {len(split)} stages, and the schedule has {len(stage_ranks)} (on "
            f"{max(stage_ranks) + 1} pipeline ranks); give colonnade.split num_stages={len(stage_ranks)}, or as many cuts",
            code="C050",
        )
    mine = [stage for stage, home in enumerate(stage_ranks) if home == rank]
    for tie in split.ties:
        homes = sorted({stage_ranks[stage] for _, stage in tie})
        here = [(name, stage) for name, stage in tie if stage in mine]
        if len(homes) > 1 and here:
            (name, stage), *_ = here
            parameter = split[stage].get_parameter(name)
            before = placement_of(parameter)
            (key, _), *_ = tie
            tied = Tied(tuple(homes), key)
            place(parameter, {**before.modes, ParallelMode.PIPELINE: tied}, before.shape)
    first, *others = (split[stage] for stage in mine)
    return Chunks([first, *others]) if others else first
