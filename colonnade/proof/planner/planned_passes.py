"""The cost of one micro-batch on one stage: its forward and backward pass run on fake tensors and are recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from colonnade.comm.torch_versions import start_fsdp
from colonnade.engine.schedule.loss import call_criterion, split_loss
from colonnade.engine.schedule.micro_batch import MicroBatch, call_module
from colonnade.engine.schedule.split_backward import StageInput, backward_input, run_backward
from colonnade.engine.schedule.transfer import HEADER_BYTES, payload_bytes
from colonnade.parallel.placement import is_dtensor, local_part, placement_of
from colonnade.parallel.split import Stage
from colonnade.proof.planner.recorder import Cost, OperatorRecorder
from colonnade.texts import pattern_of

Events = tuple[tuple[int, int], ...]
"""(number, bytes) of each allocation and (number, 0) of each free, in order."""


@dataclass(frozen=True)
class StagePass:
    """The cost of one micro-batch on one stage.

    Attributes:
        kept: Bytes kept from forward to backward.
        waiting: Bytes kept between the two parts of a split backward.
        extra: The largest temporary memory in addition to `kept`: in forward, backward, and the two parts of backward.
        output: The output of the stage, the input of the next one.
        counted: Whether the loss is (sum, count).
    """

    forward: Cost
    backward: Cost
    input_part: float
    """The fraction of backward that computes input gradients, for which the previous stage waits."""
    kept: int
    waiting: int
    extra: tuple[int, int, int, int]
    output: Any
    sent: int
    """Bytes of the message to the next stage, and of the gradient back."""
    returned: int
    counted: bool
    rank: int = 0
    """The rank that ran the pass, on behalf of all ranks of its kind; its calls have the groups of this rank."""
    result: int = 0
    """Bytes that the last stage returns to the caller, which keeps them to the end of the step."""
    pending: int = 0
    """Bytes of large gradients that are held next to their bucket until it is full, if `extra` does not contain them."""
    events: tuple[Events, Events] | None = None
    """The allocations and frees of forward and backward, with all layers; None if they were not recorded."""


def fake_module(module: nn.Module, device: str = "cpu") -> None:
    """Replace every parameter and buffer of a module by a fake tensor. Call it in a fake mode. Ties are kept."""
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
    recorder: OperatorRecorder,
    apart: bool,
    fresh: Collection[int] = (),
    pending: Sequence[tuple[Collection[int], Collection[int]]] = (),
) -> StagePass:
    """Run a stage on a micro-batch like the executor, and return the cost.

    Args:
        stage: The number of the stage.
        module: The stage, on fake tensors.
        micro_batch: The micro-batch.
        inputs: The output of the previous stage.
        criterion: The criterion; used at the last stage.
        recorder: Records the operators and their memory.
        apart: Whether the schedule splits backward into I (input gradients) and W (weight gradients).
        fresh: The ids of parameters without a gradient before this pass: autograd allocates their gradients during the pass, so
            the pass has this memory. The memory of all other gradients is counted elsewhere: in buckets, or by an earlier pass.
        pending: For each bucket that copies large gradients only when it is full: (ids of its large parameters, ids of all its
            parameters).
    """
    for parameter in module.parameters():
        parameter.grad = None
    with _elsewhere([p for p in module.parameters() if p.requires_grad and id(p) not in fresh], recorder, pending):
        return _run_stage(stage, module, micro_batch, inputs, criterion, recorder, apart)


def _run_stage(
    stage: int,
    module: nn.Module,
    micro_batch: MicroBatch,
    inputs: Any,
    criterion: Any,
    recorder: OperatorRecorder,
    apart: bool,
) -> StagePass:
    parts = _in_parts(stage, module, micro_batch, inputs, criterion, recorder) if apart else None
    if recorder.events is not None:
        recorder.events.clear()
    graph = _forward(stage, module, micro_batch, inputs, criterion, recorder)
    before, forward = recorder.live, recorder.take()
    recorder.start_peak()
    first = len(recorder.events or ())
    with recorder:
        torch.autograd.backward(graph.roots, graph.gradients)
    backward, extra = recorder.take(), recorder.peak - before
    events = None if recorder.events is None else (tuple(recorder.events[:first]), tuple(recorder.events[first:]))
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
        events=events,
    )


@contextmanager
def _elsewhere(
    parameters: Sequence[nn.Parameter],
    recorder: OperatorRecorder,
    pending: Sequence[tuple[Collection[int], Collection[int]]] = (),
) -> Iterator[None]:
    """The gradients of these go to memory that is counted elsewhere: what autograd has made is held for a moment, and of the large
    parameters of a bucket in `pending` until all its gradients have come."""
    plain = [parameter for parameter in parameters if not is_dtensor(parameter)]
    buckets = [_FillingBucket([p for p in plain if id(p) in members], large) for large, members in pending]
    bucket_of = {id(parameter): bucket for bucket in buckets for parameter in bucket.parameters}
    hooks = []
    for parameter in parameters:
        if is_dtensor(parameter):  # FSDP2 adds to it, as it does in a run
            parameter.grad = torch.empty_like(parameter)
            recorder.hold(local_part(parameter.grad))
            continue
        kept = torch.empty_like(parameter)

        def move(came: Tensor, kept: Tensor = kept) -> None:
            bucket = bucket_of.get(id(came))
            if bucket is None or id(came) not in bucket.large:
                if came.grad is not None:
                    torch._foreach_copy_([kept], [came.grad])
                came.grad = None
            if bucket is not None:
                bucket.note_arrival(came)

        hooks.append(parameter.register_post_accumulate_grad_hook(move))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in parameters:
            parameter.grad = None


class _FillingBucket:
    """The parameters of one bucket that are in a pass: its large gradients go when all gradients have come."""

    def __init__(self, parameters: Sequence[nn.Parameter], large: Collection[int]) -> None:
        self.parameters, self.large = parameters, large
        self._arrived: set[int] = set()

    def note_arrival(self, parameter: Tensor) -> None:
        self._arrived.add(id(parameter))
        if len(self._arrived) == len(self.parameters):
            self._arrived.clear()
            for each in self.parameters:
                each.grad = None


@dataclass
class _PlannedGraph:
    roots: list[Tensor]
    gradients: list[Tensor]
    inputs: list[StageInput]
    output: Any
    result: Any
    kept: int
    extra: int
    counted: bool


def _forward(
    stage: int, module: nn.Module, micro_batch: MicroBatch, inputs: Any, criterion: Any, recorder: OperatorRecorder
) -> _PlannedGraph:
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
    return _PlannedGraph(roots, gradients, entered, found, result, kept, recorder.peak - recorder.live, counted)


@dataclass(frozen=True)
class _Parts:
    """The backward pass in two parts: the first one's share of the time, bytes that wait for the second, and the most of each."""

    share: float
    waiting: int
    extra: tuple[int, int]


