"""The executor of pipeline tables: runs one rank's actions of any order, built-in or custom.

The executor is independent of the order. At construction all ranks agree on one table, and each rank derives its own program: its
compute actions with the sends and receives between them (`replay.add_transfers`). `Executor.run` executes that program, one
action after another: `_forward` and `_backward` compute, a `Link` per peer (`transfer.py`) sends and receives. A
`StepState` holds the values between the actions of one step. Losses are scaled, not gradients, so that several
calls can accumulate into `.grad`.

The second half of the class is the failure protocol, which ends a step on all ranks at once, with the reason of the
rank that failed first and with no message in flight.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from colonnade.engine.schedule.loss import LossForm, count_on
from colonnade.engine.schedule.micro_batch import SAME_BATCHES_ADVICE, MicroBatch, call_module
from colonnade.engine.schedule.replay import (
    CONFIRMS,
    Facts,
    add_transfers,
    check,
    confirmation,
    peer_stage,
    receive_early,
)
from colonnade.engine.schedule.split_backward import RunBackward, StageInput, WeightWork, backward_input, run_backward
from colonnade.engine.schedule.transfer import Incoming, Link, PeerFailed, describe, differentiable, rebuild
from colonnade.errors import ScheduleError, listed, with_users_line
from colonnade.logging import get_dist_logger
from colonnade.texts import digest_of

LossFunction: TypeAlias = Callable[[Any, Any], Any]
"""(output, label) -> a mean, or (sum, count)."""
ForwardHook: TypeAlias = Callable[[int, nn.Module, Any, MicroBatch], Any]
"""Calls a stage: (stage, module, inputs, micro-batch) -> output. It may set the label of the micro-batch."""

_CPU = torch.device("cpu")
_ENDED = (
    "the data iterator has ended on this rank, but not on all ranks of the pipeline. All of them need the same number of batches. "
    + SAME_BATCHES_ADVICE
)
_numbers: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
"""A counter per set of ranks. All ranks of a pipeline build their executors in the same order, so the numbers agree."""
_TEXT_KEPT = 1200
"""Characters of its reason that a failing rank sends; the location in the user's code follows them and must fit, too."""
_SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
_RECEIVES = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)
_PHASES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT: "backward", Kind.WEIGHT: "backward"}
"""The phase that the time of a compute action counts for; all other actions are communication."""


@dataclass(frozen=True)
class ExecutedStep:
    """The results of a step on this rank. Losses, count and outputs exist only on the rank of the last stage."""

    losses: list[Tensor]
    """The loss of each micro-batch as the loss function returned it, detached."""
    loss: Tensor | None
    """The loss of the batch: the weighted sum of the losses of the micro-batches, or sum / count."""
    count: Tensor | None
    """The count of the batch, if losses were given as (sum, count)."""
    outputs: list[Any]
    """The output of each micro-batch, detached, if outputs were kept."""
    order: list[Action]
    """The compute actions in the order in which they ran."""


@dataclass
class StageGraph:
    """The autograd graph of one micro-batch on one stage, held from its forward to its backward pass."""

    roots: list[Tensor]
    inputs: list[StageInput]


