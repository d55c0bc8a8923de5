"""Activation checkpointing (full or selective) and activation offloading, as the config sets them.

`apply_activations` finds the blocks of a model and overrides their forward pass; `torch.utils.checkpoint` does the recomputation.
Offloading to the host is in the last section.
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
"""Ops whose results selective checkpointing keeps: matrix products and attention. The rest is cheap to recompute."""


def apply_activations(
    model: nn.Module, settings: ActivationSettings, stages: Sequence[nn.Module], complete: bool = True
) -> None:
    """Apply activation checkpointing and offloading to the blocks of `model`, in place; `release_blocks` undoes it.

    Args:
        model: the model of this rank.
        settings: the `activation_checkpoint` section of the config.
        stages: the modules in which blocks are looked for: `model` itself, or all pipeline stages if they are known.
        complete: whether `stages` is the full model. If not, missing blocks cause only a warning, because another stage may have
            blocks.

    Raises:
        ConfigError: no blocks were found, or `keep` names an unknown op.
    """
    release_blocks(model)  # of an engine that was not closed
    if settings.mode == "none" and not settings.offload:
        return
    ops = frozenset(_ops(settings.keep) if settings.mode == "selective" else ())
    classes = None if settings.blocks else _repeated(stages, 2 if complete else 1)
    known = any(True for module in stages for _ in _blocks(module, settings.blocks, classes))
    if not known and complete:
        raise ConfigError(_nothing_found(settings.blocks, stages), code="C003")
    found = list(_blocks(model, settings.blocks, classes))
    for at, block in enumerate(found):
        runs = _Runs(settings.mode, settings.offload, ops) if at % settings.every == 0 else None
        block._colonnade_runs = runs  # type: ignore[assignment]
        # Blocks of one class get one new class in common: other code recognises a list of blocks by the equal class.
        override_forward(block, _run_block, mark="activations", share_class=True)
    if found:
        where = f"{len(found[:: settings.every])} of {len(found)} blocks"
        kinds = listed(sorted({type(block).__name__ for block in found}))
        offloaded = ", offloaded to the host" if settings.offload else ""
        get_dist_logger().info(f"activation_checkpoint: mode {settings.mode!r}, {where} ({kinds}){offloaded}")
    elif not complete:
        get_dist_logger().warning(f"{_nothing_found(settings.blocks, stages)} (in the stage of this rank)")


def _blocks(model: nn.Module, patterns: Sequence[str], classes: set[type] | None) -> Iterator[nn.Module]:
    """The outermost blocks of a model: modules of the given classes or, without classes, modules whose name or class matches a
    pattern.
    """
    inside = ""
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if classes is not None:
            chosen = type(module) in classes and _is_block(name, module)
        else:
            chosen = any(fnmatchcase(name, pattern) or type(module).__name__ == pattern for pattern in patterns)
        if chosen and name:
            inside = f"{name}."
            yield module


def release_blocks(model: nn.Module) -> None:
    """Restore the forward passes of the blocks of a model."""
    for module in model.modules():
        if "_colonnade_runs" in vars(module):
            module._colonnade_runs = None  # type: ignore[assignment]
            restore_forward(module, "activations")


def recomputes(model: nn.Module) -> bool:
    """Whether some blocks of a model recompute activations in backward."""
    found = [vars(module).get("_colonnade_runs") for module in model.modules()]
    return any(runs is not None and runs.mode != "none" for runs in found)


@dataclass(frozen=True)
class _Runs:
    """The checkpointing mode and offloading of one block, for calls with gradients enabled."""

    mode: str
    offload: bool
    ops: frozenset[Any]

    def __call__(self, forward: Callable[..., Any], block: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.offload:
            return self._offloaded(forward, block, args, kwargs)
        return self._checkpointed(forward, block, args, kwargs)

    # Compiled code begins inside the saved-tensor hooks, which cannot be part of a graph.
    @torch.compiler.disable(recursive=False)
    def _offloaded(self, forward: Callable[..., Any], block: nn.Module, args: Any, kwargs: Any) -> Any:
        with kept_on_host(block.parameters()):
            return self._checkpointed(forward, block, args, kwargs)

    def _checkpointed(self, forward: Callable[..., Any], block: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.mode == "none":
            return forward(block, *args, **kwargs)
        options: dict[str, Any] = {"use_reentrant": False}
        if self.mode == "selective":
            options["context_fn"] = partial(_contexts, self.ops)
        return checkpoint(forward, block, *args, **options, **kwargs)


def _contexts(kept: frozenset[Any]) -> tuple[Any, Any]:
    """torch's contexts for the forward pass and for its recomputation, restricted to the ops that are kept.

    torch's own contexts expect every op of the forward pass again in the recomputation. But ZeRO stage 3 gathers parameters
    inside a block, with different ops if they were gathered ahead, and at different points of backward.
    """

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        # Results inside the forward of an autograd.Function (no gradients are recorded there) must not be kept: the function
        # may overwrite them, and the kept tensor would change with them.
        keep = op in kept and torch.is_grad_enabled()
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    modes = create_selective_checkpoint_contexts(policy)
    for mode in modes:
        own: Any = type(mode)
        mode.__class__ = _for_kept_ops(own)  # not `override_forward`, which is for modules
        mode.kept = kept
    return modes


@cache
def _for_kept_ops(own: type[Any]) -> type[Any]:
    """A subclass of a dispatch mode of torch that sees only the ops in its attribute `kept`."""

    def __torch_dispatch__(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        # While a graph is traced, torch must see every op to mark it.
        if func in self.kept or is_traced():
            return own.__torch_dispatch__(self, func, types, args, kwargs)
        return func(*args, **kwargs)

    return type(own.__name__, (own,), {"__torch_dispatch__": __torch_dispatch__, "__module__": own.__module__})


def _run_block(block: nn.Module, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward pass of a block. FSDP2 may keep the class after `release_blocks`: then `_colonnade_runs` is None."""
    runs: Any = block._colonnade_runs
    if runs is None or not torch.is_grad_enabled():
        return before(block, *args, **kwargs)
    return runs(before, block, args, kwargs)


