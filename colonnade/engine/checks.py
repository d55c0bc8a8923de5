"""Checks of models, optimizers and training loops that would train wrongly without a word.

At `initialize`:
- `refuse_lazy`, `refuse_optimizer`, `refuse_parts`: parameters without a shape; parameters that nobody would sum; an optimizer
  whose step on a part of a tensor is not the part of its step on the whole.
- `warn_of_batch_norm`, `warn_of_repeated_work`: statistics over a part of the batch; ranks that compute the same.
- `compare_stages`: a pipeline of copies of the whole model, because nobody called `colonnade.split`.

In a run, all held by `LoopWatch`, but for `SameBatch`, which is given every batch:
- `LoopWatch`: a step on gradients that were not summed; parameters that were replaced after `initialize`.
- `SameBatch`: ranks that see the same data are given different batches; losses of two forms.
- `SameGradients`: a parameter that a plan leaves whole although each rank has a part of its gradient.
- `Evaluations`: a pass on some ranks only, whose sums would meet those of a training step on the others.
- the watch that a model's family brings for its first step (`engine.model`), and the guard (`engine.guard`), if the config asks for it.

These are not one mechanism with a list of digests, since what they compare has little in common: batches are compared exactly
over the world and named by axis, gradients of a part with a tolerance over a tensor group, evaluations must meet before a
collective that is not theirs, and the guard needs a group of its own, as the usual ones may be out of step. Only the digest
(`ordered_sum`) is shared. A steady step compares nothing.
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
from colonnade.comm.messages import agreed_errors, gather_numbers, is_same_everywhere, message_device
from colonnade.comm.rank_group import own_gloo
from colonnade.comm.torch_versions import default_store, gather_rows, gloo_all_gather, timeout_of
from colonnade.comm.waits import OUTSIDE, pauses, stalled_position
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.activations import release_blocks
from colonnade.engine.gradient_sync import GradientSync
from colonnade.engine.model import families_of, is_cut_by_plan
from colonnade.engine.schedule.base import rows_of
from colonnade.engine.schedule.micro_batch import FEED_ALIKE
from colonnade.errors import ConfigError, GradientError, ScheduleError, listed
from colonnade.gradients.uneven import USE_ONE_FORM
from colonnade.logging import get_dist_logger
from colonnade.optim.optimizer_trial import kinds_of_groups, two_steps
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.forward import ModelHook
from colonnade.parallel.held import Held, checksum, held_tensors, whole_parameters, words_of
from colonnade.parallel.placement import Shard, is_dtensor, placement_of
from colonnade.parallel.split import Chunks, Stage
from colonnade.texts import digest_of

if TYPE_CHECKING:
    from colonnade.engine.guard import Guard

# --- Models and optimizers that cannot be trained rightly ----------------------------------------


def refuse_lazy(models: Iterable[nn.Module]) -> None:
    """Refuse parameters without a shape."""
    lazy = [repr(name) for model in models for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ConfigError(
            f"{listed(lazy)} have no shape yet, as those of LazyLinear before its first call; make a forward pass of a batch "
            f"before initialize(), and build the optimizer after it"
        )


def refuse_optimizer(optimizer: Any, models: Iterable[nn.Module], context: ParallelContext) -> None:
    """Refuse one whose step wants arguments, or that has parameters of none of these models which ranks would have to sum."""
    # Of the class: a scheduler puts another on the instance. A wrapper may have none there.
    _, *taken = inspect.signature(getattr(type(optimizer), "step", Optimizer.step)).parameters.values()
    needed = [repr(one.name) for one in taken if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    if needed:
        raise ConfigError(
            f"{type(optimizer).__name__}.step() needs {listed(needed)}, and engine.step() has none: gradients are summed over "
            f"the ranks once per step. Use an optimizer whose step() can be called without arguments"
        )
    known = {id(parameter) for model in models for parameter in model.parameters()}
    for at, group in enumerate(optimizer.param_groups if context.layout.distinct_data > 1 else ()):
        strange = [tuple(one.shape) for one in group["params"] if one.requires_grad and id(one) not in known]
        if strange:
            raise GradientError(
                f"the optimizer (group {at}) has parameters of shape {listed(strange[:4])} that are not the model's, so nobody "
                f"would sum their gradients over the ranks. Make what holds them (a loss with weights of its own, say) a "
                f"part of the model, or give it an optimizer and an engine of its own",
                code="C070",
            )


def refuse_parts(optimizer: Any, model: nn.Module, context: ParallelContext) -> None:
    """Refuse one whose update of an element depends on others, as Muon's and Adafactor's do, where they are on other ranks.

    Found out by trying. One that puts parts together itself says so by an attribute, `steps_on_parts = True`.
    """
    if not isinstance(optimizer, Optimizer) or getattr(optimizer, "steps_on_parts", False):
        return
    split = {
        id(held.tensor): (held, shard.dim)
        for held in held_tensors(model, context)
        for mode, shard in held.placement.shards.items()
        if context.get_world_size(mode) > 1 and not is_dtensor(held.tensor)
    }
    for first, *more in kinds_of_groups(optimizer):
        members = [parameter for at in (first, *more) for parameter in optimizer.param_groups[at]["params"]]
        tried: set[tuple[int, int]] = set()
        for held, dim in [split[id(parameter)] for parameter in members if id(parameter) in split]:
            kind = held.tensor.dim(), dim
            if kind not in tried and _steps_otherwise(optimizer, first, *kind):
                raise GradientError(
                    f"{type(optimizer).__name__} steps otherwise on a part of a tensor than on the whole, and {held.name!r} is "
                    f"split ({held.placement}): it would not be trained as in one process. Use AdamW, SGD or another "
                    f"element-wise optimizer for it. (An optimizer of yours that puts the parts together itself has an "
                    f"attribute steps_on_parts = True.)",
                    code="C070",
                )
            tried.add(kind)


def _steps_otherwise(optimizer: Optimizer, group: int, dims: int, dim: int) -> bool:
    try:
        whole, parts = two_steps(
            optimizer, group, (4,) * dims, lambda tensor: [part.clone() for part in tensor.chunk(2, dim)]
        )
    except Exception:  # it says why at its first step
        return False
    return not torch.allclose(whole, torch.cat(parts, dim), rtol=1e-9, atol=1e-12)


# --- Models that train, but not as their user may think ------------------------------------------


def warn_of_batch_norm(model: nn.Module, context: ParallelContext) -> None:
    """Say once that batch norms see a part of the batch each; frozen ones (in evaluation mode) do not look at it."""
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training
    ]
    here = context.layout.coordinates(context.get_global_rank())
    first = all(at == 0 for name, at in here.items() if name != "pipeline")
    if found and first and (context.layout.distinct_data > 1 or context.pipeline_parallel_size > 1):
        get_dist_logger().warning(
            f"{type(model.get_submodule(found[0])).__name__} ({listed(found[:3])}{', ...' if len(found) > 3 else ''}) "
            f"normalises over the rows that one rank has at a time, not over the whole batch: gradients are not those of "
            f"one process, and running statistics differ between ranks (a checkpoint for another layout has the first "
            f"rank's). On CUDA, nn.SyncBatchNorm.convert_sync_batchnorm(model, gpc.get_group(ParallelMode.DATA)) before "
            f"initialize joins the ranks; a norm that looks at single samples (GroupNorm, LayerNorm) has no such limit."
        )


def warn_of_repeated_work(model: nn.Module, context: ParallelContext) -> None:
    """Ranks that see the same data and split no parameter compute the same; layers of ours split nothing without a mode."""
    say = get_dist_logger().warning
    count = len(list(model.parameters()))
    for axis in context.layout.axes:
        if axis.size == 1 or axis.data == "distinct" or axis.mode is ParallelMode.PIPELINE:
            continue
        if count and len(whole_parameters(model, context, axis.mode)) == count:
            say(
                f"no parameter of the model is split over the {axis.size} ranks of {axis.mode.name}: they repeat each other's "
                f"work. Build the model from the layers of colonnade.nn with tensor=dict(size={axis.size}, mode='1d'), "
                f"place() what you split yourself, or take {axis.name!r} out of `parallel`: these ranks then share the data",
                ranks=[0],
            )
    found: list[Any] = [getattr(layer, "arrangement", None) for layer in model.modules()]
    arrangements = [arrangement for arrangement in found if hasattr(arrangement, "is_split")]
    size = context.tensor_parallel_size
    if size > 1 and arrangements and not any(a.is_split("outer") or a.is_split("inner") for a in arrangements):
        say(
            f"the layers of colonnade.nn in the model are whole on each of the {size} ranks of TENSOR, as `tensor` names no "
            f"mode that splits them; write tensor=dict(size={size}, mode='1d')",
            ranks=[0],
        )


# --- Pipeline stages that are all the same model -------------------------------------------------

_ALLOW = "set compare_stages=False in the config"
_SHOWN = 3


def forms_of(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of every parameter that the model does not share with other stages."""
    return [(name, tuple(each.shape)) for name, each in model.named_parameters() if placement_of(each).tied is None]


