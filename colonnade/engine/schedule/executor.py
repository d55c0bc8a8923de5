"""The one executor of pipeline tables: every schedule, ours or the user's, runs here.

It owns no idea of an order. It checks the table, adds the transfers, and does what this rank's program
says, one action after another. Losses are scaled, gradients never are, so calls may accumulate.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map_only, tree_unflatten

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
from colonnade.engine.schedule.transfer import (
    CONFIRMS,
    Incoming,
    Link,
    PeerFailed,
    add_transfers,
    confirmation,
    describe,
    differentiable,
    peer_stage,
    rebuild,
    receive_early,
)
from colonnade.errors import ScheduleError, listed, with_users_line
from colonnade.logging import get_dist_logger
from colonnade.parallel.split import Stage, call_layer
from colonnade.texts import digest_of

# --------------------------------------------------------------------------------------------------
# Micro-batches: a batch cut on dimension 0, and the outputs of its pieces joined again.
# --------------------------------------------------------------------------------------------------


FEED_ALIKE = (
    "Use colonnade.utils.get_dataloader, or shard by gpc.get_local_rank(ParallelMode.DATA): a DistributedSampler without "
    "num_replicas= and rank= gives every rank of the world samples of its own"
)
"""What to do where ranks that see the same data were given different batches."""


@dataclass
class MicroBatch:
    """One piece of a batch. The forward hook of an executor may set `label`."""

    index: int
    data: Any = None
    label: Any = None
    weight: float = 1.0
    """Its share of the loss of the batch: all weights together are 1 for a mean."""
    rows: int | None = None
    """How many rows of the batch it has, 0 for a copy; None where no batch was given."""
    counts: bool = True
    """Whether its loss and its output are part of those of the batch."""


def cut_batch(data: Any, label: Any, count: int, fill: bool = False) -> list[MicroBatch]:
    """Cut a batch into `count` pieces whose sizes differ by at most one row, larger ones first.

    With `fill`, for a forward pass alone, a batch of fewer rows is filled up with copies of its last row that do not count.

    Tensors are cut, at any depth of tuples, lists and dicts; 0-d tensors and everything else go whole into
    every piece. The weight of a piece is its part of the rows, which makes mean losses add up to the mean
    over the batch.
    """
    rows = _rows(data, label)
    if fill and 0 < rows < count:
        pieces = cut_batch(data, label, rows)
        return pieces + [
            replace(pieces[-1], index=index, weight=0.0, rows=0, counts=False) for index in range(rows, count)
        ]
    if rows == 0:
        raise ScheduleError(
            "a batch of 0 rows cannot be cut: a pipeline sends at least one row in each micro-batch. Leave such batches out on all ranks "
            "of the pipeline (`if len(data)`), or look at what the sampler or the filter before it gives",
            code="C052",
        )
    if rows < count:
        raise ScheduleError(
            f"a batch of {rows} rows cannot be cut into {count} micro-batches. Set num_microbatches to "
            f"{rows} or less, use larger batches, or set drop_last=True on the data loader.",
            code="C052",
        )
    sizes = [rows // count + (index < rows % count) for index in range(count)]
    cuts = zip(_cut(data, sizes), _cut(label, sizes), sizes, strict=True)
    return [MicroBatch(index, item, mark, size / rows, size) for index, (item, mark, size) in enumerate(cuts)]


def join(pieces: Sequence[Any]) -> Any:
    """The pieces as one value: tensors joined on dimension 0, 0-d tensors stacked, equal values once.

    Tensors that do not fit together (another width, say) and values that differ become a list.
    """
    leaves, (spec, *others) = zip(*map(tree_flatten, pieces), strict=True)
    if any(other != spec for other in others):
        return list(pieces)
    return tree_unflatten([_join_leaf(*column) for column in zip(*leaves, strict=True)], spec)


def _join_leaf(first: Any, *others: Any) -> Any:
    items = [first, *others]
    if all(isinstance(item, Tensor) for item in items):
        if all(item.dim() == 0 for item in items):
            return torch.stack(items)
        if all(item.dim() and item.shape[1:] == first.shape[1:] for item in items):
            return torch.cat(items)
        return items
    same = not any(isinstance(item, Tensor) for item in items) and all(other == first for other in others)
    return first if same else items


def _rows(data: Any, label: Any) -> int:
    """The rows that every tensor of the batch has."""
    sizes = {
        name + keystr(path): leaf.size(0)
        for name, value in (("data", data), ("label", label))
        for path, leaf in tree_flatten_with_path(value)[0]
        if isinstance(leaf, Tensor) and leaf.dim()
    }
    if not sizes:
        raise ScheduleError("the batch holds no tensor with rows (dimension 0), so it cannot be cut", code="C052")
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ScheduleError(
            "the tensors of a batch are cut on dimension 0 and must have the same number of rows there: "
            f"{found}. What belongs to all rows is better a buffer of the model, or given as a non-tensor.",
            code="C052",
        )
    return next(iter(sizes.values()))


def _cut(value: Any, sizes: Sequence[int]) -> list[Any]:
    leaves, spec = tree_flatten(value)
    columns = [
        torch.split(leaf, list(sizes)) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * len(sizes)
        for leaf in leaves
    ]
    return [tree_unflatten([column[index] for column in columns], spec) for index in range(len(sizes))]


# --------------------------------------------------------------------------------------------------
# How a stage is called, and the message where it cannot take what the stage before it gave.
# --------------------------------------------------------------------------------------------------


_ABOUT_FORM = re.compile(r"shape|size|dtype|must match|expected|dimension", re.IGNORECASE)


def call_module(stage: int, module: nn.Module, inputs: Any, micro_batch: MicroBatch) -> Any:
    """The usual forward hook: a dict goes in by keyword, a tuple or list by position, anything else alone.

    A stage cut out of an nn.Sequential takes what the layer before it returned as one argument, as it did there.
    """
    one_value = stage > 0 and isinstance(module, Stage) and module.takes_one_value
    try:
        return call_layer(module, inputs, one_value)
    except (TypeError, RuntimeError) as error:
        if stage > 0 and (reason := stage_mismatch(module, inputs, one_value, error)):
            raise ScheduleError(
                f"stage {stage} cannot take what stage {stage - 1} gives: {reason}\n"
                f"  stage {stage - 1} gives: {format_value(inputs)}\n"
                f"  stage {stage} takes: {format_signature(module)}",
                code="C053",
            ) from error
        raise


def stage_mismatch(module: nn.Module, inputs: Any, one_value: bool, error: Exception) -> str | None:
    """The reason why a stage cannot take these inputs, if that is what the error is about."""
    if isinstance(error, TypeError):
        bind = inspect.signature(_first_layer(module).forward).bind
        try:
            call_layer(bind, inputs, one_value)
        except TypeError as mismatch:
            return str(mismatch)
        return None
    return str(error) if type(error) is RuntimeError and _ABOUT_FORM.search(str(error)) else None


def format_value(value: Any) -> str:
    """A nested value in one line: tensors as dtype and shape."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {format_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(format_value, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return repr(value)


