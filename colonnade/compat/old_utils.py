"""Colossal-AI's names outside `nn` and `communication`, for the global context.

`utils` and its modules: predicates, `clip_grad_norm_fp32`, memory, samplers, timers, `save_checkpoint`, `load_checkpoint`.
`trainer`: a Trainer with a timer, and hooks with Colossal-AI's arguments. `engine`, `engine.schedule`: schedules with its order
of arguments. `context`, `context.random`: RNG streams as functions. `testing`: assertions and decorators of its tests
(`colonnade.testing.run_world` starts the ranks).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade import trainer
from colonnade.checkpoint import CheckpointManager
from colonnade.context.parallel_mode import ParallelMode
from colonnade.core import global_context as gpc
from colonnade.engine.engine import Engine
from colonnade.engine.schedule.schedules import BaseSchedule, NonPipelineSchedule
from colonnade.engine.schedule.schedules import PipelineSchedule as _Pipeline
from colonnade.errors import CheckpointError, ConfigError
from colonnade.logging import DistributedLogger, get_dist_logger
from colonnade.optim.clip import clip_grad_norm_
from colonnade.paths import local_path
from colonnade.trainer import hooks
from colonnade.trainer.hooks.log import LogByEpochHook
from colonnade.utils.sampler import DistinctDataSampler

__all__ = ["NonPipelineSchedule"]

# --- `utils`: the global context, the device, samplers ---


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
    """Broadcast every parameter from the first rank of the mode."""
    if _is_using(parallel_mode):
        source, group = gpc.get_ranks_in_group(parallel_mode)[0], gpc.get_group(parallel_mode)
        for parameter in model.parameters():
            dist.broadcast(parameter.data, source, group=group)


def clip_grad_norm_fp32(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> float:
    """Clip by the gradient norm of the full model, for any placements; returns the norm before clipping."""
    return float(clip_grad_norm_(parameters, max_norm, norm_type, context=gpc if gpc.is_launched else None))


def conditional_context(context_manager: AbstractContextManager[Any], enable: bool = True) -> Any:
    return context_manager if enable else nullcontext()


def synchronize() -> None:
    """Synchronize the device, if it is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def empty_cache() -> None:
    torch.cuda.empty_cache()


def set_to_cuda(models: Any) -> Any:
    """Move a module, or a list of modules, to the device of this rank."""
    return [model.to(gpc.device) for model in models] if isinstance(models, list) else models.to(gpc.device)


def report_memory_usage(message: str, logger: DistributedLogger | None = None, report_cpu: bool = False) -> None:
    """Log the device memory of tensors and, with `report_cpu` or without a GPU, the peak host memory of this process."""
    figures = []
    if torch.cuda.is_available():
        used, most = torch.cuda.memory_allocated(gpc.device), torch.cuda.max_memory_allocated(gpc.device)
        figures.append(f"device {used >> 20} MiB now, {most >> 20} MiB at most")
        torch.cuda.reset_peak_memory_stats(gpc.device)
    if report_cpu or not figures:
        import resource  # does not exist on Windows

        figures.append(f"host {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB at most")
    (logger or get_dist_logger()).info(f"{message}: {', '.join(figures)}")


class DataParallelSampler(DistinctDataSampler):
    """Gives each data rank its own samples, like `get_dataloader`."""

    def __init__(self, dataset: Any, shuffle: bool = False, seed: int = 0, drop_last: bool = False) -> None:
        super().__init__(dataset, gpc.layout, gpc.get_global_rank(), shuffle, seed, drop_last)


# --- `utils`, `utils.timer`: timers on the host's clock ---


