"""Forward and backward passes as CUDA graphs: recorded once, and replayed with one launch per batch.

`GraphedSchedule` runs the first batches as usual, on the stream of the recording, so that kernels are compiled and lazy state
exists. Then it records the passes of a batch: one graph for the first micro-step of a step, whose backward pass writes gradients, and
one for the later micro-steps, whose backward pass adds to them. In a replay the kernels run on the memory of the recording: each
batch is copied into the recorded inputs, and `.grad` are the recorded gradients. Everything that the engine counts on the host is
counted in replays too (`Engine.replay_pass`). The second half of a step is recorded by `Stepper`.

A change of what was recorded is never ignored: another shape of the batch is an error, and if parameters are frozen or moved, or the
model changes between training and evaluation mode, the passes are recorded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from colonnade.engine.schedule.micro_batch import format_value
from colonnade.engine.schedule.schedules import BaseSchedule, NonPipelineSchedule, StepResult
from colonnade.errors import ConfigError, GradientError
from colonnade.logging import get_dist_logger

WARM_UP = 5
"""Batches that run before a recording. In the first four the engine may read values of the loss on the host (`MeanWatch`)."""


@dataclass
class _Recording:
    """The recorded passes of one micro-step: inputs, results, and gradients with their parameters."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Any]
    result: StepResult
    grads: list[tuple[Tensor, Tensor]]
    count: Any
    loss_count: Any