@dataclass
class StepState:
    """The state of one step: its flags, and the values that are kept between its actions."""

    micro_batches: Sequence[MicroBatch]
    train: bool
    with_loss: bool
    keep_outputs: bool
    mean_scale: float | Tensor
    sum_scale: float | Tensor
    backwards_left: int = 0
    """Backward passes of this rank that have not yet accumulated into parameters."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """By micro-batch, on the rank of the last stage; so are `counts` and `outputs`."""
    counts: dict[int, Tensor] = field(default_factory=dict)
    """Of losses given as (sum, count)."""
    outputs: dict[int, Any] = field(default_factory=dict)
    executed: list[Action] = field(default_factory=list)
    graphs: dict[tuple[int, int], StageGraph] = field(default_factory=dict)
    """By (stage, micro-batch)."""
    weight_work: dict[tuple[int, int], WeightWork] = field(default_factory=dict)
    """The weight part of split backward passes, by (stage, micro-batch)."""
    inbox: dict[Action, Incoming] = field(default_factory=dict)
    """Values between two stages of this rank, by the receive action that they replace."""
    outbox: dict[Action, tuple[str, list[Tensor]]] = field(default_factory=dict)
    """Descriptions and tensors to be sent, by their send action."""
    rows: dict[int, int | None] = field(default_factory=dict)
    """The number of rows that the first stage was given, by micro-batch."""

    def batch_loss(self) -> tuple[Tensor | None, Tensor | None]:
        """Return (loss of the batch, count of the batch).

        The loss is None if this rank has no losses, and the count is None for a mean.
        """
        if not self.losses:
            return None, None
        if self.counts:
            count = _sum(self.counts)
            return _sum(self.losses) / count, count
        return _sum({index: loss * self.micro_batches[index].weight for index, loss in self.losses.items()}), None


def _sum(values: Mapping[int, Tensor]) -> Tensor:
    """The sum over micro-batches, added by index, so that it does not depend on the order of the passes."""
    return torch.stack([values[index].reshape(()) for index in sorted(values)]).sum()


@dataclass(eq=False, repr=False)
class Executor:
    """Runs the actions of a table on this rank's stages.

    The constructor is collective over `group`: all ranks must pass the same table, and if one rank fails, all ranks raise.

    If this rank has one chunk, `backward` is called with `last=True` for the last pass of a step that accumulates gradients.
    With several chunks, `last` is never True: gradients of one chunk are complete while passes of another chunk are still to
    come, so the reduction of gradients starts after the schedule.

    Args:
        chunks: This rank's stage modules, in the order of their stages.
        table: The actions of every rank.
        rank: This rank's position in the pipeline.
        ranks: The global ranks of the pipeline.
        group: The process group of these ranks.
        transfer_group: Another group of the same ranks, used for sends and receives only, with a backend for CPU
            memory and one for the device's; default: `group`. Ranks send different numbers of messages, which
            TORCH_DISTRIBUTED_DEBUG=DETAIL reports as a mismatch in a group that also runs collectives.
        down_group: One more group, for device tensors sent to a lower rank. With it, a backend with a queue (NCCL) transfers
            both directions at the same time.
        forward: Runs the forward pass of a stage on a micro-batch.
        loss_fn: (output, label) -> loss. Required on the rank of the last stage, for training.
        loss_form: Creates the `LossForm` that requires one form of all losses; called once for training and once for evaluation.
        backward: Runs a backward pass that accumulates gradients.
        tensor_shape: If given, the shape that every stage except the last must return.
        waits: Records the time of each phase.

    Raises:
        ScheduleError: If this rank or another one cannot run the table, or if the ranks' tables differ.
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
        """The form of the losses of the current step, or of the last one."""
        self.facts = self._agree_on_table()
        self.modules = dict(zip(self.facts.stages_of(self.rank), self.chunks, strict=True))
        # A split backward would recompute checkpointed activations once for I and again for W, and FSDP2 reshards the
        # weights after I, before W reads them.
        self.unsplittable = {
            stage
            for stage, module in self.modules.items()
            if recomputes(module) or any(hasattr(inner, "_get_fsdp_state") for inner in module.modules())
        }
        """Stages whose backward pass runs in one piece; stages found to need that at run time are added."""
        table, rank = self.table, self.rank
        programs = [add_transfers(actions)[rank] for actions in (table, only_forward(table))]
        transfers = [action for program in programs for action in program if action.kind not in COMPUTE]
        self._peers = sorted({self.facts.stage_ranks[peer_stage(action)] for action in transfers})
        # Over gloo a receive can be posted early. Over a backend with a queue it would hold up what comes after it.
        if not any(self.link_to(peer).one_queue for peer in self._peers):
            programs = [receive_early(program) for program in programs]
        self._program, self._forward_program = programs
        self._confirmation = confirmation(table)[rank]

    def _agree_on_table(self) -> Facts:
        """Check that this rank can run its table and that all ranks have the same one; an error is raised on all of them."""
        # A rank that raised here would leave the others in the exchange below, so its error takes part in it.
        problem: ScheduleError | None = None
        try:
            facts = check(self.table)
            if facts.num_ranks != len(self.ranks):
                raise ScheduleError(
                    f"a table for {facts.num_ranks} ranks cannot run on a pipeline of {len(self.ranks)}", code="C051"
                )
            stages = facts.stages_of(self.rank)
            if len(stages) != len(self.chunks):
                raise ScheduleError(
                    f"this table gives pipeline rank {self.rank} the stages {listed(stages)}, but rank {self.rank} "
                    f"has {len(self.chunks)} stage module(s). Pass one module for each stage (nn.ModuleList), or "
                    "change num_chunks.",
                    code="C051",
                )
        except ScheduleError as error:
            problem = error
        if len(self.ranks) > 1:
            own = [digest_of("\n".join(format_rows(self.table))), str(problem or "")]
            gathered = gather_json(own, self.device, self.group)
            failed = [(rank, text) for rank, (_, text) in zip(self.ranks, gathered, strict=True) if text]
            if problem is None and failed:
                rank, text = failed[0]
                problem = ScheduleError(f"rank {rank} cannot run this table: {text}", code="C051", ranks=[rank])
            if problem is None and len({digest for digest, _ in gathered}) > 1:
                problem = ScheduleError(
                    f"the ranks {listed(self.ranks)} of this pipeline have different tables of actions; "
                    "pass the same table, order and number of micro-batches on all of them",
                    code="C051",
                )
        if problem is not None:
            raise problem
        return facts

    @property
    def has_first_stage(self) -> bool:
        """Whether this rank has the first stage and needs the data."""
        return self.facts.stage_ranks[0] == self.rank

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank has the last stage, and therefore the losses and outputs."""
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
        """Run one step; gradients are added to `.grad`.

        Collective over the pipeline: all its ranks must call it with the same flags.

        Args:
            micro_batches: Data on the rank of the first stage, labels on the rank of the last one.
            forward_only: Evaluate; no backward passes.
            with_loss: Whether an evaluation computes losses; training always does.
            keep_outputs: Whether to return the outputs of the last stage.
            confirm: Whether an evaluation ends on all ranks together, so that every rank raises if a rank failed. A training step
                always ends together.
            backward_scale: Factor of a mean loss, for the backward pass only.
            sum_scale: Factor of the sum of a (sum, count), for the backward pass only.

        Raises:
            PeerFailed: If another rank failed in this step.
            ScheduleError: If an earlier step failed, or the micro-batches do not fit the table.
        """
        if self._failure:  # messages of the failed step are still in flight; this step would take them for its own
            raise ScheduleError(
                f"this pipeline stopped in an earlier step ({self._failure}) and cannot continue. Start new "
                "processes, build a new engine, and load the last checkpoint.",
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
        train = not forward_only
        self.form = self._forms[train]
        confirm = confirm or train
        program = self._program if train else self._forward_program + self._confirmation * confirm
        step = StepState(micro_batches, train, with_loss or train, keep_outputs, backward_scale, sum_scale)
        # Each micro-batch accumulates into the parameters once per stage: in its B, or in its W, of which there are as many as I.
        step.backwards_left = sum(action.kind in GIVES_INPUT_GRADIENT for action in program)
        position = 0
        try:
            for position, action in enumerate(program):  # noqa: B007  # read where an action fails
                self.waits.enter(_PHASES.get(action.kind, "communication"))
                match action.kind:
                    case Kind.FORWARD:
                        self._forward(step, action)
                    case Kind.BACKWARD | Kind.INPUT | Kind.WEIGHT:
                        self._backward(step, action)
                    case Kind.SEND_FORWARD | Kind.SEND_BACKWARD:
                        confirms = action.micro_batch == CONFIRMS
                        value = describe(None, "nothing") if confirms else step.outbox.pop(action)
                        self.link_over(action).send(action, *value)
                    case Kind.RECEIVE_FORWARD | Kind.RECEIVE_BACKWARD:
                        # Only announced here. The forward or backward pass that needs the value takes it; nothing
                        # needs a confirmation, so that is taken at once.
                        self.link_over(action).expect(action)
                        if action.micro_batch == CONFIRMS:
                            self.link_over(action).take(action)
                    case Kind.SENT_FORWARD:
                        self.link_over(action).sent(action._replace(kind=Kind.SEND_FORWARD))
                    case Kind.SENT_BACKWARD:
                        self.link_over(action).sent(action._replace(kind=Kind.SEND_BACKWARD))
                if action.kind in COMPUTE:
                    step.executed.append(action)
            for link in self._links.values():
                link.finish()
        except Exception as error:
            # The peers still wait for this rank's messages, so it walks through the rest of its program without
            # computing. A send that failed has not started and is part of that rest; any other action is over.
            sending = program[position].kind in _SENDS
            no_batch = isinstance(error, PeerFailed) and error.no_batch
            self._stop(error, program[position + (not sending) :], confirm, no_batch)
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

    def _forward(self, step: StepState, action: Action) -> None:
        """F: call the stage; its output goes to the next stage, on the last stage into the loss."""
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
                roots = self._compute_loss(step, output, micro_batch)
            else:
                description, tensors = describe(output, f"the output of stage {stage}")
                roots = differentiable(tensors)
                expected = None if self.tensor_shape is None else tuple(self.tensor_shape)
                found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
                if expected is not None and found != expected:
                    raise ScheduleError(
                        f"tensor_shape={expected} is set for the values between stages, but stage {stage} returned "
                        f"{found}. Correct tensor_shape or leave it out. Without it, stages send the shapes, and "
                        "shapes may vary.",
                        code="C052",
                    )
                # The number of rows of the first stage's data goes along: the last stage compares it with its labels.
                description = f'{{"tuple":[{json.dumps(step.rows[index])},{description}]}}'
                if self.facts.stage_ranks[stage + 1] == self.rank:
                    # Copies without a graph: the next stage may change them in place, and its own graph starts there.
                    copies = [tensor.detach().clone() for tensor in tensors]
                    step.inbox[Action(stage + 1, Kind.RECEIVE_FORWARD, index)] = Incoming(*rebuild(description, copies))
                else:
                    step.outbox[Action(stage, Kind.SEND_FORWARD, index)] = (description, tensors)
        if step.train:
            step.graphs[stage, index] = StageGraph(roots, inputs)

    def _compute_loss(self, step: StepState, output: Any, micro_batch: MicroBatch) -> list[Tensor]:
        """Record output and loss of a micro-batch; returns the scaled loss, the root of its backward pass."""
        # The labels come from this rank's own loader. If it is not in step with the first stage's, they belong to other rows.
        fed, here = step.rows[micro_batch.index], micro_batch.rows
        if fed is not None and here is not None and fed != here:
            raise ScheduleError(
                f"micro-batch {micro_batch.index} has {fed} rows on the first stage of the pipeline and {here} on "
                "the last, so the labels belong to other rows. Give all ranks of a pipeline the same batches. "
                f"{SAME_BATCHES_ADVICE}",
                code="C052",
            )
        if not micro_batch.counts:  # a copy that fills up a short batch
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

    def _backward(self, step: StepState, action: Action) -> None:
        """B, I or W: a backward pass in one piece, its input part, or its weight part.

        The stage before waits only for the gradient of the inputs, so B and I pass it on and W does not.
        """
        stage, kind, index = action
        if kind is Kind.WEIGHT:
            work = step.weight_work.pop((stage, index), None)
            if work is not None:  # else I has done all of it
                work.run(self.backward, last=self._count_backward(step))
            return
        # The pass starts from the loss, or from the outputs for which the next stage has sent a gradient.
        graph = step.graphs.pop((stage, index))
        if stage == self.facts.num_stages - 1:
            roots, root_grads = graph.roots, [torch.ones_like(root) for root in graph.roots]
        else:
            received = self._take(step, action._replace(kind=Kind.RECEIVE_BACKWARD)).value
            used = [(root, grad) for root, grad in zip(graph.roots, received, strict=True) if grad is not None]
            roots, root_grads = [root for root, _ in used], [grad for _, grad in used]
        input_grads: list[Tensor | None] | None = None
        if kind is Kind.INPUT and roots and graph.inputs and stage not in self.unsplittable:
            try:
                input_grads, step.weight_work[stage, index] = backward_input(roots, root_grads, graph.inputs)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                # Nothing has been accumulated yet: the pass can still run in one piece, now and in all later steps.
                self.unsplittable.add(stage)
                get_dist_logger().warning(
                    f"the backward pass of stage {stage} cannot be split, so W runs together with I: {error}"
                )
        if input_grads is None:
            last = self._count_backward(step)
            if roots:
                self.backward(roots, root_grads, inputs=None, last=last)
            input_grads = [entry.grad for entry in graph.inputs]
        if stage == 0:
            return
        if self.facts.stage_ranks[stage - 1] == self.rank:
            step.inbox[Action(stage - 1, Kind.RECEIVE_BACKWARD, index)] = Incoming(input_grads, [])
        else:
            step.outbox[Action(stage, Kind.SEND_BACKWARD, index)] = describe(input_grads, "the gradient")

    def _count_backward(self, step: StepState) -> bool:
        """Count a pass that is about to accumulate into parameters; returns whether it is `last` (see the class)."""
        step.backwards_left -= 1
        return step.backwards_left == 0 and len(self.modules) == 1

    def _take(self, step: StepState, receive: Action) -> Incoming:
        """The received value, from another stage of this rank or over a link. Waiting for a link counts as communication."""
        if receive in step.inbox:
            return step.inbox.pop(receive)
        before = self.waits.enter("communication")
        taken = self.link_over(receive).take(receive)
        self.waits.enter(before)
        return taken

    # --- Around a step ---

    def share_loss(self, loss: Tensor | None, count: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Broadcast the loss and its count (None for a mean) from the last stage to all ranks of the pipeline, in float64.

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
        if self.form.counted is None:  # on a rank without the last stage, once: reading the value waits for the device
            self.form.keep(not bool(counted.isnan()))
        return mean, counted if self.form.counted else None

    def link_over(self, transfer: Action) -> Link:
        """The link that the action `transfer`, a send or receive of this rank, uses."""
        return self.link_to(self.facts.stage_ranks[peer_stage(transfer)])

    def link_to(self, rank: int) -> Link:
        """The link to another rank of the pipeline, created at its first use."""
        if rank not in self._links:
            group = self.transfer_group or self.group
            self._links[rank] = Link(group, self.ranks[rank], self.device, self.down_group)
        return self._links[rank]

    # --- The failure protocol ---
    #
    # A rank that fails, or has no batch, sends its reason to all peers in place of its next message (`_stop`). A peer
    # raises PeerFailed where it reads that, and does the same. A missing batch is not final: the ranks then compare
    # notes (`_agree_on_batch`), and if none of them had a batch, the pipeline stays usable.

    def refuse(self, error: Exception, *, forward_only: bool, confirm: bool) -> Exception:
        """End a step for which this rank has no batch because of `error`. Returns the error to raise.

        Collective over the pipeline: called in place of `run`, with the same flags. If no rank of the pipeline has a batch, each
        rank raises its own error and the pipeline stays usable. If some rank has a batch, all ranks raise, and the pipeline cannot
        be used any more.
        """
        if not self._peers or self._failure:
            return error
        confirm = confirm or not forward_only
        program = self._forward_program + self._confirmation * confirm if forward_only else self._program
        clean = self._stop(error, program, confirm, no_batch=True)
        return self._agree_on_batch(error, error, clean) if confirm else error

    def _agree_on_batch(self, own: Exception | None, error: Exception, clean: bool) -> Exception:
        """The error that this rank raises if some rank has no batch for the step.

        `own`: the reason why this rank has none; None if it has one. `error`: raised if the ranks cannot be asked.
        `clean`: the result of `_stop`.
        """
        reason = ScheduleError(_ENDED, code="C054") if isinstance(own, StopIteration) else own
        try:
            key = f"no batch/{'-'.join(map(str, self.ranks))}/{self._number}/{next(self._refusals)}"
            notes = share_texts(key, note_of(reason) if reason is not None else "", self.ranks)
        except RuntimeError:  # a rank is gone, or does not arrive in time
            return error
        without = [rank for rank, note in notes.items() if note]
        if own is not None and clean and len(without) == len(self.ranks):
            # No rank has a batch, and no message is in flight: the epoch is over, and the next step can run.
            self._failure = ""
            return own
        return reason or error_of(notes[without[0]], without, dist.get_rank())

    def _stop(self, error: Exception, rest: Sequence[Action], confirmed: bool, no_batch: bool) -> bool:
        """End the step on the other ranks as well: at once and with the reason, not at a timeout.

        `rest`: the actions of this step that have not run. `confirmed`: whether every link carries messages both ways
        in this step, so that each side learns in it that the other one failed. Returns whether all peers have
        acknowledged the failure, so that no message is in flight.
        """
        # A rank that fails because a peer failed passes on the rank and the reason that all of it began with.
        relayed = error if isinstance(error, PeerFailed) else None
        text = relayed.text if relayed is not None else f"{type(error).__name__}: {with_users_line(error, _TEXT_KEPT)}"
        self._failure = "" if not self._peers else text if relayed is None else str(relayed)
        links = [self.link_to(peer) for peer in self._peers]
        for link in links:
            link.fail(text, no_batch, relayed.ranks[0] if relayed is not None else None)
        with contextlib.suppress(RuntimeError):  # a rank is gone, or does not arrive in time
            # Every rank walks through the rest of its program without computing: a send or receive that NCCL has
            # started ends only if the other side does its part.
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
