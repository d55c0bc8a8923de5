"""What is attached by itself, and why: one table of rules, read from top to bottom for every row of the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.gradient_handler.base import DemandGradientHandler
from colonnade.engine.gradient_handler.data_parallel import DataParallelGradientHandler
from colonnade.engine.gradient_handler.ledger import LedgerRow
from colonnade.engine.gradient_handler.moe import MoeGradientHandler
from colonnade.engine.gradient_handler.pipeline_shared import PipelineSharedModuleGradientHandler
from colonnade.engine.gradient_handler.placed import PlacementGradientHandler
from colonnade.engine.gradient_handler.sequence_parallel import SequenceParallelGradientHandler


@dataclass(frozen=True)
class Rule:
    """Attach `handler` where any open row is over one of `when` (None: always); it takes the rows of its modes."""

    handler: type[DemandGradientHandler]
    when: frozenset[ParallelMode] | None


RULES: tuple[Rule, ...] = (
    Rule(PipelineSharedModuleGradientHandler, frozenset({ParallelMode.PIPELINE})),
    Rule(MoeGradientHandler, frozenset({ParallelMode.EXPERT_DATA, ParallelMode.MOE_DATA})),
    Rule(SequenceParallelGradientHandler, frozenset({ParallelMode.SEQUENCE, ParallelMode.SEQUENCE_DP})),
    Rule(DataParallelGradientHandler, frozenset({ParallelMode.DATA})),
    Rule(PlacementGradientHandler, None),
)
"""Before these, an optimizer with `sync_grad()` gets a ZeROGradientHandler, as if it had been named."""


def attach_automatic(
    open_rows: Sequence[LedgerRow], model: nn.Module, optimizer: Any, options: dict[str, Any]
) -> list[DemandGradientHandler]:
    """Handlers for every row that no named handler does, each limited to its rows."""
    left = [(row.parameter, ParallelMode[row.mode]) for row in open_rows]
    attached: list[DemandGradientHandler] = []
    for rule in RULES:
        modes = rule.handler.modes
        if not left or (rule.when is not None and not any(mode in rule.when for _, mode in left)):
            continue
        mine = [(name, mode) for name, mode in left if modes is None or mode in modes]
        left = [row for row in left if row not in set(mine)]
        handler = rule.handler(model, optimizer, **options)
        handler.limit_to(mine)
        attached.append(handler)
    return attached


def describe(attached: Sequence[Any], named: Sequence[Any]) -> str:
    """What was attached and why, for one log line per handler."""
    lines = [f"{type(handler).__name__}: {handler.reason}" for handler in attached]
    lines += [f"{type(handler).__name__}: named in the config" for handler in named]
    return "gradient handlers: " + ("; ".join(lines) or "none, no gradient owes a reduction")
