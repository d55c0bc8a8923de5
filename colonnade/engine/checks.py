"""Checks for mistakes in models, optimizers and training loops that would otherwise cause wrong training without an error.

At `initialize`:
- `refuse_lazy`: parameters without a shape.
- `refuse_optimizer`: parameters whose gradients no rank would reduce.
- `refuse_non_elementwise`: optimizers whose step on a shard differs from the shard of their step on the full tensor.
- `warn_of_batch_norm`: batch norm statistics over a part of the batch. `warn_of_repeated_work`: ranks that do the same work.
- `compare_stages`: pipeline stages that are copies of the full model, because `colonnade.split` was not called.

During training, all owned by `LoopWatch` except `SameBatch`:
- `LoopWatch`: a step on gradients that were not reduced; parameters that were replaced after `initialize`.
- `SameBatch`: different batches on ranks that must see the same data; two forms of loss in one step.
- `SameGradients`: a parameter that a TP plan leaves replicated although its gradient is partial on each rank.
- `Evaluations`: a forward pass on some ranks only, whose collectives would pair with those of a training step on the others.
- the first-step watch of a model family (`engine.model`), and the replica check (`engine.guard`), if the config enables it.

The checks share only the digest (`ordered_sum`), because they compare in different ways. Batches are compared bit by bit over the
world, and partial gradients with a tolerance over a tensor group. Before an evaluation, ranks wait for each other before the first
collective of the model. The guard needs its own process group, because collectives on the usual groups may not match. After the
first steps, most steps compare nothing.
"""

from __future__ import annotations

import inspect
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from colonnade.comm import waits
from colonnade.comm.groups import own_gloo
from colonnade.comm.messages import agreed_errors, gather_numbers, is_same_everywhere, message_device
from colonnade.comm.torch_versions import default_store, gather_rows, gloo_all_gather, timeout_of
from colonnade.comm.waits import OUTSIDE, pauses, stalled_position
from colonnade.config.settings import GuardSettings
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.activations import release_blocks
from colonnade.engine.gradient_sync import GradientSync
from colonnade.engine.model import families_of, is_sharded_by_plan
from colonnade.engine.schedule.micro_batch import SAME_BATCHES_ADVICE
from colonnade.engine.schedule.schedules import num_rows
from colonnade.errors import ConfigError, GradientError, ScheduleError, listed
from colonnade.gradients.uneven import USE_ONE_FORM
from colonnade.logging import get_dist_logger
from colonnade.optim.engine_optimizer import groups_by_options, run_trial_steps
from colonnade.parallel.forward import ModelHook
from colonnade.parallel.held import Held, checksum, held_tensors, replicated_parameters, words_of
from colonnade.parallel.placement import Shard, is_dtensor, local_part, placement_of
from colonnade.parallel.split import Chunks, Stage
from colonnade.texts import digest_of

if TYPE_CHECKING:
    from colonnade.engine.guard import Guard

# --- Models and optimizers that cannot be trained correctly --------------------------------------


