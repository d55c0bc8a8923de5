"""Colossal-AI's `nn` with its names and signatures: layers, optimizers, learning-rate schedulers.

`nn`, `nn.layer`, `nn.layer.parallel_1d`, `nn.layer.utils`, `nn.layer.wrapper`: `Linear1D_Col`, `Linear1D_Row`, `CheckpointModule`,
`PipelineSharedModuleWrapper`. `nn.optimizer`: `Lamb`, `Lars`, and torch's fused Adam under their names. `nn.lr_scheduler`:
torch's schedulers with `total_steps` as second argument.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.optimizer import ParamsT

from colonnade.context.parallel_mode import ParallelMode
from colonnade.core import global_context as gpc
from colonnade.errors import ConfigError, PlacementError
from colonnade.nn import lr_scheduler as schedulers
from colonnade.nn.layer import Linear
from colonnade.parallel.placement import Tied, is_dtensor, place, placement_of
from colonnade.utils import checkpoint

# --- Layers ---


class Linear1D_Col(Linear):
    """`colonnade.nn.Linear(split="column")` with the arguments of Colossal-AI."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        **initializers: Any,
    ) -> None:
        _refuse(skip_bias_add, initializers)
        super().__init__(in_features, out_features, bias, split="column", gather_output=gather_output, dtype=dtype)


class Linear1D_Row(Linear):
    """`colonnade.nn.Linear(split="row")` with the arguments of Colossal-AI."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        parallel_input: bool = True,
        skip_bias_add: bool = False,
        **initializers: Any,
    ) -> None:
        _refuse(skip_bias_add, initializers)
        super().__init__(in_features, out_features, bias, split="row", input_is_parallel=parallel_input, dtype=dtype)


def _refuse(skip_bias_add: bool, initializers: dict[str, Any]) -> None:
    if skip_bias_add:
        raise ConfigError(
            "skip_bias_add=True is not supported, because the layer adds its bias. Leave skip_bias_add out, and do "
            "not add the bias later."
        )
    if initializers:
        raise ConfigError(
            f"{', '.join(initializers)} cannot be passed to this layer. Initialize a full torch.nn.Linear, the same "
            "on every rank, and pass it to colonnade.nn.Linear.from_module(linear, split=...)."
        )


class CheckpointModule(nn.Module):
    """A module with activation checkpointing. Subclasses define `_forward`, which backward recomputes."""

    def __init__(self, checkpoint: bool = True, offload: bool = False) -> None:
        super().__init__()
        self.checkpoint, self._offload = checkpoint, offload

    def _forward(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define _forward")

    def forward(self, *args: Any, **options: Any) -> Any:
        if not (self.training and self.checkpoint):
            return self._forward(*args, **options)
        return checkpoint(partial(self._forward, **options), self._offload, *args)


class PipelineSharedModuleWrapper:
    """Ties parameters of several pipeline stages. Construct it on every rank; register on the stages of `pipeline_ranks`.

    Parameters are tied in the order of registration, which must be the same on all of these stages.
    """

    _instances = count()

    def __init__(self, pipeline_ranks: Sequence[int]) -> None:
        self.pipeline_ranks = tuple(pipeline_ranks)
        self._name = f"shared{next(self._instances)}"
        self._registered = count()

    def register_module(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            self.register_parameter(parameter)

    def register_parameter(self, param: Tensor) -> None:
        stage = gpc.get_local_rank(ParallelMode.PIPELINE)
        if stage not in self.pipeline_ranks:
            raise PlacementError(
                f"stage {stage} is not in pipeline_ranks={self.pipeline_ranks}, the list of stages that share the "
                f"module. Add stage {stage} to the list, or build the module only on these stages."
            )
        tied = Tied(self.pipeline_ranks, f"{self._name}.{next(self._registered)}")
        placement = placement_of(param)
        place(param, {**placement.modes, ParallelMode.PIPELINE: tied}, placement.shape)


# --- Optimizers ---


class _LayerWise(Optimizer, ABC):
    """Scales the update of each parameter by norms over the full parameter, which must therefore be unsharded."""

    def __init__(self, params: ParamsT, **defaults: Any) -> None:
        for name, value in defaults.items():
            if name != "betas" and value < 0:
                raise ConfigError(f"{type(self).__name__} got {name}={value!r}; the value must be 0 or larger")
        super().__init__(params, defaults)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    if is_dtensor(parameter) or placement_of(parameter).shards:
                        raise PlacementError(
                            f"{type(self).__name__} needs the norm of each full parameter, but a parameter of shape "
                            f"{tuple(parameter.shape)} is sharded ({placement_of(parameter)}). Use AdamW, or "
                            "replicate the parameters."
                        )
                    self._update(parameter, parameter.grad, self.state[parameter], group)
        return loss

    @abstractmethod
    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Change the parameter in place by its gradient."""


