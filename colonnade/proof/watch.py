"""`colonnade.watch`: the one line that a plain torch script needs for `colonnade verify`.

`PlainRecorder` records a torch optimizer, as `EngineRecorder` (record.py) records an engine.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.comm.torch_versions import leave_out_mixed_precision
from colonnade.errors import ParityError
from colonnade.parallel.placement import is_dtensor, local_part
from colonnade.parallel.whole import offset_in_dtensor
from colonnade.proof.record import (
    BatchAxis,
    Piece,
    Record,
    RunInfo,
    StepRecorder,
    TensorNote,
    Tracked,
    flat_indices,
    groups_of,
    state_of,
)
from colonnade.proof.reference import all_same
from colonnade.proof.script_job import Batches, ScriptRecorder, current_script

_WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")


def watch(model: Any, optimizer: Any, batches: Any = None) -> tuple[Any, Any, Any]:
    """Make a plain torch script visible to `colonnade verify`; in any other run, return the arguments unchanged.

    Args:
        model: The model as it will be trained: wrapped, sharded or split.
        optimizer: Its torch optimizer. A script with an engine calls `watch(engine, None, batches)`, and only for batches
            that it uses outside of the engine.
        batches: The batches of this rank. Ranks with equal batches count as one data rank; others see distinct data.

    Returns:
        The model, the optimizer and the batches, to be used instead of the arguments.

    Example::

        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        batches = [(torch.ones(8, 4), torch.ones(8, 2))]
        model, optimizer, batches = colonnade.watch(model, optimizer, batches)
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    """
    script = current_script()
    if script is None:
        return model, optimizer, batches
    if script.recorder is None:
        script.follow(PlainRecorder(model, optimizer, script), model, plain_name)
        script.begin()
    return model, optimizer, None if batches is None else Batches(batches, script)


def plain_name(name: str) -> str:
    """Return a name without the prefixes of DDP, FSDP, torch.compile and checkpoint wrappers."""
    return _WRAPPERS.sub("", name).strip(".")


class PlainRecorder:
    """Records the steps of a torch optimizer on a model."""

    def __init__(self, model: nn.Module, optimizer: Any, script: ScriptRecorder) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._norm: float | None = None
        self._limit: tuple[float, float] | None = None
        self._script, self._model = script, model
        self._passes_before: list[bool] = []
        # A model that was loaded from a file may not be in fp64 yet.
        is_half = any(p.is_floating_point() and p.dtype is not torch.float64 for p in model.parameters())
        if script.part.dtype == "fp64" and is_half:
            if isinstance(model, nn.parallel.DistributedDataParallel):
                raise ParityError(
                    "the model inside DistributedDataParallel is not in float64, and DDP has already built its "
                    "gradient buckets. Build the model in the default dtype, or run colonnade verify --dtype own.",
                    code="C100",
                )
            model.double()
        # `Module.double` leaves complex tensors as they are.
        for tensor in [*model.parameters(), *model.buffers()] if script.part.dtype == "fp64" else ():
            if tensor.dtype is torch.complex64 and not is_dtensor(tensor):
                tensor.data = tensor.data.to(torch.complex128)
        if script.part.dtype == "fp64" and leave_out_mixed_precision(model):
            script.notes.append(
                "mixed precision of FSDP was left out: both runs are in fp64 (--dtype own keeps the dtype)"
            )
        with self.whole():
            self.tracked = _tracked(model)
        self.recorder = StepRecorder(
            model,
            self.tracked,
            rank,
            rename=plain_name,
            by_count=True,
            gradients=self.gradients,
            dropping=script.dropping,
            sketched=script.sketched,
            whole=self.whole,
        )
        self.record = self.recorder.record
        floating = [entry.tensor.dtype for entry in self.tracked if entry.tensor.is_floating_point()]
        dtype = str(floating[0] if floating else torch.get_default_dtype()).removeprefix("torch.")
        self.record.run = RunInfo(dtype=dtype, data_parallel=_is_data_parallel(model))
        self.record.tensors = {
            entry.name: TensorNote(
                entry.names,
                entry.shape,
                entry.positions,
                entry.placement,
                is_parameter=entry.is_parameter,
                trained=entry.tensor.requires_grad,
            )
            for entry in self.tracked
        }
        self.record.groups = groups_of(optimizer, {id(entry.tensor): entry for entry in self.tracked})

        # A backward pass that starts at a single number starts at a loss.
        def note_loss(tensors: Any, gradients: Any = None, *args: Any, **kwargs: Any) -> None:
            some = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            given = [gradients, kwargs.get("gradient"), kwargs.get("grad_tensors")]
            if len(some) == 1 and some[0].numel() == 1 and all(entry is None for entry in given):
                self.recorder.note_loss((float(local_part(some[0].detach())), None))

        script.dropping.on_backward = note_loss
        self.follow_steps(optimizer)

    def follow_steps(self, optimizer: Any) -> None:
        """Call `before_step` and `after_step` around each step of the optimizer."""
        self.recorder.state = lambda: state_of(optimizer, {id(entry.tensor): entry for entry in self.tracked})
        optimizer.register_step_pre_hook(lambda *_: self.before_step(optimizer))
        optimizer.register_step_post_hook(lambda *_: self.after_step(checks_step=True))

    def whole(self) -> AbstractContextManager[Any]:
        """Return a block in which the tracked tensors have all elements that this rank computes with."""
        return nullcontext()

    def gradients(self) -> Iterator[tuple[Tracked, Piece]]:
        """Yield the gradients that the optimizer will use."""
        return self.recorder._own_gradients()

    def before_step(self, optimizer: Any) -> None:
        """Record the options and the gradients. If the script clips, `clipping` has recorded the unclipped ones."""
        self._script.before_step(optimizer)
        self.recorder.note_held(held_by_fsdp(self._model, self.tracked))
        self.recorder.note_gradients(into="clipped" if self._limit is not None else "total")
        self._passes_before.append(self.recorder.has_passes)

    def after_step(self, checks_step: bool = False) -> None:
        """Record the result of a step. `checks_step`: record gradients again if the step changed them."""
        has_passes = self._passes_before.pop()
        if checks_step:
            self.recorder.note_stepped(has_passes=has_passes)
        self.record.run.accumulation = max((len(by_pass) for by_pass in self.recorder.passes()), default=1)
        self.record.run.max_norm, self.record.run.norm_type = self._limit or (None, 2.0)
        self.recorder.note_step(self._norm)
        self._norm = self._limit = None
        self._script.end_of_step()

    def note_clipping(self, max_norm: float, norm: float, norm_type: float = 2.0) -> None:
        """Note that this step clips, and the norm that it found."""
        self._limit, self._norm = (max_norm, norm_type), norm

    def clipping(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record the final gradients before torch clips them, and the norm that torch computes or is given."""
        given = inspect.signature(own).bind(*args, **kwargs).arguments
        self.record.run.norm_type = float(given.get("norm_type", 2.0))
        if self._limit is None:
            self.recorder.note_gradients()
        found = own(*args, **kwargs)
        norm = given.get("total_norm", found)
        value = float(norm.full_tensor() if is_dtensor(norm) else norm)
        self.note_clipping(float(given["max_norm"]), value, self.record.run.norm_type)
        return found