def refuse_lazy(models: Iterable[nn.Module]) -> None:
    """Raise if parameters have no shape yet."""
    lazy = [repr(name) for model in models for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ConfigError(
            f"{listed(lazy)} have no shape yet, because lazy layers such as LazyLinear get their shapes in the first "
            "forward pass. Run one forward pass, build the optimizer after that pass, and then call initialize()."
        )


def refuse_optimizer(optimizer: Any, models: Iterable[nn.Module], context: ParallelContext) -> None:
    """Raise if the optimizer's `step` needs arguments, or if it has trainable parameters that are in none of the models while
    ranks see distinct data."""
    # From the class: a scheduler replaces `step` of the instance. A wrapper's class may have none.
    _, *accepted = inspect.signature(getattr(type(optimizer), "step", Optimizer.step)).parameters.values()
    needed = [repr(arg.name) for arg in accepted if arg.default is arg.empty and arg.kind is arg.POSITIONAL_OR_KEYWORD]
    if needed:
        raise ConfigError(
            f"{type(optimizer).__name__}.step() needs {listed(needed)}, but engine.step() does not pass them, "
            "because gradients are reduced over the ranks once per step. Use an optimizer whose step() can be called "
            "without arguments."
        )
    known = {id(parameter) for model in models for parameter in model.parameters()}
    for at, group in enumerate(optimizer.param_groups if context.layout.distinct_data > 1 else ()):
        unknown = [tuple(p.shape) for p in group["params"] if p.requires_grad and id(p) not in known]
        if unknown:
            raise GradientError(
                f"group {at} of the optimizer has parameters of shape {listed(unknown[:4])} that do not belong to "
                "the model, so their gradients would not be reduced over the ranks. Make their module (a loss with "
                "weights, for example) a submodule of the model. Or give this module a separate optimizer and engine.",
                code="C070",
            )


def refuse_non_elementwise(optimizer: Any, model: nn.Module, context: ParallelContext) -> None:
    """Raise if an optimizer that is not element-wise (such as Muon or Adafactor) would step on shards of a tensor.

    The check runs a trial step. An optimizer that combines the shards itself must set the attribute `steps_on_parts = True`.
    """
    if not isinstance(optimizer, Optimizer) or getattr(optimizer, "steps_on_parts", False):
        return
    # Shards of FSDP2 are DTensors, and are checked at stage 3 (`optim.zero.fsdp_checks`).
    sharded = {
        id(held.tensor): (held, shard.dim)
        for held in held_tensors(model, context)
        for mode, shard in held.placement.shards.items()
        if context.get_world_size(mode) > 1 and not is_dtensor(held.tensor)
    }
    # One trial for each kind of groups (those that differ only in how large an option is), number of dimensions and sharded one.
    for first, *more in groups_by_options(optimizer):
        members = [parameter for at in (first, *more) for parameter in optimizer.param_groups[at]["params"]]
        tried: set[tuple[int, int]] = set()
        for held, dim in [sharded[id(parameter)] for parameter in members if id(parameter) in sharded]:
            kind = held.tensor.dim(), dim
            if kind not in tried and _steps_otherwise(optimizer, first, *kind):
                raise GradientError(
                    f"{type(optimizer).__name__} updates a shard of a tensor differently than the full tensor, but "
                    f"{held.name!r} is sharded ({held.placement}). This step would differ from a single process. Use "
                    "AdamW, SGD or another element-wise optimizer for this parameter. If your optimizer combines the "
                    "shards, set the attribute steps_on_parts = True on it.",
                    code="C070",
                )
            tried.add(kind)


def _steps_otherwise(optimizer: Optimizer, group: int, dims: int, dim: int) -> bool:
    """Whether the step on the halves of a small tensor, split along `dim`, differs from the step on the tensor."""
    try:
        full, halves = run_trial_steps(
            optimizer, group, (4,) * dims, lambda tensor: [part.clone() for part in tensor.chunk(2, dim)]
        )
    except Exception:  # raised again, with a better traceback, by its first step
        return False
    return not torch.allclose(full, torch.cat(halves, dim), rtol=1e-9, atol=1e-12)


# --- Models that train, but perhaps not as intended ----------------------------------------------


def warn_of_batch_norm(model: nn.Module, context: ParallelContext) -> None:
    """Warn once if batch norms in training mode see only a part of the batch."""
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training
    ]
    # One warning per pipeline stage, from its first rank.
    here = context.layout.coordinates(context.get_global_rank())
    first = all(at == 0 for name, at in here.items() if name != "pipeline")
    if found and first and (context.layout.distinct_data > 1 or context.pipeline_parallel_size > 1):
        get_dist_logger().warning(
            f"{type(model.get_submodule(found[0])).__name__} "
            f"({listed(found[:3])}{', ...' if len(found) > 3 else ''}) normalises over the rows of one rank, not "
            "over the global batch. Gradients differ from those of a single process. Running statistics differ "
            "between ranks, and a checkpoint for another layout contains those of the first rank. On CUDA, call "
            "nn.SyncBatchNorm.convert_sync_batchnorm(model, gpc.get_group(ParallelMode.DATA)) before initialize. Or "
            "use a norm over single samples (GroupNorm, LayerNorm)."
        )


