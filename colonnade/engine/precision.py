"""Dtypes of a run: float8 products, the loss scale of fp16, autocast and master weights, and the table of what lies in which dtype.

`Precision` is what the keys `fp16` and `bf16` ask for: the dtype of the forward pass, and whether the optimizer steps on fp32
weights. `LossScaler` keeps fp16 gradients from vanishing. `convert_to_float8` replaces linear layers. `precision_table` reads the dtypes and
bytes of the tensors that there are.
"""

from __future__ import annotations

import copy
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colonnade.config.settings import Bf16Settings, Float8Settings, Fp16Settings
from colonnade.engine.model import layer_kind
from colonnade.errors import ConfigError, listed
from colonnade.gradients.synchroniser import Synchroniser
from colonnade.logging import get_dist_logger
from colonnade.optim.engine_optimizer import EngineOptimizer
from colonnade.optim.norm import Norms
from colonnade.optim.optimizer_trial import state_dtypes
from colonnade.optim.zero.formula import dtypes_of, make_fp32
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.forward import override_forward, restore_forward

# --- Linear layers in float8 by torchao, an optional extra: plain ones, and ours under tensor parallelism ---


_MULTIPLE = 16
"""What float8 products want of every side of a weight."""
_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}
_SHOWN = 6


def convert_to_float8(model: nn.Module, settings: Float8Settings, device: torch.device) -> None:
    """Let the linear layers of a model that suit it multiply in float8, in place; parameters stay the same objects."""
    _require_float8(settings, device)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(settings.recipe)
    config = replace(config, emulate=settings.emulate, pad_inner_dim=True)
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) or layer_kind(m) == "embedding"}
    chosen, left = [], []
    for root in model if isinstance(model, nn.ModuleList) else [model]:
        for name, layer in _linears(root):
            reason = _why_not_float8(name, layer, settings.skip, tied)
            if reason is not None:
                left.append(f"{name} ({reason})")
                continue
            chosen.append(name)
            if layer_kind(layer) is not None:
                layer.arrangement = copy.copy(layer.arrangement)
                layer.arrangement.multiply = _multiplier(config)
        convert_to_float8_training(root, module_filter_fn=lambda _, name: name in chosen, config=config)
    rest = listed(left[:_SHOWN]) + (f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else "")
    get_dist_logger().info(
        f"float8 ({settings.recipe}{', emulated' if settings.emulate else ''}): {len(chosen)} linear layers; in their own dtype: "
        f"{rest or 'none'}"
    )


def _require_float8(settings: Float8Settings, device: torch.device) -> None:
    """Refuse what is not there: the package, or the hardware."""
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "float8 needs torchao, which is not installed: pip install torchao, or leave float8 out", code="C024"
        )
    if settings.emulate:
        return
    needed, found = _CAPABILITY[settings.recipe], (0, 0)
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
    if found < needed:
        here = f"{device} has {found[0]}.{found[1]}" if device.type == "cuda" else f"this rank computes on {device}"
        raise ConfigError(
            f"float8 with recipe={settings.recipe!r} needs a GPU of compute capability {needed[0]}.{needed[1]} or above, and "
            f"{here}. Leave float8 out, or try it with float8=dict(emulate=True), which is slow.",
            code="C024",
        )


def _why_not_float8(name: str, layer: Any, skip: Sequence[str], tied: set[int]) -> str | None:
    """Why a layer keeps its dtype; None if it does not."""
    if layer_kind(layer) == "classifier" or id(layer.weight) in tied:
        return "the classifier"
    if any(fnmatchcase(name, pattern) or name.rpartition(".")[2] == pattern for pattern in skip):
        return "skipped"
    rows, columns = layer.weight.flatten(0, -2).shape
    if rows % _MULTIPLE or columns % _MULTIPLE:
        return f"{rows} x {columns} is no multiple of {_MULTIPLE}"
    if layer.weight.dtype is torch.float64:
        return "float64"
    if layer_kind(layer) is not None and not layer.arrangement.multiplies_blocks:
        return f"{type(layer.arrangement).__name__} multiplies in several pieces"
    return None


