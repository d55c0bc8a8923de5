"""in_double: a model whose code casts to float32 computes in float64 throughout, so that it can be compared in fp64.

with in_double():                       # around building the model, and around its passes; on ranks as in one process
    model = LlamaForCausalLM(config)    # parameters, tables and norms in float64
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from colonnade.comm.torch_versions import BACKWARD, backward_inside


class _Double(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in BACKWARD:
            return backward_inside(self, func, args, kwargs)
        if func is Tensor.float and _widens(args):
            return args[0].to(torch.float64, **kwargs)
        if func is not Tensor.view and _widens(args):  # view reads the same bits by another name
            args = tuple(_wide(value) for value in args)
            kwargs = {name: _wide(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _widens(args: tuple[Any, ...]) -> bool:
    """What lies in 32 bits or fewer already stays as its owner has it; all else, new tensors too, becomes float64."""
    first = args[0] if args else None
    return not isinstance(first, Tensor) or first.dtype == torch.float64 or not first.is_floating_point()


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_double() -> Iterator[None]:
    """Inside, float64 is the default dtype, and casts of float64 to float32 give float64.

    That holds for `Tensor.to`, `float` and `type`, and for float32 as the dtype of any function (softmax, zeros, arange).
    Models of transformers cast so in norms, softmax, rotary tables and routers, which leaves float64 with the rounding
    of float32. Tensors of float32 and below are left alone. It holds in this thread, and so for backward on the CPU.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Double():
            yield
    finally:
        torch.set_default_dtype(before)
