"""Gradient synchronisation of an engine: runs the gradient handlers and the all-reduces that they share, and builds the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from colonnade.comm.groups import RankGroup
from colonnade.comm.messages import agreed_errors, note_of
from colonnade.config.settings import SyncSettings
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import GradientError
from colonnade.gradients.handler import BaseGradientHandler, BuiltHandler, describe, plan_sums
from colonnade.gradients.ledger import Ledger, is_waived
from colonnade.gradients.sums import Claim, Shards, read_demands, with_groups
from colonnade.gradients.synchroniser import StepOutcome, Synchroniser
from colonnade.logging import get_dist_logger
from colonnade.optim.bucket_step import scale_all

if TYPE_CHECKING:
    from colonnade.engine.guard import CallLog


class GradientSync:
    """Runs every handler once per step: the automatic ones first, then the named ones in the config's order.

    Automatic reductions start during backward and are complete before a custom handler runs. Since all reductions are linear,
    their order does not change the result. `loose`: for each handler, its parameters whose gradients are in no bucket;
    the last list has the parameters that no handler reduces (for example because FSDP2 reduces them during backward).
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
        """Called at the start of a backward pass: waits for all-gathers of weights that still run."""
        self.log: CallLog | None = None
        """The log of the collectives called by handlers; set by the guard."""
        self._outcome: StepOutcome | None = None

    def prepare(self, last: bool) -> None:
        """Prepare buckets and handlers.

        Called before each backward pass; `last`: whether this is the last backward pass of the step.
        """
        self.before_pass()
        self._outcome = None
        self.synchroniser.prepare(last)
        for handler in self.handlers:
            handler.prepare(last)

    def finish(self, scale: float | Tensor | None = None, *, counts: bool = False) -> StepOutcome:
        """Complete all reductions after the last backward pass: every gradient is final when this returns. Collective.

        `scale` and `counts` are passed to `Synchroniser.wait`, whose outcome is returned.
        """
        if self._outcome is None:
            # Gradients changed by hand are an error of this rank only, and the other ranks have started to reduce. They learn of
            # it from the status flags that go with the reductions: so all ranks raise, and none waits for this one.
            try:
                self.synchroniser.check_untouched()
            except GradientError as error:
                self.synchroniser.fail(note_of(error))

            # Planned reductions come first, since a custom handler may read any gradient. They run once: if a step has failed
            # after its reductions, the loop may call `step` again, and without a backward pass in between the result is there.
            self._outcome = self.synchroniser.wait(scale, counts=counts)
        outcome = self._outcome
        if outcome.failed_ranks:  # all gradients are None
            return outcome

        # Handlers in their order. Gradients outside of buckets are scaled by their handler, if it supports that, or else below.
        scaling = [handler for handler in self.handlers if handler.set_scale(outcome.scale)]
        for handler in self.handlers:
            handler.handle_gradient() if self.log is None else self.log.run(handler)
        if outcome.scale is not None:
            unscaled = [p for owner, parameters in self._loose if owner not in scaling for p in parameters]
            scale_all([parameter.grad for parameter in unscaled if parameter.grad is not None], outcome.scale)
        return outcome

    @property
    def world(self) -> RankGroup | None:
        """The `RankGroup` of all ranks, if it has idle sockets; else None.

        With sharded reductions, messages may still be in flight on the sockets.
        """
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
    *,
    bucket_all: bool = False,
    shards: Shards | None = None,
    before_pass: Callable[[], None] = lambda: None,
) -> GradientSync:
    """Build the ledger from the named handlers, attach automatic handlers for the rest, and lay out buckets.

    Collective over the world.

    Args:
        model: the model of this rank.
        optimizer: the optimizer that steps.
        context: the context of this rank.
        handlers: the named handlers, each with its planned reductions, or None if a probe must find them.
        bucket_all: whether gradients without a reduction are put into buckets too, for a flat optimizer step.
        shards: the parameters whose gradients are sharded (ZeRO 1 and 2).
        before_pass: see `GradientSync.before_pass`.
    """
    waive = SyncSettings.read(context.config.get("sync")).waive
    demands = read_demands(model, context.layout, context.get_global_rank())
    named = [handler for handler, _ in handlers]
    touched: dict[str, str] = {}
    claims: list[Claim] = []
    for handler, reductions in handlers:
        if reductions is None:
            # A handler that calls collectives itself has no plan. Few runs have one, so the probe is imported here.
            from colonnade.gradients.probe import probe

            reductions = probe(handler, demands, context, lambda name: is_waived(name, waive), touched)
        claims.append((handler, reductions))
    with agreed_errors(context.device):
        plan = plan_sums(model, optimizer, context, claims, bucket_all=bucket_all, shards=shards, touched=touched)
    get_dist_logger().debug(describe(plan.attached, named))
    sums = with_groups(plan.sums, context)
    with agreed_errors(context.device):
        synchroniser = Synchroniser(sums, log=get_dist_logger().info)
    for planner in plan.planned:
        planner.use(synchroniser)

    # Parameters outside of all buckets, by their handler: `finish` must scale their gradients itself.
    left = {id(d.parameter): d.parameter for d in demands if id(d.parameter) not in synchroniser.parameters}
    loose: list[tuple[BaseGradientHandler | None, list[nn.Parameter]]] = []
    for handler, claimed in claims:
        members = (parameter for reduction in claimed for parameter in reduction.parameters)
        loose.append((handler, [p for p in members if left.pop(id(p), None) is not None]))
    loose.append((None, list(left.values())))
    return GradientSync([*plan.attached, *named], synchroniser, plan.ledger, loose, before_pass)