class Timer:
    """A stopwatch in seconds with an optional history of laps."""

    def __init__(self) -> None:
        self.history: list[float] = []
        self._since: float | None = None
        self._last = 0.0

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self, keep_in_history: bool = False) -> float:
        """Synchronize the device, end the lap and return its seconds; 0 if no lap was started."""
        synchronize()
        if self._since is None:
            return 0.0
        self._last, self._since = time.perf_counter() - self._since, None
        if keep_in_history:
            self.history.append(self._last)
        return self._last

    def reset(self) -> None:
        self.history.clear()
        self._since, self._last = None, 0.0

    def get_elapsed_time(self) -> float:
        """Return the seconds of the last lap."""
        return self._last

    def get_history_sum(self) -> float:
        return sum(self.history)

    def get_history_mean(self) -> float:
        return sum(self.history) / len(self.history)


class MultiTimer:
    """Timers by name, created on first use, which can be switched off together."""

    def __init__(self, on: bool = True) -> None:
        self._on = on
        self._timers: dict[str, Timer] = {}

    def start(self, name: str) -> None:
        if self._on:
            self.get_timer(name).start()

    def stop(self, name: str, keep_in_history: bool = True) -> float:
        return self.get_timer(name).stop(keep_in_history) if self._on else 0.0

    def get_timer(self, name: str) -> Timer:
        return self._timers.setdefault(name, Timer())

    def reset(self, name: str | None = None) -> None:
        """Reset one timer, or all."""
        for timer in [self.get_timer(name)] if name is not None else self._timers.values():
            timer.reset()

    def is_on(self) -> bool:
        return self._on

    def set_status(self, mode: bool) -> None:
        self._on = mode

    def __iter__(self) -> Iterator[tuple[str, Timer]]:
        yield from self._timers.items()


# --- `utils`, `utils.checkpointing`: checkpoints in a folder ---


def save_checkpoint(
    file: str | Path, epoch: int, model: nn.Module, optimizer: Any = None, lr_scheduler: Any = None, **options: Any
) -> None:
    """Save model, optimizer and scheduler to the folder `file`, as a checkpoint that any layout can load.

    Collective over the world.
    """
    if options:
        raise ConfigError(
            f"save_checkpoint does not accept {', '.join(options)}, because its checkpoints are not torch.save "
            "files. Leave these options out."
        )
    with CheckpointManager(_folder(file), gpc, keep=1) as manager:
        manager.save(epoch, model, optimizer, _extra(lr_scheduler))


def load_checkpoint(
    file: str | Path, model: nn.Module, optimizer: Any = None, lr_scheduler: Any = None, strict: bool = True
) -> int:
    """Load a checkpoint of `save_checkpoint`, on any layout, and return its epoch. Collective over the world."""
    if not strict:
        raise ConfigError(
            "strict=False is not supported, because a checkpoint is always loaded completely. Leave it out."
        )
    with CheckpointManager(_folder(file), gpc, read_only=True) as manager:
        return manager.load(model, optimizer, _extra(lr_scheduler)).step


def _folder(file: str | Path) -> Path:
    folder = local_path(file, "the file of a checkpoint", CheckpointError)
    if folder.is_file():
        raise CheckpointError(
            f"{file} is a file, but save_checkpoint writes folders. To load a torch.save file, call "
            "model.load_state_dict before initialize."
        )
    return folder


def _extra(lr_scheduler: Any) -> dict[str, Any]:
    return {} if lr_scheduler is None else {"lr_scheduler": lr_scheduler}


# --- `trainer`, `trainer.hooks` ---