def format_signature(module: nn.Module) -> str:
    """How the first layer of a stage is called."""
    first = _first_layer(module)
    weights = ", ".join(f"{name} {list(parameter.shape)}" for name, parameter in first.named_parameters(recurse=False))
    return f"{type(first).__name__}.forward{inspect.signature(first.forward)}" + (f" with {weights}" if weights else "")


def _first_layer(module: nn.Module) -> nn.Module:
    return module.get_submodule(next(iter(module.layer_names))) if isinstance(module, Stage) else module


# --------------------------------------------------------------------------------------------------
# Backward in one part or in two: gradients of a stage's inputs first, of its parameters later.
#
# The split finds, in the autograd graph, the nodes on the way from the outputs to the stage's inputs. The
# input part runs these alone, and keeps the gradient that arrives at every node from which a parameter hangs.
# The weight part starts from those gradients. Parameters get their gradient as in a plain backward pass, so
# that hooks on them (post-accumulate hooks too) fire.
# --------------------------------------------------------------------------------------------------


Root: TypeAlias = "Tensor | GradientEdge"


class RunBackward(Protocol):
    """How gradients are accumulated: `torch.autograd.backward`, and whether more is to come.

    `last`: no later call of this step touches the parameters of this chunk (of these chunks, where some share
    parameters), so their gradients are complete after it; said at most once for a chunk.
    """

    def __call__(
        self, tensors: Sequence[Root], grads: Sequence[Tensor], *, inputs: Sequence[Tensor] | None, last: bool
    ) -> None: ...