def compare_stages(
    model: nn.Module, was_split: bool, num_stages: int, context: ParallelContext
) -> ScheduleError | None:
    """Warn where the stages of a pipeline have parameters of equal names and shapes and were not made by `split`.

    Returns an error, to be raised on all ranks, where their values are equal too. Collective along the pipeline.
    `compare_stages=False` in the config turns this off. `num_stages`: how many the schedule runs.
    """
    ranks = context.get_world_size(ParallelMode.PIPELINE)
    if ranks == 1 or context.config.get("compare_stages") is False:
        return None
    # Every stage takes part in the collective; one that is not compared gives a number that no other stage gives.
    forms = forms_of(model)
    compared = forms and not was_split
    number = digest_of(repr(forms)) if compared else context.get_local_rank(ParallelMode.PIPELINE)
    group = context.get_group(ParallelMode.PIPELINE)
    if not is_same_everywhere(number, context.device, group):
        return None
    if is_same_everywhere(_digest_of_values(model), context.device, group):
        return ScheduleError(
            f"{same_stages(forms, ranks)}, with equal values: every rank has brought the whole model, and a step would run "
            f"{ranks} copies of it one after another. {_cut(num_stages)}. If the stages start equal on purpose, pass them as "
            f"colonnade.split([first, second, ...]), or {_ALLOW}",
            code="C160",
        )
    get_dist_logger().warning(
        f"{same_stages(forms, ranks)}. If each rank has built the whole model, a step runs {ranks} models one after another. "
        f"{_cut(num_stages)}. If the stages are meant to be alike, {_ALLOW}",
        ranks=[0],
    )
    return None