def warn_of_repeated_work(model: nn.Module, context: ParallelContext) -> None:
    """Warn if ranks see the same data although no parameter is sharded over them, or if no layer of colonnade.nn is sharded."""
    warn = get_dist_logger().warning
    count = len(list(model.parameters()))
    for axis in context.layout.axes:
        if axis.size == 1 or axis.data == "distinct" or axis.mode is ParallelMode.PIPELINE:
            continue
        if count and len(replicated_parameters(model, context, axis.mode)) == count:
            warn(
                f"no parameter of the model is sharded over the {axis.size} ranks of {axis.mode.name}, so these "
                "ranks repeat the same work. There are three remedies. 1. Build the model from the layers of "
                f"colonnade.nn with tensor=dict(size={axis.size}, mode='1d'). 2. Call place() on the parameters that "
                f"your code shards. 3. Remove {axis.name!r} from `parallel`, so that the ranks become data-parallel.",
                ranks=[0],
            )
    found: list[Any] = [getattr(layer, "arrangement", None) for layer in model.modules()]
    arrangements = [arrangement for arrangement in found if hasattr(arrangement, "is_split")]
    size = context.tensor_parallel_size
    if size > 1 and arrangements and not any(a.is_split("outer") or a.is_split("inner") for a in arrangements):
        warn(
            f"the layers of colonnade.nn in the model are replicated on all {size} ranks of TENSOR, because `tensor` "
            f"has no mode that shards them. Write tensor=dict(size={size}, mode='1d').",
            ranks=[0],
        )


# --- Pipeline stages that are all the same model -------------------------------------------------

_ALLOW = "set compare_stages=False in the config"
_SHOWN = 3


