"""The base class of schedules: how the forward and backward passes of one step run.

A custom schedule is a subclass of `BaseSchedule`, registered in `SCHEDULE` and named in the config. The engine calls
`pre_processing` once and `forward_back_step` for each batch. A schedule that runs its backward passes itself sets
`runs_backward`, calls `engine.backward_micro_batch` for each of them and `engine.note_loss` once; any other calls
`engine.backward(loss)` once. `load_batch` splits a batch of the loader into data and label and moves it to the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from colonnade.engine.schedule.criterion import required_arguments
from colonnade.engine.schedule.micro_batch import format_value
from colonnade.errors import ScheduleError

StepResult = tuple[Any, Any, Tensor | None]
"""(output or None, label or None, loss or None)"""


class BaseSchedule(ABC):
    """Runs the forward and backward passes of one step on an engine.

    Implement `forward_back_step` (a subclass with Colossal-AI's `forward_backward_step` works, too), register the class
    in `SCHEDULE`, and choose it with `schedule=dict(type="YourSchedule", ...)`.

    Args:
        data_process_func: Maps a batch of the loader to (data, label). By default the "labels" (or "label") of a dict
            are the label if the criterion takes two arguments and the model does not require them; any other dict goes
            to the model unchanged.
    """

    runs_backward = False
    """Whether the schedule runs the backward passes itself (a pipeline); else it must call `engine.backward` once a step."""

    _take_dict_apart: Callable[[Mapping[str, Any]], tuple[Any, Any]] | None = None
    """For a model that computes its own loss, in a pipeline: splits a dict into (data, label)."""

    _label_keys: tuple[str, ...] = ()
    """The keys of a dict that may be its label."""

    uses_batch = True
    """Whether this rank computes with its batch; a stage in the middle of a pipeline only keeps its loader in step."""

    def __init__(self, data_process_func: Callable[..., tuple[Any, Any]] | None = None) -> None:
        self.data_process_func = data_process_func
        self.batch_size = 0
        self.device = torch.device("cpu")
        self._same_batch: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward_backward_step" in cls.__dict__ and "forward_back_step" not in cls.__dict__:
            cls.forward_back_step = cls.__dict__["forward_backward_step"]  # type: ignore[method-assign]

    def pre_processing(self, engine: Any) -> None:
        """Called once, when the engine is built, for checks and buffers. An override must call super."""
        self.device = engine.context.device
        criterion, own_loss = getattr(engine, "criterion", None), getattr(engine, "own_loss", None)
        self.choose_label_keys(getattr(engine, "model", None), criterion, own_loss)
        self._same_batch = getattr(engine, "same_batch", None)  # not the engine: the cycle would keep it alive

    def choose_label_keys(self, model: Any, criterion: Any, own_loss: Any) -> None:
        """Decide which entries of a dict are its label. `own_loss`: the `OwnLoss` of a model that computes its loss, or None."""
        takes_label, needed = len(required_arguments(criterion)) > 1, required_arguments(model)
        self._take_dict_apart = own_loss.unpack_batch if own_loss is not None and criterion is not None else None
        self._label_keys = tuple(key for key in ("labels", "label") if takes_label and key not in needed)

    @abstractmethod
    def forward_back_step(
        self,
        engine: Any,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> StepResult:
        """Run one step: load the batch, run the forward and, unless `forward_only`, the backward passes.

        Gradients are left in `.grad`; the optimizer does not step.

        Returns:
            (output, label, loss), each None if not asked for or not known on this rank.
        """

    def load_batch(self, data_iter: Iterator[Any], to_gpu: bool = True) -> tuple[Any, Any]:
        """The next batch as (data, label), on the engine's device if `to_gpu`."""
        if data_iter is None:
            raise ScheduleError(
                "this schedule needs a data iterator on this rank, but got None; pass iter(dataloader)", code="C051"
            )
        batch = next(data_iter)
        data, label = self.unpack_batch(batch)
        self.batch_size = num_rows(data)
        if to_gpu:
            data, label = move(data, self.device), move(label, self.device)
        if self._same_batch is not None and self.uses_batch:
            self._same_batch.see(data, label)
        return data, label

    def unpack_batch(self, batch: Any) -> tuple[Any, Any]:
        """(data, label) of a batch of the loader."""
        if self.data_process_func is not None:
            return self.data_process_func(batch)
        if isinstance(batch, (list, tuple)) and len(batch) == 2:
            return batch[0], batch[1]
        if isinstance(batch, Mapping):
            if self._take_dict_apart is not None:
                return self._take_dict_apart(batch)
            key = next((key for key in self._label_keys if key in batch), None)
            data = {name: value for name, value in batch.items() if name != key}
            return data, None if key is None else batch[key]
        if isinstance(batch, Tensor):
            return batch, None
        length = f" of {len(batch)}" if isinstance(batch, (list, tuple)) else ""
        raise ScheduleError(
            f"a batch must be (data, label), a dict or a tensor, not a {type(batch).__name__}{length}; "
            f"pass data_process_func=lambda batch: (data, label) to the schedule",
            code="C051",
        )


def checked_result(schedule: BaseSchedule, result: Any) -> StepResult:
    """The result of `forward_back_step`, checked to be (output, label, loss)."""
    if not isinstance(result, (tuple, list)) or len(result) != 3:
        raise ScheduleError(
            f"{type(schedule).__name__}.forward_back_step() returned {format_value(result)}; it must return (output, label, "
            f"loss), each None if not asked for or not known on this rank",
            code="C051",
        )
    output, label, loss = result
    return output, label, loss


def move(value: Any, device: torch.device) -> Any:
    """A nested value with every tensor moved to `device`."""
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, value)


def num_rows(data: Any) -> int:
    """The size of dimension 0 of the first tensor in a nested value; 0 if there is none."""
    return next((leaf.size(0) for leaf in tree_leaves(data) if isinstance(leaf, Tensor) and leaf.dim()), 0)
