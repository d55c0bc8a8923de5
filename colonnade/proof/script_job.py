"""The code of `colonnade verify train.py` that runs inside the processes of the script.

The parent (scripts.py) sets COLONNADE_VERIFY to a file with a `ScriptPart`: the role of this process.
`recorded_for_verify` wraps the script, and `ScriptRecorder` records it. There are two roles:

- "ranks": the script runs unchanged, and its batches are recorded too.
- "single": the script runs in a single process, where every parallel size is 1. It starts from the weights of the ranks, and
  wherever a batch comes in (a loader, a call of the engine, a schedule, a criterion) it gets the global batch instead.

`colonnade.verify(engine)` (api.py) needs none of this: the caller passes the batches, so the ranks train in the same
process, and the reference is plain torch (`OneProcess`). A script has its own loop, so its functions are replaced from
the outside, and the reference is the script itself. Both ways record an engine with `EngineRecorder` (record.py), and
both make a `Record` for each rank and a `TrueRun`. They meet in `compare.assemble`, which combines these to the
`Evidence` for `diagnose`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.data import DataLoader

from colonnade.checkpoint.manager import CheckpointManager
from colonnade.config import Config
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine import build
from colonnade.engine.engine import Engine
from colonnade.errors import ParityError
from colonnade.parallel.placement import local_part
from colonnade.parallel.split import Split
from colonnade.proof.frameworks import frameworks_adapted
from colonnade.proof.local_shards import LOCAL, LocalTensors
from colonnade.proof.mutation import plant
from colonnade.proof.processes import NEEDS_NEW_PYTHON, is_forked
from colonnade.proof.races import asynchronous_work
from colonnade.proof.random_numbers import RandomNumbers, RecordedDraws, ReplayedDraws, notes_of
from colonnade.proof.record import (
    EngineRecorder,
    Tracked,
    as_real,
    is_sketchable,
    name_in_full_model,
    on_cpu,
    options_of,
)
from colonnade.proof.reference import canonical_names, load, moved_by_an_ulp
from colonnade.proof.sketch import Block, Blocks, Stored, store
from colonnade.proof.start_weights import own_start
from colonnade.testing.truth import in_double

VARIABLE = "COLONNADE_VERIFY"
_LOADED = 64
"""The number of batches that are recorded of each loader."""
JOINED, START, DRAWS, REFERENCE, OPTIONS = "joined{data_rank}.pt", "start.pt", "draws.pt", "reference.pt", "options.pt"
WEIGHTS = "weights{step}.pt"


@dataclass(frozen=True)
class ScriptPart:
    """The role of one process in a verification.

    `result` is the name of the file that it writes, with a placeholder {rank}.
    """

    role: str
    folder: str
    result: str
    steps: int = 2
    dtype: str = "fp64"
    noise: int | None = None
    """In a single process: the seed for moving weights and inputs by one ulp."""
    reseeds_host: bool = False
    """In a single process: Python's and NumPy's generators get another seed, because the ranks draw different numbers from them."""
    data_rank: int | None = None
    """In a single process: the data rank whose batches it gets instead of the global batches."""
    mistake: str | None = None
    whole: list[str] | None = None
    """On the ranks: the large tensors that are recorded as a whole, and not as sketches; None: all."""
    keeps_weights: bool = False
    """In a single process: write the weights after each step to a file, for runs on the batches of one data rank."""
    off: dict[str, str] | None = None
    """The modules without dropout, with the reasons; None: all of them."""
    keeps_checkpoints: bool = False
    """On the ranks: the script writes and reads its checkpoints, and the state of its optimizer is recorded (resume.py)."""
    ends_before: int | None = None
    """On the ranks: the step before whose update the process ends, like in a crash."""
    schedule: str | None = None
    """On the ranks: when asynchronous work runs (races.py)."""

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)))
        return path

    @property
    def is_single(self) -> bool:
        """Whether the script runs in a single process."""
        return self.role == "single"


def current_role() -> ScriptPart | None:
    """Return the role of this process; None if it was not started by `colonnade verify`."""
    path = os.environ.get(VARIABLE)
    return ScriptPart(**json.loads(Path(path).read_text())) if path else None


IN_EVAL = "in evaluation mode"
"""The key in the joined batches that says that all ranks trained in evaluation mode."""
_HALF = ("bf16", "fp16", "float8")
_ONLY_TOGETHER = ("zero", "sync", "gradient_handler", "gradient_handlers", "schedule", "compare_batches", "cuda_graph")
_FROM_GRAPH = "from the graph"


@contextmanager
def recorded_for_verify(part: ScriptPart) -> Iterator[None]:
    """Record the engine of a script, or the model that it passes to `watch`, in the block.

    The process ends after the last compared step. The code of the script is unchanged: the functions with which it
    loads a config, builds an engine, iterates a loader, clips and saves are replaced before it can import them by name.
    """
    with ExitStack() as stack:
        if part.dtype == "fp64":
            stack.enter_context(in_double())
        script = ScriptRecorder(part, stack)
        global _script
        _script = script
        stack.enter_context(script.dropping)
        stack.enter_context(_replaced(ParallelContext, "load_config", script.load_config))
        stack.enter_context(_replaced(build, "initialize", script.initialize))
        if part.dtype == "fp64":
            stack.enter_context(_replaced(torch.amp.GradScaler, "__init__", script.without_scaler))
        stack.enter_context(_replaced(DataLoader, "__iter__", script.fed_loader))
        for name in ("clip_grad_norm_", "clip_grads_with_norm_"):
            stack.enter_context(_replaced(nn.utils, name, script.seen_clipping))

        def install(adapter: Any) -> None:
            for home, name, make in adapter.replacements(script):
                stack.enter_context(_replaced(home, name, make))

        stack.enter_context(frameworks_adapted(install))

        # A verified script must not write checkpoints, which a real run might resume from, nor wait for other writers.
        def read_only(own: Callable[..., None]) -> Callable[..., None]:
            return lambda *args, **kwargs: own(*args, **{**kwargs, "read_only": True})

        if not part.keeps_checkpoints:
            stack.enter_context(_replaced(CheckpointManager, "__init__", read_only))
            stack.enter_context(_replaced(CheckpointManager, "save", lambda own: lambda *args, **kwargs: None))
        if part.schedule is not None:
            stack.enter_context(asynchronous_work(part.schedule))

        # The compiler has hung in a forked process. The parent starts this script again in new ones.
        if is_forked():
            stack.enter_context(_replaced(torch, "compile", lambda own: end_for_new_python))
        try:
            yield
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        script.end_of_script()


def end_for_new_python(*_: Any, **__: Any) -> NoReturn:
    """End this forked process, because the script needs one that was not forked."""
    os._exit(NEEDS_NEW_PYTHON)


def shown(value: Any) -> str:
    """Format a config value without the addresses of objects and functions, which differ between processes."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