class Trainer(trainer.Trainer):
    """Colonnade's Trainer with a timer, which measures epochs and steps of training and testing."""

    def __init__(
        self,
        engine: Engine,
        timer: MultiTimer | None = None,
        logger: DistributedLogger | None = None,
        schedule: BaseSchedule | None = None,
    ) -> None:
        super().__init__(engine, logger, schedule)
        self.timer = timer

    def fit(
        self,
        train_dataloader: Iterable[Any],
        epochs: int | None = None,
        max_steps: int | None = None,
        test_dataloader: Iterable[Any] | None = None,
        test_interval: int = 1,
        hooks: Iterable[Any] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        given = [*(hooks or ()), *([_TimerHook(self.timer)] if self.timer is not None else [])]
        super().fit(
            train_dataloader,
            epochs,
            max_steps,
            test_dataloader,
            test_interval,
            given,
            display_progress,
            return_output_label,
        )


class _TimerHook(hooks.BaseHook):
    """Runs the timers of a Colossal-AI trainer: "Train-epoch", "Train-step", "Test-epoch", "Test-step"."""

    def __init__(self, timer: MultiTimer) -> None:
        super().__init__(priority=-1000)  # before other hooks, which may log the laps
        for kind, point in (("Train", "train"), ("Test", "test")):
            for lap, part in (("epoch", "epoch"), ("step", "iter")):

                def start(*_: Any, name: str = f"{kind}-{lap}") -> None:
                    timer.start(name)

                def stop(*_: Any, name: str = f"{kind}-{lap}") -> None:
                    timer.stop(name)

                vars(self).update({f"before_{point}_{part}": start, f"after_{point}_{part}": stop})


class LogTimingByEpochHook(LogByEpochHook):
    """Logs the laps of the trainer's timer on rank 0: the epoch, and the mean of its steps."""

    def __init__(
        self,
        timer: MultiTimer | None = None,
        logger: Any = None,
        interval: int = 1,
        priority: int = 10,
        log_eval: bool = True,
        ignore_num_train_steps: int = 0,
    ) -> None:
        super().__init__(logger, interval, priority)
        self._timer, self._log_eval, self._ignore = timer, log_eval, max(0, ignore_num_train_steps)

    def after_hook_is_attached(self, trainer: trainer.Trainer) -> None:
        self._timer = getattr(trainer, "timer", None) or self._timer
        if self._timer is None:
            raise ConfigError("LogTimingByEpochHook needs a timer: Trainer(engine, timer=MultiTimer())", code="C092")

    def after_train_epoch(self, trainer: trainer.Trainer) -> None:
        self._log(trainer, "Train")

    def after_test_epoch(self, trainer: trainer.Trainer) -> None:
        if self._log_eval:
            self._log(trainer, "Test")

    def _log(self, trainer: trainer.Trainer, kind: str) -> None:
        assert self._timer is not None
        steps = self._timer.get_timer(f"{kind}-step").history[self._ignore :]
        step = f", a step {1000 * sum(steps) / len(steps):.2f} ms" if steps else ""
        spent = self._timer.get_timer(f"{kind}-epoch").get_elapsed_time()
        self.write(trainer, f"{kind.lower()}: {spent:.2f} s{step}")
        self._timer.reset(f"{kind}-step")


class SaveCheckpointHook(hooks.SaveCheckpointHook):
    def __init__(
        self,
        interval: int = 1,
        checkpoint_dir: str = "checkpoints",
        model: Any = None,
        save_by_iter: bool = False,
        priority: int = 100,
        **options: Any,
    ) -> None:
        folder = options.pop("folder", checkpoint_dir)
        super().__init__(interval, folder, model, **{"by_epoch": not save_by_iter, "priority": priority, **options})


class LoadCheckpointHook(hooks.LoadCheckpointHook):
    def __init__(self, checkpoint_dir: str = "checkpoints", *args: Any, **options: Any) -> None:
        super().__init__(options.pop("folder", checkpoint_dir), *args, **options)


class TensorboardHook(hooks.TensorBoardHook):
    def __init__(self, log_dir: str, *args: Any, **options: Any) -> None:
        super().__init__(log_dir, *args, **options)


# --- `engine`, `engine.schedule` ---

_Process = Callable[..., tuple[Any, Any]] | None


class PipelineSchedule(_Pipeline):
    """1F1B. `scatter_gather_tensors` is ignored: full tensors are sent between stages."""

    def __init__(
        self,
        num_microbatches: int,
        data_process_func: _Process = None,
        tensor_shape: Sequence[int] | None = None,
        scatter_gather_tensors: bool = False,
    ) -> None:
        super().__init__(num_microbatches, "1f1b", None, data_process_func, tensor_shape)


class InterleavedPipelineSchedule(_Pipeline):
    """1F1B over several chunks per rank; `engine.model` is a ModuleList of the chunks."""

    def __init__(
        self,
        num_microbatches: int,
        num_model_chunks: int,
        data_process_func: _Process = None,
        tensor_shape: Sequence[int] | None = None,
        scatter_gather_tensors: bool = False,
    ) -> None:
        super().__init__(num_microbatches, "interleaved_1f1b", num_model_chunks, data_process_func, tensor_shape)


# --- `context`, `context.random`: the RNG streams of the global context as functions ---


_chosen = ExitStack()


def seed(parallel_mode: ParallelMode) -> AbstractContextManager[None]:
    """Use the RNG stream of the mode inside the block."""
    return gpc.streams.use(parallel_mode)


def set_mode(parallel_mode: ParallelMode) -> None:
    """Use the RNG stream of the mode until the next `set_mode` or `reset_seeds`."""
    _chosen.close()
    _chosen.enter_context(seed(parallel_mode))


def add_seed(parallel_mode: ParallelMode, seed: int, overwrite: bool = False) -> None:
    """Start an RNG stream for the mode; raises if the mode has one, unless `overwrite` is set."""
    gpc.streams.add(parallel_mode, seed, overwrite)


def reset_seeds() -> None:
    """Remove all RNG streams."""
    _chosen.close()
    gpc.streams.clear()


def with_seed(function: Callable[..., Any], parallel_mode: ParallelMode) -> Callable[..., Any]:
    """Return a function that runs `function` with the RNG stream of the mode."""

    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        with gpc.streams.use(parallel_mode):
            return function(*args, **options)

    return run


# --- `testing` ---


Function = Callable[..., Any]


def assert_equal(a: Tensor, b: Tensor) -> None:
    assert torch.equal(a, b), f"expected a and b to be equal, but they are {a} and {b}"


def assert_not_equal(a: Tensor, b: Tensor) -> None:
    assert not torch.equal(a, b), f"expected a and b to differ, but both are {a}"


def assert_close(a: Tensor, b: Tensor, rtol: float = 1e-5, atol: float = 1e-8) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def assert_close_loose(a: Tensor, b: Tensor, rtol: float = 1e-3, atol: float = 1e-3) -> None:
    assert_close(a, b, rtol, atol)


def assert_equal_in_group(tensor: Tensor, process_group: dist.ProcessGroup | None = None) -> None:
    """Assert that every rank of the group has the same tensor. Collective over the group."""
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(others, tensor.contiguous(), group=process_group)
    for other in others:
        assert_equal(tensor, other)


def parameterize(argument: str, values: Iterable[Any]) -> Callable[[Function], Function]:
    """Decorator: call the function once for each value of the argument. Other arguments must be keywords."""
    chosen = list(values)

    def around(function: Function) -> Function:
        @wraps(function)
        def run(**options: Any) -> None:
            for value in chosen:
                function(**{argument: value, **options})

        # pytest would follow __wrapped__ and look for a fixture with the name of the argument.
        del run.__wrapped__
        return run

    return around


def rerun_on_exception(
    exception_type: type[BaseException] = Exception, pattern: str | None = None, max_try: int | None = 5
) -> Callable[[Function], Function]:
    """Decorator: call the function up to `max_try` times while it raises such an error; the last error is raised."""

    def around(function: Function) -> Function:
        @wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            tries = 0
            while True:
                tries += 1
                try:
                    return function(*args, **options)
                except exception_type as error:
                    if tries == max_try or (pattern is not None and not re.match(pattern, str(error))):
                        raise

        return run

    return around


def rerun_if_address_is_in_use() -> Callable[[Function], Function]:
    return rerun_on_exception(pattern=r"(.*\n)*.*[Aa]ddress already in use")


def skip_if_not_enough_gpus(min_gpus: int) -> Callable[[Function], Function]:
    """Decorator: call the function only if there are at least `min_gpus` CUDA devices."""

    def around(function: Function) -> Function:
        @wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            return function(*args, **options) if torch.cuda.device_count() >= min_gpus else None

        return run

    return around
