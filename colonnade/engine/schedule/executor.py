"""The one executor of pipeline tables: every schedule, ours or the user's, runs here.

It owns no idea of an order. It checks the table, adds the transfers, and does what this rank's program
says, one action after another. Losses are scaled, gradients never are, so calls may accumulate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.engine.schedule.actions import COMPUTE, Action, Table, format_csv, only_forward
from colonnade.engine.schedule.backward import RunBackward, run_backward
from colonnade.engine.schedule.check import Facts, check
from colonnade.engine.schedule.micro_batch import MicroBatch
from colonnade.engine.schedule.misfit import misfit, shown, takes
from colonnade.engine.schedule.non_pipeline import call_model
from colonnade.engine.schedule.program import add_transfers, peer_stage, receive_early
from colonnade.engine.schedule.step import ForwardHook, LossFunction, Place, Step
from colonnade.engine.schedule.transfer import Link, PeerFailed
from colonnade.errors import ScheduleError, listed
from colonnade.parallel.split import Stage


@dataclass(frozen=True)
class Ran:
    """What a step gave on this rank; losses and outputs are there only where the last stage is."""

    losses: list[Tensor]
    """The loss of each micro-batch as the loss function gave it, detached."""
    loss: Tensor | None
    """The loss of the batch: the losses times the weights of their micro-batches; or sum over count."""
    count: Tensor | None
    """The count of the batch, where losses were given as (sum, count)."""
    outputs: list[Any]
    """The outputs of each micro-batch, detached, if they were to be kept."""
    order: list[Action]
    """The compute actions in the order in which they ran."""


def call_module(stage: int, module: nn.Module, inputs: Any, micro_batch: MicroBatch) -> Any:
    """The usual forward hook: a dict goes in by keyword, a tuple or list by position, anything else alone.

    A stage cut out of an nn.Sequential takes what the layer before it returned as one argument, as it did there.
    """
    alone = stage > 0 and isinstance(module, Stage) and module.takes_one_value
    try:
        return module(inputs) if alone else call_model(module, inputs)
    except (TypeError, RuntimeError) as error:
        if stage > 0 and (reason := misfit(module, inputs, alone, error)):
            raise ScheduleError(
                f"stage {stage} cannot take what stage {stage - 1} gives: {reason}\n"
                f"  stage {stage - 1} gives: {shown(inputs)}\n"
                f"  stage {stage} takes: {takes(module)}"
            ) from error
        raise


class Executor:
    """Runs a table on this rank's stages.

    `chunks`: this rank's stage modules, in the order of their stages. `rank`: this rank's place in the
    pipeline; `ranks`: the global ranks of the pipeline; `group`: their process group; `transfer_group`:
    another one of the same ranks for transfers, with a backend for CPU memory and one for the device's.
    Without it `group` is used, and TORCH_DISTRIBUTED_DEBUG=DETAIL then takes the transfers, of which ranks
    have different numbers, for a mismatch. `forward`, `loss_fn(output, label)` and `backward` say how work
    is done. Creating one is collective over the group: all ranks must have the same table, and a fault on
    one is an error on all.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        table: Table,
        *,
        rank: int = 0,
        ranks: Sequence[int] = (0,),
        group: dist.ProcessGroup | None = None,
        transfer_group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        forward: ForwardHook = call_module,
        loss_fn: LossFunction | None = None,
        backward: RunBackward = run_backward,
        tensor_shape: Sequence[int] | None = None,
    ) -> None:
        self._rank, self._ranks, self._group = rank, list(ranks), group
        self._transfer_group = transfer_group or group
        self._device = device or torch.device("cpu")
        self._links: dict[int, Link] = {}
        self._counts: bool | None = None
        self.table, self.facts = table, self._agree(chunks, table)
        stages = [stage for stage, home in enumerate(self.facts.stage_ranks) if home == rank]
        self._place = Place(
            rank=rank,
            stage_ranks=self.facts.stage_ranks,
            modules=dict(zip(stages, chunks, strict=True)),
            links=self._link,
            forward=forward,
            loss_fn=loss_fn,
            backward=backward,
            tensor_shape=None if tensor_shape is None else tuple(tensor_shape),
            accounts=_accounts(dict(zip(stages, chunks, strict=True))),
        )
        programs = [add_transfers(each)[rank] for each in (table, only_forward(table))]
        transfers = [action for action in programs[0] if action.kind not in COMPUTE]
        self._peers = sorted({self.facts.stage_ranks[peer_stage(action)] for action in transfers})
        if not any(self._link(peer).one_queue for peer in self._peers):
            programs = [receive_early(program) for program in programs]
        self._program, self._forward_program = programs

    @property
    def has_first_stage(self) -> bool:
        """Whether this rank feeds the data in."""
        return self.facts.stage_ranks[0] == self._rank

    @property
    def has_last_stage(self) -> bool:
        """Whether losses and outputs appear on this rank."""
        return self.facts.stage_ranks[-1] == self._rank

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        forward_only: bool = False,
        with_loss: bool = True,
        keep_outputs: bool = False,
        backward_scale: float | Tensor = 1.0,
        sum_scale: float | Tensor = 1.0,
        takes_counts: bool = True,
    ) -> Ran:
        """Run one step. Collective over the pipeline: all its ranks, with the same flags.

        Gradients are added to `.grad`. `micro_batches` needs data where the first stage is and labels where the last
        one is. `with_loss` and `keep_outputs` say what an evaluation gives. `backward_scale` multiplies a mean, and
        `sum_scale` the sum of a (sum, count), for the backward pass only; `takes_counts=False` refuses such losses.
        """
        self._check_run(micro_batches, forward_only)
        train = not forward_only
        scales, forms = (backward_scale, sum_scale), (takes_counts, self._counts)
        step = Step(self._place, micro_batches, train, with_loss or train, keep_outputs, *scales, *forms)
        try:
            step.run(self._forward_program if forward_only else self._program)
            for link in self._links.values():
                link.finish()
        except Exception as error:
            self._tell_failure(error)
            raise
        self._counts = step.counts_before
        loss, count = _joined_loss(step, micro_batches)
        return Ran(
            losses=[step.losses[index] for index in sorted(step.losses)],
            loss=loss,
            count=count,
            outputs=[step.outputs[index] for index in sorted(step.outputs)],
            order=step.ran,
        )

    def share_loss(self, loss: Tensor | None, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Loss and count (NaN: there is none) of the last stage on all ranks, in float64.

        Collective over the pipeline: a broadcast.
        """
        device = self._collective_device()
        shared = torch.full((2,), torch.nan, dtype=torch.float64, device=device)
        for at, value in enumerate((loss, count)):
            if value is not None:
                shared[at].copy_(value.detach().reshape(()))
        if len(self._ranks) > 1:
            dist.broadcast(shared, src=self._ranks[self.facts.stage_ranks[-1]], group=self._group)
        value, counted = shared.to(self._device).unbind()
        return value, counted

    def _link(self, rank: int) -> Link:
        if rank not in self._links:
            self._links[rank] = Link(self._transfer_group, self._ranks[rank], self._device)
        return self._links[rank]

    def _tell_failure(self, error: Exception) -> None:
        """Let the ranks that wait for this one fail too, now and with the reason, not at a timeout."""
        heard_from = error.peer if isinstance(error, PeerFailed) else None
        text = f"{type(error).__name__}: {error}"
        ends = [self._link(peer).fail(text) for peer in self._peers if self._ranks[peer] != heard_from]
        for end in ends:
            end()

    def _check_run(self, micro_batches: Sequence[MicroBatch], forward_only: bool) -> None:
        expected = self.facts.num_micro_batches
        if len(micro_batches) != expected:
            raise ScheduleError(f"the table is for {expected} micro-batches, but {len(micro_batches)} were given")
        if self.has_last_stage and self._place.loss_fn is None and not forward_only:
            raise ScheduleError("training needs a loss function on the rank of the last stage; pass loss_fn")

    def _collective_device(self) -> torch.device:
        on_gloo = not dist.is_initialized() or dist.get_backend(self._group) == "gloo"
        return torch.device("cpu") if on_gloo else self._device

    def _agree(self, chunks: Sequence[nn.Module], table: Table) -> Facts:
        """The facts of a table that every rank can run and that is the same on all; else an error on all."""
        facts, problem = self._problem(chunks, table)
        if len(self._ranks) > 1:
            digest = hashlib.sha256(format_csv(table).encode()).digest()
            mine = torch.tensor([int.from_bytes(digest[:7], "big"), problem is not None])
            mine = mine.to(self._collective_device())
            everyone = [torch.empty_like(mine) for _ in self._ranks]
            dist.all_gather(everyone, mine, group=self._group)
            digests, failed = zip(*(row.tolist() for row in everyone), strict=True)
            if problem is None and any(failed):
                ranks = listed(rank for rank, bad in zip(self._ranks, failed, strict=True) if bad)
                problem = ScheduleError(f"rank {ranks} cannot run this table; its own message says why")
            if problem is None and len(set(digests)) > 1:
                problem = ScheduleError(
                    f"the ranks {listed(self._ranks)} of this pipeline have different tables of actions; "
                    "give all of them the same table, order and number of micro-batches"
                )
        if problem is not None or facts is None:
            raise problem or ScheduleError("this table of actions cannot run")
        return facts

    def _problem(self, chunks: Sequence[nn.Module], table: Table) -> tuple[Facts | None, ScheduleError | None]:
        """What is wrong on this rank, as an error that is not raised yet."""
        try:
            facts = check(table)
            stages = [stage for stage, home in enumerate(facts.stage_ranks) if home == self._rank]
            size = len(self._ranks)
            if facts.num_ranks != size:
                raise ScheduleError(f"a table for {facts.num_ranks} ranks cannot run on a pipeline of {size}")
            if len(stages) != len(chunks):
                raise ScheduleError(
                    f"this table gives pipeline rank {self._rank} the stages {listed(stages)}, but {len(chunks)} "
                    "stage module(s) are here. Give a module for each (nn.ModuleList), or change num_chunks."
                )
        except ScheduleError as error:
            return None, error
        return facts, None


def _joined_loss(step: Step, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor | None, Tensor | None]:
    """(loss of the batch, count of the batch), each None where there is none."""
    if not step.losses:
        return None, None
    if step.counts:
        count = torch.stack([step.counts[index].reshape(()) for index in sorted(step.counts)]).sum()
        return torch.stack([step.losses[index].reshape(()) for index in sorted(step.losses)]).sum() / count, count
    weighted = [step.losses[index].reshape(()) * micro_batches[index].weight for index in sorted(step.losses)]
    return torch.stack(weighted).sum(), None


def _accounts(modules: Mapping[int, nn.Module]) -> dict[int, int]:
    """For each stage the first one that it shares parameters with, directly or not; mostly itself."""
    accounts = {stage: stage for stage in modules}
    owner: dict[Tensor, int] = {}
    for stage, module in modules.items():
        for parameter in module.parameters():
            first = accounts[owner.setdefault(parameter, stage)]
            own = accounts[stage]
            accounts = {key: min(first, own) if value in (first, own) else value for key, value in accounts.items()}
    return accounts
