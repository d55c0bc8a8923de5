"""Gradient synchronisation of an engine: the handlers in their order, the sums they share, the ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from colonnade.comm.messages import agreed_errors, note_of
from colonnade.comm.rank_group import RankGroup
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import GradientError
from colonnade.gradients.handler import BaseGradientHandler, BuiltHandler, describe
from colonnade.gradients.ledger import Ledger, is_waived
from colonnade.gradients.sum_plan import plan_sums, waived_patterns
from colonnade.gradients.sums import Claim, Demand, Shards, read_demands, with_groups
from colonnade.gradients.synchroniser import StepOutcome, Synchroniser
from colonnade.logging import get_dist_logger
from colonnade.optim.bucket_step import scale_all

if TYPE_CHECKING:
    from colonnade.engine.guard import CallLog


class GradientSync:
    """Runs every handler once per step: the automatic ones first, then the named ones in the config's order.

    Automatic sums start during backward, so they are waited for before a user's handler may look at
    a gradient. All sums are linear: the order does not change the result. `loose` are the parameters of each handler
    whose gradients are in no bucket (and last those that no handler sums: FSDP's, say, which are final when they come).
    """

    def __init__(
        self,
        handlers: Sequence[BaseGradientHandler],
        synchroniser: Synchroniser,
        ledger: Ledger,
        loose: Sequence[tuple[BaseGradientHandler | None, Sequence[nn.Parameter]]] = (),
        before_pass: Callable[[], None] = lambda: None,
    ) -> None:
        self.handlers = list(handlers)
        self.synchroniser = synchroniser
        self.ledger = ledger
        self._loose = list(loose)
        self.before_pass = before_pass
        """Called before anything else of a backward pass: gathers of weights that run on must end."""
        self.log: CallLog | None = None
        """The log of the collectives that handlers make; the guard sets one."""
        self._outcome: StepOutcome | None = None

    def prepare(self, last: bool) -> None:
        """Before each backward pass."""
        self.before_pass()
        self._outcome = None
        self.synchroniser.prepare(last)
        for handler in self.handlers:
            handler.prepare(last)

    def finish(self, scale: float | Tensor | None = None, *, counts: bool = False) -> StepOutcome:
        """After the last backward pass: every gradient is final when this returns.

        `scale` and `counts` as of `Synchroniser.wait`, whose outcome is returned.
        """
        if self._outcome is None:
            # Gradients that were changed by hand are an error of this rank alone. The other ranks have begun to sum: they learn
            # of it in the sums, so that all ranks raise the error, and none waits for this one.
            try:
                self.synchroniser.check_untouched()
            except GradientError as error:
                self.synchroniser.fail(note_of(error))

            # Sums of planned handlers come first: a user's handler may look at any gradient. They are made once: after a step
            # that failed later than its sums the loop may call `step` again, and without a pass in between they are there.
            self._outcome = self.synchroniser.wait(scale, counts=counts)
        outcome = self._outcome
        if outcome.failed_ranks:  # there is no gradient that a handler could look at
            return outcome

        # Handlers in their order. What is in no bucket is multiplied by its handler, if that can, or afterwards here.
        scaling = [handler for handler in self.handlers if handler.set_scale(outcome.scale)]
        for handler in self.handlers:
            handler.handle_gradient() if self.log is None else self.log.run(handler)
        if outcome.scale is not None:
            unscaled = [p for owner, parameters in self._loose if owner not in scaling for p in parameters]
            scale_all([parameter.grad for parameter in unscaled if parameter.grad is not None], outcome.scale)
        return outcome

    @property
    def world(self) -> RankGroup | None:
        """All ranks, if they have sockets between them on which nothing is on its way, as may be where sums are sharded."""
        if any(bucket.is_sharded for bucket in self.synchroniser.buckets):
            return None
        world = self.synchroniser.groups.get(tuple(range(dist.get_world_size())))
        return world if world is not None and world.sockets is not None else None

    def close(self) -> None:
        for handler in self.handlers:
            handler.close()
        self.synchroniser.close()


def build_sync(
    model: nn.Module,
    optimizer: Any,
    context: ParallelContext,
    handlers: Sequence[BuiltHandler],
    options: Mapping[str, Any],
    bucket_all: bool = False,
    shards: Shards | None = None,
    before_pass: Callable[[], None] = lambda: None,
) -> GradientSync:
    """Let the ledger see what the named handlers do, attach what is missing, lay out buckets. Collective.

    `bucket_all`: gradients that owe no reduction lie in flat buckets too, for a flat optimizer step. `shards`: what is
    to be sharded over the ranks that share it. `before_pass` as of `GradientSync`.
    """
    waive = waived_patterns(options)
    demands = read_demands(model, context.layout, context.get_global_rank())
    mine = [handler for handler, _ in handlers]
    touched: dict[str, str] = {}
    claims: list[Claim] = []
    for handler, said in handlers:
        if said is None:
            from colonnade.gradients.probe import probe  # few runs have a handler that must be tried

            said = probe(handler, demands, context, lambda name: is_waived(name, waive), touched)
        claims.append((handler, said))
    with agreed_errors(context.device):
        plan = plan_sums(
            model, optimizer, context, claims, options, bucket_all=bucket_all, shards=shards, touched=touched
        )
    get_dist_logger().debug(describe(plan.attached, mine))
    sums = with_groups(plan.sums, context)
    with agreed_errors(context.device):
        synchroniser = Synchroniser(sums, log=get_dist_logger().info)
    for planner in plan.planned:
        planner.use(synchroniser)
    loose = _loose(demands, claims, synchroniser)
    return GradientSync([*plan.attached, *mine], synchroniser, plan.ledger, loose, before_pass)


def _loose(
    demands: Sequence[Demand],
    claims: Sequence[Claim],
    synchroniser: Synchroniser,
) -> list[tuple[BaseGradientHandler | None, list[nn.Parameter]]]:
    """The parameters that are in no sum, by who handles them."""
    left = {id(d.parameter): d.parameter for d in demands if id(d.parameter) not in synchroniser.parameters}
    found: list[tuple[BaseGradientHandler | None, list[nn.Parameter]]] = []
    for handler, reductions in claims:
        theirs = [p for reduction in reductions for p in reduction.parameters if left.pop(id(p), None) is not None]
        found.append((handler, theirs))
    return [*found, (None, list(left.values()))]
