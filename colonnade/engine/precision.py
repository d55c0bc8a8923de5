"""Mixed precision: float8 matrix products, the fp16 loss scale, autocast and master weights, and a table of the dtypes in use.

`Precision` reads the keys `fp16` and `bf16`: the autocast dtype of the forward pass, and whether the optimizer steps on fp32
weights. `LossScaler` keeps fp16 gradients from underflowing. `convert_to_float8` converts linear layers. `precision_table` lists
the dtypes and bytes of the existing tensors.
"""

from __future__ import annotations

import copy
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from colonnade.optim.engine_optimizer import EngineOptimizer, state_dtypes
from colonnade.optim.norm import Norms
from colonnade.optim.zero.formula import dtypes_of, make_fp32
from colonnade.parallel.forward import override_forward, restore_forward
from colonnade.parallel.placement import local_part

# --- Linear layers in float8 by torchao, an optional extra: nn.Linear, and the tensor-parallel layers of colonnade.nn ---


_MULTIPLE = 16
"""Both sides of a weight must be multiples of this for float8 products."""
_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}
_SHOWN = 6


def convert_to_float8(model: nn.Module, settings: Float8Settings, device: torch.device) -> None:
    """Convert suitable linear layers of a model to float8 matrix products, in place; parameters stay the same objects.

    Raises:
        ConfigError: torchao is not installed, or the device has no float8.
    """
    _require_float8(settings, device)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(settings.recipe)
    config = replace(config, emulate=settings.emulate, pad_inner_dim=True)
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) or layer_kind(m) == "embedding"}
    chosen, left = [], []
    for root in model if isinstance(model, nn.ModuleList) else [model]:
        for name, layer in root.named_modules():
            # Exactly nn.Linear: subclasses in torch (as in its attention) use the weight without calling forward.
            linear = layer_kind(layer) in ("linear", "classifier") or type(layer) is nn.Linear
            if not name or not linear:
                continue
            reason = _why_not_float8(name, layer, settings.skip, tied)
            if reason is not None:
                left.append(f"{name} ({reason})")
                continue
            chosen.append(name)
            if layer_kind(layer) is not None:
                # The arrangement is shared by the layers of a model, and only this one is to use float8.
                layer.arrangement = copy.copy(layer.arrangement)
                layer.arrangement.multiply = _multiplier(config)
        convert_to_float8_training(root, module_filter_fn=lambda _, name: name in chosen, config=config)
    rest = listed(left[:_SHOWN]) + (f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else "")
    get_dist_logger().info(
        f"float8 ({settings.recipe}{', emulated' if settings.emulate else ''}): {len(chosen)} linear layers; in their own dtype: "
        f"{rest or 'none'}"
    )


def _require_float8(settings: Float8Settings, device: torch.device) -> None:
    """Raise if torchao is not installed or the device does not support the recipe."""
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "float8 needs torchao, which is not installed. Run pip install torchao, or leave float8 out.", code="C024"
        )
    if settings.emulate:
        return
    needed, found = _CAPABILITY[settings.recipe], (0, 0)
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
    if found < needed:
        here = f"{device} has {found[0]}.{found[1]}" if device.type == "cuda" else f"this rank computes on {device}"
        raise ConfigError(
            f"float8 with recipe={settings.recipe!r} needs a GPU of compute capability {needed[0]}.{needed[1]} or "
            f"above, but {here}. Leave float8 out. To try it slowly on this device, set float8=dict(emulate=True).",
            code="C024",
        )


def _why_not_float8(name: str, layer: Any, skip: Sequence[str], tied: set[int]) -> str | None:
    """The reason why a layer keeps its dtype; None if it can use float8."""
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


def _multiplier(config: Any) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """A float8 version of `F.linear`."""
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    how = Float8Linear.from_float(nn.Linear(_MULTIPLE, _MULTIPLE, device="meta"), config).linear_mm_config

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = matmul_with_hp_or_float8_args.apply(x, weight.t(), how, config)
        return y if bias is None else y + bias.to(y.dtype)

    return multiply