def _tracked(model: nn.Module) -> list[Tracked]:
    found: dict[int, tuple[Any, list[str]]] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        found.setdefault(id(tensor), (tensor, []))[1].append(plain_name(name))
    tracked = []
    for tensor, names in found.values():
        shape = tuple(tensor.shape)
        if not is_dtensor(tensor):
            tracked.append(Tracked(names[0], tuple(names), tensor, shape))
            continue
        local = local_part(tensor)
        places = flat_indices(offset_in_dtensor(tensor), local.shape, shape)
        positions = None if tuple(local.shape) == shape else places
        tracked.append(Tracked(names[0], tuple(names), tensor, shape, positions, str(tuple(tensor.placements))))
    return tracked


def _is_data_parallel(model: nn.Module) -> bool:
    """Whether a wrapper shows that ranks should see distinct data. FSDP on a mesh of several axes does not show which."""
    from torch.distributed.fsdp import FSDPModule  # slow to import, and only needed here

    if isinstance(model, nn.parallel.DistributedDataParallel):
        return dist.get_world_size(model.process_group) > 1
    sharded: list[Any] = [parameter for parameter in model.parameters() if is_dtensor(parameter)]
    meshes = [parameter.device_mesh for parameter in sharded]
    return isinstance(model, FSDPModule) and all(mesh.ndim == 1 and mesh.size() > 1 for mesh in meshes)


def held_by_fsdp(model: nn.Module, tracked: Sequence[Tracked]) -> list[str]:
    """Return the parameters whose gradients FSDP2 accumulates without reducing them (`set_requires_gradient_sync(False)`)."""
    names, held = {id(entry.tensor): entry.name for entry in tracked}, []
    for module in model.modules():
        # torch has no public attribute that tells whether synchronization is on. Without this one, nothing counts as held.
        find: Any = getattr(module, "_get_fsdp_state", None)
        state = None if find is None else find()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            if getattr(group, "reduce_grads", True) is False:
                held += [names[id(one.sharded_param)] for one in group.fsdp_params if id(one.sharded_param) in names]
    return held


# --- In the process that compares ---


def with_layout(records: Sequence[Record]) -> list[Record]:
    """Return the records with a layout that is inferred from the batches: ranks with equal batches share their data.

    Plain torch has no layout.
    """
    if all(record.run.axes is not None for record in records):
        return list(records)
    kinds: list[list[Record]] = []
    for record in records:
        for kind in kinds:
            if all_same([kind[0].run.given, record.run.given]):
                kind.append(record)
                break
        else:
            kinds.append([record])
    deepest = max(len(kind) for kind in kinds)
    axes = [BatchAxis("data", len(kinds), True), BatchAxis("model", deepest, False)]
    groups = {
        "DATA": [sorted(kind[at].rank for kind in kinds if at < len(kind)) for at in range(deepest)],
        "MODEL": [[record.rank for record in kind] for kind in kinds],
    }
    staged = any(record.tensors.keys() != records[0].tensors.keys() for record in records)
    for data, kind in enumerate(kinds):
        for at, record in enumerate(kind):
            required = (("DATA", tuple(groups["DATA"][at]), float(len(kinds))),) if len(kinds) > 1 else ()
            record.tensors = {name: replace(note, required=required) for name, note in record.tensors.items()}
            # torch's pipeline stages run once on made-up inputs to learn their shapes: these outputs mean nothing.
            if staged:
                record.steps[0].activations.clear()
            record.run.axes, record.run.coordinates = axes, {"data": data, "model": at}
            record.run.groups = {name: lists for name, lists in groups.items() if any(len(g) > 1 for g in lists)}
            record.run.distinct_data = ["DATA"] if len(kinds) > 1 else []
    return list(records)