_script: ScriptRecorder | None = None


def current_script() -> ScriptRecorder | None:
    """Return the recorder of this process; None if it was not started by `colonnade verify`."""
    return _script


class ScriptRecorder:
    """Records a script from `launch` to its last compared step, and writes the record."""

    def __init__(self, part: ScriptPart, around: ExitStack) -> None:
        self.part, self._around = part, around
        self.folder = Path(part.folder)
        self.dropping: RandomNumbers = RecordedDraws(part.off)
        if part.is_single:
            redraws = 0 if part.noise is None else part.noise + 1
            self.dropping = ReplayedDraws(torch.load(self.folder / DRAWS, weights_only=False), redraws)
            self.dropping.data_rank = part.data_rank
            self.dropping.host_seed = redraws if part.reseeds_host else None
        self.given: dict[str, list[Any]] = {}
        self._given_in: dict[str, list[int]] = {}
        self._joined: dict[str, list[Any]] = {}
        self._joined_in: dict[str, list[int]] = {}
        if part.is_single:
            self._joined, self._joined_in = torch.load(
                self.folder / JOINED.format(data_rank="" if part.data_rank is None else part.data_rank),
                weights_only=False,
            )
        self._noise = torch.Generator().manual_seed(part.noise) if part.noise is not None else None
        self.notes: list[str] = []
        self.recorder: Any = None
        self._model: nn.Module | None = None
        self._rename: Callable[[str], str] = lambda name: name
        self._optimizer: Any = None
        self._options, self._ulp, self.config_of_ranks, self._of_blocks = (
            torch.load(self.folder / OPTIONS, weights_only=False) if part.is_single else ([], None, {}, [])
        )
        self._config: dict[str, str] = {}
        """The config of the script as text, by key, for the comparison between ranks and single process."""
        self._loaders: dict[int, int] = {}
        self._begun = False
        self._fed_by_schedule = False
        self.loading = False
        """Whether a loader is asked for a batch, which may come from a loader inside it."""

    # --- Replacements of functions of the library and of torch ---

    def load_config(self, own: Callable[..., None]) -> Callable[..., None]:
        """Wrap `ParallelContext.load_config`: compare the config with that of the ranks, and change it for this role."""

        def load_config(context: ParallelContext, config: Any) -> None:
            own(context, config)
            self._config = {key: shown(value) for key, value in context.config.items()}

            # Values that the script computes from the number of ranks differ in a single process. That is no mistake of the
            # ranks, so it is only noted, unless the steps cannot be compared with it.
            keys = self.config_of_ranks.keys() | self._config.keys() if self.config_of_ranks else set[str]()
            for key in sorted(keys.difference(_ONLY_TOGETHER, ["parallel"])):
                on_ranks, here = self.config_of_ranks.get(key, "not set"), self._config.get(key, "not set")
                if on_ranks == here:
                    continue
                differs = f"{key} is {on_ranks} on the ranks and {here} in a single process, because it depends on the number of ranks"
                if key == "gradient_accumulation":
                    raise ParityError(
                        f"{differs}. The single process gets the global batch of each pass, so it must take the same "
                        f"number of passes in a step. Set {key} to a fixed value for the comparison, here {on_ranks}.",
                        code="C100",
                    )
                self.notes.append(f"{differs}: each used its own value")
            context.config = self._changed(context.config)

        return load_config

    def initialize(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `initialize`: change the model for this role, and record the engine."""

        @wraps(own)
        def initialize(model: Any, *args: Any, **kwargs: Any) -> Any:
            built = own(self._prepared(model), *args, **kwargs)
            if self.recorder is None:
                self._attach(built[0])
            return built

        return initialize

    def fed_loader(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `DataLoader.__iter__`: record or replace the batches of every loader.

        Batches are recorded here too, because a script may pass labels to its own loss, past the engine.
        """

        def iterate(loader: Any) -> Loaded:
            with self.dropping.paused():  # it draws a seed for its workers
                found = own(loader)
            return Loaded(found, f"loader{self._loaders.setdefault(id(loader), len(self._loaders))}", self)

        return iterate

    def seen_clipping(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a clip function of torch: the recorder of a plain torch script gets the unclipped gradients and the norm."""

        @wraps(own)
        def clip(*args: Any, **kwargs: Any) -> Any:
            clipping = getattr(self.recorder, "clipping", None)
            return own(*args, **kwargs) if clipping is None else clipping(own, *args, **kwargs)

        return clip

    def _changed(self, config: Config) -> Config:
        """The config for this process.

        In fp64, half precision is removed. In a single process, every size is 1 and keys for several ranks are removed.
        """
        changed = config.copy()
        half = [key for key in _HALF if changed.get(key)] if self.part.dtype == "fp64" else []
        for key in half:
            changed.pop(key)
        if half:
            verb = "was" if len(half) == 1 else "were"
            self.notes.append(f"{', '.join(half)} {verb} left out: both runs are in fp64 (--dtype own keeps the dtype)")
        if not self.part.is_single:
            return changed
        wanted = changed.get("schedule") or {}
        schedule = {"type": wanted} if isinstance(wanted, str) else dict(wanted)
        for key in _ONLY_TOGETHER:
            if key in changed:
                changed.pop(key)
        # A schedule with micro-batches must keep them, because losses and gradients are recorded for each of them.
        if schedule.get("num_microbatches"):
            kept = {
                key: value for key, value in schedule.items() if key not in ("type", "order", "num_chunks", "table")
            }
            changed["schedule"] = {"type": "OneFOneB", **kept}
        elif schedule:
            changed["schedule"] = schedule

        def size_one(value: Any) -> Any:
            if not isinstance(value, dict):
                return 1
            return {key: 1 if key == "size" else content for key, content in value.items() if key != "depth"}

        parallel = {key: value for key, value in (changed.get("parallel") or {}).items() if key != "expert"}
        changed["parallel"] = {key: size_one(value) for key, value in parallel.items()}
        return changed

    def _prepared(self, model: Any) -> Any:
        """The model (or the function that makes it) as this process builds it: unsplit in a single process, double in fp64."""
        if not isinstance(model, (nn.Module, Split)):
            return lambda: self._prepared(model())
        if self.part.is_single and isinstance(model, Split):
            if model.whole is None:
                raise ParityError(
                    "the model was passed as custom stages, so the unsplit model is unknown. Pass the full model to "
                    "colonnade.split, or call colonnade.verify(engine, reference=...) in the script.",
                    code="C100",
                )
            model = model.whole
        if self.part.dtype == "fp64":
            for module in model if isinstance(model, Split) else [model]:
                module.double()
        return model

    # --- The engine ---

    def follow(self, recorder: Any, model: nn.Module, rename: Callable[[str], str] = lambda name: name) -> None:
        """Use this recorder, and intercept the random operators of the model from now on."""
        self.recorder, self._model, self._rename = recorder, model, rename
        self._around.enter_context(self.dropping.watching(model, rename))

    def _attach(self, engine: Engine) -> None:
        """Record an engine, and note or replace the batches that reach it: by a call, by its schedule or by its criterion."""
        if self.part.mistake is not None:
            plant(engine, self.part.mistake)
        self.follow(
            EngineRecorder(engine, self.dropping, self.sketched),
            engine.model,
            partial(name_in_full_model, engine.model),
        )
        self._optimizer = engine.optimizer
        schedule: Any = engine.schedule
        forward, load_batch = engine._forward, schedule.load_batch
        execute, step = engine.execute_schedule, engine.step

        # A schedule calls the engine with micro-batches of a batch that was replaced already, so calls count only outside.
        # In evaluation mode, a pass belongs to the training only if a backward pass follows: some ranks may have been left in
        # that mode. A single process cannot look ahead, and does what the ranks did.
        in_eval: list[Any] = []
        trains_in_eval = bool(self._joined.get(IN_EVAL))

        # Replaces `engine._forward`: a script that calls the engine passes the batch here.
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and not self._fed_by_schedule:
                if engine.training or trains_in_eval:
                    in_eval.clear()
                    self.begin()
                    args, kwargs = self.note_or_replace("call", (args, kwargs))
                elif not self.part.is_single:
                    self.begin()
                    in_eval.append(on_cpu((args, kwargs)))
            return forward(*args, **kwargs)

        # Replaces `engine.backward`: it shows that the preceding calls in evaluation mode belong to the training. Only the ranks
        # have such calls; their batches are recorded here.
        @wraps(engine.backward)
        def backward(*args: Any, own: Callable[..., Any] = engine.backward, **kwargs: Any) -> Any:
            for batch in in_eval:
                self.note_or_replace("call", batch)
            in_eval.clear()
            return own(*args, **kwargs)

        # Replaces `schedule.load_batch`: a script that runs `execute_schedule` passes an iterator, and the schedule takes the batch
        # from it. The batch is recorded or replaced before the schedule splits it into micro-batches.
        def load_replaced(data_iter: Any, *args: Any, **kwargs: Any) -> Any:
            if data_iter is None or not self._begun:
                return load_batch(data_iter, *args, **kwargs)
            self._fed_by_schedule = True
            return load_batch(iter([self.note_or_replace("batch", next(data_iter))]), *args, **kwargs)

        # Replaces `engine.execute_schedule`: the initial weights must be recorded (or loaded) before its first forward pass, and its
        # end is the end of the time in which calls of the engine are those of the schedule.
        @wraps(execute)
        def execute_schedule(*args: Any, **kwargs: Any) -> Any:
            self.begin(kwargs.get("forward_only", False))
            try:
                return execute(*args, **kwargs)
            finally:
                self._fed_by_schedule = False

        # Replaces `engine.step`: only the script knows when a step is. The options of the optimizer are recorded (or set) before the
        # step, and the process ends after the last compared step.
        @wraps(step)
        def recorded_step(*args: Any, **kwargs: Any) -> Any:
            self.before_step(self._optimizer)
            # The optimizer has no dropout, and must not compute in the dtypes of the recorded model.
            with torch._C.DisableTorchFunction():
                stepped = step(*args, **kwargs)
            if stepped:
                self.end_of_step()
            return stepped

        engine._forward, schedule.load_batch = call, load_replaced
        # A script may pass labels past the engine's call, to its criterion only.
        if engine._criterion is not None:
            engine._criterion = Criterion(engine._criterion, self)
        for name, method in (("execute_schedule", execute_schedule), ("step", recorded_step), ("backward", backward)):
            setattr(engine, name, method)

    # --- During the run ---

    def note_config(self, config: dict[str, str]) -> None:
        """Record the values of a framework's config; a single process finds those of the ranks in `config_of_ranks`."""
        self._config |= config

    def sketched(self, entry: Tracked) -> Blocks:
        """Return the blocks of a tensor that are recorded as sketches.

        On the ranks, these are the parts that they store of large tensors; in a single process, the blocks of all
        ranks.
        """
        if self.part.is_single:
            return list(dict.fromkeys(block for name, block in self._of_blocks if name in entry.names))
        whole = self.part.whole
        if whole is None or not set(entry.names).isdisjoint(whole):
            return ()
        return (None,) if is_sketchable(entry.shape, entry.tensor, entry.positions) else ()

    def begin(self, forward_only: bool = False) -> None:
        """Called before each pass.

        Before the first training pass, record the initial weights; a single process loads those of the ranks.
        """
        if self._begun or forward_only:
            return
        self._begun = True
        if self.part.is_single:
            start = torch.load(self.folder / START, weights_only=False)
            start = {name: x.tensor() if isinstance(x, Stored) else x for name, x in start.items()}
            start = self._with_local_shards(start)
            if self.part.noise is None and self.part.data_rank is None and self._model is not None:
                self.recorder.record.run.own_start = own_start(self._model, start, self._rename)
            self._load(start)
        self.recorder.recorder.note_start()
        if not self.part.is_single:
            with torch._C.DisableTorchFunction():
                self.recorder.record.run.sketched = {
                    entry.name: None if entry.positions is None else Block.at(entry.positions)
                    for entry in self.recorder.tracked
                    if entry.name in self.recorder.recorder.sketched
                }
                self.recorder.record.run.stored = {
                    entry.name: store(entry.name, local_part(entry.tensor), self.folder)
                    for entry in self.recorder.tracked
                    if entry.name in self.recorder.recorder.sketched
                }

    def _with_local_shards(self, start: dict[str, Tensor]) -> dict[str, Tensor]:
        """Join the blocks of parameters that have another shape in this process."""
        local: LocalTensors = torch.load(self.folder / LOCAL, weights_only=False)
        for name, parameter in self._model.named_parameters() if self._model is not None else ():
            value = start.get(self._rename(name))
            own = as_real(local_part(parameter.detach()))
            if value is None or value.shape == own.shape:
                continue
            joined = local.joined(self._rename(name), value, own)
            if joined is None:
                raise ParityError(
                    f"the parameter {self._rename(name)} has the shape {tuple(value.shape)} on the ranks and {tuple(own.shape)} in a "
                    f"single process. verify cannot infer which elements each rank has: the shards, joined in the order of the ranks, are "
                    f"not the initial weight of the single process. Do one of these: make the parameter a DTensor; declare its "
                    f"placement with place(); or draw the full weight from one seed on every rank, and shard it afterwards",
                    code="C100",
                )
            start[self._rename(name)] = joined
        return start

    def note_or_replace(self, key: str, value: Any, most: int | None = None) -> Any:
        """On the ranks, record a value and return it; in a single process, return the joined value of all ranks.

        Args:
            key: The place where the value comes in.
            value: A batch, or the arguments of a call.
            most: The number of values that are recorded at that place; later ones are returned unchanged.
        """

        def widened(leaf: Tensor) -> Tensor:
            return leaf.double() if leaf.is_floating_point() and not leaf.requires_grad else leaf

        if self.part.dtype == "fp64":
            value = tree_map_only(Tensor, widened, value)
        noted = self.given.setdefault(key, [])
        if most is not None and len(noted) >= most:
            return value
        if not self.part.is_single:
            # Results of the model (the arguments of a criterion) have no place in a batch; the single process computes them.
            inputs = tree_map(
                lambda leaf: _FROM_GRAPH if isinstance(leaf, Tensor) and leaf.requires_grad else leaf, value
            )
            noted.append(on_cpu(inputs))
            done = len(self.recorder.record.steps) if self.recorder is not None else 0
            self._given_in.setdefault(key, []).append(done)
            return value
        noted.append(None)
        found, at = self._joined.get(key, ()), len(noted) - 1
        if key in self._joined_in:
            # The ranks took unequal numbers of batches in a step, so those of each step are counted from its start.
            taken, done = self._given_in.setdefault(key, []), len(self.recorder.record.steps)
            places = [place for place, step in enumerate(self._joined_in[key]) if step == done]
            at = places[taken.count(done)] if taken.count(done) < len(places) else len(found)
            taken.append(done)
        if at >= len(found) and most is None:
            raise ParityError(
                f"the script takes {len(noted)} batches in {self.part.steps} steps in a single process, but only "
                f"{len(found)} on each rank, at {key}. The number of passes in a step may depend on the number of "
                "ranks (WORLD_SIZE). Set it to a fixed value for the comparison.",
                code="C100",
            )

        def replaced(own: Any, joined: Any) -> Any:
            if isinstance(own, Tensor) and isinstance(joined, Tensor):
                return moved_by_an_ulp(joined, self._noise, self._ulp).to(own.device)
            return own

        return tree_map(replaced, value, found[at]) if at < len(found) else value

    def before_step(self, optimizer: Any) -> None:
        """Record the options of the optimizer; in a single process, set those of the ranks.

        A learning rate that the script scales with the number of ranks is therefore no difference.
        """
        here, done = options_of(optimizer), len(self.recorder.record.steps)
        if done == self.part.ends_before:
            self.finish()
        self.recorder.recorder.note_options(here)
        if self.part.keeps_checkpoints:
            self.recorder.recorder.note_state()
        on_ranks = self._options[done] if done < len(self._options) else []
        for group, own, given in zip(optimizer.param_groups, here, on_ranks, strict=False):
            for key in [key for key in given if key in own and own[key] != given[key]]:
                group[key] = group[key].fill_(given[key]) if isinstance(group[key], Tensor) else given[key]
                if not any(note.startswith(f"{key} of the optimizer") for note in self.notes):
                    self.notes.append(
                        f"{key} of the optimizer is {given[key]:g} on the ranks and {own[key]:g} in a single process, because "
                        f"it depends on the number of ranks: both used the value of the ranks"
                    )

    def without_scaler(self, own: Callable[..., None]) -> Callable[..., None]:
        """Wrap the constructor of GradScaler: the scaler is disabled.

        In fp64 no loss needs a scale, and torch's scaler does not support fp64.
        """

        def make(scaler: Any, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("enabled", True):
                self.notes.append("GradScaler was turned off: both runs are in fp64 (--dtype own keeps the dtype)")
            own(scaler, *args[:5], **{**kwargs, "enabled": False})

        return make

    def end_of_step(self) -> None:
        """Called after each step; writes the record and ends the process after the last compared one."""
        done = len(self.recorder.record.steps)
        if self.part.keeps_weights:
            tracked = self.recorder.tracked
            weights = {entry.name: local_part(entry.tensor) for entry in tracked if entry.is_parameter}
            with torch._C.DisableTorchFunction():
                torch.save(weights, self.folder / WEIGHTS.format(step=done - 1))
        if done >= self.part.steps:
            self.finish()
        # A run on the batches of one data rank has other gradients. The next step needs the weights of the reference again.
        if self.part.data_rank is not None:
            self._load(torch.load(self.folder / WEIGHTS.format(step=done - 1), weights_only=False))

    def end_of_script(self) -> None:
        """Called if the script ends before the last step.

        Without any step, the file only has whether there was an engine.
        """
        if self.recorder is None or not self.recorder.record.steps:
            torch.save(self.recorder is not None, self.folder / self.part.result.format(rank=os.environ["RANK"]))
            return
        done = len(self.recorder.record.steps)
        self.notes.append(f"{done} of {self.part.steps} steps were compared: the script took no more")
        self.finish()

    def finish(self) -> NoReturn:
        """Write the record and end this process, so that no code of the script runs after the last compared step."""
        record = self.recorder.record
        record.notes += [*notes_of(self.dropping, self.part.off), *self.notes]
        record.run.zeroed, record.run.config = self.dropping.zeroed, self._config
        record.run.host = self.dropping.host
        if not self.part.is_single:
            record.run.given, record.run.given_in = self.given, self._given_in
        elif self._model is not None:
            record.run.names = canonical_names(self._model, self._rename)
        if isinstance(self.dropping, ReplayedDraws):
            record.run.replays = self.dropping.found
        with torch._C.DisableTorchFunction():
            torch.save(record, self.folder / self.part.result.format(rank=record.rank))
            if dist.is_initialized():
                dist.barrier()  # other ranks may still wait for messages of this one
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _load(self, weights: dict[str, Tensor]) -> None:
        assert self._model is not None
        with torch._C.DisableTorchFunction():
            load(self._model, weights, self._noise, in_place=True, rename=self._rename, ulp=self._ulp)


@contextmanager
def _replaced(home: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    own = getattr(home, name)
    setattr(home, name, make(own))
    try:
        yield
    finally:
        setattr(home, name, own)


# --- Wrappers of a script's loader, batches and criterion, which record values or replace them by the global ones ---


class Loaded:
    """The iterator of a DataLoader, whose batches are recorded or replaced."""

    def __init__(self, own: Iterator[Any], key: str, script: ScriptRecorder) -> None:
        self._own, self._key, self._script = own, key, script

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        script = self._script
        if script.loading:
            return next(self._own)
        script.loading = True
        try:
            with script.dropping.paused():
                own = next(self._own)
        finally:
            script.loading = False
        return script.note_or_replace(self._key, own, most=_LOADED)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class Batches:
    """The batches of a plain torch script, which are recorded or replaced.

    All other attributes come from the script's object.
    """

    def __init__(self, own: Any, script: ScriptRecorder) -> None:
        self._own, self._script = own, script

    def __iter__(self) -> Iterator[Any]:
        with self._script.dropping.paused():
            batches = iter(self._own)
        while True:
            with self._script.dropping.paused():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield self._script.note_or_replace("batch", batch)

    def __len__(self) -> int:
        return len(self._own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class Criterion:
    """The criterion of an engine. Its arguments are recorded; in a single process, it gets the labels of all ranks."""

    def __init__(self, own: Any, script: ScriptRecorder) -> None:
        self._own, self._script = own, script

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        script = self._script
        if torch.is_grad_enabled() and script._begun and not script._fed_by_schedule:
            args, kwargs = script.note_or_replace("criterion", (args, kwargs))
        return self._own(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