def same_stages(forms: Sequence[tuple[str, tuple[int, ...]]], stages: int) -> str:
    """The beginning of a sentence about stages that all have these parameters."""
    names = [name for name, _ in forms]
    shown = f"{listed(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
    return f"all {stages} pipeline stages have parameters of the same {len(names)} names and shapes ({shown})"


def _cut(num_stages: int) -> str:
    return f"Cut it before initialize(): model = colonnade.split(model, num_stages={num_stages})"


def _digest_of_values(model: nn.Module) -> int:
    """62 bits that follow from the values that this rank holds; read once, with one wait of the host."""
    parts = [local_part(each) for each in model.parameters() if placement_of(each).tied is None]
    sums = [checksum(part) for part in parts if part.numel()]
    return digest_of(repr(torch.stack(sums).tolist() if sums else []))


# --- The training loop ---------------------------------------------------------------------------

_LOOK_EVERY = 100
"""Steps between two looks at the model's parameters, after the first two."""


class LoopWatch:
    """Watches that steps go through the engine, and that the model keeps the parameters that the optimizer has.

    `unsummed`: there are gradients that were not summed over the ranks yet.
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
        self._kept = [
            parameter for _, parameter in named
        ]  # as long as this lives, no other tensor gets one of these ids
        self._steps = 0
        # Not references to this object: it would never go.
        watch = weakref.ref(self)
        self._handles = [model.register_load_state_dict_post_hook(ModelHook(lambda *_: _look(watch)))]
        self._step_guard: _StepGuard | None = None
        if isinstance(optimizer, Optimizer):
            hooks = optimizer._optimizer_step_pre_hooks.values()
            self._step_guard = next((one for one in hooks if isinstance(one, _StepGuard)), None) or _StepGuard(
                optimizer
            )
            self._step_guard.watches.add(self)

    @property
    def unprepared_gradients(self) -> bool:
        """Whether gradients came from a backward pass that was none of the engine's."""
        return self._sync is not None and self._sync.synchroniser.unprepared_gradients

    def end_sums(self, complete: bool) -> None:
        """Gradients are summed now. `complete`: this rank has made all passes of the step."""
        self.unsummed = False
        if self._same_gradients.is_due:
            self._same_gradients.check(complete)

    def end_step(self) -> None:
        """A step was made: now and then, see that the model still has its parameters."""
        if self._steps == 0:
            self._end_first_step()
        self._steps += 1
        if self._steps <= 2 or self._steps % _LOOK_EVERY == 0:
            self.look()
        if self._guard is not None:
            self._guard.end_step()

    def look(self) -> None:
        """Refuse a model whose parameters are other objects than at `initialize`."""
        model = self._model()
        for name, parameter in model.named_parameters() if model is not None else ():
            if id(parameter) not in self._names and name in self._names.values():
                raise GradientError(
                    f"{name!r} is another parameter than at initialize(), so the optimizer would step on one that the model "
                    f"no longer has. Load weights without assign=True, or write them into the parameter in place",
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
    """A step hook that only checks: a flat step need not treat its optimizer as one that somebody watches.

    One for all engines of an optimizer: the synchronisers of the others see gradients that no pass of theirs prepared.
    """

    only_looks = True

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
        if not unsummed and watches and all(watch.unprepared_gradients for watch in watches):
            unsummed = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        if unsummed:
            raise GradientError(
                "the optimizer was told to step on gradients that were not summed over the ranks, nor clipped; write "
                "engine.step(), which does all three, after engine.backward(loss)",
                code="C046",
            )


def _look(watch: weakref.ref[LoopWatch]) -> None:
    alive = watch()
    if alive is not None:
        alive.look()


def guard_of(model: nn.Module, optimizer: Any, context: ParallelContext, sync: GradientSync | None) -> Guard | None:
    """The guard that the config asks for, if there are ranks to compare. Collective over the world."""
    asked = context.config.get("guard")
    if not asked or context.world_size == 1 or sync is None:
        return None
    from colonnade.engine.guard import EVERY, Guard  # a run without a guard imports nothing of it

    return Guard(model, optimizer, context, sync, (asked.get("every") if isinstance(asked, dict) else None) or EVERY)


# --- A batch for one stage of a pipeline, as for a whole model -----------------------------------

_OF_A_MESSAGE = {"inputs", "values", "forms", "calls"}


def refuse_batch(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise where stages that `colonnade.split` has made are called with a batch. Stages of one's own take what they take."""
    from colonnade.parallel.own_forward import ModelStage

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


# --- Batches of ranks that see the same data -----------------------------------------------------

# All ranks of such an axis must be given the same batch, and all ranks of the world the same form of loss. Compared in the
# first steps and then rarely: a digest of what went in, one small collective, and the same error on every rank.

_FORMS = ("", "a mean", "(sum, count)")
_SAMPLED = 1 << 16
"""How many elements of a tensor are looked at, evenly spread: another batch differs in nearly all of them."""
_Given = tuple[int, int]
"""(digest, rows)"""


class _BatchNote(NamedTuple):
    """One rank's note on its step: the form of its loss, and digests and rows of what it was given. Zeros: nothing."""

    form: int
    inputs: int
    labels: int
    input_rows: int
    label_rows: int


class SameBatch:
    """Looks at the batches of training steps, and compares them where ranks see the same data.

    The axes of the layout say which ranks these are: tensor and pipeline, and axes of your own with `data="same"`. Ranks
    of other axes (data, sequence) have batches, or parts of sequences, of their own.
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
        """Whether the step that is under way is compared: steps 0 and 1, and every power of two from 64 on."""
        return self._step < 2 or (self._step >= 64 and self._step.bit_count() == 1)

    def see(self, inputs: Any, labels: Any = None) -> None:
        """Note what a rank was given; does nothing in a step that is not compared."""
        if not (self._looks and self.training and self.due and torch.is_grad_enabled()):
            return
        for seen, given in zip(self._seen, (inputs, labels), strict=True):
            digest = _digest(given)
            if digest is not None:
                seen.append((digest, rows_of(given)))

    def end_step(self, counted: bool | None, whole: bool) -> None:
        """Compare, if it is due. Collective over the world then; all ranks raise, or none.

        `counted`: whether the step's losses were (sum, count), None if there was none. `whole`: whether this rank has
        made all passes of the step; one that has not says nothing.
        """
        if not self._alone and self.due:
            form = 0 if counted is None else 1 + counted
            digests = [digest_of(repr(seen)) * bool(seen) for seen in self._seen]
            rows = [sum(rows for _, rows in seen) for seen in self._seen]
            with self._context.waits.during("comparing the batches"):
                mine = _BatchNote(form, *digests, *rows) if whole else _BatchNote(0, 0, 0, 0, 0)
                everyone = gather_numbers(mine, self._context.device)
            self._check([_BatchNote(*row) for row in everyone])
        self._step += 1
        self._clear()

    def _clear(self) -> None:
        self._seen: tuple[list[_Given], list[_Given]] = [], []
        """Of the passes so far: inputs, labels."""

    def _check(self, everyone: list[_BatchNote]) -> None:
        forms = {form: [rank for rank, note in enumerate(everyone) if note.form == form] for form in (1, 2)}
        if all(forms.values()):
            forms_text = "; ".join(f"{_FORMS[form]} on ranks {listed(ranks)}" for form, ranks in forms.items())
            raise GradientError(
                f"step {self._step}: the loss is not of one form on all ranks: {forms_text}; {USE_ONE_FORM}",
                code="C045",
            )
        first: dict[tuple[Any, ...], tuple[int, _Given]] = {}
        for rank, note in enumerate(everyone):
            given = {"inputs": (note.inputs, note.input_rows), "labels": (note.labels, note.label_rows)}
            for what, (digest, rows) in given.items():
                if digest:
                    mine = digest, rows
                    self._compare(what, *first.setdefault((what, *self._place(rank)), (rank, mine)), rank, mine)

    def _place(self, rank: int) -> tuple[int, ...]:
        """Where the rank stands among those that see distinct data."""
        here = self._context.layout.coordinates(rank)
        return tuple(here[axis.name] for axis in self._context.layout.axes if axis.data == "distinct")

    def _compare(self, what: str, other: int, theirs: _Given, rank: int, mine: _Given) -> None:
        if theirs == mine:
            return
        here, there = (self._context.layout.coordinates(each) for each in (rank, other))
        own = (
            " (the groups are not those of the grid, so the place of a rank in the data is "
            "gpc.layout.coordinates(gpc.get_global_rank())['data'])"
            if self._context.layout.places is not None
            else ""
        )
        axes = listed(repr(name) for name in here if here[name] != there[name])
        raise ScheduleError(
            f"step {self._step}: ranks {other} and {rank} differ on the axis {axes} alone, whose ranks see the same data, but "
            f"were given different {what}: {theirs[1]} rows on rank {other}, {mine[1]} on rank {rank}"
            f"{'' if theirs[1] != mine[1] else ', of other content'}. {FEED_ALIKE}{own}. Where the ranks of this axis are meant to "
            f"get different ones, set compare_batches=False in the config",
            code="C044",
        )


def ordered_sum(numbers: Tensor) -> Tensor:
    """One 64-bit number of many: it changes with the order of the numbers, and always when one of them changes."""
    factors = torch.arange(len(numbers), device=numbers.device) * 0x9E3779B97F4A7C1
    return ((factors ^ factors >> 29 | 1) * numbers).sum()


@torch.no_grad()
def _digest(given: Any) -> int | None:
    """A number that another batch does not have; None where there are no plain tensors. Waits for them."""
    found = []
    for leaf in tree_leaves(given):
        if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.is_nested or leaf.is_meta:
            continue
        some = leaf.reshape(-1)[:: 1 + leaf.numel() // _SAMPLED].contiguous()
        found.append((leaf.dtype, tuple(leaf.shape), ordered_sum(words_of(some)).item()))
    return digest_of(repr(found)) if found else None


# --- Gradients of parameters that a plan leaves whole --------------------------------------------

# Each tensor rank must have the whole gradient of such a parameter. Where each uses it for its own part of the features (a norm of
# each head), each has a part, and a sum is owed. A plan that forgets it trains wrongly. Compared once, in the first step.


class SameGradients:
    """Looks at raw gradients as backward passes make them; of a model that no plan has cut, at none."""

    def __init__(self, model: nn.Module, context: ParallelContext) -> None:
        self._context = context
        self._watched: dict[str, nn.Parameter] = {}
        self._sums: dict[str, Tensor] = {}
        if context.tensor_parallel_size > 1 and is_cut_by_plan(model):
            whole = whole_parameters(model, context, ParallelMode.TENSOR)
            named = model.named_parameters()
            self._watched = {name: p for name, p in named if id(p) in whole and p.requires_grad}
        self.is_due = bool(self._watched)
        # FSDP has gradients in other tensors until they are summed; those are looked at afterwards.
        plain = [(name, parameter) for name, parameter in self._watched.items() if not is_dtensor(parameter)]
        self._handles = [parameter.register_hook(partial(self._add, name)) for name, parameter in plain]

    def check(self, complete: bool) -> None:
        """Raise on every rank if tensor ranks differ. Collective over the world; not in a step of which a pass has failed."""
        for name, parameter in self._watched.items():
            if is_dtensor(parameter) and parameter.grad is not None:
                self._add(name, local_part(parameter.grad))
        sizes = [self._sums[name].tolist() if name in self._sums else [0.0, 0.0] for name in self._watched]
        mine = torch.tensor(
            [float(complete), *(number for pair in sizes for number in pair)], dtype=torch.float64, device="cpu"
        )
        mine = mine.to(message_device(self._context.device))
        rows = gather_rows(mine, self._context.get_group(ParallelMode.TENSOR)).cpu()
        self._sums.clear()
        if bool((rows[:, 0] == 1).all()):
            names, dtypes = list(self._watched), [parameter.dtype for parameter in self._watched.values()]
            self.close()
            with agreed_errors(self._context.device):
                _compare(names, dtypes, rows[:, 1:].reshape(len(rows), -1, 2))

    def close(self) -> None:
        """Look no longer."""
        self.is_due = False
        for handle in self._handles:
            handle.remove()
        self._watched, self._handles = {}, []

    def _add(self, name: str, gradient: Any) -> None:
        """Add what tells one gradient from another: its length along a fixed direction, and its norm squared."""
        if gradient.layout is not torch.strided or not gradient.numel():
            return
        with torch.no_grad():
            some = gradient.detach().reshape(-1)[:: -(-gradient.numel() // _SAMPLED)].double()
            along = torch.cos(torch.arange(len(some), device=some.device, dtype=torch.float64) * 1.7)
            found = torch.stack([(some * along).sum(), some.square().sum()])
            self._sums[name] = self._sums[name] + found if name in self._sums else found


def _compare(names: list[str], dtypes: list[torch.dtype], sums: Tensor) -> None:
    """`sums`: of every rank, for each name. What is far smaller than the largest gradient may be nothing but rounding."""
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
            f"the plan leaves {listed(map(repr, found[:8]))}{' ...' if len(found) > 8 else ''} whole, but the ranks of the "
            f"tensor group have different gradients of it: each rank uses it for its own part of the features. Give its layer "
            f"the style 'replicated_with_grad_allreduce' in the plan, so that the gradients are summed",
            code="C047",
        )


# --- Passes without training ---------------------------------------------------------------------

# A rank that evaluates alone, under `if rank == 0`, would meet the sums of the others' training step in its own, and get a number
# that is wrong. So where a model's layers are split over ranks, these meet before each such pass, apart from the collectives of
# the model: the first time by the store of the world, then by connections of their own. Passes of training meet nobody.


class Evaluations:
    """Watches the calls of a model; one whose parameters are split over no ranks, or are stages, not at all."""

    def __init__(self, model: nn.Module, context: ParallelContext) -> None:
        held = _held(model, context)
        self._meetings = [_Meeting(mode, context) for mode in _split_over(held, context)]
        self._handles: list[Any] = []
        self._inside: nn.Module | None = None
        # Not a reference to this object: it would never go.
        watch = weakref.ref(self)
        for module in _entries(model, held) if self._meetings else ():
            before, after = (ModelHook(partial(act, watch)) for act in (_meet, _leave))
            self._handles.append(module.register_forward_pre_hook(before, prepend=True))
            self._handles.append(module.register_forward_hook(after, always_call=True))

    def meet(self, module: nn.Module) -> None:
        """Before a pass without training through `module`. Collective over each group that the model is split over."""
        if self._inside is not None:
            return
        for meeting in self._meetings:
            meeting()
        self._inside = module

    def leave(self, module: nn.Module) -> None:
        """After a pass through `module`, whatever its end."""
        if self._inside is module:
            self._inside = None

    def close(self) -> None:
        """Watch no longer."""
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


def _held(model: nn.Module, context: ParallelContext) -> list[Held]:
    if context.world_size == 1 or context.pipeline_parallel_size > 1 or dist.get_backend() == "fake":
        return []
    return held_tensors(model, context)


def _entries(model: nn.Module, held: Sequence[Held]) -> list[nn.Module]:
    """Where a script may enter: the model; what it wraps, as peft's does, whose `generate` goes around the wrapper; and the parts
    of the innermost, such as an encoder. Not what is inside these, for the time that hooks take."""
    split = {id(entry.tensor) for entry in held if any(_is_split(spec) for spec in entry.placement.modes.values())}
    inside = {part: len(split.intersection(map(id, part.parameters()))) for part in model.modules()}
    found, module = [model], model
    while True:
        parts = [part for part in module.children() if inside[part]]
        if len(parts) != 1:
            return found + [part for part in parts if any(True for _ in part.children())]
        (module,) = parts
        found.append(module)


def _is_split(spec: Any) -> bool:
    return isinstance(spec, Shard) and spec.owes != "nothing"


def _split_over(held: Sequence[Held], context: ParallelContext) -> list[ParallelMode]:
    """The modes over which parameters are split, so that forward passes need all their ranks; one for each set of ranks."""
    specs = {mode: spec for entry in held for mode, spec in entry.placement.modes.items() if _is_split(spec)}
    found: dict[tuple[int, ...], ParallelMode] = {}
    for mode in sorted(specs, key=lambda mode: mode.name):
        ranks = tuple(context.get_ranks_in_group(mode)) if context.is_initialized(mode) else ()
        if len(ranks) > 1 and mode is not ParallelMode.DATA:
            found.setdefault(ranks, mode)
    return list(found.values())


class _Meeting:
    """The ranks of one group, which all come to it or none."""

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
            if self._gloo is None:
                self._by_store()
                self._gloo = own_gloo(self._group)
                return
            work, began = gloo_all_gather(self._gloo, *self._here), time.monotonic()
            seconds = 1.5 * waits.SAY_AFTER
            while not self._has_ended(work, seconds):
                self._look(began)
                seconds = waits.SAY_AFTER / 5

    def _by_store(self) -> None:
        store, key = default_store(), f"colonnade/evaluation/{self._ranks}"
        count, began = store.add(key, 1), time.monotonic()
        whole = -(-count // len(self._ranks)) * len(self._ranks)
        look = began + 1.5 * waits.SAY_AFTER
        for pause in pauses(0.05):
            if count >= whole:
                return
            if time.monotonic() > look:
                look += waits.SAY_AFTER / 5
                try:
                    self._look(began)
                except GradientError:
                    store.add(key, -1)
                    raise
            time.sleep(pause)
            count = store.add(key, 0)

    def _has_ended(self, work: Any, seconds: float) -> bool:
        """Whether all have come, after at most so many seconds; an error of the connections is raised."""
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if work.is_completed():
                raise
            return False
        return True

    def _look(self, began: float) -> None:
        """Raise where a rank is busy with a step that it cannot make without this rank."""
        for rank in self._ranks:
            place = stalled_position(rank) if rank != self._rank else None
            if (
                place is not None
                and not place.what.startswith(OUTSIDE)
                and (place.step or 0) >= (self._waits.step or 0)
            ):
                raise self._alone(f"rank {rank} is {place} meanwhile")
        if time.monotonic() - began > self._seconds:
            raise self._alone(f"not all of them have come for {self._seconds:g} s")

    def _alone(self, what: str) -> GradientError:
        return GradientError(
            f"the model is called without training on rank {self._rank}, and {what}. Its parameters are split over ranks "
            f"{listed(self._ranks)} of {self._mode.name}, so a pass needs all of them: evaluate and generate on every rank, and "
            f"only print and log under a condition such as `if rank == 0`",
            code="C130",
        )
