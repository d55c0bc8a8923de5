"""A batch that is given to one stage of a pipeline, as to a whole model: said by name, with what takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from colonnade.errors import ScheduleError
from colonnade.parallel.own_forward.stage import ModelStage
from colonnade.parallel.split import Stage
from colonnade.parallel.stages import Chunks

_OF_A_MESSAGE = {"inputs", "values", "forms", "calls"}


def refuse_batch(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise where stages that `colonnade.split` has made are called with a batch. Stages of one's own take what they take."""
    if not isinstance(model, (Chunks, ModelStage, Stage)):
        return
    is_message = kwargs.keys() >= _OF_A_MESSAGE
    is_batch = not is_message and (bool(kwargs) or (len(args) == 1 and isinstance(args[0], Mapping)))
    later = isinstance(model, ModelStage) and not is_message and model._colonnade_part.first > 0
    if not (is_batch or later or isinstance(model, Chunks)):
        return
    raise ScheduleError(
        "engine(...) was called with a batch, but the model is split over a pipeline and this rank has one stage of it. Write "
        "output, label, loss = engine.execute_schedule(iter([batch])) on every rank in place of engine(batch) and "
        "engine.backward(loss), then engine.step(); with forward_only=True to evaluate",
        code="C132",
    )