def run_backward(
    tensors: Sequence[Root], grads: Sequence[Tensor], *, inputs: Sequence[Tensor] | None, last: bool
) -> None:
    """Accumulate gradients: into all leaves and free the graph, or into the leaves `inputs` and keep it."""
    torch.autograd.backward(
        list(tensors),  # type: ignore[arg-type]  # it takes a mixture, whatever its annotation says
        list(grads),
        inputs=None if inputs is None else list(inputs),
        retain_graph=inputs is not None,
    )


class _Enter(torch.autograd.Function):
    """Make a tensor without a graph the start of one, in place, and catch the gradient that comes back.

    Not a leaf, unlike `requires_grad_()`: a stage may begin with an in-place layer, as it may in one process.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, caught: list[Tensor], tensor: Tensor) -> Tensor:
        ctx.caught = caught
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.caught.append(grad)
        return None, None, None


class StageInput:
    """A tensor from another stage, made the start of this stage's graph; the tensor itself is changed."""

    def __init__(self, tensor: Tensor) -> None:
        self._caught: list[Tensor] = []
        with torch.enable_grad():
            _Enter.apply(torch.zeros((), requires_grad=True, device="cpu"), self._caught, tensor)
        self.edge = get_gradient_edge(tensor)

    @property
    def grad(self) -> Tensor | None:
        """The gradient that came out here in a full backward; None where the stage did not use the tensor."""
        return next(iter(self._caught), None)


@dataclass
class _Group:
    """Parameters that hang together, and the nodes that their gradients come from."""

    sources: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)
    """Where to start, with the gradient there; outputs that no input leads to are such starts."""
    crossings: list[Node] = field(default_factory=list)
    """Nodes on the way to the inputs from which parameters of this group hang."""
    leaves: list[Tensor] = field(default_factory=list)


class WeightWork:
    """The weight part of a split backward, ready to run."""

    def __init__(self, groups: list[_Group], arrived: dict[Node, tuple[Tensor | None, ...]]) -> None:
        self._groups = groups
        self._arrived = arrived

    def run(self, backward: RunBackward, last: bool) -> None:
        """Accumulate the gradients of the parameters; to be called once. Only the last group's call is told `last`."""
        started = [(group, starts) for group in self._groups if (starts := self._starts(group))]
        for index, (group, starts) in enumerate(started, 1):
            edges, grads = zip(*starts, strict=True)
            # A crossing above another one would pass it what has already arrived there, and hooks on tensors
            # would work a second time: each crossing takes exactly what the input part saw, and nothing else.
            handles = [node.register_prehook(lambda _, node=node: self._arrived.get(node)) for node in group.crossings]
            try:
                backward(edges, grads, inputs=group.leaves, last=last and index == len(started))
            finally:
                for handle in handles:
                    handle.remove()
        self._groups, self._arrived = [], {}

    def _starts(self, group: _Group) -> list[tuple[GradientEdge, Tensor]]:
        """Where the gradients of a group come in; empty where none has come."""
        arrived = [
            (GradientEdge(node, index), grad)
            for node in group.crossings
            for index, grad in enumerate(self._arrived.get(node, ()))
            if grad is not None
        ]
        return group.sources + arrived


