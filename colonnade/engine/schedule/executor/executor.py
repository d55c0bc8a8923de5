"""The one executor of pipeline tables: every schedule, ours or the user's, runs here.

It owns no idea of an order. It checks the table, adds the transfers, and does what this rank's program
says, one action after another. Losses are scaled, gradients never are, so calls may accumulate.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.comm.messages import error_of, gather_json, note_of, share_texts
from colonnade.comm.waits import WaitWatch
from colonnade.engine.schedule.actions import COMPUTE, Action, Kind, Table, format_rows, only_forward
from colonnade.engine.schedule.check import Facts, check
from colonnade.engine.schedule.executor.backward import RunBackward, run_backward
from colonnade.engine.schedule.executor.call import call_module
from colonnade.engine.schedule.executor.micro_batch import FEED_ALIKE, MicroBatch
from colonnade.engine.schedule.executor.step import ForwardHook, LossFunction, Step
from colonnade.engine.schedule.loss import LossForm
from colonnade.engine.schedule.transfer.link import Link, PeerFailed
from colonnade.engine.schedule.transfer.plan import add_transfers, confirmation, peer_stage, receive_early
from colonnade.errors import ScheduleError, listed, with_users_line
from colonnade.nn.activations import recomputes

_CPU = torch.device("cpu")
_ENDED = (
    "the data iterator has ended here, and not on all ranks of the pipeline, which must be given equally many batches. "
    + FEED_ALIKE
)
_numbers: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
"""Of the executors that these ranks make, the same on all of them."""
_TEXT_KEPT = 1200
"""How many characters of its reason a failing rank tells: the place where it began comes after them, and must fit too."""
_SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
_RECEIVES = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)


@dataclass(frozen=True)
class ExecutedStep:
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


@dataclass(eq=False, repr=False)
class Executor:
    """Runs a table on this rank's stages.

    `chunks`: this rank's stage modules, in the order of their stages. `rank`: this rank's place in the
    pipeline; `ranks`: the global ranks of the pipeline; `group`: their process group; `transfer_group`:
    another one of the same ranks for transfers, with a backend for CPU memory and one for the device's.
    Without it `group` is used, and TORCH_DISTRIBUTED_DEBUG=DETAIL then takes the transfers, of which ranks
    have different numbers, for a mismatch. `down_group`: one more for the device's memory that goes to a lower rank,
    so that both directions move at once over backends with a queue (NCCL). `forward`, `loss_fn(output, label)` and `backward` say how work
    is done; `waits` keeps the time of each phase; `loss_form` makes what holds the losses of training, and of evaluation, to one form. Creating one is collective over the group: all ranks must
    have the same table, and a fault on one is an error on all.
    """

    chunks: Sequence[nn.Module]
    table: Table
    _: KW_ONLY
    rank: int = 0
    ranks: Sequence[int] = (0,)
    group: dist.ProcessGroup | None = None
    transfer_group: dist.ProcessGroup | None = None
    down_group: dist.ProcessGroup | None = None
    device: torch.device = _CPU
    forward: ForwardHook = call_module
    loss_fn: LossFunction | None = None
    loss_form: Callable[[], LossForm] = LossForm
    backward: RunBackward = run_backward
    tensor_shape: Sequence[int] | None = None
    waits: WaitWatch = field(default_factory=WaitWatch)

    def __post_init__(self) -> None:
        self._links: dict[int, Link] = {}
        self._failure = ""
        self._number, self._refusals = next(_numbers[tuple(self.ranks)]), itertools.count()
        self._forms = {train: self.loss_form() for train in (True, False)}
        self.form = self._forms[True]
        """Of the losses of the step that runs, or ran last."""
        self.facts = self._common_facts()
        self.modules = dict(zip(self.facts.stages_of(self.rank), self.chunks, strict=True))
        self.first_sharing = _first_sharing(self.modules)
        # In two parts, activations would be computed again for each of the products that follow; and FSDP2 has given the
        # weights back before the second one.
        self.unsplittable = {
            stage for stage, module in self.modules.items() if recomputes(module) or _is_sharded(module)
        }
        """Stages that need their backward in one part, from the start or found to."""
        table, rank = self.table, self.rank
        programs = [add_transfers(each)[rank] for each in (table, only_forward(table))]
        transfers = [action for program in programs for action in program if action.kind not in COMPUTE]
        self._peers = sorted({self.facts.stage_ranks[peer_stage(action)] for action in transfers})
        if not any(self.link_to(peer).one_queue for peer in self._peers):
            programs = [receive_early(program) for program in programs]
        self._program, self._forward_program = programs
        self._confirmation = confirmation(table)[rank]

    @property
    def has_first_stage(self) -> bool:
        """Whether this rank feeds the data in."""
        return self.facts.stage_ranks[0] == self.rank

    @property
    def has_last_stage(self) -> bool:
        """Whether losses and outputs appear on this rank."""
        return self.facts.stage_ranks[-1] == self.rank

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        forward_only: bool = False,
        with_loss: bool = True,
        keep_outputs: bool = False,
        confirm: bool = True,
        backward_scale: float | Tensor = 1.0,
        sum_scale: float | Tensor = 1.0,
    ) -> ExecutedStep:
        """Run one step. Collective over the pipeline: all its ranks, with the same flags.

        Gradients are added to `.grad`. `micro_batches` needs data where the first stage is and labels where the last
        one is. `with_loss` and `keep_outputs` say what an evaluation gives; with `confirm` it ends on all ranks together, so
        that each hears if another one fails. `backward_scale` multiplies a mean, and `sum_scale` the sum of a (sum, count),
        for the backward pass only.
        """
        self._check_run(micro_batches, forward_only)
        train = not forward_only
        self.form = self._forms[train]
        step = Step(self, micro_batches, train, with_loss or train, keep_outputs, backward_scale, sum_scale)
        confirm = confirm or train
        program = self._program if train else self._forward_program + self._confirmation * confirm
        try:
            step.run(program)
            for link in self._links.values():
                link.finish()
        except Exception as error:
            sending = program[step.at].kind in _SENDS
            no_batch = isinstance(error, PeerFailed) and error.no_batch
            self._stop(error, program[step.at + (not sending) :], confirm, no_batch)
            if no_batch:
                raise self._agree_on_batch(None, error, clean=False) from None
            raise
        loss, count = step.batch_loss()
        return ExecutedStep(
            losses=[step.losses[index] for index in sorted(step.losses)],
            loss=loss,
            count=count,
            outputs=[step.outputs[index] for index in sorted(step.outputs)],
            order=step.executed,
        )

    def share_loss(self, loss: Tensor | None, count: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Loss and count (None for a mean) of the last stage on all ranks, in float64.

        Collective over the pipeline: a broadcast.
        """
        on_gloo = not dist.is_initialized() or dist.get_backend(self.group) == "gloo"
        shared = torch.full((2,), torch.nan, dtype=torch.float64, device="cpu" if on_gloo else self.device)
        for at, value in enumerate((loss, count)):
            if value is not None:
                shared[at].copy_(value.detach().reshape(()))
        if len(self.ranks) > 1:
            dist.broadcast(shared, src=self.ranks[self.facts.stage_ranks[-1]], group=self.group)
        mean, counted = shared.to(self.device).unbind()
        if self.form.counted is None:  # on a rank without the last stage; asked of the device only once
            self.form.keep(not bool(counted.isnan()))
        return mean, counted if self.form.counted else None

    def link_over(self, transfer: Action) -> Link:
        """The channel that a transfer of this rank takes."""
        return self.link_to(self.facts.stage_ranks[peer_stage(transfer)])

    def link_to(self, rank: int) -> Link:
        """The channel to another rank of the pipeline."""
        if rank not in self._links:
            group = self.transfer_group or self.group
            self._links[rank] = Link(group, self.ranks[rank], self.device, self.down_group)
        return self._links[rank]

    def refuse(self, error: Exception, *, forward_only: bool, confirm: bool) -> Exception:
        """What to raise where this rank has no batch for a step, after telling the ranks that run it. Collective, as `run`.

        If no rank of the pipeline has one, each raises its own error, and the pipeline can go on; else all raise.
        """
        if not self._peers or self._failure:
            return error
        confirm = confirm or not forward_only
        program = self._forward_program + self._confirmation * confirm if forward_only else self._program
        clean = self._stop(error, program, confirm, no_batch=True)
        return self._agree_on_batch(error, error, clean) if confirm else error

    def _agree_on_batch(self, mine: Exception | None, error: Exception, clean: bool) -> Exception:
        """What this rank raises, where some rank has no batch; `mine`: why this one has none."""
        told = ScheduleError(_ENDED, code="C054") if isinstance(mine, StopIteration) else mine
        try:
            key = f"no batch/{'-'.join(map(str, self.ranks))}/{self._number}/{next(self._refusals)}"
            notes = share_texts(key, note_of(told) if told is not None else "", self.ranks)
        except RuntimeError:  # a rank is gone, or does not come
            return error
        without = [rank for rank, note in notes.items() if note]
        if mine is not None and clean and len(without) == len(self.ranks):
            self._failure = ""
            return mine
        return told or error_of(notes[without[0]], without, dist.get_rank())

    def _stop(self, error: Exception, rest: Sequence[Action], heard: bool, no_batch: bool) -> bool:
        """Let the other ranks fail too, now and with the reason, not at a timeout, and leave nothing under way.

        All go through the rest of their programs without computing: what one has begun to send or to receive over NCCL
        ends only if the other side does its part. `heard`: whether all ranks will hear of it in this step, and say so.
        Returns whether they did.
        """
        # Who hears of it from a rank that has only heard of it is told of the rank that failed, with that one's reason.
        told = error if isinstance(error, PeerFailed) else None
        text = told.text if told is not None else f"{type(error).__name__}: {with_users_line(error, _TEXT_KEPT)}"
        self._failure = "" if not self._peers else text if told is None else str(told)
        links = [self.link_to(peer) for peer in self._peers]
        for link in links:
            link.fail(text, no_batch, told.ranks[0] if told is not None else None)
        with contextlib.suppress(RuntimeError):  # a rank is gone, or does not come
            for action in rest:
                if action.kind in _SENDS:
                    self.link_over(action).skip_send(action)
                elif action.kind in _RECEIVES:
                    self.link_over(action).skip_receive(action)
            hearing = [link for link in links if heard and link.hear_out()]
            for link in hearing:
                link.end_failure()
            return len(hearing) == len(links)
        return False

    def _check_run(self, micro_batches: Sequence[MicroBatch], forward_only: bool) -> None:
        if self._failure:  # messages of that step are still under way, and would be taken for those of this one
            raise ScheduleError(
                f"this pipeline stopped in an earlier step ({self._failure}) and cannot go on. Build a new engine in new "
                f"processes, and load the last checkpoint.",
                code="C054",
            )
        expected = self.facts.num_microbatches
        if len(micro_batches) != expected:
            raise ScheduleError(
                f"the table is for {expected} micro-batches, but {len(micro_batches)} were given", code="C051"
            )
        if self.has_last_stage and self.loss_fn is None and not forward_only:
            raise ScheduleError(
                "training needs a loss function on the rank of the last stage; pass loss_fn", code="C051"
            )

    def _common_facts(self) -> Facts:
        """The facts of a table that every rank can run and that is the same on all; else an error on all."""
        problem: ScheduleError | None = None
        try:
            facts = self._check_own()
        except ScheduleError as error:
            problem = error
        if len(self.ranks) > 1:
            mine = [hashlib.sha256("\n".join(format_rows(self.table)).encode()).hexdigest(), str(problem or "")]
            everyone = gather_json(mine, self.device, self.group)
            failed = [(rank, text) for rank, (_, text) in zip(self.ranks, everyone, strict=True) if text]
            if problem is None and failed:
                rank, text = failed[0]
                problem = ScheduleError(f"rank {rank} cannot run this table: {text}", code="C051", ranks=[rank])
            if problem is None and len({digest for digest, _ in everyone}) > 1:
                problem = ScheduleError(
                    f"the ranks {listed(self.ranks)} of this pipeline have different tables of actions; "
                    "give all of them the same table, order and number of micro-batches",
                    code="C051",
                )
        if problem is not None:
            raise problem
        return facts

    def _check_own(self) -> Facts:
        """The facts of a table that this rank can run."""
        facts = check(self.table)
        if facts.num_ranks != len(self.ranks):
            raise ScheduleError(
                f"a table for {facts.num_ranks} ranks cannot run on a pipeline of {len(self.ranks)}", code="C051"
            )
        stages = facts.stages_of(self.rank)
        if len(stages) != len(self.chunks):
            raise ScheduleError(
                f"this table gives pipeline rank {self.rank} the stages {listed(stages)}, but {len(self.chunks)} "
                "stage module(s) are here. Give a module for each (nn.ModuleList), or change num_chunks.",
                code="C051",
            )
        return facts


def _is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 gathers weights of it for each pass."""
    return any(hasattr(one, "_get_fsdp_state") for one in module.modules())


def _first_sharing(modules: Mapping[int, nn.Module]) -> dict[int, int]:
    """For each stage the first one that it shares parameters with, directly or not; mostly itself."""
    first = {stage: stage for stage in modules}
    owner: dict[Tensor, int] = {}
    for stage, module in modules.items():
        for parameter in module.parameters():
            both = first[owner.setdefault(parameter, stage)], first[stage]
            first = {key: min(both) if value in both else value for key, value in first.items()}
    return first
