"""The one executor of pipeline tables: every schedule, ours or the user's, runs here.

It owns no idea of an order. It checks the table, adds the transfers (`transfer.py`), and does what this rank's program
says, one action after another: `Executor.run` tells a step, and `_forward` to `_finish_send` are what each kind of action
does. What is held between actions of a step is a `StepState`. Losses are scaled, gradients never are, so calls may
accumulate. The second half is what happens where a rank fails, and the agreement on one table at the start.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from colonnade.comm.messages import error_of, gather_json, note_of, share_texts
from colonnade.comm.waits import WaitWatch
from colonnade.engine.activations import recomputes
from colonnade.engine.schedule.actions import (
    COMPUTE,
    GIVES_INPUT_GRADIENT,
    Action,
    Kind,
    Table,
    format_rows,
    only_forward,
)
from colonnade.engine.schedule.check import Facts, check
from colonnade.engine.schedule.loss import LossForm, count_on
from colonnade.engine.schedule.micro_batch import FEED_ALIKE, MicroBatch, call_module
from colonnade.engine.schedule.programs import CONFIRMS, add_transfers, confirmation, peer_stage, receive_early
from colonnade.engine.schedule.split_backward import RunBackward, StageInput, WeightWork, backward_input, run_backward
from colonnade.engine.schedule.transfer import Incoming, Link, PeerFailed, describe, differentiable, rebuild
from colonnade.errors import ScheduleError, listed, with_users_line
from colonnade.logging import get_dist_logger
from colonnade.texts import digest_of

LossFunction: TypeAlias = Callable[[Any, Any], Any]
"""(output, label) -> a mean, or (sum, count)."""
ForwardHook: TypeAlias = Callable[[int, nn.Module, Any, MicroBatch], Any]
"""How a stage is called: (stage, module, inputs, micro-batch) -> output. It may set the label of the micro-batch."""

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
_PHASES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT: "backward", Kind.WEIGHT: "backward"}
"""Where the time of an action counts; that of the others is communication."""


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


@dataclass
class StageGraph:
    """The autograd graph of a micro-batch between the forward and the backward pass of a stage."""

    roots: list[Tensor]
    inputs: list[StageInput]


@dataclass
class StepState:
    """What one step was asked to do, and what is held between its actions. Keys of stages are (stage, micro-batch)."""

    micro_batches: Sequence[MicroBatch]
    train: bool
    with_loss: bool
    keep_outputs: bool
    mean_scale: float | Tensor
    sum_scale: float | Tensor
    backwards_left: int = 0
    """Passes of this rank that accumulate gradients and are still to come."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """By micro-batch, where the last stage is, as `counts` and `outputs`."""
    counts: dict[int, Tensor] = field(default_factory=dict)
    """Of losses given as (sum, count)."""
    outputs: dict[int, Any] = field(default_factory=dict)
    executed: list[Action] = field(default_factory=list)
    graphs: dict[tuple[int, int], StageGraph] = field(default_factory=dict)
    weight_work: dict[tuple[int, int], WeightWork] = field(default_factory=dict)
    inbox: dict[Action, Incoming] = field(default_factory=dict)
    """What stages of this rank gave to stages of this rank, by the action that would receive it."""
    outbox: dict[Action, tuple[str, list[Tensor]]] = field(default_factory=dict)
    """Descriptions and tensors of what is to be sent, by the action that sends it."""
    rows: dict[int, int | None] = field(default_factory=dict)
    """How many rows the first stage was given, by micro-batch."""

    def batch_loss(self) -> tuple[Tensor | None, Tensor | None]:
        """(loss of the batch, count of the batch), each None where there is none."""
        if not self.losses:
            return None, None
        if self.counts:
            count = _sum(self.counts)
            return _sum(self.losses) / count, count
        return _sum({index: loss * self.micro_batches[index].weight for index, loss in self.losses.items()}), None


def _sum(values: Mapping[int, Tensor]) -> Tensor:
    """The sum of the numbers of all micro-batches, in their order, so that it is the same for every order of passes."""
    return torch.stack([values[index].reshape(()) for index in sorted(values)]).sum()


@dataclass(eq=False, repr=False)
class Executor:
    """Runs a table on this rank's stages.

    `chunks`: this rank's stage modules, in the order of their stages. `rank`: this rank's place in the
    pipeline; `ranks`: the global ranks of the pipeline; `group`: their process group; `transfer_group`:
    another one of the same ranks for transfers, with a backend for CPU memory and one for the device's.
    Without it `group` is used, and TORCH_DISTRIBUTED_DEBUG=DETAIL then takes the transfers, of which ranks
    have different numbers, for a mismatch. `down_group`: one more for the device's memory that goes to a lower rank,
    so that both directions move at once over backends with a queue (NCCL). `forward`, `loss_fn(output, label)` and `backward` say how work
    is done; `waits` keeps the time of each phase; `loss_form` makes what holds the losses of training, and of evaluation, to one form.
    Creating one is collective over the group: all ranks must have the same table, and a fault on one is an error on all.

    `backward` is told `last` with the last pass of a step that accumulates gradients here, where this rank has one chunk.
    With several, gradients of one chunk are complete while passes of another are to come, and hooks that start sums at
    `last` would have missed them: the sums then start when the schedule is over.
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
        confirm = confirm or train
        program = self._program if train else self._forward_program + self._confirmation * confirm
        step = StepState(micro_batches, train, with_loss or train, keep_outputs, backward_scale, sum_scale)
        step.backwards_left = sum(action.kind in GIVES_INPUT_GRADIENT for action in program)
        at = 0
        try:
            for at, action in enumerate(program):  # noqa: B007  # read where an action fails
                self.waits.enter(_PHASES.get(action.kind, "communication"))
                match action.kind:
                    case Kind.FORWARD:
                        self._forward(step, action)
                    case Kind.BACKWARD:
                        self._backward(step, action)
                    case Kind.INPUT:
                        self._backward_input(step, action)
                    case Kind.WEIGHT:
                        self._backward_weight(step, action)
                    case Kind.SEND_FORWARD | Kind.SEND_BACKWARD:
                        self._send(step, action)
                    case Kind.RECEIVE_FORWARD | Kind.RECEIVE_BACKWARD:
                        self._receive(action)
                    case Kind.SENT_FORWARD | Kind.SENT_BACKWARD:
                        self._finish_send(action)
                if action.kind in COMPUTE:
                    step.executed.append(action)
            for link in self._links.values():
                link.finish()
        except Exception as error:
            # The other ranks expect what this one would have sent: it goes through the rest of its program without
            # computing, from the action that failed on where that is a send (which has not been begun), else after it.
            sending = program[at].kind in _SENDS
            no_batch = isinstance(error, PeerFailed) and error.no_batch
            self._stop(error, program[at + (not sending) :], confirm, no_batch)
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

    # --- What each kind of action does ---

    def _forward(self, step: StepState, action: Action) -> None:
        stage, _, index = action
        micro_batch = step.micro_batches[index]
        if stage == 0:
            incoming, step.rows[index] = Incoming(micro_batch.data, []), micro_batch.rows
        else:
            incoming = self._take(step, action._replace(kind=Kind.RECEIVE_FORWARD))
            step.rows[index], incoming.value = incoming.value
        inputs = [StageInput(tensor) for tensor in incoming.need_grad] if step.train else []
        with torch.set_grad_enabled(step.train):
            output = self.forward(stage, self.modules[stage], incoming.value, micro_batch)
            if stage == self.facts.num_stages - 1:
                roots = self._finish_forward(step, output, micro_batch)
            else:
                roots = self._pass_output_on(step, action, output)
        if step.train:
            step.graphs[stage, index] = StageGraph(roots, inputs)

    def _finish_forward(self, step: StepState, output: Any, micro_batch: MicroBatch) -> list[Tensor]:
        """The end of the pipeline: the loss, scaled for the backward pass, is the root of the graph."""
        # Labels must belong to the rows that the first stage was given.
        fed, here = step.rows[micro_batch.index], micro_batch.rows
        if fed is not None and here is not None and fed != here:
            raise ScheduleError(
                f"micro-batch {micro_batch.index} has {fed} rows on the first stage of the pipeline and {here} on the last, "
                f"so the labels belong to other rows: all ranks of a pipeline must be given the same batches. {FEED_ALIKE}",
                code="C052",
            )
        if not micro_batch.counts:
            return []
        if step.keep_outputs:
            step.outputs[micro_batch.index] = tree_map_only(Tensor, Tensor.detach, output)
        if not step.with_loss or self.loss_fn is None:
            return []
        loss, count = self.form.read(self.loss_fn(output, micro_batch.label))
        step.losses[micro_batch.index] = loss.detach()
        if count is None:
            return differentiable([loss * (micro_batch.weight * step.mean_scale)])
        step.counts[micro_batch.index] = count_on(count, loss.device)
        return differentiable([loss * step.sum_scale])

    def _pass_output_on(self, step: StepState, action: Action, output: Any) -> list[Tensor]:
        """Give the output to the next stage, here or on another rank; its differentiable tensors are the roots."""
        stage, _, index = action
        description, tensors = describe(output, f"the output of stage {stage}")
        # The output travels with the rows that the first stage was given.
        description = f'{{"tuple":[{json.dumps(step.rows[index])},{description}]}}'
        expected = None if self.tensor_shape is None else tuple(self.tensor_shape)
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        if expected is not None and found != expected:
            raise ScheduleError(
                f"tensor_shape={expected} was promised for what goes from stage to stage, but stage {stage} "
                f"gave {found}. Correct it, or leave tensor_shape out: shapes are sent along and may vary.",
                code="C052",
            )
        if self.facts.stage_ranks[stage + 1] == self.rank:
            # A copy with no graph: the next stage may change it in place, and ends its own graph there.
            copies = [tensor.detach().clone() for tensor in tensors]
            step.inbox[Action(stage + 1, Kind.RECEIVE_FORWARD, index)] = Incoming(*rebuild(description, copies))
        else:
            step.outbox[Action(stage, Kind.SEND_FORWARD, index)] = (description, tensors)
        return differentiable(tensors)

    def _backward(self, step: StepState, action: Action) -> None:
        graph = step.graphs.pop((action.stage, action.micro_batch))
        self._backward_in_one_part(step, action, graph, *self._roots(step, action, graph))

    def _backward_input(self, step: StepState, action: Action) -> None:
        """The input part; where a stage cannot be split, all of it now, and nothing is left for W."""
        graph = step.graphs.pop((action.stage, action.micro_batch))
        roots, grads = self._roots(step, action, graph)
        if not roots or not graph.inputs or action.stage in self.unsplittable:
            return self._backward_in_one_part(step, action, graph, roots, grads)
        try:
            found, work = backward_input(roots, grads, graph.inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.unsplittable.add(action.stage)
            get_dist_logger().warning(
                f"stage {action.stage} cannot do its backward pass in two parts, so W is done with I: {error}"
            )
            return self._backward_in_one_part(step, action, graph, roots, grads)
        step.weight_work[action.stage, action.micro_batch] = work
        return self._pass_gradient_back(step, action, found)

    def _backward_weight(self, step: StepState, action: Action) -> None:
        work = step.weight_work.pop((action.stage, action.micro_batch), None)
        if work is not None:
            work.run(self.backward, last=self._count_backward(step))

    def _backward_in_one_part(
        self, step: StepState, action: Action, graph: StageGraph, roots: list[Tensor], grads: list[Tensor]
    ) -> None:
        last = self._count_backward(step)
        if roots:
            self.backward(roots, grads, inputs=None, last=last)
        self._pass_gradient_back(step, action, [each.grad for each in graph.inputs])

    def _roots(self, step: StepState, action: Action, graph: StageGraph) -> tuple[list[Tensor], list[Tensor]]:
        """Where the backward pass starts, and with which gradients: the loss, or outputs that were used."""
        if action.stage == self.facts.num_stages - 1:
            return graph.roots, [torch.ones_like(root) for root in graph.roots]
        grads = self._take(step, action._replace(kind=Kind.RECEIVE_BACKWARD)).value
        used = [(root, grad) for root, grad in zip(graph.roots, grads, strict=True) if grad is not None]
        return [root for root, _ in used], [grad for _, grad in used]

    def _count_backward(self, step: StepState) -> bool:
        """Count a pass that accumulates gradients, just before it runs; whether it is `last` (see the class)."""
        step.backwards_left -= 1
        return step.backwards_left == 0 and len(self.modules) == 1

    def _pass_gradient_back(self, step: StepState, action: Action, grads: Iterable[Tensor | None]) -> None:
        """Give the gradient of the inputs to the stage before, here or on another rank."""
        stage, _, index = action
        if stage == 0:
            return
        value = list(grads)
        if self.facts.stage_ranks[stage - 1] == self.rank:
            step.inbox[Action(stage - 1, Kind.RECEIVE_BACKWARD, index)] = Incoming(value, [])
        else:
            step.outbox[Action(stage, Kind.SEND_BACKWARD, index)] = describe(value, "the gradient")

    def _take(self, step: StepState, receive: Action) -> Incoming:
        """What a stage of this rank has left, or what comes over a link; waiting for it is communication."""
        if receive in step.inbox:
            return step.inbox.pop(receive)
        before = self.waits.enter("communication")
        taken = self.link_over(receive).take(receive)
        self.waits.enter(before)
        return taken

    def _send(self, step: StepState, action: Action) -> None:
        value = step.outbox.pop(action) if action.micro_batch != CONFIRMS else describe(None, "nothing")
        self.link_over(action).send(action, *value)

    def _receive(self, action: Action) -> None:
        link = self.link_over(action)
        link.expect(action)
        if action.micro_batch == CONFIRMS:
            link.take(action)

    def _finish_send(self, action: Action) -> None:
        started = Kind.SEND_FORWARD if action.kind is Kind.SENT_FORWARD else Kind.SEND_BACKWARD
        self.link_over(action).sent(action._replace(kind=started))

    # --- Around a step ---

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

    # --- Where a rank fails, or has no batch ---

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
        """What this rank raises, where some rank has no batch; `mine`: why this one has none, `clean`: of `_stop`."""
        reason = ScheduleError(_ENDED, code="C054") if isinstance(mine, StopIteration) else mine
        try:
            key = f"no batch/{'-'.join(map(str, self.ranks))}/{self._number}/{next(self._refusals)}"
            notes = share_texts(key, note_of(reason) if reason is not None else "", self.ranks)
        except RuntimeError:  # a rank is gone, or does not come
            return error
        without = [rank for rank, note in notes.items() if note]
        if mine is not None and clean and len(without) == len(self.ranks):
            # No rank has a batch and no message is under way: the loop over batches has ended, and the pipeline is as before.
            self._failure = ""
            return mine
        return reason or error_of(notes[without[0]], without, dist.get_rank())

    def _stop(self, error: Exception, rest: Sequence[Action], confirmed: bool, no_batch: bool) -> bool:
        """Let the other ranks fail too, now and with the reason, not at a timeout, and leave nothing under way.

        `confirmed`: messages of this step go both ways over every link, so that each side learns of the other's failure in it.
        Returns whether all peers have acknowledged the failure, and nothing is under way.
        """
        # A rank that failed because of another one passes on which rank that was, with that one's reason.
        relayed = error if isinstance(error, PeerFailed) else None
        text = relayed.text if relayed is not None else f"{type(error).__name__}: {with_users_line(error, _TEXT_KEPT)}"
        self._failure = "" if not self._peers else text if relayed is None else str(relayed)
        links = [self.link_to(peer) for peer in self._peers]
        for link in links:
            link.fail(text, no_batch, relayed.ranks[0] if relayed is not None else None)
        with contextlib.suppress(RuntimeError):  # a rank is gone, or does not come
            # All go through the rest of their programs without computing: what one has begun to send or to receive over NCCL
            # ends only if the other side does its part.
            for action in rest:
                if action.kind in _SENDS:
                    self.link_over(action).skip_send(action)
                elif action.kind in _RECEIVES:
                    self.link_over(action).skip_receive(action)
            acknowledged = [link for link in links if confirmed and link.wait_for_peer()]
            for link in acknowledged:
                link.end_failure()
            return len(acknowledged) == len(links)
        return False

    # --- What is checked before a step, and once for all ---

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
            mine = [digest_of("\n".join(format_rows(self.table))), str(problem or "")]
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
