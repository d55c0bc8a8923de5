"""Linear layers in float8 by torchao, which is an optional extra: plain ones, and ours under tensor parallelism."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.errors import ConfigError, listed
from colonnade.logging import get_dist_logger
from colonnade.nn.layer import Classifier, Embedding, Linear

_MULTIPLE = 16
"""What float8 products want of every side of a weight."""
_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}
_SKIPPED = ("lm_head", "head", "classifier", "output", "router", "gate")
_SHOWN = 6


@dataclass(frozen=True)
class Float8:
    """The `float8` key. `skip`: names or patterns of layers that keep their dtype, instead of the usual ones.

    `emulate`: compute as float8 would with the operations of wider dtypes, on any device, to try it out.
    """

    recipe: str = "tensorwise"
    skip: tuple[str, ...] = _SKIPPED
    emulate: bool = False

    @classmethod
    def read(cls, given: Any) -> Float8 | None:
        """From the value of the key: nothing, True, or a dict."""
        if not given:
            return None
        values = {key: value for key, value in given.items() if value is not None} if isinstance(given, Mapping) else {}
        if "skip" in values:
            values["skip"] = (values["skip"],) if isinstance(values["skip"], str) else tuple(values["skip"])
        return cls(**values)

    def convert(self, model: nn.Module, device: torch.device) -> None:
        """Let the linear layers of a model that suit it multiply in float8, in place; parameters stay the same objects."""
        self._check(device)
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(self.recipe)
        config = replace(config, emulate=self.emulate, pad_inner_dim=True)
        tied = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, Embedding))}
        chosen, left = [], []
        for root in model if isinstance(model, nn.ModuleList) else [model]:
            for name, layer in _linears(root):
                reason = self._why_not(name, layer, tied)
                if reason is not None:
                    left.append(f"{name} ({reason})")
                    continue
                chosen.append(name)
                if isinstance(layer, Linear):
                    layer.arrangement = copy.copy(layer.arrangement)
                    layer.arrangement.multiply = _multiplier(config)
            convert_to_float8_training(root, module_filter_fn=lambda _, name: name in chosen, config=config)
        rest = listed(left[:_SHOWN]) + (f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else "")
        get_dist_logger().info(
            f"float8 ({self.recipe}{', emulated' if self.emulate else ''}): {len(chosen)} linear layers; in their own dtype: "
            f"{rest or 'none'}"
        )

    def _check(self, device: torch.device) -> None:
        """Refuse what is not there: the package, or the hardware."""
        if importlib.util.find_spec("torchao") is None:
            raise ConfigError(
                "float8 needs torchao, which is not installed: pip install torchao, or leave float8 out", code="C024"
            )
        if self.emulate:
            return
        needed, found = _CAPABILITY[self.recipe], (0, 0)
        if device.type == "cuda":
            found = torch.cuda.get_device_capability(device)
        if found < needed:
            here = f"{device} has {found[0]}.{found[1]}" if device.type == "cuda" else f"this rank computes on {device}"
            raise ConfigError(
                f"float8 with recipe={self.recipe!r} needs a GPU of compute capability {needed[0]}.{needed[1]} or above, and "
                f"{here}. Leave float8 out, or try it with float8=dict(emulate=True), which is slow.",
                code="C024",
            )

    def _why_not(self, name: str, layer: Any, tied: set[int]) -> str | None:
        """Why a layer keeps its dtype; None if it does not."""
        if isinstance(layer, Classifier) or id(layer.weight) in tied:
            return "the classifier"
        if any(fnmatchcase(name, pattern) or name.rpartition(".")[2] == pattern for pattern in self.skip):
            return "skipped"
        rows, columns = layer.weight.flatten(0, -2).shape
        if rows % _MULTIPLE or columns % _MULTIPLE:
            return f"{rows} x {columns} is no multiple of {_MULTIPLE}"
        if layer.weight.dtype is torch.float64:
            return "float64"
        if isinstance(layer, Linear) and not layer.arrangement.multiplies_blocks:
            return f"{type(layer.arrangement).__name__} multiplies in several pieces"
        return None


def _linears(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """The linear layers inside a model, by name. Torch's own kinds (as in its attention) use the weight by themselves."""
    for name, module in root.named_modules():
        if name and (isinstance(module, Linear) or type(module) is nn.Linear):
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
