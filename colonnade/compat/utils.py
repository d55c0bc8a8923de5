"""`colossalai.utils`: small functions over the global context, timers, and checkpoints in a folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.checkpoint import CheckpointManager
from colonnade.context.parallel_mode import ParallelMode
from colonnade.core import global_context as gpc
from colonnade.errors import CheckpointError, ConfigError
from colonnade.logging import DistributedLogger, get_dist_logger
from colonnade.optim.clip import clip_grad_norm_
from colonnade.paths import local_path
from colonnade.utils import timer
from colonnade.utils.sampler import DistinctDataSampler


def is_dp_rank_0() -> bool:
    return not gpc.is_initialized(ParallelMode.DATA) or gpc.is_first_rank(ParallelMode.DATA)


def is_tp_rank_0() -> bool:
    return not gpc.is_initialized(ParallelMode.TENSOR) or gpc.is_first_rank(ParallelMode.TENSOR)


def is_no_pp_or_last_stage() -> bool:
    return not gpc.is_initialized(ParallelMode.PIPELINE) or gpc.is_pipeline_last_stage()


def is_using_ddp() -> bool:
    return _is_using(ParallelMode.DATA)


def is_using_pp() -> bool:
    return _is_using(ParallelMode.PIPELINE)


def is_using_sequence() -> bool:
    return _is_using(ParallelMode.SEQUENCE)


def _is_using(mode: ParallelMode) -> bool:
    return gpc.is_initialized(mode) and gpc.get_world_size(mode) > 1


def sync_model_param(model: nn.Module, parallel_mode: ParallelMode) -> None:
    """Give every parameter the values of the first rank of the mode."""
    if _is_using(parallel_mode):
        source, group = gpc.get_ranks_in_group(parallel_mode)[0], gpc.get_group(parallel_mode)
        for parameter in model.parameters():
            dist.broadcast(parameter.data, source, group=group)


def clip_grad_norm_fp32(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> float:
    """Clip by the norm of the whole model, whatever its placements; returns the norm before it."""
    return float(clip_grad_norm_(parameters, max_norm, norm_type, context=gpc if gpc.is_launched else None))


def conditional_context(context_manager: AbstractContextManager[Any], enable: bool = True) -> Any:
    return context_manager if enable else nullcontext()


def synchronize() -> None:
    """Wait for the device, where it has anything to wait for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def empty_cache() -> None:
    torch.cuda.empty_cache()


def set_to_cuda(models: Any) -> Any:
    """Modules, alone or in a list, on the device of this rank."""
    return [model.to(gpc.device) for model in models] if isinstance(models, list) else models.to(gpc.device)


def report_memory_usage(message: str, logger: DistributedLogger | None = None, report_cpu: bool = False) -> None:
    """Log what tensors take on the device and, with `report_cpu`, what this process takes of the host's memory."""
    told = [message]
    if torch.cuda.is_available():
        used, most = torch.cuda.memory_allocated(gpc.device), torch.cuda.max_memory_allocated(gpc.device)
        told.append(f"device {used >> 20} MiB now, {most >> 20} MiB at most")
        torch.cuda.reset_peak_memory_stats(gpc.device)
    if report_cpu or len(told) == 1:
        import resource  # where there is none, this is not called

        told.append(f"host {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB at most")
    (logger or get_dist_logger()).info(": ".join(told[:1]) + ": " + ", ".join(told[1:]))


class DataParallelSampler(DistinctDataSampler):
    """Each data rank its own samples, as `get_dataloader` deals them."""

    def __init__(self, dataset: Any, shuffle: bool = False, seed: int = 0, drop_last: bool = False) -> None:
        super().__init__(dataset, gpc.layout, gpc.get_global_rank(), shuffle, seed, drop_last)


class Timer(timer.Timer):
    """A stopwatch that remembers only the laps it is told to keep."""

    def stop(self, keep_in_history: bool = False) -> float:
        synchronize()
        seconds = super().stop()
        if self.history and not keep_in_history:
            self.history.pop()
        return seconds

    def get_history_sum(self) -> float:
        return sum(self.history)

    def get_history_mean(self) -> float:
        return sum(self.history) / len(self.history)


class MultiTimer(timer.MultiTimer):
    """Timers by name, which can be switched off."""

    def __init__(self, on: bool = True) -> None:
        super().__init__()
        self._on = on

    def start(self, name: str) -> None:
        if self._on:
            super().start(name)

    def stop(self, name: str, keep_in_history: bool = True) -> float:
        return self.get_timer(name).stop(keep_in_history) if self._on else 0.0

    def get_timer(self, name: str) -> Timer:
        found = self._timers.setdefault(name, Timer())
        assert isinstance(found, Timer)
        return found

    def is_on(self) -> bool:
        return self._on

    def set_status(self, mode: bool) -> None:
        self._on = mode

    def __iter__(self) -> Iterator[tuple[str, timer.Timer]]:
        yield from self._timers.items()


def save_checkpoint(
    file: str | Path, epoch: int, model: nn.Module, optimizer: Any = None, lr_scheduler: Any = None, **options: Any
) -> None:
    """Save everything under `file`, which becomes a folder with one checkpoint of Colonnade. Collective.

    The optimizer and the scheduler are saved too, and any layout can load it.
    """
    if options:
        raise ConfigError(
            f"save_checkpoint takes no {', '.join(options)}: the file is none of torch.save's. Leave it out."
        )
    with CheckpointManager(_folder(file), gpc, keep=1) as manager:
        manager.save(epoch, model, optimizer, _extra(lr_scheduler))


def load_checkpoint(
    file: str | Path, model: nn.Module, optimizer: Any = None, lr_scheduler: Any = None, strict: bool = True
) -> int:
    """Load what `save_checkpoint` wrote to `file`, on any layout, and return its epoch. Collective."""
    if not strict:
        raise ConfigError("strict=False: a checkpoint is loaded whole or not at all. Leave it out.")
    with CheckpointManager(_folder(file), gpc, read_only=True) as manager:
        return manager.load(model, optimizer, _extra(lr_scheduler)).step


def _folder(file: str | Path) -> Path:
    folder = local_path(file, "the file of a checkpoint", CheckpointError)
    if folder.is_file():
        raise CheckpointError(
            f"{file} is a file. Checkpoints are folders here, written by save_checkpoint; weights in a file of torch.save's "
            f"are loaded by model.load_state_dict before initialize."
        )
    return folder


def _extra(lr_scheduler: Any) -> dict[str, Any]:
    return {} if lr_scheduler is None else {"lr_scheduler": lr_scheduler}
