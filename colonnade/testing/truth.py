"""One process is the truth: whole tensors rebuilt from placements, compared with the plain model's.

gradients = gather_gradients(engine.model, context)           # on every rank: name -> whole tensor
truth = plain_gradients(plain_model, loss_of_the_joined_batch)
compare(truth, gradients, rtol=1e-12)                         # a table per parameter; raises if they differ
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colonnade.checkpoint.full_weights import WholeTensors
from colonnade.checkpoint.values import Encoded
from colonnade.comm.messages import gather_from_all
from colonnade.comm.torch_versions import BACKWARD, backward_inside
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ParityError
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.whole import LocalTensor

Tensors = dict[str, Tensor]


def gather_weights(model: nn.Module, context: ParallelContext) -> Tensors:
    """The whole weights in fp64 (of complex ones the real parts), by each of their names, on every rank. Collective over the world; holders must agree to the bit."""
    return _gather(model, context, lambda parameter: parameter.detach())


def gather_gradients(model: nn.Module, context: ParallelContext) -> Tensors:
    """The whole gradients, by name, on every rank; zeros where there is none. Collective over the world."""
    return _gather(
        model,
        context,
        lambda parameter: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach(),
    )


def plain_gradients(model: nn.Module, loss: Tensor) -> Tensors:
    """The gradients of a plain model in this process; zeros for parameters that the loss does not reach."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
    }


@dataclass(frozen=True)
class Difference:
    """How far one parameter is from the truth: |found - truth| / |truth|, and the largest single element."""

    name: str
    relative: float
    largest: float
    ok: bool
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """The differences of all parameters; prints as a table, worst first."""

    differences: tuple[Difference, ...]
    rtol: float

    @property
    def ok(self) -> bool:
        return all(difference.ok for difference in self.differences)

    def __str__(self) -> str:
        width = max(map(len, ["parameter", *(difference.name for difference in self.differences)]))
        lines = [f"{'parameter':<{width}}  relative   largest    (tolerance {self.rtol:g})"]
        for entry in sorted(self.differences, key=lambda entry: (entry.ok, -entry.relative)):
            mark = "ok" if entry.ok else "DIFFERS"
            lines.append(
                f"{entry.name:<{width}}  {entry.relative:.2e}  {entry.largest:.2e}  {mark} {entry.note}".rstrip()
            )
        return "\n".join(lines)


def compare(truth: Mapping[str, Tensor], found: Mapping[str, Tensor], rtol: float, check: bool = True) -> Comparison:
    """Compare every tensor of the truth; a missing one differs. Raises ParityError with the table if `check`."""
    result = Comparison(tuple(_difference(name, truth[name], found.get(name), rtol) for name in truth), rtol)
    if check and not result.ok:
        raise ParityError(f"not equal to one process:\n{result}", code="C100")
    return result


def _difference(name: str, truth: Tensor, found: Tensor | None, rtol: float) -> Difference:
    if found is None:
        return Difference(name, float("inf"), float("inf"), False, "missing")
    if found.shape != truth.shape:
        return Difference(
            name, float("inf"), float("inf"), False, f"shape {tuple(found.shape)}, not {tuple(truth.shape)}"
        )
    found, truth = _wide(found), _wide(truth)
    distance = (found - truth).abs()
    largest = float(distance.max()) if distance.numel() else 0.0
    size = float(truth.norm())
    relative = float(distance.norm()) / size if size else largest
    return Difference(name, relative, largest, relative <= rtol)


def _wide(tensor: Tensor) -> Tensor:
    """On the CPU, in the widest dtype of its kind: whole numbers and flags too."""
    return tensor.detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)


def _gather(model: nn.Module, context: ParallelContext, read: Callable[[nn.Parameter], Tensor]) -> Tensors:
    def exact(tensor: LocalTensor) -> Tensor:
        # Adding zero makes -0.0 the 0.0 that it is equal to.
        return local_part(read(tensor.tensor)).to("cpu", torch.float64, copy=True).add_(0.0)  # type: ignore[arg-type]

    whole = WholeTensors(model, context, exact, lambda tensor: isinstance(tensor.tensor, nn.Parameter))
    _check_holders(whole.tensors, exact, context)
    return {name: content for record, content in whole.gather_all() for name in record.names}


def _check_holders(
    tensors: list[LocalTensor], exact: Callable[[LocalTensor], Tensor], context: ParallelContext
) -> None:
    """Two ranks that hold the same part must hold the same bits."""
    mine = {tensor.label: [str(tensor.places), Encoded(0, (exact(tensor),)).digest()] for tensor in tensors}
    first: dict[tuple[str, str], tuple[int, str]] = {}
    for rank, found in enumerate(gather_from_all(mine, context)):
        for name, (places, digest) in found.items():
            other, expected = first.setdefault((name, places), (rank, digest))
            if digest != expected:
                raise ParityError(
                    f"{name}: ranks {other} and {rank} hold the same part with different values", code="C100"
                )


# --------------------------------------------------------------------------------------------------
# in_double: a model whose code casts to float32 computes in float64 throughout, so that it can be compared in fp64.
#
# --------------------------------------------------------------------------------------------------


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
            args = tuple(_widened_dtype(value) for value in args)
            kwargs = {name: _widened_dtype(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _widens(args: tuple[Any, ...]) -> bool:
    """What lies in 32 bits or fewer already stays as its owner has it; all else, new tensors too, becomes float64."""
    first = args[0] if args else None
    return not isinstance(first, Tensor) or first.dtype == torch.float64 or not first.is_floating_point()


def _widened_dtype(value: Any) -> Any:
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