def _is_block(name: str, module: nn.Module) -> bool:
    """Whether a module is a numbered member of a list or sequence, with submodules and parameters."""
    numbered = name.rpartition(".")[2].isdigit()
    return numbered and any(True for _ in module.children()) and any(True for _ in module.parameters())


def _repeated(stages: Iterable[nn.Module], times: int) -> set[type]:
    """The classes with at least this many blocks, not counting blocks inside of blocks."""
    counts: Counter[type] = Counter()
    for stage in stages:
        inside = ""
        for name, module in stage.named_modules():
            if not (inside and name.startswith(inside)) and _is_block(name, module):
                counts[type(module)] += 1
                inside = f"{name}."
    return {kind for kind, count in counts.items() if count >= times}


def _nothing_found(blocks: Sequence[str], stages: Iterable[nn.Module]) -> str:
    kinds = sorted({type(module).__name__ for stage in stages for module in stage.modules()})
    if blocks:
        close = did_you_mean(blocks[0], kinds)
        return (
            f"activation_checkpoint.blocks={list(blocks)} matches no module and no class of the model.{close} "
            f"The classes of the model are {listed(kinds)}."
        )
    return (
        "activation_checkpoint finds no blocks in the model. Blocks are two or more members of one class in an "
        "nn.ModuleList or nn.Sequential, and each has submodules. Name the blocks by class or by pattern of "
        f"module names: activation_checkpoint = dict(blocks=['{kinds[0]}']). The classes of the model are "
        f"{listed(kinds)}."
    )