# --- The fp16 loss scale ---
#
# No separate pass unscales the gradients: the norm is divided by the scale, and the scale is part of the clipping divisor inside
# the optimizer step. Skipping follows from the global norm, so all ranks skip a step, and lower the scale, together.


class LossScaler:
    """The fp16 loss scale, a device tensor.

    It increases after `growth_interval` steps without overflow, and decreases after an overflow.
    """

    def __init__(self, device: torch.device, settings: Fp16Settings) -> None:
        self.scale = torch.tensor(float(settings.init_scale), device=device)
        self.count = torch.ones((), device=device)
        """The divisor of a loss given as (sum, count) in backward, so that its gradients are about those of a mean and fit
        fp16: the count of the last step, rounded to a power of two, so that the division costs no precision."""
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._factors = (settings.growth_factor, settings.backoff_factor, settings.growth_interval)
        self._limits = (settings.min_scale, settings.max_scale)
        self._dynamic = settings.dynamic_grad_scale

    def unscaled(self, norms: Norms) -> Norms:
        """The norms of the gradients without the loss scale, computed from the norms of the scaled gradients."""
        p = norms.p
        factor = self.scale.double() if p == float("inf") else self.scale.double() ** p
        return Norms(p, norms.sums / factor, norms.nonfinite)

    def expect(self, count: Tensor) -> None:
        """Set `count` for the next step, from the loss count of this step."""
        self.count.copy_(torch.where(count.isfinite() & (count > 1), count, 1.0).log2().floor().exp2())

    def update(self, found_inf: Tensor) -> None:
        """Increase or decrease the scale after a step. `found_inf`: whether the gradient of the step was not finite."""
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
    """The mixed precision of a config: the autocast dtype (None: no autocast), and the settings of the loss scaler (None: no
    scaler)."""

    dtype: torch.dtype | None = None
    scaler: Fp16Settings | None = None
    master_weights: bool = True
    """Whether the optimizer steps on fp32 weights."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Precision:
        """Read the `fp16` and `bf16` sections. `master_weights` is also allowed in `zero`, with the same meaning.

        Raises:
            ConfigError: `bf16.master_weights` and `zero.master_weights` differ.
        """
        sections = {key: config.get(key) for key in ("bf16", "zero")}
        masters = {
            key: section["master_weights"]
            for key, section in sections.items()
            if isinstance(section, Mapping) and "master_weights" in section
        }
        if len(set(masters.values())) > 1:
            raise ConfigError(
                f"bf16.master_weights={masters['bf16']} and zero.master_weights={masters['zero']} contradict each "
                "other. Both options decide whether the optimizer steps on fp32 weights. Set only one of them, or "
                "set both to the same value.",
                code="C003",
            )
        fp16, bf16 = Fp16Settings.read(config.get("fp16")), Bf16Settings.read(config.get("bf16"))
        dtype = torch.float16 if fp16 is not None else torch.bfloat16 if bf16 is not None else None
        return cls(dtype, fp16, bool(next(iter(masters.values()), True)))

    def apply(self, model: nn.Module, device: torch.device, stage: int) -> None:
        """Make the model's forward passes run in the configured dtype, in place.

        With master weights (the default), parameters are fp32, and autocast casts them for suitable operations. Without master
        weights, the parameters themselves are cast to the half-precision dtype, and the optimizer steps on them.

        Args:
            model: the model of this rank.
            device: the device of its forward passes.
            stage: the ZeRO stage. Stages 1 to 3 keep fp32 master weights themselves; at stage 0, this method converts parameters in
                half precision to fp32.

        Raises:
            ConfigError: all parameters are float64, which autocast does not change.
        """
        if self.dtype is None:
            return
        if not self.master_weights:
            model.to(self.dtype)
        elif stage == 0:
            make_fp32(model.parameters())
        floating = {name: p.dtype for name, p in model.named_parameters() if p.is_floating_point()}
        if floating and all(found is torch.float64 for found in floating.values()):
            key = "bf16" if self.dtype is torch.bfloat16 else "fp16"
            raise ConfigError(
                f"{key} has no effect on this model, because {next(iter(floating))} and all other parameters are "
                f"float64, and autocast does not change float64. Pass model.float(), or leave {key} out.",
                code="C003",
            )
        for module in model if isinstance(model, nn.ModuleList) else [model]:
            _autocast_module(module, device.type, self.dtype)

    def undo(self, *modules: Any) -> None:
        """Restore the forward passes that `apply` changed; arguments that are no modules, or None, are ignored."""
        for module in modules:
            for part in module if isinstance(module, nn.ModuleList) else [module]:
                if isinstance(part, nn.Module):
                    restore_forward(part, "autocast")

    def around(self, criterion: Any, device: torch.device) -> Any:
        """Wrap the criterion in autocast, which computes most losses in fp32 for model outputs of any dtype."""
        if self.dtype is None or criterion is None:
            return criterion
        if isinstance(criterion, nn.Module):
            return _autocast_module(criterion, device.type, self.dtype)
        dtype = self.dtype

        @wraps(criterion)
        def autocast_criterion(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device.type, dtype=dtype):
                return criterion(*args, **kwargs)

        return autocast_criterion

    def build_scaler(self, device: torch.device) -> LossScaler | None:
        """Build the fp16 loss scaler; None for bf16, which has the range of fp32."""
        return LossScaler(device, self.scaler) if self.scaler is not None else None


def _autocast_module(module: nn.Module, device_type: str, dtype: torch.dtype) -> nn.Module:
    """Make the module's forward pass run under autocast."""

    def forward(self: nn.Module, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            return before(self, *args, **kwargs)

    restore_forward(module, "autocast")  # from an engine that was not closed
    override_forward(module, forward, mark="autocast")
    return module


# --- Table of the dtypes on this rank, with bytes per parameter ---


WEIGHTS, COMPUTED, MASTERS = "weights", "computed with", "master copies"
GRADIENTS, REDUCED, STATE = "gradients", "reduced in", "optimizer state"


@dataclass(frozen=True)
class PrecisionRow:
    """A row of the table for one kind of tensors: their dtypes, and their bytes per parameter on this rank (None: no separate
    memory)."""

    what: str
    dtypes: tuple[str, ...]
    bytes: float | None = None


@dataclass(frozen=True)
class PrecisionTable:
    """The dtypes and bytes of each kind of tensors, and the number of parameters of this rank's model (or stage), before ZeRO
    3 shards them."""

    parameters: int
    rows: tuple[PrecisionRow, ...]

    @property
    def bytes_per_parameter(self) -> float:
        """The sum of the bytes per parameter of all kinds that are kept between steps, including gradients at the end of a
        backward pass."""
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
    """Build the table from the existing tensors.

    Optimizer state exists only after the first step. Before the first step, the state of torch's own optimizers is determined by a
    trial step on a small matrix. There is no trial step for other optimizers, which may communicate in a step.
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
        # A shard of the same dtype is a slice of the gradients that the bucket keeps, and is not counted twice.
        if bucket.shard is not None and not (bucket.keeps_gradients and bucket.shard.flat.dtype is dtype):
            gradients[bucket.shard.flat.dtype] += bucket.shard.flat.nbytes
        reduced += [reduced_in] if reduced_in is not None else []
    for parameter in parameters:
        gathered, summed = dtypes_of(parameter)
        own = gathered or parameter.dtype
        # Autocast casts all floating point dtypes except float64.
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
    """Bytes of the optimizer state by dtype, without scalars such as step counts."""
    stepped = optimizer.stepped
    if not isinstance(stepped, Optimizer):
        return Counter()
    existing = [value for state in stepped.state.values() for value in state.values() if isinstance(value, Tensor)]
    if existing:
        return _sizes(local_part(value) for value in existing if value.dim() > 0)
    sizes: Counter[torch.dtype] = Counter()
    if not type(stepped).__module__.startswith("torch.optim"):
        return sizes
    known: dict[torch.dtype, tuple[torch.dtype, ...]] = {}
    for group in stepped.param_groups:
        # Slices of ZeRO do not require gradients, and all of them are stepped on.
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
