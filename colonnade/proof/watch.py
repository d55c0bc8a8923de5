"""watch: the one line by which a script of plain torch takes part in `colonnade verify`.

`PlainRecorder` does for a torch optimizer what `EngineRecorder` (record.py) does for an engine.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.comm.torch_versions import leave_out_mixed_precision
from colonnade.errors import ParityError
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.placement import is_dtensor
from colonnade.parallel.whole import offset_in_dtensor
from colonnade.proof.record import BatchAxis, Record, RunInfo, StepRecorder, TensorNote, Tracked, groups_of
from colonnade.proof.reference import all_same
from colonnade.proof.script_job import Batches, ScriptRecorder, current_script

_WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")


def watch(model: Any, optimizer: Any, batches: Any = None) -> tuple[Any, Any, Any]:
    """Let `colonnade verify` see a script of plain torch: its model (wrapped, sharded or split as it will be trained), its
    optimizer and the batches of this rank. Returns the three, to be used in their place.

    Ranks that are given the same batches share one; others see distinct data. A script with an engine hands over only batches
    that it uses outside of that: `watch(engine, None, batches)`. Anywhere but under `colonnade verify` it returns what it was given.
    """
    script = current_script()
    if script is None:
        return model, optimizer, batches
    if script.recorder is None:
        script.follow(PlainRecorder(model, optimizer, script), model, plain_name)
        script.begin()
    return model, optimizer, None if batches is None else Batches(batches, script)


def plain_name(name: str) -> str:
    """A name without what DDP, torch.compile and checkpoint wrappers put before it."""
    return _WRAPPERS.sub("", name).strip(".")


class PlainRecorder:
    """Notes the steps of a torch optimizer on a model."""

    def __init__(self, model: nn.Module, optimizer: Any, script: ScriptRecorder) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._optimizer, self._script = optimizer, script
        self._norm: float | None = None
        self._limit: tuple[float, float] | None = None
        if script.part.dtype == "fp64":
            _make_double(model)
            if leave_out_mixed_precision(model):
                script.notes.append(
                    "mixed precision of FSDP was left out: both runs are in fp64 (--dtype own keeps it)"
                )
        self.tracked = _tracked(model)
        self.recorder = StepRecorder(
            model, self.tracked, rank, rename=plain_name, by_count=True, dropping=script.dropping
        )
        self.record = self.recorder.record
        self.record.run = RunInfo(dtype=_dtype(self.tracked), data_parallel=_is_data_parallel(model))
        self.record.tensors = {
            one.name: TensorNote(
                one.names,
                one.shape,
                one.positions,
                one.placement,
                is_parameter=one.is_parameter,
                trained=one.tensor.requires_grad,
            )
            for one in self.tracked
        }
        self.record.groups = groups_of(optimizer, {id(one.tensor): one for one in self.tracked})
        optimizer.register_step_pre_hook(lambda *_: self._before_step())
        optimizer.register_step_post_hook(lambda *_: self._after_step())
        script.dropping.on_backward = self._note_loss

    def _note_loss(self, tensors: Any, gradients: Any = None, *args: Any, **kwargs: Any) -> None:
        """A backward pass that begins at one number: that is a loss."""
        some = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        given = [gradients, kwargs.get("gradient"), kwargs.get("grad_tensors")]
        if len(some) == 1 and some[0].numel() == 1 and all(one is None for one in given):
            self.recorder.note_loss((float(local_part(some[0].detach())), None))

    def clipping(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Gradients are final before torch clips them. The function returns their norm, or is given it."""
        if self._limit is None:
            self.recorder.note_gradients()
        given = inspect.signature(own).bind(*args, **kwargs).arguments
        found = own(*args, **kwargs)
        norm = given.get("total_norm", found)
        self._limit = (float(given["max_norm"]), float(given.get("norm_type", 2.0)))
        self._norm = float(norm.full_tensor() if is_dtensor(norm) else norm)
        return found

    def _before_step(self) -> None:
        self._script.before_step(self._optimizer)
        self.recorder.note_gradients(into="clipped" if self._limit is not None else "total")

    def _after_step(self) -> None:
        run, passes = self.record.run, [len(each) for each in self.recorder.passes()]
        run.accumulation = max(passes, default=1)
        run.max_norm, run.norm_type = self._limit or (None, 2.0)
        self.recorder.note_step(self._norm)
        self._norm = self._limit = None
        self._script.end_of_step()


def _tracked(model: nn.Module) -> list[Tracked]:
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        found.setdefault(id(tensor), (tensor, []))[1].append(plain_name(name))
    return [_lying(tensor, tuple(names)) for tensor, names in found.values()]


def _lying(tensor: Any, names: tuple[str, ...]) -> Tracked:
    if not is_dtensor(tensor):
        return Tracked(names[0], names, tensor, tuple(tensor.shape))
    local, strides = local_part(tensor), [1] * tensor.dim()
    for dim in range(tensor.dim() - 2, -1, -1):
        strides[dim] = strides[dim + 1] * tensor.shape[dim + 1]
    places = torch.zeros((), dtype=torch.int64)
    for offset, size, stride in zip(offset_in_dtensor(tensor), local.shape, strides, strict=True):
        places = places.unsqueeze(-1) + (offset + torch.arange(size)) * stride
    whole = tuple(local.shape) == tuple(tensor.shape)
    return Tracked(
        names[0], names, tensor, tuple(tensor.shape), None if whole else places, str(tuple(tensor.placements))
    )


def _is_data_parallel(model: nn.Module) -> bool:
    """Whether a wrapper says that its ranks see distinct data. FSDP on a mesh of several axes does not say over which."""
    from torch.distributed.fsdp import FSDPModule  # here: it takes long, and other runs do without it

    if isinstance(model, nn.parallel.DistributedDataParallel):
        return dist.get_world_size(model.process_group) > 1
    sharded: list[Any] = [parameter for parameter in model.parameters() if is_dtensor(parameter)]
    meshes = [parameter.device_mesh for parameter in sharded]
    return isinstance(model, FSDPModule) and all(mesh.ndim == 1 and mesh.size() > 1 for mesh in meshes)


def _dtype(tracked: Sequence[Tracked]) -> str:
    floating = [one.tensor.dtype for one in tracked if one.tensor.is_floating_point()]
    return str(floating[0] if floating else torch.get_default_dtype()).removeprefix("torch.")


def _make_double(model: nn.Module) -> None:
    """Turn a model that is not in float64 yet (loaded from a file) into it."""
    if any(p.is_floating_point() and p.dtype is not torch.float64 for p in model.parameters()):
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ParityError(
                "the model of DistributedDataParallel is not in float64, and its buckets are made: build it in the default "
                "dtype, or run colonnade verify --dtype own",
                code="C100",
            )
        model.double()


# --- In the process that compares ---


def with_layout(records: Sequence[Record]) -> list[Record]:
    """Records of plain torch have no layout. It is read off the batches: ranks that were given the same ones share their data."""
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
            owed = (("DATA", tuple(groups["DATA"][at]), float(len(kinds))),) if len(kinds) > 1 else ()
            record.tensors = {name: replace(note, owed=owed) for name, note in record.tensors.items()}
            if staged:  # torch's stages run once on made-up inputs, to learn their shapes
                record.steps[0].activations.clear()
            record.run.axes, record.run.coordinates = axes, {"data": data, "model": at}
            record.run.groups = {name: lists for name, lists in groups.items() if any(len(g) > 1 for g in lists)}
            record.run.distinct_data = ["DATA"] if len(kinds) > 1 else []
    return list(records)
