"""The side of the processes of `colonnade verify train.py`: the script runs here, recorded, and fed where it runs alone.

The parent (scripts.py) sets COLONNADE_VERIFY to a file with a `ScriptPart`: the role of this process. `taking_part` wraps
the script. One of the "ranks" runs it as it is, and notes what it does. "Alone" it is one process in which every parallel
size is 1: it starts from the weights that the ranks started from, and wherever a batch comes in (a loader, a call of the
engine, a schedule, a criterion) it is given those of all ranks, joined. `ScriptRecorder` is both.
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
from colonnade.parallel.split import Split
from colonnade.proof.dropout_masks import Dropping, Nothing, Noting, Replaying, notes_of
from colonnade.proof.mutation import plant
from colonnade.proof.record import EngineRecorder, name_in_whole, on_cpu, options_of
from colonnade.proof.reference import canonical_names, load, moved_by_an_ulp
from colonnade.testing.truth import in_double

VARIABLE = "COLONNADE_VERIFY"
_LOADED = 64
"""Batches of each loader that are kept."""
JOINED, START, MASKS, REFERENCE, OPTIONS = "joined{share}.pt", "start.pt", "masks.pt", "reference.pt", "options.pt"


@dataclass(frozen=True)
class ScriptPart:
    """The role of one process in a verification; `result` is the file that it writes, with {rank}."""

    role: str
    folder: str
    result: str
    steps: int = 2
    dtype: str = "fp64"
    noise: int | None = None
    """Alone: the seed by which weights and inputs are moved by one ulp."""
    share: int | None = None
    """Alone: which share of the batches it is given, of those that ranks see apart."""
    mistake: str | None = None
    off: dict[str, str] | None = None
    """The modules in which nothing is dropped, and why; None: nothing is dropped anywhere."""

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)))
        return path

    @property
    def alone(self) -> bool:
        return self.role == "alone"


def current_part() -> ScriptPart | None:
    """The role of this process, if it was started by `colonnade verify`."""
    path = os.environ.get(VARIABLE)
    return ScriptPart(**json.loads(Path(path).read_text())) if path else None


_HALF = ("bf16", "fp16", "float8")
_ONLY_TOGETHER = ("zero", "sync", "gradient_handler", "gradient_handlers", "schedule", "compare_batches", "graph_step")
_FROM_GRAPH = "from the graph"


@contextmanager
def taking_part(part: ScriptPart) -> Iterator[None]:
    """Around a script: its engine is recorded, or the model that it hands to `watch`. The process ends after the last step.

    Nothing of the script is changed. The functions by which it loads a config, builds an engine, iterates a loader, clips and
    saves are replaced while it runs, before it can import them by name.
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
        stack.enter_context(_replaced(CheckpointManager, "__init__", _only_reads))
        stack.enter_context(_replaced(CheckpointManager, "save", lambda own: lambda *args, **kwargs: None))
        try:
            yield
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        script.end_of_script()