def _in_parts(
    stage: int, module: nn.Module, micro_batch: MicroBatch, inputs: Any, criterion: Any, recorder: OperatorRecorder
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


# --- Models of equal blocks -----------------------------------------------------------------------
#
# They are run with one and with two of the blocks; the cost of any number of them follows, to the byte.


_FEWEST = 3
"""With fewer repetitions nothing is saved."""


@dataclass(frozen=True)
class Repeat:
    """`times` repetitions of the same `unit` layers in a container, from the layer with the index `start` on."""

    container: nn.Module
    start: int
    unit: int
    times: int

    @contextmanager
    def shortened(self, times: int) -> Iterator[None]:
        """Remove repetitions from the container until the end of the block, so that `times` of them are left."""
        stop, end = self.start + self.unit * times, self.start + self.unit * self.times
        if isinstance(self.container, Stage):
            names = self.container.layer_names
            self.container.layer_names = (*names[:stop], *names[end:])
            try:
                yield
            finally:
                self.container.layer_names = names
            return
        layers = dict(self.container._modules)
        kept = [each for at, each in enumerate(layers.values()) if at < stop or at >= end]
        self.container._modules.clear()
        self.container._modules.update({str(at): each for at, each in enumerate(kept)})
        try:
            yield
        finally:
            self.container._modules.clear()
            self.container._modules.update(layers)


def run_repeated(
    module: nn.Module, run: Callable[[], StagePass], sharded: bool = False, recorder: OperatorRecorder | None = None
) -> StagePass:
    """Return the cost of `run()`, one pass through the module, by running only a few of its repeated layers.

    `recorder`: also run all layers, and record their allocations.
    `sharded`: the module uses FSDP2, which must see all layers when it starts, and whose first pass differs from the
    others.
    """
    found = find_repeat(module)
    if sharded:
        start_fsdp(module)
        with found.shortened(2) if found is not None else nullcontext():
            run()
    if found is None:
        if recorder is not None:
            recorder.events = []
        return run()
    with found.shortened(1):
        one = run()
    with found.shortened(2):
        two = run()
    made = extended(one, two, found.times - 2)
    if recorder is not None:
        recorder.events = []
        made = replace(made, events=run().events)
    return made


def find_repeat(module: nn.Module) -> Repeat | None:
    """Return the longest sequence of repeated layers in a container or stage; None if there is none."""
    best: Repeat | None = None
    for each in module.modules():
        layers = _layers(each)
        for found in _runs(each, [signature(layer) for layer in layers]) if len(layers) >= _FEWEST else ():
            if best is None or found.unit * found.times > best.unit * best.times:
                best = found
    return best


def signature(module: nn.Module) -> Any:
    """Return a value that is equal for modules with equal cost: their layers and parameters, without numbers in names."""
    layers = tuple(
        (type(each).__name__, str(vars(each).get("_colonnade_runs")))
        if next(each.children(), None) is not None
        else (type(each).__name__, each.extra_repr())
        for each in module.modules()
    )
    parameters = tuple(
        (pattern_of(name, inside=True), tuple(p.shape), p.dtype, p.requires_grad, placement_of(p).key[0])
        for name, p in module.named_parameters()
    )
    return layers, parameters


def _layers(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, Stage):
        return [module.get_submodule(name) for name in module.layer_names]
    return list(module.children()) if isinstance(module, (nn.Sequential, nn.ModuleList)) else []


def _runs(container: nn.Module, kinds: list[Any]) -> Iterator[Repeat]:
    """Every way to see these layers as a unit that comes again and again, the shortest unit first."""
    numbers: dict[Any, int] = {}
    row = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
    for unit in range(1, len(row) // _FEWEST + 1):
        start = 0
        while start + unit * _FEWEST <= len(row):
            stop = start + unit
            while row[stop : stop + unit] == row[start : start + unit]:
                stop += unit
            if (times := (stop - start) // unit) >= _FEWEST:
                yield Repeat(container, start, unit, times)
            start += max(1, stop - start - unit + 1) if times >= _FEWEST else 1


def extended(one: StagePass, two: StagePass, more: int) -> StagePass:
    """Extrapolate the cost of a pass linearly.

    `one` and `two` are passes with one and two repetitions of some layers; the result has `more` repetitions than
    `two`.
    """

    def on(first: float, second: float) -> Any:
        return second + more * (second - first)

    def longer(first: Tensor, second: Tensor) -> Tensor:
        return second.new_empty([on(a, b) for a, b in zip(first.shape, second.shape, strict=True)])

    outputs, spec = tree_flatten(two.output)
    before = tree_leaves(one.output)
    made = [longer(a, b) if isinstance(b, Tensor) else b for a, b in zip(before, outputs, strict=True)]
    return replace(
        two,
        forward=_longer(one.forward, two.forward, more),
        backward=_longer(one.backward, two.backward, more),
        kept=on(one.kept, two.kept),
        waiting=on(one.waiting, two.waiting),
        extra=cast(
            "tuple[int, int, int, int]", tuple(max(0, on(a, b)) for a, b in zip(one.extra, two.extra, strict=True))
        ),
        output=tree_unflatten(made, spec),
        sent=on(one.sent, two.sent),
        returned=on(one.returned, two.returned),
    )


def _longer(one: Cost, two: Cost, more: int) -> Cost:
    """Calls that both make stay, those that have grown grow on, and those that are new come again."""
    both = Counter(one.calls) & Counter(two.calls)
    old, new = list((Counter(one.calls) - both).elements()), list((Counter(two.calls) - both).elements())
    calls = list(both.elements())
    for call in old:
        grown = next((each for each in new if (each.op, each.ranks) == (call.op, call.ranks)), None)
        if grown is not None:
            new.remove(grown)
            calls.append(replace(grown, bytes=grown.bytes + more * (grown.bytes - call.bytes)))
    return Cost(
        two.seconds + more * (two.seconds - one.seconds),
        two.host + more * (two.host - one.host),
        two.flops + more * (two.flops - one.flops),
        two.graded + more * (two.graded - one.graded),
        two.moved + more * (two.moved - one.moved),
        two.operators + more * (two.operators - one.operators),
        calls + new * (1 + more) if len(one.calls) != len(two.calls) else calls + new,
    )
