"""One micro-batch through one stage, forward and backward, on fake tensors: what is computed, sent and kept."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from colonnade.engine.schedule.executor.backward import StageInput, backward_input, run_backward
from colonnade.engine.schedule.executor.call import call_module
from colonnade.engine.schedule.executor.micro_batch import MicroBatch
from colonnade.engine.schedule.loss import split_loss
from colonnade.engine.schedule.non_pipeline import call_criterion
from colonnade.engine.schedule.transfer.values import HEADER_BYTES, payload_bytes
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.placement import is_dtensor
from colonnade.planner.recorder import Cost, Recorder


@dataclass(frozen=True)
class StagePass:
    """What a micro-batch costs on a stage. `kept`: bytes from forward to backward; `waiting`: between the two parts of backward,
    where they are apart; `extra`: the most for a moment beyond that, in forward, backward and its two parts. `output`: what goes
    to the next stage; `counted`: the loss is (sum, count)."""

    forward: Cost
    backward: Cost
    input_part: float
    """The part of backward that the stage before waits for, where the two are apart."""
    kept: int
    waiting: int
    extra: tuple[int, int, int, int]
    output: Any
    sent: int
    """Bytes of the message to the next stage, and of the gradient back."""
    returned: int
    counted: bool
    rank: int = 0
    """The rank that ran it, among those that are alike: its calls are to that rank's groups."""
    result: int = 0
    """Bytes that the last stage gives back to the caller, and so keeps to the end of the step."""


def fake_module(module: nn.Module, device: str = "cpu") -> None:
    """Give every parameter and buffer of a module memory that is not there; to be called in a fake mode."""
    places = [(each, name, p) for each in module.modules() for name, p in each._parameters.items() if p is not None]
    module._apply(lambda tensor: torch.empty_like(tensor, device=device))
    first: dict[int, nn.Parameter] = {}
    for each, name, old in places:  # what was one parameter in several places stays one
        made = each._parameters[name]
        assert made is not None
        each._parameters[name] = first.setdefault(id(old), made)


def run_stage(
    stage: int,
    module: nn.Module,
    micro_batch: MicroBatch,
    inputs: Any,
    criterion: Any,
    recorder: Recorder,
    apart: bool,
    fresh: Collection[int] = (),
) -> StagePass:
    """Run a stage as the executor does. `criterion`: at the last stage. `apart`: the table has I and W. `fresh`: the ids of
    parameters that have no gradient before it: theirs come one after another, as a part of what the pass takes. The gradients of
    all others lie in buckets, or are there from the pass before, and are counted elsewhere."""
    for parameter in module.parameters():
        parameter.grad = None
    with _elsewhere([p for p in module.parameters() if p.requires_grad and id(p) not in fresh], recorder):
        return _run_stage(stage, module, micro_batch, inputs, criterion, recorder, apart)


def _run_stage(
    stage: int, module: nn.Module, micro_batch: MicroBatch, inputs: Any, criterion: Any, recorder: Recorder, apart: bool
) -> StagePass:
    parts = _in_parts(stage, module, micro_batch, inputs, criterion, recorder) if apart else None
    graph = _forward(stage, module, micro_batch, inputs, criterion, recorder)
    before, forward = recorder.live, recorder.take()
    recorder.start_peak()
    with recorder:
        torch.autograd.backward(graph.roots, graph.gradients)
    backward, extra = recorder.take(), recorder.peak - before
    returned = [each.grad for each in graph.inputs if each.grad is not None]
    result = sum(_bytes(each) for each in _tensors(graph.result))
    if parts is None:
        parts = _Parts(1.0, result, (extra, 0))
    return StagePass(
        forward=forward,
        backward=backward,
        input_part=parts.share,
        kept=graph.kept,
        waiting=parts.waiting,
        extra=(graph.extra, extra, *parts.extra),
        output=graph.output,
        sent=HEADER_BYTES + payload_bytes(_tensors(graph.output)),
        returned=HEADER_BYTES + payload_bytes(returned),
        counted=graph.counted,
        result=result,
    )


@contextmanager
def _elsewhere(parameters: Sequence[nn.Parameter], recorder: Recorder) -> Iterator[None]:
    """The gradients of these go, as they come, to memory that is counted elsewhere: what autograd has made is held for a moment."""
    hooks = []
    for parameter in parameters:
        if is_dtensor(parameter):  # FSDP2 adds to it, as it does in a run
            parameter.grad = torch.empty_like(parameter)
            recorder.hold(local_part(parameter.grad))
            continue
        kept = torch.empty_like(parameter)

        def move(came: Tensor, kept: Tensor = kept) -> None:
            if came.grad is not None:
                torch._foreach_copy_([kept], [came.grad])
            came.grad = None

        hooks.append(parameter.register_post_accumulate_grad_hook(move))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in parameters:
            parameter.grad = None


@dataclass
class _Graph:
    roots: list[Tensor]
    gradients: list[Tensor]
    inputs: list[StageInput]
    output: Any
    result: Any
    kept: int
    extra: int
    counted: bool


def _forward(
    stage: int, module: nn.Module, micro_batch: MicroBatch, inputs: Any, criterion: Any, recorder: Recorder
) -> _Graph:
    given = tree_map_only(Tensor, lambda each: each.detach(), inputs)
    entered = [StageInput(each) for each in _tensors(given) if stage > 0 and each.is_floating_point()]
    recorder.take()
    before = recorder.live
    recorder.start_peak()
    with recorder:
        output = call_module(stage, module, given, micro_batch)
        counted, result = False, None
        roots = [each for each in _tensors(output) if each.requires_grad]
        if criterion is not None:
            loss, count = split_loss(call_criterion(criterion, output, micro_batch.label))
            roots, counted = [loss] if loss.requires_grad else [], count is not None
            output, result = None, output  # whoever asked for the step gets it
    kept = recorder.live - before + sum(_bytes(each) for each in _tensors(given))
    gradients = [torch.empty_like(each) for each in roots]
    found = tree_map_only(Tensor, lambda each: torch.empty_like(each), output)
    return _Graph(roots, gradients, entered, found, result, kept, recorder.peak - recorder.live, counted)


@dataclass(frozen=True)
class _Parts:
    """The backward pass in two parts: the first one's share of the time, bytes that wait for the second, and the most of each."""

    share: float
    waiting: int
    extra: tuple[int, int]


def _in_parts(
    stage: int, module: nn.Module, micro_batch: MicroBatch, inputs: Any, criterion: Any, recorder: Recorder
) -> _Parts | None:
    """First the gradient of the inputs, then those of the parameters; None where all of it is done with the first."""
    graph = _forward(stage, module, micro_batch, inputs, criterion, recorder)
    if not graph.inputs or not graph.roots:
        return None
    before, kept, result = recorder.live, graph.kept, graph.result
    recorder.take()
    recorder.start_peak()
    try:
        with recorder:
            work = backward_input(graph.roots, graph.gradients, graph.inputs)[1]
            first, most = recorder.take().seconds, recorder.peak - before
            del graph  # what the second part does not need goes; what the caller gets stays
            waiting = recorder.live
            recorder.start_peak()
            work.run(run_backward, last=True)
            second = recorder.take().seconds
    except RuntimeError:
        return None
    extra = most, recorder.peak - waiting
    share = first / (first + second) if first + second else 0.5
    del result
    return _Parts(share, kept + waiting - before, extra)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