def backward_input(
    outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[StageInput]
) -> tuple[list[Tensor | None], WeightWork]:
    """The input part: gradients of the inputs, and the weight part for later. No parameter is touched.

    Raises RuntimeError, with nothing changed, if the graph holds something that cannot be run in part.
    """
    roots = [get_gradient_edge(output) for output in outputs]
    ends = {each.edge.node for each in inputs}
    on_way = _nodes_on_way(roots, ends)
    groups = _groups(on_way, ends, list(zip(roots, grads, strict=True)))
    arrived: dict[Node, tuple[Tensor | None, ...]] = {}
    handles = [
        node.register_prehook(partial(arrived.__setitem__, node)) for group in groups for node in group.crossings
    ]
    try:
        edges = [each.edge for each in inputs]
        found = torch.autograd.grad(list(outputs), edges, list(grads), retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return list(found), WeightWork(groups, arrived)


def _below(node: Node) -> Iterator[Node]:
    return (child for child, _ in node.next_functions if child is not None)


def _nodes_on_way(roots: Iterable[GradientEdge], ends: set[Node]) -> dict[Node, bool]:
    """Every node below the roots, down to `ends`, with whether one of the ends lies below it."""
    on_way: dict[Node, bool] = {}
    stack = [(edge.node, False) for edge in roots]
    while stack:
        node, children_done = stack.pop()
        if children_done:
            on_way[node] = any(on_way[child] for child in _below(node))
        elif node not in on_way:
            on_way[node] = node in ends
            if node not in ends:
                stack.append((node, True))
                stack.extend((child, False) for child in _below(node) if child not in on_way)
    return on_way


def _groups(on_way: dict[Node, bool], ends: set[Node], roots: list[tuple[GradientEdge, Tensor]]) -> list[_Group]:
    """The parameters below the roots, in groups that share no node off the way to the inputs."""
    neighbours: dict[Node, list[Node]] = defaultdict(list)
    for node in on_way:
        for child in _below(node) if node not in ends else ():
            if not on_way[child]:
                neighbours[node].append(child)
                neighbours[child].append(node)
    sources: dict[Node, list[tuple[GradientEdge, Tensor]]] = defaultdict(list)
    for edge, grad in roots:
        if not on_way[edge.node]:
            sources[edge.node].append((edge, grad))
    groups, seen = [], set[Node]()
    for start in on_way:
        group, stack = _Group(), [start]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            stack.extend(neighbours[node])
            group.sources += sources[node]
            group.crossings += [node] if on_way[node] else []
            group.leaves += [node.variable] if hasattr(node, "variable") else []
        groups += [group] if group.leaves else []
    return groups


# --------------------------------------------------------------------------------------------------
# One step of one rank: what each kind of action does, and what is held between actions.
# --------------------------------------------------------------------------------------------------


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
class _MicroBatchGraph:
    """The autograd graph of a micro-batch between the forward and the backward pass of a stage."""

    roots: list[Tensor]
    inputs: list[StageInput]


@dataclass
class PipelineStep:
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
    _graphs: dict[tuple[int, int], _MicroBatchGraph] = field(default_factory=dict)
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
            self._graphs[stage, index] = _MicroBatchGraph(roots, inputs)

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

    def _full_backward(self, action: Action, graph: _MicroBatchGraph, roots: list[Tensor], grads: list[Tensor]) -> None:
        last = self._is_last(action)
        if roots:
            self.executor.backward(roots, grads, inputs=None, last=last)
        self._return_gradient(action, [each.grad for each in graph.inputs])

    def _roots(self, action: Action, graph: _MicroBatchGraph) -> tuple[list[Tensor], list[Tensor]]:
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
        step = PipelineStep(self, micro_batches, train, with_loss or train, keep_outputs, backward_scale, sum_scale)
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


def _first_sharing(modules: Mapping[int, nn.Module]) -> dict[int, int]:
    """For each stage the first one that it shares parameters with, directly or not; mostly itself."""
    first = {stage: stage for stage in modules}
    owner: dict[Tensor, int] = {}
    for stage, module in modules.items():
        for parameter in module.parameters():
            both = first[owner.setdefault(parameter, stage)], first[stage]
            first = {key: min(both) if value in both else value for key, value in first.items()}
    return first
