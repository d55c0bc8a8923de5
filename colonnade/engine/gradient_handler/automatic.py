"""What is attached by itself, and why: one table of rules, read from top to bottom for every row of the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.gradient_handler.base import DemandGradientHandler
from colonnade.engine.gradient_handler.built_in import (
    DataParallelGradientHandler,
    MoeGradientHandler,
    PipelineSharedModuleGradientHandler,
    PlacementGradientHandler,
    SequenceParallelGradientHandler,
)
from colonnade.engine.gradient_handler.ledger import Ledger


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


def attach_automatic(ledger: Ledger, model: nn.Module, optimizer: Any) -> tuple[list[DemandGradientHandler], Ledger]:
    """Handlers for every row that no named handler does, each limited to its rows; and the ledger with them."""
    left = [(row.parameter, ParallelMode[row.mode]) for row in ledger.open_rows()]
    attached: list[DemandGradientHandler] = []
    done: dict[tuple[str, str], str] = {}
    for rule in RULES:
        modes = rule.handler.modes
        if not left or (rule.when is not None and not any(mode in rule.when for _, mode in left)):
            continue
        mine = [(name, mode) for name, mode in left if modes is None or mode in modes]
        left = [(name, mode) for name, mode in left if not (modes is None or mode in modes)]
        handler = rule.handler(model, optimizer)
        handler.limit_to(mine)
        attached.append(handler)
        done.update(((name, mode.name), type(handler).__name__) for name, mode in mine)
    return attached, ledger.filled(done)


def describe(attached: Sequence[Any], named: Sequence[Any]) -> str:
    """Which handlers there are, and why, as one line for the log."""
    lines = [f"{type(handler).__name__}: {handler.reason}" for handler in attached]
    lines += [
        f"{type(handler).__name__}: {getattr(handler, 'reason', '') or 'named in the config'}" for handler in named
    ]
    return "gradient handlers: " + ("; ".join(lines) or "none, no gradient owes a reduction")