def forms_of(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """The name and shape of every parameter of a stage that is not tied to another stage."""
    return [(name, tuple(p.shape)) for name, p in model.named_parameters() if placement_of(p).tied is None]


def compare_stages(
    model: nn.Module, was_split: bool, num_stages: int, context: ParallelContext
) -> ScheduleError | None:
    """Find pipeline stages that are copies of one model. Collective along the pipeline.

    Args:
        model: the model of this rank.
        was_split: whether `colonnade.split` made the stages; then equal stages are intended.
        num_stages: the number of stages of the schedule, for the message.
        context: the context of this rank. `compare_stages=False` in its config disables the check.

    Returns:
        An error, to be raised on all ranks, if the parameters of all stages have equal names, shapes and values. With equal
        names and shapes only, a warning is logged.
    """
    ranks = context.get_world_size(ParallelMode.PIPELINE)
    if ranks == 1 or context.config.get("compare_stages") is False:
        return None
    # Every stage joins the collective. A stage that must not be compared sends a number that no other stage sends.
    forms = forms_of(model)
    compared = forms and not was_split
    number = digest_of(repr(forms)) if compared else context.get_local_rank(ParallelMode.PIPELINE)
    group = context.get_group(ParallelMode.PIPELINE)
    if not is_same_everywhere(number, context.device, group):
        return None
    split_it = f"Split it before initialize(): model = colonnade.split(model, num_stages={num_stages})"
    # Checksums of all values, read with a single wait of the host.
    shards = [local_part(parameter) for parameter in model.parameters() if placement_of(parameter).tied is None]
    sums = [checksum(shard) for shard in shards if shard.numel()]
    values = digest_of(repr(torch.stack(sums).tolist() if sums else []))
    if is_same_everywhere(values, context.device, group):
        return ScheduleError(
            f"{same_stages(forms, ranks)}, with equal values. Every rank has built the full model, and a step would "
            f"run {ranks} copies of the model one after another. {split_it}. If the stages start equal on purpose, "
            f"pass them as colonnade.split([first, second, ...]), or {_ALLOW}",
            code="C160",
        )
    get_dist_logger().warning(
        f"{same_stages(forms, ranks)}. If each rank has built the full model, a step runs {ranks} models one after another. "
        f"{split_it}. If the stages have equal shapes on purpose, {_ALLOW}",
        ranks=[0],
    )
    return None


def same_stages(forms: Sequence[tuple[str, tuple[int, ...]]], stages: int) -> str:
    """Return the first part of the message about stages with equal parameter names and shapes."""
    names = [name for name, _ in forms]
    shown = f"{listed(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
    return f"all {stages} pipeline stages have parameters of the same {len(names)} names and shapes ({shown})"


# --- The training loop ---------------------------------------------------------------------------

_LOOK_EVERY = 100
"""Steps between two checks of the model's parameters, after the first two steps."""


class LoopWatch:
    """Checks that the optimizer steps only in `engine.step`, and that the model keeps the parameters that the optimizer has.

    `unsummed`: whether some gradients have not been reduced over the ranks yet.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, context: ParallelContext, sync: GradientSync | None = None
    ) -> None:
        self.unsummed = False
        self._sync = sync
        self._guard = guard_of(model, optimizer, context, sync)
        watches = (family.watch_first_step(model, context) for _, family in families_of(model))
        self._first_step = [watch for watch in watches if watch is not None]
        self._same_gradients = SameGradients(model, context)
        self._evaluations = Evaluations(model, context)
        self._model = weakref.ref(model)
        named = list(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in named}
        # References to all parameters: as long as they exist, no other tensor can get one of these ids.
        self._kept = [parameter for _, parameter in named]
        self._steps = 0
        # A weak reference in the hook: with a strong one the model would keep this object, and through it the engine, alive.
        watch = weakref.ref(self)
        self._handles = [model.register_load_state_dict_post_hook(ModelHook(lambda *_: _look(watch)))]
        self._step_guard: _StepGuard | None = None
        if isinstance(optimizer, Optimizer):
            hooks = optimizer._optimizer_step_pre_hooks.values()
            step_guard = next((hook for hook in hooks if isinstance(hook, _StepGuard)), None)
            self._step_guard = step_guard or _StepGuard(optimizer)
            self._step_guard.watches.add(self)

    @property
    def unprepared_gradients(self) -> bool:
        """Whether gradients came from a backward pass outside of the engine."""
        return self._sync is not None and self._sync.synchroniser.unprepared_gradients

    def end_sums(self, complete: bool) -> None:
        """Run the checks after gradients are reduced. `complete`: whether this rank has run all micro-steps of the step."""
        self.unsummed = False
        if self._same_gradients.is_due:
            self._same_gradients.check(complete)

    def end_step(self) -> None:
        """Run the checks after a step: periodically check that the model still has the same parameter objects."""
        if self._steps == 0:
            self._end_first_step()
        self._steps += 1
        if self._steps <= 2 or self._steps % _LOOK_EVERY == 0:
            self.look()
        if self._guard is not None:
            self._guard.end_step()

    def look(self) -> None:
        """Raise if a parameter of the model was replaced by another object since `initialize`."""
        model = self._model()
        for name, parameter in model.named_parameters() if model is not None else ():
            if id(parameter) not in self._names and name in self._names.values():
                raise GradientError(
                    f"{name!r} was replaced by another parameter after initialize(), so the optimizer would update a "
                    "tensor that the model no longer uses. Load weights without assign=True, or copy them into the "
                    "parameter in place.",
                    code="C046",
                )

    def _end_first_step(self) -> None:
        for watch in self._first_step:
            watch.close()

    def close(self) -> None:
        self._end_first_step()
        self._same_gradients.close()
        self._evaluations.close()
        for handle in self._handles:
            handle.remove()
        if self._step_guard is not None:
            self._step_guard.leave(self)
        self._kept = []
        if self._guard is not None:
            self._guard.close()
        model = self._model()
        if model is not None:
            release_blocks(model)


class _StepGuard:
    """Optimizer hook that raises on `optimizer.step()` with gradients that were not reduced.

    All engines of an optimizer share one hook, because the synchroniser of one engine does not know the gradients of
    another engine.
    """

    only_looks = True  # the flat step is allowed although the optimizer has a hook

    def __init__(self, optimizer: Optimizer) -> None:
        self.watches: weakref.WeakSet[LoopWatch] = weakref.WeakSet()
        self._handle = optimizer.register_step_pre_hook(self)

    def leave(self, watch: LoopWatch) -> None:
        self.watches.discard(watch)
        if not self.watches:
            self._handle.remove()

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        watches = list(self.watches)
        unsummed = any(watch.unsummed for watch in watches)
        # A backward pass outside of all engines leaves gradients that no synchroniser has prepared for.
        if not unsummed and watches and all(watch.unprepared_gradients for watch in watches):
            unsummed = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        if unsummed:
            raise GradientError(
                "optimizer.step() was called, but the gradients were neither reduced over the ranks nor clipped. "
                "Call engine.step() after engine.backward(loss). engine.step() reduces and clips the gradients, and "
                "then steps the optimizer.",
                code="C046",
            )


def _look(watch: weakref.ref[LoopWatch]) -> None:
    alive = watch()
    if alive is not None:
        alive.look()


def guard_of(model: nn.Module, optimizer: Any, context: ParallelContext, sync: GradientSync | None) -> Guard | None:
    """Build the replica check (`Guard`); None if the config does not enable it, or in a world of one rank.

    Collective over the world.
    """
    settings = GuardSettings.read(context.config.get("guard"))
    if settings is None or context.world_size == 1 or sync is None:
        return None
    from colonnade.engine.guard import EVERY, Guard  # not loaded by runs without a guard

    return Guard(model, optimizer, context, sync, settings.every or EVERY)


# --- A pipeline stage that is called with a batch ------------------------------------------------

_OF_A_MESSAGE = {"inputs", "values", "forms", "calls"}


def refuse_batch(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if a stage made by `colonnade.split` is called with a batch instead of activations.

    Custom stages may take any arguments.
    """
    from colonnade.parallel.own_forward import ModelStage

    if not isinstance(model, (Chunks, ModelStage, Stage)):
        return
    # The executor calls a stage with the keywords of a message between stages, a script with a batch.
    is_message = kwargs.keys() >= _OF_A_MESSAGE
    is_batch = not is_message and (bool(kwargs) or (len(args) == 1 and isinstance(args[0], Mapping)))
    later = isinstance(model, ModelStage) and not is_message and model._colonnade_stage.first > 0
    if not (is_batch or later or isinstance(model, Chunks)):
        return
    raise ScheduleError(
        "engine(...) was called with a batch, but this rank has only one pipeline stage of the model. On every rank, "
        "call output, label, loss = engine.execute_schedule(iter([batch])) and then engine.step(). This replaces "
        "engine(batch) and engine.backward(loss). To evaluate, add forward_only=True.",
        code="C132",
    )


# --- Batches of ranks that see the same data -----------------------------------------------------

# All ranks of a tensor or pipeline axis must get the same batch, and all ranks of the world must use the same form of loss. This
# is compared in the first steps and then rarely: a digest of the inputs, one small collective, the same error on every rank.

_FORMS = ("", "a mean", "(sum, count)")
_SAMPLED = 1 << 16
"""Number of elements of a tensor that are read, evenly spaced: a different batch differs in nearly all of them."""
_Given = tuple[int, int]
"""(digest, rows)"""


class _BatchNote(NamedTuple):
    """One rank's summary of its step: the form of the loss, and digests and row counts of inputs and labels. 0 means none."""

    form: int
    inputs: int
    labels: int
    input_rows: int
    label_rows: int


class SameBatch:
    """Compares the batches of training steps between ranks that must see the same data.

    These are the ranks of the tensor and pipeline axes, and of custom axes with `data="same"`. Ranks along other axes (data,
    sequence) have different batches, or different slices of the sequences.
    """

    def __init__(self, context: ParallelContext) -> None:
        self._context = context
        self._alone = context.world_size == 1
        shares = any(axis.data == "same" and axis.size > 1 for axis in context.layout.axes)
        self._looks = shares and context.config.get("compare_batches") is not False
        self._step = 0
        self.training = True
        self._clear()

    @property
    def due(self) -> bool:
        """Whether batches are compared in the current step: in steps 0 and 1, and in every power of two from 64 on."""
        return self._step < 2 or (self._step >= 64 and self._step.bit_count() == 1)

    def see(self, inputs: Any, labels: Any = None) -> None:
        """Add a batch to the digest of this step; does nothing in a step that is not compared."""
        if not (self._looks and self.training and self.due and torch.is_grad_enabled()):
            return
        for seen, given in zip(self._seen, (inputs, labels), strict=True):
            digest = _digest(given)
            if digest is not None:
                seen.append((digest, num_rows(given)))

    def end_step(self, counted: bool | None, complete: bool) -> None:
        """Compare the batches of all ranks if the step is due.

        Then the call is collective over the world, and either all ranks raise or none.

        Args:
            counted: whether the losses of the step were (sum, count); None if there was no loss.
            complete: whether this rank has run all micro-steps of the step. If not, this rank is left out of the comparison.
        """
        if not self._alone and self.due:
            form = 0 if counted is None else 1 + counted
            digests = [digest_of(repr(seen)) * bool(seen) for seen in self._seen]
            rows = [sum(rows for _, rows in seen) for seen in self._seen]
            with self._context.waits.during("comparing the batches"):
                note = _BatchNote(form, *digests, *rows) if complete else _BatchNote(0, 0, 0, 0, 0)
                notes = gather_numbers(note, self._context.device)
            self._check([_BatchNote(*row) for row in notes])
        self._step += 1
        self._clear()

    def _clear(self) -> None:
        self._seen: tuple[list[_Given], list[_Given]] = [], []
        """Inputs and labels of the micro-steps so far."""

    def _check(self, notes: list[_BatchNote]) -> None:
        """Raise if the notes of the ranks, in rank order, contradict each other."""
        forms = {form: [rank for rank, note in enumerate(notes) if note.form == form] for form in (1, 2)}
        if all(forms.values()):
            forms_text = "; ".join(f"{_FORMS[form]} on ranks {listed(ranks)}" for form, ranks in forms.items())
            raise GradientError(
                f"step {self._step}: the loss does not have the same form on all ranks. It is {forms_text}. To "
                f"correct this, {USE_ONE_FORM}",
                code="C045",
            )

        # Ranks with the same coordinates on all axes of distinct data must agree: compare each with the first of them.
        layout = self._context.layout
        first: dict[tuple[Any, ...], tuple[int, _Given]] = {}
        for rank, note in enumerate(notes):
            here = layout.coordinates(rank)
            place = tuple(here[axis.name] for axis in layout.axes if axis.data == "distinct")
            for kind, given in (
                ("inputs", (note.inputs, note.input_rows)),
                ("labels", (note.labels, note.label_rows)),
            ):
                if not given[0]:
                    continue
                other, other_given = first.setdefault((kind, *place), (rank, given))
                if other_given == given:
                    continue
                there = layout.coordinates(other)
                axes = listed(repr(name) for name in here if here[name] != there[name])
                rows, other_rows = given[1], other_given[1]
                own_groups = (
                    " (the process groups are custom, so the data index of a rank is "
                    "gpc.layout.coordinates(gpc.get_global_rank())['data'])"
                    if layout.places is not None
                    else ""
                )
                raise ScheduleError(
                    f"step {self._step}: ranks {other} and {rank} must get the same data, because they differ only "
                    f"on the axis {axes}. But they got different {kind}: {other_rows} rows on rank {other}, {rows} "
                    f"rows on rank {rank}{'' if other_rows != rows else ' with different content'}. "
                    f"{SAME_BATCHES_ADVICE}{own_groups}. If the ranks of this axis should get different batches, set "
                    "compare_batches=False in the config.",
                    code="C044",
                )


def ordered_sum(numbers: Tensor) -> Tensor:
    """A 64-bit digest of integers. It depends on their order, and always changes if a single integer changes."""
    factors = torch.arange(len(numbers), device=numbers.device) * 0x9E3779B97F4A7C1
    return ((factors ^ factors >> 29 | 1) * numbers).sum()


@torch.no_grad()
def _digest(given: Any) -> int | None:
    """A digest of the plain tensors in a batch; None if there are none. Waits for their values."""
    found = []
    for leaf in tree_leaves(given):
        if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.is_nested or leaf.is_meta:
            continue
        sample = leaf.reshape(-1)[:: 1 + leaf.numel() // _SAMPLED].contiguous()
        found.append((leaf.dtype, tuple(leaf.shape), ordered_sum(words_of(sample)).item()))
    return digest_of(repr(found)) if found else None


# --- Gradients of parameters that a TP plan leaves replicated ------------------------------------

# Each tensor rank must have the full gradient of a replicated parameter. If each rank uses the parameter for its own shard of the
# features (a norm per attention head), its gradient is partial and needs an all-reduce. A plan without it trains wrongly. The
# gradients are compared once, in the first step.


class SameGradients:
    """Compares the local gradients of replicated parameters between tensor ranks, only in models that a TP plan has sharded."""

    def __init__(self, model: nn.Module, context: ParallelContext) -> None:
        self._context = context
        self._watched: dict[str, nn.Parameter] = {}
        self._sums: dict[str, Tensor] = {}
        if context.tensor_parallel_size > 1 and is_sharded_by_plan(model):
            replicated = replicated_parameters(model, context, ParallelMode.TENSOR)
            named = model.named_parameters()
            self._watched = {name: p for name, p in named if id(p) in replicated and p.requires_grad}
        self.is_due = bool(self._watched)
        # FSDP keeps gradients in other tensors until it has reduced them; `check` reads those.
        plain = [(name, parameter) for name, parameter in self._watched.items() if not is_dtensor(parameter)]
        self._handles = [parameter.register_hook(partial(self._add, name)) for name, parameter in plain]

    def check(self, complete: bool) -> None:
        """Raise on every rank if the gradients of tensor ranks differ. Collective over the world.

        `complete`: whether this rank has run all micro-steps. If any rank has not, the comparison is made in the next step.
        """
        for name, parameter in self._watched.items():
            if is_dtensor(parameter) and parameter.grad is not None:
                self._add(name, local_part(parameter.grad))
        sums = [self._sums[name].tolist() if name in self._sums else [0.0, 0.0] for name in self._watched]
        row = torch.tensor(
            [float(complete), *(number for pair in sums for number in pair)], dtype=torch.float64, device="cpu"
        )
        row = row.to(message_device(self._context.device))
        rows = gather_rows(row, self._context.get_group(ParallelMode.TENSOR)).cpu()
        self._sums.clear()
        if bool((rows[:, 0] == 1).all()):
            names, dtypes = list(self._watched), [parameter.dtype for parameter in self._watched.values()]
            self.close()
            with agreed_errors(self._context.device):
                _compare(names, dtypes, rows[:, 1:].reshape(len(rows), -1, 2))

    def close(self) -> None:
        """Remove the hooks."""
        self.is_due = False
        for handle in self._handles:
            handle.remove()
        self._watched, self._handles = {}, []

    def _add(self, name: str, gradient: Any) -> None:
        """Add the two numbers that are compared for a gradient: its projection on a fixed direction, and its squared norm."""
        if gradient.layout is not torch.strided or not gradient.numel():
            return
        with torch.no_grad():
            sample = gradient.detach().reshape(-1)[:: -(-gradient.numel() // _SAMPLED)].double()
            direction = torch.cos(torch.arange(len(sample), device=sample.device, dtype=torch.float64) * 1.7)
            found = torch.stack([(sample * direction).sum(), sample.square().sum()])
            self._sums[name] = self._sums[name] + found if name in self._sums else found


def _compare(names: list[str], dtypes: list[torch.dtype], sums: Tensor) -> None:
    """Raise if ranks differ in `sums` (rank, name, 2). Gradients far below the largest one may differ by rounding."""
    along, norms = sums[..., 0], sums[..., 1].sqrt()
    largest, longest = norms.max(), norms.max(0).values
    apart = torch.maximum((along - along[:1]).abs().max(0).values, (norms - norms[:1]).abs().max(0).values)
    found = []
    for name, dtype, distance, norm in zip(names, dtypes, apart.tolist(), longest.tolist(), strict=True):
        rounding = 100 * torch.finfo(dtype).eps
        if norm > rounding * largest and distance > min(max(rounding, 1e-3), 0.1) * norm:
            found.append(name)
    if found:
        raise GradientError(
            f"the TP plan leaves {listed(map(repr, found[:8]))}{' ...' if len(found) > 8 else ''} replicated, but "
            "the gradient differs between the ranks of the tensor group. The reason is that each rank uses the "
            "parameter for its own shard of the features. Give the layer of this parameter the style "
            "'replicated_with_grad_allreduce' in the plan. The gradients are then all-reduced.",
            code="C047",
        )


# --- Forward passes without training -------------------------------------------------------------

# A rank that evaluates alone, under `if rank == 0`, would pair its collectives with those of the others' training step, and get
# wrong numbers. So if layers are sharded, the ranks of their groups meet before each pass without training, outside of the
# collectives of the model: the first time by the store of the world, then on connections of their own. Training passes do not meet.


class Evaluations:
    """Makes ranks wait for each other before evaluation passes, by hooks on the model.

    Only for sharded models that are not pipeline stages.
    """

    def __init__(self, model: nn.Module, context: ParallelContext) -> None:
        self._meetings: list[_Meeting] = []
        self._handles: list[Any] = []
        self._inside: nn.Module | None = None
        if context.world_size == 1 or context.pipeline_parallel_size > 1 or dist.get_backend() == "fake":
            return

        # The groups whose ranks a forward pass needs; modes with the same ranks need only one meeting.
        held = held_tensors(model, context)
        modes = {mode for entry in held for mode, spec in entry.placement.modes.items() if _is_sharded(spec)}
        by_ranks: dict[tuple[int, ...], ParallelMode] = {}
        for mode in sorted(modes, key=lambda mode: mode.name):
            ranks = tuple(context.get_ranks_in_group(mode)) if context.is_initialized(mode) else ()
            if len(ranks) > 1 and mode is not ParallelMode.DATA:
                by_ranks.setdefault(ranks, mode)
        self._meetings = [_Meeting(mode, context) for mode in by_ranks.values()]

        # A weak reference in the hooks, so that the model does not keep this object alive.
        watch = weakref.ref(self)
        for module in _entries(model, held) if self._meetings else ():
            before, after = (ModelHook(partial(act, watch)) for act in (_meet, _leave))
            self._handles.append(module.register_forward_pre_hook(before, prepend=True))
            self._handles.append(module.register_forward_hook(after, always_call=True))

    def meet(self, module: nn.Module) -> None:
        """Wait for the other ranks before an evaluation pass of `module`.

        Collective over each group over which the model is sharded.
        """
        if self._inside is not None:
            return
        for meeting in self._meetings:
            meeting()
        self._inside = module

    def leave(self, module: nn.Module) -> None:
        """Record the end of the evaluation pass of `module`, also after an error."""
        if self._inside is module:
            self._inside = None

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _meet(watch: weakref.ref[Evaluations], module: nn.Module, *_: Any) -> None:
    if (module.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return
    alive = watch()
    if alive is not None:
        alive.meet(module)


def _leave(watch: weakref.ref[Evaluations], module: nn.Module, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    alive = watch()
    if alive is not None:
        alive.leave(module)


def _entries(model: nn.Module, held: Sequence[Held]) -> list[nn.Module]:
    """The modules that a script may call: the model, the models it wraps, and the submodules of the innermost of these.

    `generate` of a peft model calls the wrapped model directly, and scripts call an encoder. Deeper modules have no hook,
    which would cost time in every pass.
    """
    sharded = {id(entry.tensor) for entry in held if any(_is_sharded(spec) for spec in entry.placement.modes.values())}
    inside = {module: len(sharded.intersection(map(id, module.parameters()))) for module in model.modules()}
    found, module = [model], model
    while True:
        children = [child for child in module.children() if inside[child]]
        if len(children) != 1:
            return found + [child for child in children if any(True for _ in child.children())]
        (module,) = children
        found.append(module)


def _is_sharded(spec: Any) -> bool:
    return isinstance(spec, Shard) and spec.owes != "nothing"


class _Meeting:
    """A barrier for the ranks of one group, with an error if a rank is in a training step and cannot come."""

    def __init__(self, mode: ParallelMode, context: ParallelContext) -> None:
        self._mode, self._group, self._waits = mode, context.get_group(mode), context.waits
        self._rank, self._ranks = context.get_global_rank(), tuple(context.get_ranks_in_group(mode))
        self._seconds = timeout_of(self._group).total_seconds()
        self._gloo: Any = None
        self._here = (
            torch.empty(len(self._ranks), dtype=torch.uint8, device="cpu"),
            torch.zeros(1, dtype=torch.uint8, device="cpu"),
        )

    def __call__(self) -> None:
        with self._waits.during(f"{OUTSIDE}, in an evaluation"):
            if self._gloo is not None:
                # From the second time on: an all-gather of one byte, waited for in short turns to look at the other ranks.
                work, began = gloo_all_gather(self._gloo, *self._here), time.monotonic()
                seconds = 1.5 * waits.PUBLISH_AFTER
                while True:
                    try:
                        work.wait(timedelta(seconds=seconds))
                        return
                    except RuntimeError:
                        if work.is_completed():  # an error of the connections, not the end of a turn
                            raise
                    self._look(began)
                    seconds = waits.PUBLISH_AFTER / 5

            # The first time: count arrivals in the store, because opening connections is itself collective. A rank that gives up
            # takes its arrival back, so that a later evaluation starts from a multiple of the group's size again.
            store, key = default_store(), f"colonnade/evaluation/{self._ranks}"
            count, began = store.add(key, 1), time.monotonic()
            all_here = -(-count // len(self._ranks)) * len(self._ranks)
            look = began + 1.5 * waits.PUBLISH_AFTER
            for pause in pauses(0.05):
                if count >= all_here:
                    break
                if time.monotonic() > look:
                    look += waits.PUBLISH_AFTER / 5
                    try:
                        self._look(began)
                    except GradientError:
                        store.add(key, -1)
                        raise
                time.sleep(pause)
                count = store.add(key, 0)
            self._gloo = own_gloo(self._group)

    def _look(self, began: float) -> None:
        """Raise if a rank is in a step that it cannot finish without this rank, or if the time limit has passed."""
        for rank in self._ranks:
            place = stalled_position(rank) if rank != self._rank else None
            if place is None or place.what.startswith(OUTSIDE) or (place.step or 0) < (self._waits.step or 0):
                continue
            raise self._error(f"rank {rank} is {place} meanwhile")
        if time.monotonic() - began > self._seconds:
            raise self._error(f"not all of them have come within {self._seconds:g} s")

    def _error(self, what: str) -> GradientError:
        return GradientError(
            f"rank {self._rank} calls the model outside of a training step, and {what}. The parameters of the model "
            f"are sharded over ranks {listed(self._ranks)} of {self._mode.name}, so all these ranks must call a "
            "forward pass. Evaluate and generate on every rank. Only print and log under a condition such as `if "
            "rank == 0`.",
            code="C130",
        )