class GraphedSchedule(NonPipelineSchedule):
    """A `NonPipelineSchedule` that runs the passes of a batch as CUDA graphs. The config key `cuda_graph` selects this schedule.

    Args:
        device: The GPU.
        data_process_func: As for `BaseSchedule`.
    """

    def __init__(self, device: torch.device, data_process_func: Callable[..., tuple[Any, Any]] | None = None) -> None:
        super().__init__(data_process_func)
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._recordings: dict[bool, _Recording] = {}
        self._runs = {True: 0, False: 0}
        self._form: tuple[TreeSpec, list[Any]] | None = None
        self._recorded_for: object = None
        self.calls_backward = False

    def forward_back_step(
        self,
        engine: Any,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> StepResult:
        """Run or replay the passes of a batch. The results are copies, so the next replay does not overwrite them."""
        if forward_only:
            return super().forward_back_step(engine, data_iter, True, return_loss, return_output_label)
        batch = next(data_iter)
        leaves, structure = tree_flatten(batch)
        first = engine.is_first_pass

        # Recorded kernels use the memory of the recording, so what they use must still be there: the memory of parameters and buffers
        # (the first flat step moves parameters), and the parameters that get a gradient. The first steps of a run change these.
        state = _state_of(engine.model)
        if state != self._recorded_for:
            if self._recordings:
                get_dist_logger().info(
                    "cuda_graph: parameters were frozen, unfrozen or moved, or the model changed its mode; passes are recorded again"
                )
            self._recordings, self._runs, self._recorded_for = {}, {True: 0, False: 0}, state

        # All passes run on the stream of the recording: autograd accumulates a gradient on the stream of its first use.
        if first not in self._recordings:
            self._runs[first] += 1
            # A later micro-step adds to the gradients of the first one, so these must be recorded before.
            if self._runs[first] <= WARM_UP or not (first or self._recordings):
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    result = self._run(engine, batch, return_output_label)
                torch.cuda.current_stream().wait_stream(self._stream)
                self._form = structure, [format_value(leaf) for leaf in leaves]
                return result
            self._check_form(leaves, structure)
            self._recordings[first] = self._record(engine, leaves, structure, first, return_output_label)
        recording = self._recordings[first]
        self._check_form(leaves, structure)
        for to, leaf in zip(recording.inputs, leaves, strict=True):
            if isinstance(to, Tensor):
                to.copy_(leaf, non_blocking=True)

        # The first pass of a step writes gradients and does not add to those of an earlier step.
        if first and any(parameter.grad is not None for parameter, _ in recording.grads):
            raise GradientError(
                "cuda_graph=True: there are gradients of an earlier step, which the recorded backward pass would overwrite; call "
                "engine.zero_grad() before the first batch of every step",
                code="C046",
            )

        def replay() -> None:
            recording.graph.replay()
            for parameter, grad in recording.grads:
                parameter.grad = grad

        engine.replay_pass(replay, recording.count, recording.loss_count)
        copied: StepResult = tree_map_only(Tensor, torch.clone, recording.result)
        return copied

    def _run(self, engine: Any, batch: Any, return_output_label: bool) -> StepResult:
        self.calls_backward = True
        try:
            return super().forward_back_step(engine, iter([batch]), return_output_label=return_output_label)
        finally:
            self.calls_backward = False

    def _record(
        self, engine: Any, leaves: list[Any], structure: TreeSpec, first: bool, return_output_label: bool
    ) -> _Recording:
        """Record the passes of a batch, without running them."""
        inputs = [leaf.to(self.device, copy=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        parameters = list(engine.model.parameters())
        if first:
            for parameter in parameters:
                parameter.grad = None
        graph = torch.cuda.CUDAGraph()
        random_state = torch.cuda.get_rng_state(self.device)
        try:
            with (
                engine.pass_without_trace() as traced,
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                result = self._run(engine, tree_unflatten(inputs, structure), return_output_label)
        except RuntimeError as error:
            # A recording that failed leaves the default generator in a state that only a recording may use.
            fresh = torch.Generator(self.device)
            fresh.set_state(random_state)
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            torch.cuda.default_generators[index].graphsafe_set_state(fresh.graphsafe_get_state())
            reason: BaseException = error
            while reason.__context__ is not None:  # the end of a failed recording raises an error of its own
                reason = reason.__context__
            raise GradientError(
                f"cuda_graph=True: the forward and backward passes cannot be recorded as a CUDA graph: {reason}. Typical reasons are "
                f"values that are read on the host (.item(), .tolist(), bool(tensor), nonzero, masks as indices) and random numbers "
                f"of a custom generator. Remove them from model and criterion, or use cuda_graph='step', which records only "
                f"clipping and optimizer step",
                code="C071",
            ) from error
        grads = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        if first:
            for parameter in parameters:
                parameter.grad = None
        get_dist_logger().debug(f"cuda_graph: recorded the passes of a batch, with {len(grads)} gradients")
        return _Recording(graph, inputs, result, grads, traced.count, traced.loss_count)

    def _check_form(self, leaves: list[Any], structure: TreeSpec) -> None:
        """Raise if the batch has another structure, shape or dtype than the recorded one."""
        assert self._form is not None
        expected, forms = self._form
        found = [format_value(leaf) for leaf in leaves]
        if structure != expected or found != forms:
            one, other = next(
                ((a, b) for a, b in zip(forms, found, strict=False) if a != b), (str(expected), str(structure))
            )
            raise GradientError(
                f"cuda_graph=True needs batches of one form: the recorded batch has {one}, this one has {other}. Use "
                f"drop_last=True in the data loader, pad the batches, or use cuda_graph='step'",
                code="C071",
            )


def graphed(schedule: BaseSchedule, handlers: Sequence[Any], device: torch.device, world_size: int) -> GraphedSchedule:
    """Return the schedule that records the passes of `schedule`. Raises ConfigError if they cannot be CUDA graphs."""
    reason = None
    if device.type != "cuda":
        reason = f"the device is {device.type}, and CUDA graphs need a GPU"
    elif world_size > 1:
        reason = f"there are {world_size} ranks, and reductions between ranks are started by the host during the backward pass"
    elif type(schedule) is not NonPipelineSchedule:
        reason = f"the schedule is {type(schedule).__name__}; only the default schedule can be recorded"
    elif handlers:
        reason = f"the gradient handler {format_value(handlers[0])} runs on the host"
    if reason is not None:
        raise ConfigError(
            f"cuda_graph=True is not available here: {reason}. Use cuda_graph='step', which records only clipping and optimizer step, "
            f"or remove the key",
            code="C071",
        )
    return GraphedSchedule(device, schedule.data_process_func)


def _state_of(model: torch.nn.Module) -> object:
    """What a recording depends on: mode, addresses, and which parameters get a gradient."""
    parameters = [(parameter.data_ptr(), parameter.requires_grad) for parameter in model.parameters()]
    return model.training, parameters, [buffer.data_ptr() for buffer in model.buffers()]
