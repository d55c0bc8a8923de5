"""Activations by config: blocks that compute theirs again in backward, wholly or but for chosen ops, or keep them on the host.

`apply_activations` finds the blocks and gives each a `_Runs`; `torch.utils.checkpoint` does the rest. Keeping on the host is the
last section.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from colonnade.comm.torch_versions import is_traced
from colonnade.config.settings import ActivationSettings
from colonnade.errors import ConfigError, did_you_mean, listed
from colonnade.logging import get_dist_logger
from colonnade.parallel.forward import override_forward, restore_forward

_PRODUCTS = (
    "mm addmm bmm baddbmm _scaled_mm _grouped_mm _scaled_grouped_mm convolution _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _flash_attention_forward _efficient_attention_forward"
)
"""What selective checkpointing keeps: matrix products and attention. The rest is cheap to compute again."""


def apply_activations(
    model: nn.Module, settings: ActivationSettings, whole: Sequence[nn.Module], complete: bool = True
) -> None:
    """Have the blocks of `model` run as the settings say, in place; `release_blocks` undoes it.

    `whole`: the modules that `model` is a part of, itself or all pipeline stages, by which blocks are known. Unless they are
    `complete`, a model without blocks is only warned of: another stage may have them.
    """
    release_blocks(model)  # of an engine that was not closed
    if settings.mode == "none" and not settings.offload:
        return
    ops = frozenset(_ops(settings.keep) if settings.mode == "selective" else ())
    classes = None if settings.blocks else _repeated(whole, 2 if complete else 1)
    known = any(True for part in whole for _ in _blocks(part, settings.blocks, classes))
    if not known and complete:
        raise ConfigError(_nothing_found(settings.blocks, whole), code="C003")
    found = list(_blocks(model, settings.blocks, classes))
    for at, block in enumerate(found):
        runs = _Runs(settings.mode, settings.offload, ops) if at % settings.every == 0 else None
        block._colonnade_runs = runs  # type: ignore[assignment]
        # Blocks of one class stay of one class: others tell a list of blocks by that.
        override_forward(block, _run_block, mark="activations", share_class=True)
    if found:
        where = f"{len(found[:: settings.every])} of {len(found)} blocks"
        kinds = listed(sorted({type(block).__name__ for block in found}))
        offloaded = ", what they keep on the host" if settings.offload else ""
        get_dist_logger().info(f"activation_checkpoint: mode {settings.mode!r}, {where} ({kinds}){offloaded}")
    elif not complete:
        get_dist_logger().warning(f"{_nothing_found(settings.blocks, whole)} (in the stage of this rank)")


def _blocks(model: nn.Module, named: Sequence[str], classes: set[type] | None) -> Iterator[nn.Module]:
    """The blocks of a model, none of them inside another: of these classes, or else those named."""
    inside = ""
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if classes is not None:
            chosen = type(module) in classes and _is_block(name, module)
        else:
            chosen = any(fnmatchcase(name, each) or type(module).__name__ == each for each in named)
        if chosen and name:
            inside = f"{name}."
            yield module


def release_blocks(model: nn.Module) -> None:
    """Give the blocks of a model their own forward pass back."""
    for module in model.modules():
        if "_colonnade_runs" in vars(module):
            module._colonnade_runs = None  # type: ignore[assignment]
            restore_forward(module, "activations")


def recomputes(model: nn.Module) -> bool:
    """Whether blocks of a model compute activations again."""
    runs = [vars(module).get("_colonnade_runs") for module in model.modules()]
    return any(each is not None and each.mode != "none" for each in runs)


@dataclass(frozen=True)
class _Runs:
    """How one block runs while gradients are wanted."""

    mode: str
    offload: bool
    ops: frozenset[Any]

    def __call__(self, forward: Callable[..., Any], block: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.offload:
            return self._offloaded(forward, block, args, kwargs)
        return self._again(forward, block, args, kwargs)

    # Compiled code begins inside the hooks, which would not fit into a graph.
    @torch.compiler.disable(recursive=False)
    def _offloaded(self, forward: Callable[..., Any], block: nn.Module, args: Any, kwargs: Any) -> Any:
        with kept_on_host(block.parameters()):
            return self._again(forward, block, args, kwargs)

    def _again(self, forward: Callable[..., Any], block: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.mode == "none":
            return forward(block, *args, **kwargs)
        options: dict[str, Any] = {"use_reentrant": False}
        if self.mode == "selective":
            options["context_fn"] = partial(_contexts, self.ops)
        return checkpoint(forward, block, *args, **options, **kwargs)


def _contexts(kept: frozenset[Any]) -> tuple[Any, Any]:
    """torch's two contexts, for the forward pass and for computing it again, which look at the ops that are kept alone.

    torch's own want every op again that there was, as often at most. But zero stage 3 gathers parameters inside a block, with other
    ops where they were gathered ahead, and in other places of backward.
    """
    modes = create_selective_checkpoint_contexts(partial(_policy, kept))
    for mode in modes:
        own: Any = type(mode)
        mode.__class__ = _looking_at_kept_ops(own)  # no module: `override_forward` is for forward passes
        mode.kept = kept
    return modes


@cache
def _looking_at_kept_ops(own: type[Any]) -> type[Any]:
    def __torch_dispatch__(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        # Where a graph is made, every op is marked.
        if func in self.kept or is_traced():
            return own.__torch_dispatch__(self, func, types, args, kwargs)
        return func(*args, **kwargs)

    return type(own.__name__, (own,), {"__torch_dispatch__": __torch_dispatch__, "__module__": own.__module__})


def _policy(kept: frozenset[Any], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What selective checkpointing does with the result of an op.

    Inside the forward pass of an autograd.Function, where no gradients are recorded, it is nobody's to keep: the function may
    write over it, and the copy that was kept would change with it.
    """
    keep = op in kept and torch.is_grad_enabled()
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _run_block(block: nn.Module, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward pass of a block as its `_colonnade_runs` says; None once it was released, if FSDP2 keeps the class."""
    runs: Any = block._colonnade_runs
    if runs is None or not torch.is_grad_enabled():
        return before(block, *args, **kwargs)
    return runs(before, block, args, kwargs)


def _is_block(name: str, module: nn.Module) -> bool:
    """Whether it is a numbered member of a list or a sequence, with layers and parameters inside."""
    numbered = name.rpartition(".")[2].isdigit()
    return numbered and any(True for _ in module.children()) and any(True for _ in module.parameters())


def _repeated(whole: Iterable[nn.Module], times: int) -> set[type]:
    """The classes that this many blocks have, inner blocks of blocks not counted."""
    counts: Counter[type] = Counter()
    for part in whole:
        inside = ""
        for name, module in part.named_modules():
            if not (inside and name.startswith(inside)) and _is_block(name, module):
                counts[type(module)] += 1
                inside = f"{name}."
    return {kind for kind, count in counts.items() if count >= times}


def _nothing_found(blocks: Sequence[str], whole: Iterable[nn.Module]) -> str:
    kinds = sorted({type(module).__name__ for part in whole for module in part.modules()})
    if blocks:
        close = did_you_mean(blocks[0], kinds)
        return (
            f"activation_checkpoint.blocks={list(blocks)} names no module and no class of the model.{close} Its classes are "
            f"{listed(kinds)}"
        )
    return (
        f"activation_checkpoint finds no blocks in the model: they are members of an nn.ModuleList or nn.Sequential that have "
        f"layers inside, two or more of one class. Name them: activation_checkpoint = dict(blocks=['{kinds[0]}']), by class or by "
        f"pattern of module names; the classes are {listed(kinds)}"
    )


def _ops(names: Sequence[str]) -> list[Any]:
    """The ops of these names, aten.mm for every overload of it; without names, the products that this torch has."""
    found: list[Any] = []
    for name in names or [f"aten.{each}" for each in _PRODUCTS.split()]:
        at: Any = torch.ops
        for part in name.split("."):
            # Some namespaces answer to every name: an op is what has overloads, or is one.
            at = getattr(at, part, None)
        if isinstance(at, torch._ops.OpOverload):
            found.append(at)
        elif isinstance(at, torch._ops.OpOverloadPacket):
            found += [getattr(at, overload) for overload in at.overloads()]
        elif names:
            raise ConfigError(
                f"activation_checkpoint.keep: torch has no op {name!r}; write it as in torch.ops, 'aten.mm' say, or leave "
                f"`keep` out for all matrix products and attention",
                code="C003",
            )
    return found


# --- Offload: tensors that autograd keeps go to the host while forward goes on, and come back a block ahead of backward ---

_SMALLEST = 1 << 16
"""Bytes below which a tensor stays: a copy of it would take longer than it is worth."""

_streams: dict[torch.device, torch.cuda.Stream] = {}
"""Beside the work of a device: what copies out and, after that, back."""
_last: dict[torch.device, weakref.ref[_BlockCall]] = {}
"""The block that ran last: backward comes to it before the next one."""


def kept_on_host(parameters: Iterable[nn.Parameter]) -> saved_tensors_hooks:
    """Inside, what autograd keeps on a GPU goes to pinned memory of the host, but for these parameters and small tensors."""
    block = _BlockCall({parameter.untyped_storage().data_ptr() for parameter in parameters})
    return saved_tensors_hooks(block.pack, _unpack)


@dataclass
class _Kept:
    """One tensor on the host, and while it is on its way back, on the device."""

    block: _BlockCall
    host: Tensor
    device: torch.device
    back: Tensor | None = None

    def fetch(self) -> Tensor:
        with torch.cuda.stream(_stream(self.device)):
            return self.host.to(self.device, non_blocking=True)


class _BlockCall:
    """What one call of a block keeps."""

    def __init__(self, parameters: set[int]) -> None:
        self._parameters = parameters
        self._kept: list[weakref.ref[_Kept]] = []
        self._before: weakref.ref[_BlockCall] | None = None
        self._arrived: torch.cuda.Event | None = None

    def pack(self, tensor: Tensor) -> Tensor | _Kept:
        if not tensor.is_cuda or tensor.nbytes < _SMALLEST or tensor.untyped_storage().data_ptr() in self._parameters:
            return tensor
        if not self._kept:
            self._before, _last[tensor.device] = _last.get(tensor.device), weakref.ref(self)
        stream = _stream(tensor.device)
        # In its own order of elements, which compiled code insists on.
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(stream)
        kept = _Kept(self, host, tensor.device)
        self._kept.append(weakref.ref(kept))
        return kept

    def fetch(self, device: torch.device) -> torch.cuda.Event:
        """Have everything on its way back; the event is when it has arrived."""
        if self._arrived is None:
            for kept in filter(None, (each() for each in self._kept)):
                kept.back = kept.fetch()
            self._arrived = _stream(device).record_event()
        return self._arrived

    def fetch_before(self, device: torch.device) -> None:
        before = self._before() if self._before is not None else None
        if before is not None:
            before.fetch(device)


def _unpack(kept: Tensor | _Kept) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    current = torch.cuda.current_stream(kept.device)
    current.wait_event(kept.block.fetch(kept.device))
    tensor, kept.back = kept.back, None
    if tensor is None:  # a second backward pass over the same graph
        tensor = kept.fetch()
        current.wait_stream(_stream(kept.device))
    tensor.record_stream(current)
    kept.block.fetch_before(kept.device)
    return tensor


def _stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