def _linears(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """The linear layers inside a model, by name. Torch's own kinds (as in its attention) use the weight by themselves."""
    for name, module in root.named_modules():
        if name and (layer_kind(module) in ("linear", "classifier") or type(module) is nn.Linear):
            yield name, module


def _multiplier(config: Any) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """`F.linear` in float8."""
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    how = Float8Linear.from_float(nn.Linear(_MULTIPLE, _MULTIPLE, device="meta"), config).linear_mm_config

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = matmul_with_hp_or_float8_args.apply(x, weight.t(), how, config)
        return y if bias is None else y + bias.to(y.dtype)

    return multiply


# --- The loss scale of fp16: its decisions are the same on every rank ---
#
# The scaled gradients are never unscaled in a pass of their own: the norm is divided by the scale, and the scale joins the
# clip divisor inside the optimizer step. Whether a step is dropped follows from the norm of the whole world, so every rank
# drops it, and the scale falls, together.


class LossScaler:
    """The loss scale as a device tensor; grows after `growth_interval` good steps, falls after a dropped one."""

    def __init__(self, device: torch.device, settings: Fp16Settings) -> None:
        self.scale = torch.tensor(float(settings.init_scale), device=device)
        self.count = torch.ones((), device=device)
        """What a loss given as (sum, count) is divided by for its backward pass, so that fp16 meets the gradients of a mean:
        about the count of the step before, as a power of two, by which dividing costs no precision."""
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._factors = (settings.growth_factor, settings.backoff_factor, settings.growth_interval)
        self._limits = (settings.min_scale, settings.max_scale)
        self._dynamic = settings.dynamic_grad_scale

    def unscaled(self, norms: Norms) -> Norms:
        """The norms of the gradients as they would be without the scale."""
        p = norms.p
        factor = self.scale.double() if p == float("inf") else self.scale.double() ** p
        return Norms(p, norms.sums / factor, norms.nonfinite)

    def expect(self, count: Tensor) -> None:
        """The losses of the next step will have about this count."""
        self.count.copy_(torch.where(count.isfinite() & (count > 1), count, 1.0).log2().floor().exp2())

    def update(self, found_inf: Tensor) -> None:
        """After a step; `found_inf`: whether its gradient was not finite."""
        if not self._dynamic:
            return
        torch._amp_update_scale_(self.scale, self._good_steps, found_inf.float().reshape(()), *self._factors)
        low, high = self._limits
        if low is not None or high is not None:
            self.scale.clamp_(low, high)

    def state_dict(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good_steps": self._good_steps, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.scale.copy_(state["scale"])
        self._good_steps.copy_(state["good_steps"])
        self.count.copy_(state.get("count", torch.ones((), device="cpu")))


@dataclass(frozen=True)
class Precision:
    """What the config asks for: the autocast dtype (None: off), and the settings of a loss scaler (None: off)."""

    dtype: torch.dtype | None = None
    scaler: Fp16Settings | None = None
    master_weights: bool = True
    """Whether the optimizer steps on fp32 weights."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Precision:
        """From the `fp16` and `bf16` keys; `master_weights` may stand under `zero` as well."""
        masters = _masters(config)
        fp16, bf16 = Fp16Settings.read(config.get("fp16")), Bf16Settings.read(config.get("bf16"))
        dtype = torch.float16 if fp16 is not None else torch.bfloat16 if bf16 is not None else None
        return cls(dtype, fp16, masters)

    def apply(self, model: nn.Module, device: torch.device, stage: int) -> None:
        """Run the model's forward passes in the chosen dtype, beside this stage of ZeRO.

        With master weights (the default) the optimizer steps on fp32: parameters are fp32, and autocast casts them where
        it pays. Those of half precision are made fp32 here, but where ZeRO keeps an fp32 copy of its own. Without,
        parameters are cast, and the optimizer steps on what the model computes with.
        """
        if self.dtype is None:
            return
        if not self.master_weights:
            model.to(self.dtype)
        elif stage == 0:
            make_fp32(model.parameters())
        _check_castable(model, self.dtype)
        for module in model if isinstance(model, nn.ModuleList) else [model]:
            _autocast_module(module, device.type, self.dtype)

    def undo(self, *modules: Any) -> None:
        """Give modules their own forward pass back; of others, and of None, this does nothing."""
        for module in modules:
            for one in module if isinstance(module, nn.ModuleList) else [module]:
                if isinstance(one, nn.Module):
                    restore_forward(one, "autocast")

    def around(self, criterion: Any, device: torch.device) -> Any:
        """The criterion under the same rule, which takes most losses in fp32 whatever the model's output is."""
        if self.dtype is None or criterion is None:
            return criterion
        if isinstance(criterion, nn.Module):
            return _autocast_module(criterion, device.type, self.dtype)
        return _autocast(criterion, device.type, self.dtype)

    def build_scaler(self, device: torch.device) -> LossScaler | None:
        """The loss scaler of fp16; bf16 has the range of fp32 and needs none."""
        return LossScaler(device, self.scaler) if self.scaler is not None else None


def _masters(config: Mapping[str, Any]) -> bool:
    """`master_weights` has one meaning, whichever section it stands in."""
    sections = {key: config.get(key) for key in ("bf16", "zero")}
    given = {
        key: one["master_weights"]
        for key, one in sections.items()
        if isinstance(one, Mapping) and "master_weights" in one
    }
    if len(set(given.values())) > 1:
        raise ConfigError(
            f"bf16.master_weights={given['bf16']} and zero.master_weights={given['zero']}: both say whether the optimizer "
            f"steps on fp32 weights. Give one of them, or both the same value.",
            code="C003",
        )
    return bool(next(iter(given.values()), True))


def _check_castable(model: nn.Module, dtype: torch.dtype) -> None:
    """Refuse a model in float64: autocast leaves that as it is, so the config would have no effect."""
    floating = {name: p.dtype for name, p in model.named_parameters() if p.is_floating_point()}
    if floating and all(found is torch.float64 for found in floating.values()):
        key = "bf16" if dtype is torch.bfloat16 else "fp16"
        raise ConfigError(
            f"{key} has no effect on this model: {next(iter(floating))} and all its other parameters are float64, which "
            f"autocast leaves as they are. Pass model.float(), or leave {key} out.",
            code="C003",
        )


def _autocast_module(module: nn.Module, device_type: str, dtype: torch.dtype) -> nn.Module:
    """Let the module's forward pass run under autocast."""

    def forward(self: nn.Module, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            return before(self, *args, **kwargs)

    restore_forward(module, "autocast")  # from an engine that was not closed
    override_forward(module, forward, mark="autocast")
    return module


def _autocast(forward: Callable[..., Any], device_type: str, dtype: torch.dtype) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            return forward(*args, **kwargs)

    return run


# --- What lies in which dtype on this rank, and how many bytes of it there are per parameter ---


WEIGHTS, COMPUTED, MASTERS = "weights", "computed with", "master copies"
GRADIENTS, REDUCED, STATE = "gradients", "reduced in", "optimizer state"


@dataclass(frozen=True)
class PrecisionRow:
    """One kind of tensors: their dtypes, and the bytes that this rank keeps of them per parameter (None: none of its own)."""

    what: str
    dtypes: tuple[str, ...]
    bytes: float | None = None


@dataclass(frozen=True)
class PrecisionTable:
    """The rows, and how many parameters of the model this rank holds or has a share in."""

    parameters: int
    rows: tuple[PrecisionRow, ...]

    @property
    def bytes_per_parameter(self) -> float:
        """What this rank keeps between steps, with the gradients at the end of a backward pass."""
        return sum(row.bytes or 0.0 for row in self.rows)

    def __getitem__(self, what: str) -> PrecisionRow:
        return next(row for row in self.rows if row.what == what)

    def __str__(self) -> str:
        lines = [f"{self.parameters:,} parameters, bytes of each on this rank:"]
        for row in self.rows:
            size = "" if row.bytes is None else f"{row.bytes:8.3f}"
            lines.append(f"  {row.what:16s}{size:8s}  {', '.join(row.dtypes) or 'none'}")
        return "\n".join([*lines, f"  {'in all':16s}{self.bytes_per_parameter:8.3f}"])


def precision_table(
    model: nn.Module, optimizer: EngineOptimizer, synchroniser: Synchroniser, autocast: torch.dtype | None
) -> PrecisionTable:
    """From the tensors that there are.

    State comes with the first step. Before it, that of torch's own optimizers is known from a trial on a small matrix;
    others may talk to other ranks in theirs, and are not tried.
    """
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters) or 1
    computed: list[torch.dtype] = []
    reduced: list[torch.dtype] = []
    gradients: Counter[torch.dtype] = Counter()
    for bucket in synchroniser.layout:
        dtype, reduced_in = bucket.layout.dtype, bucket.transport.reduced_in
        if bucket.keeps_gradients:
            gradients[dtype] += bucket.numel * dtype.itemsize
        if bucket.shard is not None and not (bucket.keeps_gradients and bucket.shard.flat.dtype is dtype):
            gradients[bucket.shard.flat.dtype] += bucket.shard.flat.nbytes
        reduced += [reduced_in] if reduced_in is not None else []
    for parameter in parameters:
        gathered, summed = dtypes_of(parameter)
        own = gathered or parameter.dtype
        computed.append(autocast if autocast is not None and own is not torch.float64 else own)
        if id(parameter) not in synchroniser.parameters and parameter.requires_grad:
            gradients[parameter.dtype] += local_part(parameter).nbytes
            reduced += [summed] if summed is not None else []
    return PrecisionTable(
        count,
        (
            _row(WEIGHTS, _sizes(map(local_part, parameters)), count),
            PrecisionRow(COMPUTED, _names(computed)),
            _row(MASTERS, _sizes(optimizer.masters), count),
            _row(GRADIENTS, gradients, count),
            PrecisionRow(REDUCED, _names(reduced)),
            _row(STATE, _state(optimizer), count),
        ),
    )


def _state(optimizer: EngineOptimizer) -> Counter[torch.dtype]:
    """Bytes of the optimizer's state by dtype; without single numbers, such as counts of steps."""
    stepped = optimizer.stepped
    if not isinstance(stepped, Optimizer):
        return Counter()
    held = [value for state in stepped.state.values() for value in state.values() if isinstance(value, Tensor)]
    if held:
        return _sizes(local_part(value) for value in held if value.dim() > 0)
    sizes: Counter[torch.dtype] = Counter()
    if not type(stepped).__module__.startswith("torch.optim"):
        return sizes
    known: dict[torch.dtype, tuple[torch.dtype, ...]] = {}
    for group in stepped.param_groups:
        # Slices take no gradient from autograd; all of them are stepped on.
        for parameter in [p for p in group["params"] if p.requires_grad or stepped is not optimizer.user_optimizer]:
            if parameter.dtype not in known:
                known[parameter.dtype] = state_dtypes(stepped, parameter.dtype)
            for dtype in known[parameter.dtype]:
                sizes[dtype] += local_part(parameter).numel() * dtype.itemsize
    return sizes


def _sizes(tensors: Iterable[Tensor]) -> Counter[torch.dtype]:
    found: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        found[tensor.dtype] += tensor.nbytes
    return found


def _row(what: str, sizes: Counter[torch.dtype], count: int) -> PrecisionRow:
    return PrecisionRow(what, _names(sizes), sum(sizes.values()) / count)


def _names(dtypes: Iterable[torch.dtype]) -> tuple[str, ...]:
    return tuple(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes}))