def shown(value: Any) -> str:
    """A value of a config as text that two processes have in common: their objects and functions lie at other addresses."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


_script: ScriptRecorder | None = None


def current_script() -> ScriptRecorder | None:
    """The recorder of the script that runs in this process, if `colonnade verify` started it."""
    return _script


class ScriptRecorder:
    """Follows one process from `launch` to its last step, and writes what it saw."""

    def __init__(self, part: ScriptPart, around: ExitStack) -> None:
        self.part, self._around = part, around
        self.folder = Path(part.folder)
        self.dropping = self._dropping()
        self.given: dict[str, list[Any]] = {}
        self._joined: dict[str, list[Any]] = {}
        if part.alone:
            self._joined = torch.load(
                self.folder / JOINED.format(share="" if part.share is None else part.share), weights_only=False
            )
        self._noise = torch.Generator().manual_seed(part.noise) if part.noise is not None else None
        self.notes: list[str] = []
        self.recorder: Any = None
        self._model: nn.Module | None = None
        self._rename: Callable[[str], str] = lambda name: name
        self._optimizer: Any = None
        self._options, self._ulp, self._of_ranks = (
            torch.load(self.folder / OPTIONS, weights_only=False) if part.alone else ([], None, {})
        )
        self._config: dict[str, str] = {}
        """What the script gave, by key: to be compared with what it gives as one process."""
        self._loaders: dict[int, int] = {}
        self._begun = False
        self._fed_by_schedule = False

    def _dropping(self) -> Dropping:
        if self.part.off is None:
            return Nothing()
        if not self.part.alone:
            return Noting(self.part.off)
        replaying = Replaying(torch.load(self.folder / MASKS, weights_only=False))
        replaying.share = self.part.share
        return replaying

    # --- Functions that stand in the place of ours and of torch's ---

    def load_config(self, own: Callable[..., None]) -> Callable[..., None]:
        def load_config(context: ParallelContext, config: Any) -> None:
            own(context, config)
            self._config = {key: shown(value) for key, value in context.config.items()}
            if self.part.alone:
                self._compare_config()
            context.config = self._changed(context.config)

        return load_config

    def initialize(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own)
        def initialize(model: Any, *args: Any, **kwargs: Any) -> Any:
            built = own(self._prepared(model), *args, **kwargs)
            if self.recorder is None:
                self._attach(built[0])
            return built

        return initialize

    def fed_loader(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Labels may go from a loader past the engine, into a loss of the script's own."""
        return lambda loader: Loaded(
            own(loader), f"loader{self._loaders.setdefault(id(loader), len(self._loaders))}", self
        )

    def seen_clipping(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """A script of plain torch clips by itself. Its recorder sees the gradients before, and the norm."""

        @wraps(own)
        def clip(*args: Any, **kwargs: Any) -> Any:
            clipping = getattr(self.recorder, "clipping", None)
            return own(*args, **kwargs) if clipping is None else clipping(own, *args, **kwargs)

        return clip

    def _compare_config(self) -> None:
        """Alone: values that the script computes from the number of ranks are others, which is no mistake of the ranks."""
        both = self._of_ranks.keys() | self._config.keys()
        for key in sorted(both.difference(_ONLY_TOGETHER, ["parallel"])):
            theirs, mine = self._of_ranks.get(key, "not set"), self._config.get(key, "not set")
            if theirs == mine or not self._of_ranks:
                continue
            told = f"{key} is {theirs} on the ranks and {mine} in the script as one process, as it depends on the number of ranks"
            if key == "gradient_accumulation":
                raise ParityError(
                    f"{told}. One process is given the batches of all ranks, joined, so it must make a step of as many passes: "
                    f"give {key} a fixed value for the comparison, {theirs} in this case",
                    code="C100",
                )
            self.notes.append(f"{told}: each ran with its own")

    def _changed(self, config: Config) -> Config:
        """Alone: every size is 1, and what only ranks together do is left out. In fp64: no half precision."""
        changed = config.copy()
        half = [key for key in _HALF if changed.get(key)] if self.part.dtype == "fp64" else []
        for key in half:
            changed.pop(key)
        if half:
            self.notes.append(f"{', '.join(half)} was left out: both runs are in fp64 (--dtype own keeps it)")
        if not self.part.alone:
            return changed
        wanted = changed.get("schedule") or {}
        schedule = {"type": wanted} if isinstance(wanted, str) else dict(wanted)
        for key in _ONLY_TOGETHER:
            if key in changed:
                changed.pop(key)
        if schedule.get("num_microbatches"):
            kept = {
                key: value for key, value in schedule.items() if key not in ("type", "order", "num_chunks", "table")
            }
            changed["schedule"] = {"type": "OneFOneB", **kept}
        elif schedule:
            changed["schedule"] = schedule
        parallel = {key: value for key, value in (changed.get("parallel") or {}).items() if key != "expert"}
        changed["parallel"] = {key: _size_one(value) for key, value in parallel.items()}
        return changed

    def _prepared(self, model: Any) -> Any:
        if not isinstance(model, (nn.Module, Split)):
            return lambda: self._prepared(model())
        if self.part.alone and isinstance(model, Split):
            if model.whole is None:
                raise ParityError(
                    "the model was given as stages that were made by hand, so it is not known as one: give colonnade.split "
                    "the whole model, or call colonnade.verify(engine, reference=...) in the script",
                    code="C100",
                )
            model = model.whole
        if self.part.dtype == "fp64":
            for module in model if isinstance(model, Split) else [model]:
                module.double()
        return model

    # --- The engine ---

    def follow(self, recorder: Any, model: nn.Module, rename: Callable[[str], str] = lambda name: name) -> None:
        """Record this model from now on."""
        self.recorder, self._model, self._rename = recorder, model, rename
        self._around.enter_context(self.dropping.watching(model, rename))

    def _attach(self, engine: Engine) -> None:
        if self.part.mistake is not None:
            plant(engine, self.part.mistake)
        self.follow(EngineRecorder(engine, self.dropping), engine.model, partial(name_in_whole, engine.model))
        self._optimizer = engine.optimizer
        engine._forward = self._fed_forward(engine, engine._forward)
        if engine._criterion is not None:
            engine._criterion = Criterion(engine._criterion, self)
        schedule: Any = engine.schedule
        schedule.load_batch = self._fed_load(schedule.load_batch)
        for name, method in (("execute_schedule", engine.execute_schedule), ("step", engine.step)):
            setattr(engine, name, self._wrapped(name, method))

    def _wrapped(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "execute_schedule":
                self.begin(kwargs.get("forward_only", False))
                try:
                    return method(*args, **kwargs)
                finally:
                    self._fed_by_schedule = False
            self.before_step(self._optimizer)
            with torch._C.DisableTorchFunction():  # a step is ours, and knows its dtypes
                stepped = method(*args, **kwargs)
            if stepped:
                self.end_of_step()
            return stepped

        return call

    def _fed_forward(self, engine: Engine, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and engine.training and not self._fed_by_schedule:
                self.begin()
                args, kwargs = self.note_or_replace("call", (args, kwargs))
            return forward(*args, **kwargs)

        return call

    def _fed_load(self, load_batch: Callable[..., Any]) -> Callable[..., Any]:
        def call(data_iter: Any, *args: Any, **kwargs: Any) -> Any:
            if data_iter is None or not self._begun:
                return load_batch(data_iter, *args, **kwargs)
            self._fed_by_schedule = True
            return load_batch(iter([self.note_or_replace("batch", next(data_iter))]), *args, **kwargs)

        return call

    # --- While it runs ---

    def begin(self, forward_only: bool = False) -> None:
        """Before the first pass: the weights are now what training starts from."""
        if self._begun or forward_only:
            return
        self._begun = True
        if self.part.alone:
            self._load(torch.load(self.folder / START, weights_only=False))
        self.recorder.recorder.note_start()

    def note_or_replace(self, key: str, value: Any, most: int | None = None) -> Any:
        """A value that comes in: noted on one of the ranks; alone, the joined one of all ranks is returned in its place.

        `key` says where it came in. `most`: how many are noted there at most.
        """
        if self.part.dtype == "fp64":
            value = tree_map_only(Tensor, _widened, value)
        noted = self.given.setdefault(key, [])
        if most is not None and len(noted) >= most:
            return value
        if not self.part.alone:
            noted.append(on_cpu(tree_map(_without_graph, value)))
            return value
        noted.append(None)
        found = self._joined.get(key, ())
        if len(noted) > len(found) and most is None:
            raise ParityError(
                f"the script alone takes more batches in {self.part.steps} steps than each of its ranks did: {key} {len(noted)}, "
                f"and theirs were {len(found)}. Does the number of passes in a step depend on the number of ranks (WORLD_SIZE)? "
                f"Give it a fixed value for the comparison",
                code="C100",
            )
        return tree_map(self._placed, value, found[len(noted) - 1]) if len(noted) <= len(found) else value

    def _placed(self, own: Any, joined: Any) -> Any:
        if isinstance(own, Tensor) and isinstance(joined, Tensor):
            return moved_by_an_ulp(joined, self._noise, self._ulp).to(own.device)
        return own

    def before_step(self, optimizer: Any) -> None:
        """Note what the optimizer is told to step with; alone, tell it what the ranks were: a rate may grow with their number."""
        mine, done = options_of(optimizer), len(self.recorder.record.steps)
        self.recorder.recorder.note_options(mine)
        theirs = self._options[done] if done < len(self._options) else []
        for group, own, given in zip(optimizer.param_groups, mine, theirs, strict=False):
            for key in [key for key in given if key in own and own[key] != given[key]]:
                group[key] = group[key].fill_(given[key]) if isinstance(group[key], Tensor) else given[key]
                if not any(note.startswith(f"{key} of the optimizer") for note in self.notes):
                    self.notes.append(
                        f"{key} of the optimizer is {given[key]:g} on the ranks and {own[key]:g} in the script as one "
                        f"process, as it depends on the number of ranks: both were stepped with that of the ranks"
                    )

    def without_scaler(self, own: Callable[..., None]) -> Callable[..., None]:
        """In fp64 no loss needs a scale, and torch's own cannot take one."""

        def make(scaler: Any, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("enabled", True):
                self.notes.append("GradScaler was turned off: both runs are in fp64 (--dtype own keeps it)")
            own(scaler, *args[:5], **{**kwargs, "enabled": False})

        return make

    def end_of_step(self) -> None:
        done = len(self.recorder.record.steps)
        if done >= self.part.steps:
            self.finish()
        if self.part.share is not None:  # gradients of a share, at the weights that all together have
            truth = torch.load(self.folder / REFERENCE, weights_only=False)
            self._load(truth.steps[done - 1].weights)

    def end_of_script(self) -> None:
        """The script has come to its end by itself. Where it took no step, there is nothing to write but that."""
        if self.recorder is None or not self.recorder.record.steps:
            torch.save(self.recorder is not None, self.folder / self.part.result.format(rank=os.environ["RANK"]))
            return
        done = len(self.recorder.record.steps)
        self.notes.append(f"{done} of {self.part.steps} steps were compared: the script took no more")
        self.finish()

    def finish(self) -> NoReturn:
        """Write what was seen, and end this process: nothing of the script after its last step is run."""
        record = self.recorder.record
        record.notes += [*notes_of(self.dropping, self.part.off), *self.notes]
        record.run.zeroed, record.run.config = self.dropping.zeroed, self._config
        if not self.part.alone:
            record.run.given = self.given
        elif self._model is not None:
            record.run.names = canonical_names(self._model, self._rename)
        if isinstance(self.dropping, Replaying):
            record.run.replays = self.dropping.found
        with torch._C.DisableTorchFunction():
            torch.save(record, self.folder / self.part.result.format(rank=record.rank))
            if dist.is_initialized():
                dist.barrier()  # others may still wait for what this rank has to say
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _load(self, weights: dict[str, Tensor]) -> None:
        assert self._model is not None
        with torch._C.DisableTorchFunction():
            load(self._model, weights, self._noise, in_place=True, rename=self._rename, ulp=self._ulp)


def _size_one(value: Any) -> Any:
    if not isinstance(value, dict):
        return 1
    return {key: 1 if key == "size" else content for key, content in value.items() if key not in ("depth",)}


def _widened(leaf: Tensor) -> Tensor:
    return leaf.double() if leaf.is_floating_point() and not leaf.requires_grad else leaf


def _without_graph(leaf: Any) -> Any:
    return _FROM_GRAPH if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def _only_reads(own: Callable[..., None]) -> Callable[..., None]:
    """A run that is looked at writes no checkpoints, and waits for none who does."""
    return lambda *args, **kwargs: own(*args, **{**kwargs, "read_only": True})


@contextmanager
def _replaced(home: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    own = getattr(home, name)
    setattr(home, name, make(own))
    try:
        yield
    finally:
        setattr(home, name, own)


# --- Stand-ins for a script's loader, batches and criterion: what goes through them is noted or, alone, replaced ---


class Loaded:
    """Batches of a loader; alone, those of all ranks, as far as the ranks took any."""

    def __init__(self, own: Iterator[Any], key: str, script: ScriptRecorder) -> None:
        self._own, self._key, self._script = own, key, script

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._script.note_or_replace(self._key, next(self._own), most=_LOADED)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class Batches:
    """The batches of a script of plain torch, each noted or replaced; in all else this is the object of the script."""

    def __init__(self, own: Any, script: ScriptRecorder) -> None:
        self._own, self._script = own, script

    def __iter__(self) -> Iterator[Any]:
        for batch in self._own:
            yield self._script.note_or_replace("batch", batch)

    def __len__(self) -> int:
        return len(self._own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class Criterion:
    """The user's criterion, which is given the labels of all ranks where it is given those of one."""

    def __init__(self, own: Any, script: ScriptRecorder) -> None:
        self._own, self._script = own, script

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        script = self._script
        if torch.is_grad_enabled() and script._begun and not script._fed_by_schedule:
            args, kwargs = script.note_or_replace("criterion", (args, kwargs))
        return self._own(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
