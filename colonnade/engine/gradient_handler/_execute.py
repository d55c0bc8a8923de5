"""The one executor of reductions: plans of several handlers become one sum per parameter, in shared buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.gradient_handler._options import GroupReduction, SyncOptions
from colonnade.engine.gradient_handler._reducer import GradientReducer
from colonnade.engine.gradient_handler._reduction import Reduction
from colonnade.logging import get_dist_logger
from colonnade.parallel.demand import Owed, joint_ranks
from colonnade.parallel.dtensor import effective_placement


@dataclass
class _Entry:
    """One parameter with everything that planned handlers want done to it."""

    name: str
    parameter: nn.Parameter
    options: SyncOptions
    reductions: list[Reduction] = field(default_factory=list)


class Executor:
    """Owns the reducers. `prepare` before each backward, `finish` when the gradients must be final."""

    def __init__(
        self,
        plans: Iterable[tuple[list[Reduction], SyncOptions]],
        context: ParallelContext,
        also: Iterable[tuple[str, nn.Parameter]] = (),
        options: SyncOptions | None = None,
    ) -> None:
        """`also`: parameters that owe nothing here, and are to lie in buckets all the same (by `options`)."""
        self._context = context
        entries = _by_parameter(plans)
        taken = {id(entry.parameter) for entry in entries}
        local = options or SyncOptions()
        entries += [_Entry(name, parameter, local) for name, parameter in also if id(parameter) not in taken]
        joined = {option: self._join(entries, option) for option in dict.fromkeys(e.options for e in entries)}
        # Every rank asks for its sets at the same moment, whether it has reductions or not.
        context.ensure_groups(ranks for sums in joined.values() for ranks in sums if len(ranks) > 1)
        self.reducers = [
            GradientReducer(self._with_groups(sums), option, log=get_dist_logger().info)
            for option, sums in joined.items()
        ]
        self._pending = False

    @classmethod
    def for_plan(cls, plan: list[Reduction], context: ParallelContext, options: SyncOptions) -> Executor:
        """An executor of one handler's plan, for a handler that is used by itself."""
        return cls([(plan, options)], context)

    def prepare(self, last: bool) -> None:
        """Before a backward pass: is it the last of this step, so that full buckets may be sent?"""
        self._pending = True
        for reducer in self.reducers:
            reducer.prepare(last)

    def finish(self) -> None:
        """Reduce what is left and wait for all; a second call in the same step does nothing."""
        if self._pending:
            self._pending = False
            for reducer in self.reducers:
                reducer.wait()

    def set_scale(self, scale: float | Tensor | None) -> None:
        """A further factor on every gradient of this step, folded into the reduction."""
        for reducer in self.reducers:
            reducer.scale = scale

    @property
    def generation(self) -> tuple[int, ...]:
        """Changes whenever any bucket has been laid out anew."""
        return tuple(reducer.generation for reducer in self.reducers)

    @property
    def order(self) -> list[str]:
        """The names of all parameters in the order that their buckets follow."""
        return [name for reducer in self.reducers for name in reducer.order]

    def follow(self, names: Sequence[str]) -> None:
        """Lay the buckets out in an order of an earlier run. Collective over the world."""
        for reducer in self.reducers:
            reducer.follow(names)

    def close(self) -> None:
        """Remove hooks and give back shared memory."""
        for reducer in self.reducers:
            reducer.close()

    def _join(self, entries: list[_Entry], options: SyncOptions) -> dict[tuple[int, ...], dict[float, list[_Entry]]]:
        """ranks -> divisor -> parameters: one sum for each parameter, over all its modes at once."""
        layout, rank = self._context.layout, self._context.get_global_rank()
        sums: dict[tuple[int, ...], dict[float, list[_Entry]]] = {}
        for entry in entries:
            if entry.options != options:
                continue
            divisor = 1.0
            for reduction in entry.reductions:
                divisor *= reduction.divisor
            ranks = entry.reductions[0].ranks if entry.reductions else (rank,)
            if len(entry.reductions) > 1:
                placement = effective_placement(entry.parameter, layout, rank)
                factors = tuple(Owed(r.mode, r.ranks, int(r.divisor)) for r in entry.reductions)
                ranks = joint_ranks(layout, placement, factors, rank)
            sums.setdefault(ranks, {}).setdefault(divisor, []).append(entry)
        return sums

    def _with_groups(self, sums: dict[tuple[int, ...], dict[float, list[_Entry]]]) -> list[GroupReduction]:
        layout = self._context.layout
        return [
            GroupReduction(
                names=tuple(entry.name for entry in entries),
                parameters=tuple(entry.parameter for entry in entries),
                ranks=ranks,
                group=self._context.group_of_ranks(ranks) if len(ranks) > 1 else None,
                divisor=divisor,
                between_stages=len({layout.local_rank(ParallelMode.PIPELINE, rank) for rank in ranks}) > 1,
            )
            for ranks, by_divisor in sums.items()
            for divisor, entries in by_divisor.items()
        ]


def _by_parameter(plans: Iterable[tuple[list[Reduction], SyncOptions]]) -> list[_Entry]:
    entries: dict[int, _Entry] = {}
    for plan, options in plans:
        for reduction in plan:
            for name, parameter in zip(reduction.names, reduction.parameters, strict=True):
                entry = entries.setdefault(id(parameter), _Entry(name, parameter, options))
                entry.reductions.append(reduction)
    return list(entries.values())