class Lamb(_LayerWise):
    """LAMB (1904.00962, without bias correction): Adam's update, scaled to the norm of the weight."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"Lamb got betas={betas!r}; each must be at least 0 and less than 1")
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._scales = not adam

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        first, second = group["betas"]
        mean.lerp_(gradient, 1 - first)
        square.lerp_(gradient.square(), 1 - second)
        update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * parameter
        if self._scales:
            update *= _ratio(parameter.norm(), update.norm())
        parameter.sub_(group["lr"] * update)


class Lars(_LayerWise):
    """LARS (1708.03888): SGD with momentum, each gradient scaled to `eeta` times the norm of its weight."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0,
        eeta: float = 1e-3,
        weight_decay: float = 0,
        epsilon: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, eeta=eeta, weight_decay=weight_decay, epsilon=epsilon)

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        size, decay = parameter.norm(), group["weight_decay"]
        steepness = gradient.norm()
        ratio = _ratio(group["eeta"] * size, steepness + decay * size + group["epsilon"])
        update = torch.where(steepness > 0, ratio, 1.0) * (gradient + decay * parameter)
        if group["momentum"]:
            before = state.get("momentum_buffer")
            update = state["momentum_buffer"] = update if before is None else group["momentum"] * before + update
        parameter.sub_(group["lr"] * update)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient; 1 if one of the numbers is zero."""
    return torch.where((numerator > 0) & (denominator > 0), numerator / denominator, 1.0)


def FusedAdam(
    params: ParamsT,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adamw_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> Adam:
    """Return torch's fused AdamW, or its fused Adam with `adamw_mode=False`."""
    return _adam(params, lr, bias_correction, betas, eps, weight_decay, adamw_mode, amsgrad)


def HybridAdam(
    model_params: ParamsT,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0,
    adamw_mode: bool = True,
    simd_log: bool = False,
) -> Adam:
    """Return torch's fused AdamW (Adam with `adamw_mode=False`), on the device of the parameters."""
    return _adam(model_params, lr, bias_correction, betas, eps, weight_decay, adamw_mode, False)


CPUAdam, FusedLAMB = HybridAdam, Lamb


def _adam(
    params: ParamsT,
    lr: float,
    bias_correction: bool,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    adamw_mode: bool,
    amsgrad: bool,
) -> Adam:
    if not bias_correction:
        raise ConfigError(
            "bias_correction=False is not supported, because torch's Adam always corrects the bias of its averages. "
            "Leave it out."
        )
    kind = AdamW if adamw_mode else Adam
    return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, fused=True)


# --- Learning-rate schedulers ---


class MultiStepLR(torch_schedulers.MultiStepLR):
    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, list(milestones or ()), gamma, last_epoch)


class StepLR(torch_schedulers.StepLR):
    def __init__(
        self, optimizer: Optimizer, total_steps: int, step_size: int = 1, gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, step_size, gamma, last_epoch)


class ExponentialLR(torch_schedulers.ExponentialLR):
    def __init__(self, optimizer: Optimizer, total_steps: int, gamma: float = 1.0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, gamma, last_epoch)


class OneCycleLR(torch_schedulers.OneCycleLR):
    """torch's OneCycleLR. The maximum rates of the cycle are those of the optimizer's parameter groups."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 10000.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(
            optimizer,
            [group["lr"] for group in optimizer.param_groups],
            total_steps,
            pct_start=pct_start,
            anneal_strategy=anneal_strategy,
            cycle_momentum=cycle_momentum,
            base_momentum=base_momentum,
            max_momentum=max_momentum,
            div_factor=div_factor,
            final_div_factor=final_div_factor,
            last_epoch=last_epoch,
        )


class PolynomialLR(schedulers.PolynomialWarmupLR):
    """Decays the rate by (1 - progress) ** power, to `end_lr` at `total_steps`."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, end_lr: float = 0.0001, power: float = 1.0, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, total_steps, 0, _factor(optimizer, "end_lr", end_lr), power, last_epoch)


class CosineAnnealingLR(schedulers.CosineAnnealingLR):
    """`colonnade.nn.lr_scheduler.CosineAnnealingLR`, but `eta_min` is a rate, not a factor of the initial rate."""

    def __init__(self, optimizer: Optimizer, total_steps: int, eta_min: float = 0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_steps, _factor(optimizer, "eta_min", eta_min), last_epoch=last_epoch)


class CosineAnnealingWarmupLR(schedulers.CosineAnnealingWarmupLR):
    """`colonnade.nn.lr_scheduler.CosineAnnealingWarmupLR`, but `eta_min` is a rate, not a factor of the initial rate."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, _factor(optimizer, "eta_min", eta_min), last_epoch)


def _factor(optimizer: Optimizer, name: str, rate: float) -> float:
    """A final learning rate as a factor of the initial one."""
    initial = {group.get("initial_lr", group["lr"]) for group in optimizer.param_groups}
    if rate and len(initial) > 1:
        raise ConfigError(
            f"{name} is {rate}, but the parameter groups have the different initial learning rates "
            f"{sorted(initial)}. Set {name}=0, or use equal learning rates."
        )
    return rate / initial.pop() if rate else 0.0
