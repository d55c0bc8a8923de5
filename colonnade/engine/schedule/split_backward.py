"""The backward pass of a stage, full or split in two: first the gradients of its inputs (I), later the gradients of its
parameters (W).

I runs only the nodes of the autograd graph between the outputs and the stage's inputs, and keeps the gradient that arrives at each
node from which a path leads to parameters. W starts from these gradients. Gradients of parameters are accumulated as in a plain
backward pass, so all hooks of parameters are called, including post-accumulate hooks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Root: TypeAlias = "Tensor | GradientEdge"


class RunBackward(Protocol):
    """The type of functions that run a backward pass and accumulate gradients, as `torch.autograd.backward` does.

    `last`: whether the gradients of all parameters of this rank are complete after this call. True at most once in a step, and
    never on a rank with several chunks (see `Executor`).
    """

    def __call__(
        self, tensors: Sequence[Root], grads: Sequence[Tensor], *, inputs: Sequence[Tensor] | None, last: bool
    ) -> None: ...


def run_backward(
    tensors: Sequence[Root], grads: Sequence[Tensor], *, inputs: Sequence[Tensor] | None, last: bool
) -> None:
    """Run a backward pass.

    Without `inputs`, accumulate gradients into all leaves and free the graph; else only into `inputs`, and keep the graph.
    """
    torch.autograd.backward(
        list(tensors),  # type: ignore[arg-type]  # it accepts a mixture, unlike its annotation
        list(grads),
        inputs=None if inputs is None else list(inputs),
        retain_graph=inputs is not None,
    )


class _Enter(torch.autograd.Function):
    """Make a tensor without a graph the start of one, in place, and record the gradient that arrives.

    The tensor is no leaf, unlike after `requires_grad_()`, because a stage may begin with an in-place layer.
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
    """Makes a tensor from another stage the start of this stage's autograd graph.

    Changes the tensor in place; it does not become a leaf.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._caught: list[Tensor] = []
        with torch.enable_grad():
            _Enter.apply(torch.zeros((), requires_grad=True, device="cpu"), self._caught, tensor)
        self.edge = get_gradient_edge(tensor)

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the tensor after a full backward pass; None if the stage did not use the tensor."""
        return next(iter(self._caught), None)


@dataclass
class _Group:
    """Parameters that share graph nodes outside of the paths to the inputs, and the nodes from which their gradients come."""

    sources: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)
    """Outputs with no path to an input, with their gradients: the weight part starts there."""
    crossings: list[Node] = field(default_factory=list)
    """Nodes on the way to the inputs with a path to parameters of this group."""
    leaves: list[Tensor] = field(default_factory=list)


class WeightWork:
    """The second part (W) of a split backward pass: computes the gradients of parameters."""

    def __init__(self, groups: list[_Group], arrived: dict[Node, tuple[Tensor | None, ...]]) -> None:
        self._groups = groups
        self._arrived = arrived

    def run(self, backward: RunBackward, last: bool) -> None:
        """Accumulate the gradients of the parameters; call it only once.

        If `backward` is called several times, only the final call gets `last`.
        """
        started = [(group, starts) for group in self._groups if (starts := self._starts(group))]
        for index, (group, starts) in enumerate(started, 1):
            edges, grads = zip(*starts, strict=True)
            # A crossing above another one would send it a gradient that has already arrived there in I, and hooks on
            # tensors would apply twice. So each crossing is reset to exactly the gradient that I saw.
            handles = [node.register_prehook(lambda _, node=node: self._arrived.get(node)) for node in group.crossings]
            try:
                backward(edges, grads, inputs=group.leaves, last=last and index == len(started))
            finally:
                for handle in handles:
                    handle.remove()
        self._groups, self._arrived = [], {}

    def _starts(self, group: _Group) -> list[tuple[GradientEdge, Tensor]]:
        """The edges from which the gradients of a group start, with their gradients; empty if none has arrived."""
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
    """Run the first part (I) of a backward pass. Returns the gradients of the inputs, and the second part to run later.

    No gradient of a parameter is accumulated.

    Raises:
        RuntimeError: If the graph contains a node that cannot run in part. No state has changed then.
    """
    roots = [get_gradient_edge(output) for output in outputs]
    ends = {entry.edge.node for entry in inputs}
    # Every node below the roots, down to the inputs, with whether an input lies below it: depth first, children before parents.
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
    # Only the nodes on the way run now. Each gradient that arrives at a crossing is kept for the weight part.
    groups = _groups(on_way, ends, list(zip(roots, grads, strict=True)))
    arrived: dict[Node, tuple[Tensor | None, ...]] = {}
    handles = [
        node.register_prehook(partial(arrived.__setitem__, node)) for group in groups for node in group.crossings
    ]
    try:
        edges = [entry.edge for entry in inputs]
        found = torch.autograd.grad(list(outputs), edges, list(grads), retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return list(found), WeightWork(groups, arrived)


def _below(node: Node) -> Iterator[Node]:
    return (child for child, _ in node.next_functions if child is not None)


def _groups(on_way: dict[Node, bool], ends: set[Node], roots: list[tuple[GradientEdge, Tensor]]) -> list[_Group]:
    """Group the parameters below the roots.

    Groups share only nodes on paths to the inputs, so the weight part runs each group separately.
    """
    # Groups are the connected components of the nodes off the way together with the crossings above them.
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
