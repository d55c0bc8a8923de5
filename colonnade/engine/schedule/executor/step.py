"""One step of one rank: what each kind of action does, and what is held between actions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from colonnade.engine.schedule.actions import COMPUTE, GIVES_INPUT_GRADIENT, Action, Kind
from colonnade.engine.schedule.executor.backward import StageInput, WeightWork, backward_input
from colonnade.engine.schedule.executor.micro_batch import FEED_ALIKE, MicroBatch
from colonnade.engine.schedule.loss import count_on
from colonnade.engine.schedule.transfer.link import Incoming
from colonnade.engine.schedule.transfer.plan import CONFIRMS
from colonnade.engine.schedule.transfer.values import describe, differentiable, rebuild
from colonnade.errors import ScheduleError
from colonnade.logging import get_dist_logger

if TYPE_CHECKING:
    from colonnade.engine.schedule.executor.executor import Executor

LossFunction: TypeAlias = Callable[[Any, Any], Any]
"""(output, label) -> a mean, or (sum, count)."""
ForwardHook: TypeAlias = Callable[[int, nn.Module, Any, MicroBatch], Any]
"""How a stage is called: (stage, module, inputs, micro-batch) -> output. It may set the label of the micro-batch."""

_PHASES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward",
    Kind.WEIGHT: "backward",
}
"""Where the time of an action counts; that of the others is communication."""


@dataclass
class _Graph:
    """The autograd graph of a micro-batch between the forward and the backward pass of a stage."""

    roots: list[Tensor]
    inputs: list[StageInput]


@dataclass
class Step:
    """Runs a program once. `losses` and `outputs` are filled where the last stage is, by micro-batch."""

    executor: Executor
    micro_batches: Sequence[MicroBatch]
    train: bool
    with_loss: bool
    keep_outputs: bool
    mean_scale: float | Tensor
    sum_scale: float | Tensor
    losses: dict[int, Tensor] = field(default_factory=dict)
    counts: dict[int, Tensor] = field(default_factory=dict)
    """Of losses given as (sum, count)."""
    outputs: dict[int, Any] = field(default_factory=dict)
    executed: list[Action] = field(default_factory=list)
    at: int = field(init=False)
    """The place in the program of the action that runs, or ran last."""
    _graphs: dict[tuple[int, int], _Graph] = field(default_factory=dict)
    _weight_work: dict[tuple[int, int], WeightWork] = field(default_factory=dict)
    _inbox: dict[Action, Incoming] = field(default_factory=dict)
    """What stages of this rank gave to stages of this rank."""
    _outbox: dict[Action, tuple[str, list[Tensor]]] = field(default_factory=dict)
    _rows: dict[int, int | None] = field(default_factory=dict)
    """How many rows the first stage was given, by micro-batch."""
    _to_come: Counter[int] = field(default_factory=Counter)
    """How many passes that accumulate gradients are still to come, by the first of the stages that share."""

    def run(self, program: Sequence[Action]) -> None:
        """Do every action in order."""
        self._to_come = Counter(
            self.executor.first_sharing[action.stage] for action in program if action.kind in GIVES_INPUT_GRADIENT
        )
        do = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._backward_input,
            Kind.WEIGHT: self._backward_weight,
            Kind.SEND_FORWARD: self._send,
            Kind.SEND_BACKWARD: self._send,
            Kind.RECEIVE_FORWARD: self._receive,
            Kind.RECEIVE_BACKWARD: self._receive,
            Kind.SENT_FORWARD: self._sent,
            Kind.SENT_BACKWARD: self._sent,
        }
        enter = self.executor.waits.enter
        for self.at, action in enumerate(program):
            enter(_PHASES.get(action.kind, "communication"))
            do[action.kind](action)
            if action.kind in COMPUTE:
                self.executed.append(action)

    def batch_loss(self) -> tuple[Tensor | None, Tensor | None]:
        """(loss of the batch, count of the batch), each None where there is none."""
        if not self.losses:
            return None, None
        if self.counts:
            count = _sum(self.counts)
            return _sum(self.losses) / count, count
        return _sum({index: loss * self.micro_batches[index].weight for index, loss in self.losses.items()}), None

    # -- compute ------------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        stage, _, index = action
        micro_batch = self.micro_batches[index]
        if stage == 0:
            incoming, self._rows[index] = Incoming(micro_batch.data, []), micro_batch.rows
        else:
            incoming = self._take(action, Kind.RECEIVE_FORWARD)
            self._rows[index], incoming.value = incoming.value
        inputs = [StageInput(tensor) for tensor in incoming.need_grad] if self.train else []
        with torch.set_grad_enabled(self.train):
            output = self.executor.forward(stage, self.executor.modules[stage], incoming.value, micro_batch)
            if stage == self.executor.facts.num_stages - 1:
                self._check_rows(micro_batch)
                roots = self._finish_forward(output, micro_batch)
            else:
                roots = self._hand_on(action, output)
        if self.train:
            self._graphs[stage, index] = _Graph(roots, inputs)

    def _finish_forward(self, output: Any, micro_batch: MicroBatch) -> list[Tensor]:
        """The end of the pipeline: the loss, scaled for the backward pass."""
        if not micro_batch.counts:
            return []
        if self.keep_outputs:
            self.outputs[micro_batch.index] = tree_map_only(Tensor, Tensor.detach, output)
        if not self.with_loss or self.executor.loss_fn is None:
            return []
        loss, count = self.executor.form.read(self.executor.loss_fn(output, micro_batch.label))
        self.losses[micro_batch.index] = loss.detach()
        if count is None:
            return differentiable([loss * (micro_batch.weight * self.mean_scale)])
        self.counts[micro_batch.index] = count_on(count, loss.device)
        return differentiable([loss * self.sum_scale])

    def _hand_on(self, action: Action, output: Any) -> list[Tensor]:
        """Give the output to the next stage, here or on another rank."""
        stage, _, index = action
        description, tensors = describe(output, f"the output of stage {stage}")
        # The output travels with the rows that the first stage was given.
        description = f'{{"tuple":[{json.dumps(self._rows[index])},{description}]}}'
        self._check_shape(stage, output)
        if self.executor.facts.stage_ranks[stage + 1] == self.executor.rank:
            copies = [tensor.detach().clone() for tensor in tensors]
            self._inbox[Action(stage + 1, Kind.RECEIVE_FORWARD, index)] = Incoming(*rebuild(description, copies))
        else:
            self._outbox[Action(stage, Kind.SEND_FORWARD, index)] = (description, tensors)
        return differentiable(tensors)

    def _check_rows(self, micro_batch: MicroBatch) -> None:
        """Refuse labels that belong to other rows than those that the first stage was given."""
        fed, here = self._rows[micro_batch.index], micro_batch.rows
        if fed is not None and here is not None and fed != here:
            raise ScheduleError(
                f"micro-batch {micro_batch.index} has {fed} rows on the first stage of the pipeline and {here} on the last, "
                f"so the labels belong to other rows: all ranks of a pipeline must be given the same batches. {FEED_ALIKE}",
                code="C052",
            )

    def _check_shape(self, stage: int, output: Any) -> None:
        expected = None if self.executor.tensor_shape is None else tuple(self.executor.tensor_shape)
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        if expected is not None and found != expected:
            raise ScheduleError(
                f"tensor_shape={expected} was promised for what goes from stage to stage, but stage {stage} "
                f"gave {found}. Correct it, or leave tensor_shape out: shapes are sent along and may vary.",
                code="C052",
            )

    def _backward(self, action: Action) -> None:
        graph = self._graphs.pop((action.stage, action.micro_batch))
        self._full_backward(action, graph, *self._roots(action, graph))

    def _backward_input(self, action: Action) -> None:
        """The input part; where a stage cannot be split, all of it now, and nothing is left for W."""
        graph = self._graphs.pop((action.stage, action.micro_batch))
        roots, grads = self._roots(action, graph)
        if not roots or not graph.inputs or action.stage in self.executor.unsplittable:
            return self._full_backward(action, graph, roots, grads)
        try:
            found, work = backward_input(roots, grads, graph.inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.executor.unsplittable.add(action.stage)
            get_dist_logger().warning(
                f"stage {action.stage} cannot do its backward pass in two parts, so W is done with I: {error}"
            )
            return self._full_backward(action, graph, roots, grads)
        self._weight_work[action.stage, action.micro_batch] = work
        return self._return_gradient(action, found)

    def _backward_weight(self, action: Action) -> None:
        work = self._weight_work.pop((action.stage, action.micro_batch), None)
        if work is not None:
            work.run(self.executor.backward, last=self._is_last(action))

    def _full_backward(self, action: Action, graph: _Graph, roots: list[Tensor], grads: list[Tensor]) -> None:
        last = self._is_last(action)
        if roots:
            self.executor.backward(roots, grads, inputs=None, last=last)
        self._return_gradient(action, [each.grad for each in graph.inputs])

    def _roots(self, action: Action, graph: _Graph) -> tuple[list[Tensor], list[Tensor]]:
        """Where the backward pass starts, and with which gradients: the loss, or outputs that were used."""
        if action.stage == self.executor.facts.num_stages - 1:
            return graph.roots, [torch.ones_like(root) for root in graph.roots]
        grads = self._take(action, Kind.RECEIVE_BACKWARD).value
        used = [(root, grad) for root, grad in zip(graph.roots, grads, strict=True) if grad is not None]
        return [root for root, _ in used], [grad for _, grad in used]

    def _is_last(self, action: Action) -> bool:
        """Count one pass that accumulates gradients; whether no later one touches the same parameters."""
        first = self.executor.first_sharing[action.stage]
        self._to_come[first] -= 1
        return self._to_come[first] == 0

    def _return_gradient(self, action: Action, grads: Iterable[Tensor | None]) -> None:
        """Give the gradient of the inputs to the stage before, here or on another rank."""
        stage, _, index = action
        if stage == 0:
            return
        value = list(grads)
        if self.executor.facts.stage_ranks[stage - 1] == self.executor.rank:
            self._inbox[Action(stage - 1, Kind.RECEIVE_BACKWARD, index)] = Incoming(value, [])
        else:
            self._outbox[Action(stage, Kind.SEND_BACKWARD, index)] = describe(value, "the gradient")

    # -- transfers ----------------------------------------------------------------------------------------

    def _take(self, action: Action, kind: Kind) -> Incoming:
        key = action._replace(kind=kind)
        if key in self._inbox:
            return self._inbox.pop(key)
        before = self.executor.waits.enter("communication")
        taken = self.executor.link_over(key).take(key)
        self.executor.waits.enter(before)
        return taken

    def _send(self, action: Action) -> None:
        value = self._outbox.pop(action) if action.micro_batch != CONFIRMS else describe(None, "nothing")
        self.executor.link_over(action).send(action, *value)

    def _receive(self, action: Action) -> None:
        link = self.executor.link_over(action)
        link.expect(action)
        if action.micro_batch == CONFIRMS:
            link.take(action)

    def _sent(self, action: Action) -> None:
        started = Kind.SEND_FORWARD if action.kind is Kind.SENT_FORWARD else Kind.SEND_BACKWARD
        self.executor.link_over(action).sent(action._replace(kind=started))


def _sum(values: Mapping[int, Tensor]) -> Tensor:
    """The sum of the numbers of all micro-batches, in their order, so that it is the same for every order of passes."""
    return torch.stack([values[index].reshape(()) for index in sorted(values)]).sum()
