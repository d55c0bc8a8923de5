"""A hook that profiles a few steps on every rank with torch.profiler."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.comm.messages import is_alone
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError
from colonnade.paths import local_path
from colonnade.proof.report.traces import NAME
from colonnade.registry import HOOKS
from colonnade.trainer.hooks.hook import BaseHook

if TYPE_CHECKING:
    from colonnade.trainer.trainer import Trainer


_BARRIERS = 9
"""Barriers after which the ranks note their clocks; the median is used, so a single delay of a rank does no harm."""


@HOOKS.register_module
class ProfilerHook(BaseHook):
    """Traces `steps` steps after the first `skip` steps of a fit, and writes one trace per rank to `folder`.

    `colonnade report --trace FOLDER` joins the traces on a common clock, into one file for Perfetto. Traced steps are slower.
    """

    def __init__(
        self, folder: str | Path, steps: int = 3, skip: int = 5, memory: bool = False, priority: int = 900
    ) -> None:
        super().__init__(priority)
        if steps < 1 or skip < 0:
            raise ConfigError(
                f"ProfilerHook got steps={steps} and skip={skip}; steps must be an int >= 1, and skip an int >= 0"
            )
        self.folder = local_path(folder, f"{type(self).__name__}'s folder")
        self._steps, self._skip, self._memory = steps, skip, memory
        self._profile: Any = None
        self._seen = 0
        self._met: list[float] = []

    def before_train(self, trainer: Trainer) -> None:
        self._seen = 0
        if self._skip == 0:
            self._begin(trainer)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        if not trainer.step_done:
            return
        self._seen += 1
        if self._profile is not None and self._seen == self._skip + self._steps:
            self._end(trainer)
        elif self._seen == self._skip and self._profile is None:
            self._begin(trainer)

    def after_train(self, trainer: Trainer) -> None:
        if self._profile is not None:
            self._end(trainer)
        elif self._seen < self._skip:
            trainer.logger.warning(
                f"ProfilerHook wrote no trace, because the run had only {self._seen} steps and the hook skips the "
                f"first {self._skip}. Run more steps, or set a smaller skip."
            )

    def close(self) -> None:
        if self._profile is not None:  # after an error
            self._profile.stop()
            self._profile = None

    def _begin(self, trainer: Trainer) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if trainer.context.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._met = _clocks(trainer, _BARRIERS)
        self._profile = torch.profiler.profile(activities=kinds, profile_memory=self._memory)
        self._profile.start()

    def _end(self, trainer: Trainer) -> None:
        self._profile.stop()
        profile, self._profile = self._profile, None
        try:
            self._write(profile, trainer.context)
        finally:
            # All traces exist when rank 0 logs them. A rank whose write failed takes part, so that no other rank hangs.
            _clocks(trainer, 1)
        trainer.logger.info(
            f"wrote traces of {self._steps} steps to {self.folder}; join them with: colonnade report --trace {self.folder}"
        )

    def _write(self, profile: Any, context: ParallelContext) -> None:
        rank = context.get_global_rank()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / NAME.format(rank)
        profile.export_chrome_trace(str(path))
        place = ", ".join(f"{name} {at}" for name, at in context.layout.coordinates(rank).items())
        trace = json.loads(path.read_text(encoding="utf-8"))
        trace["colonnade"] = {"rank": rank, "met_us": self._met, "place": place}
        path.write_text(json.dumps(trace), encoding="utf-8")


def _clocks(trainer: Trainer, times: int) -> list[float]:
    """The clock of this rank, in microseconds, at the ends of several barriers that all ranks pass. Collective over the world."""
    moments = []
    for _ in range(times):
        if not is_alone(trainer.context):
            dist.barrier(group=trainer.context.get_group(ParallelMode.GLOBAL))
        moments.append(time.time_ns() / 1000)
    return moments