def _ops(names: Sequence[str]) -> list[Any]:
    """The ops with these names ("aten.mm" stands for all its overloads). Without names: the ops of `_PRODUCTS` that
    this torch version has."""
    found: list[Any] = []
    for name in names or [f"aten.{product}" for product in _PRODUCTS.split()]:
        at: Any = torch.ops
        for attribute in name.split("."):
            # Some namespaces return something for every name, so the type decides whether the result is an op.
            at = getattr(at, attribute, None)
        if isinstance(at, torch._ops.OpOverload):
            found.append(at)
        elif isinstance(at, torch._ops.OpOverloadPacket):
            found += [getattr(at, overload) for overload in at.overloads()]
        elif names:
            raise ConfigError(
                f"activation_checkpoint.keep contains {name!r}, but torch has no such op. Write the name as in "
                "torch.ops, for example 'aten.mm'. Leave `keep` out to keep the results of all matrix products and "
                "attention.",
                code="C003",
            )
    return found


# --- Offloading: saved tensors are copied to the host during forward, and back one block ahead of backward ---

_SMALLEST = 1 << 16
"""Bytes below which a tensor stays on the device: copying it costs more than it saves."""

_streams: dict[torch.device, torch.cuda.Stream] = {}
"""The copy stream of each device, for both directions: a copy back never overtakes the copy out."""
_last: dict[torch.device, weakref.ref[_BlockCall]] = {}
"""The last block call with offloaded tensors: the one that backward needs first."""


def kept_on_host(parameters: Iterable[nn.Parameter]) -> saved_tensors_hooks:
    """A context manager in which autograd saves GPU tensors in pinned host memory, except small tensors and the given
    parameters."""
    block = _BlockCall({parameter.untyped_storage().data_ptr() for parameter in parameters})
    return saved_tensors_hooks(block.pack, _unpack)


@dataclass
class _Kept:
    """One saved tensor on the host; `back` is its copy on the device, from its prefetch until backward uses it."""

    block: _BlockCall
    host: Tensor
    device: torch.device
    back: Tensor | None = None

    def fetch(self) -> Tensor:
        with torch.cuda.stream(_stream(self.device)):
            return self.host.to(self.device, non_blocking=True)


class _BlockCall:
    """The offloaded tensors of one call of a block.

    References to tensors and to the call before are weak: autograd owns the tensors, and a graph that is freed without a
    backward pass must free them.
    """

    def __init__(self, parameters: set[int]) -> None:
        self._parameters = parameters
        self._kept: list[weakref.ref[_Kept]] = []
        self._before: weakref.ref[_BlockCall] | None = None
        self._arrived: torch.cuda.Event | None = None

    def pack(self, tensor: Tensor) -> Tensor | _Kept:
        """Start the copy of a saved tensor to the host."""
        if not tensor.is_cuda or tensor.nbytes < _SMALLEST or tensor.untyped_storage().data_ptr() in self._parameters:
            return tensor
        if not self._kept:
            self._before, _last[tensor.device] = _last.get(tensor.device), weakref.ref(self)
        stream = _stream(tensor.device)
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)  # with its strides, which compiled code checks
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host.copy_(tensor.detach(), non_blocking=True)
        # The caching allocator must not reuse the memory before the copy has ended.
        tensor.record_stream(stream)
        kept = _Kept(self, host, tensor.device)
        self._kept.append(weakref.ref(kept))
        return kept

    def fetch(self, device: torch.device) -> torch.cuda.Event:
        """Start the copies of all tensors back to the device, once. An event marks the end of the copies."""
        if self._arrived is None:
            for kept in filter(None, (reference() for reference in self._kept)):
                kept.back = kept.fetch()
            self._arrived = _stream(device).record_event()
        return self._arrived

    def fetch_before(self, device: torch.device) -> None:
        """Prefetch the tensors of the block call before this one, which backward needs next."""
        before = self._before() if self._before is not None else None
        if before is not None:
            before.fetch(device)


def _unpack(kept: Tensor | _Kept) -> Tensor:
    """Return a saved tensor to backward.

    The first one of a block copies back all tensors of the block, and prefetches those of the block before.
    """
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
