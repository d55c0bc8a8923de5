"""Comparison with a single process: full tensors are rebuilt from shards and compared with those of the plain model.

gradients = gather_gradients(engine.model, context)           # on every rank: name -> full tensor
truth = plain_gradients(plain_model, loss_of_the_global_batch)
compare(truth, gradients, rtol=1e-12)                         # one row per parameter; raises if they differ
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colonnade.checkpoint.full_weights import FullTensors
from colonnade.checkpoint.values import Encoded
from colonnade.comm.messages import gather_from_all
from colonnade.comm.torch_versions import BACKWARD, backward_inside
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ParityError
from colonnade.parallel.placement import local_part
from colonnade.parallel.whole import LocalTensor

Tensors = dict[str, Tensor]


def gather_weights(model: nn.Module, context: ParallelContext) -> Tensors:
    """Return the full weights in fp64 (real parts of complex ones), by every name of each parameter, on every rank.

    Collective over the world. Raises ParityError if replicas are not bitwise equal.
    """
    return _gather(model, context, lambda parameter: parameter.detach())


def gather_gradients(model: nn.Module, context: ParallelContext) -> Tensors:
    """Return the full gradients by name, on every rank; zeros for parameters without gradient.

    Collective over the world.
    """
    return _gather(
        model,
        context,
        lambda parameter: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach(),
    )


def plain_gradients(model: nn.Module, loss: Tensor) -> Tensors:
    """Run backward and return the gradients of a plain model in this process.

    The gradients are zeros for parameters that do not affect the loss.
    """
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
    }


@dataclass(frozen=True)
class Difference:
    """The difference of one parameter: |found - truth| / |truth|, and the largest absolute difference of an element."""

    name: str
    relative: float
    largest: float
    ok: bool
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """The differences of all parameters. Prints as a table, the largest difference first."""

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
    """Compare every tensor of `truth` with the one in `found`; a missing tensor differs.

    Args:
        truth: tensors of the single-process run, by name.
        found: tensors of the parallel run, by name.
        rtol: the allowed relative difference, |found - truth| / |truth|, of each tensor.
        check: raise ParityError with the table if a tensor differs.

    Example::

        from colonnade.testing import compare, gather_weights

        gpc = colonnade.launch({})
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        truth = {name: value.detach().double() for name, value in model.named_parameters()}
        print(compare(truth, gather_weights(model, gpc), rtol=1e-6))
    """
    result = Comparison(tuple(_difference(name, truth[name], found.get(name), rtol) for name in truth), rtol)
    if check and not result.ok:
        raise ParityError(f"the results differ from a single process:\n{result}", code="C100")
    return result


def _difference(name: str, truth: Tensor, found: Tensor | None, rtol: float) -> Difference:
    if found is None:
        return Difference(name, float("inf"), float("inf"), False, "missing")
    if found.shape != truth.shape:
        return Difference(
            name, float("inf"), float("inf"), False, f"shape {tuple(found.shape)} instead of {tuple(truth.shape)}"
        )
    found, truth = _wide(found), _wide(truth)
    distance = (found - truth).abs()
    largest = float(distance.max()) if distance.numel() else 0.0
    size = float(truth.norm())
    relative = float(distance.norm()) / size if size else largest
    return Difference(name, relative, largest, relative <= rtol)


def _wide(tensor: Tensor) -> Tensor:
    """The tensor on the CPU in the widest dtype of its kind; integers and bools become fp64."""
    return tensor.detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)


def _gather(model: nn.Module, context: ParallelContext, read: Callable[[nn.Parameter], Tensor]) -> Tensors:
    def exact(tensor: LocalTensor) -> Tensor:
        # Adding zero turns -0.0 into 0.0, so that equal values have equal bits.
        return local_part(read(tensor.tensor)).to("cpu", torch.float64, copy=True).add_(0.0)  # type: ignore[arg-type]

    full = FullTensors(model, context, exact, lambda tensor: isinstance(tensor.tensor, nn.Parameter))

    # Replicas of a shard must be bitwise equal: the gather reads only one of them, and would hide a difference.
    local = {tensor.label: [str(tensor.places), Encoded(0, (exact(tensor),)).digest()] for tensor in full.tensors}
    first: dict[tuple[str, str], tuple[int, str]] = {}
    for rank, digests in enumerate(gather_from_all(local, context)):
        for name, (places, digest) in digests.items():
            other, expected = first.setdefault((name, places), (rank, digest))
            if digest != expected:
                raise ParityError(
                    f"ranks {other} and {rank} store the same shard of {name}, but with different values", code="C100"
                )
    return {name: content for record, content in full.gather_all() for name in record.names}


# --- in_double: a model whose code casts to float32 computes in float64 throughout, to be compared in fp64 ---


class _Double(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in BACKWARD:
            return backward_inside(self, func, args, kwargs)
        if func is Tensor.float and _widens(args):
            return args[0].to(torch.float64, **kwargs)
        if func is not Tensor.view and _widens(args):  # view reinterprets bits
            args = tuple(_widened_dtype(value) for value in args)
            kwargs = {name: _widened_dtype(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _widens(args: tuple[Any, ...]) -> bool:
    """Whether a function must return float64 in place of float32; False if its arguments have 32 bits or fewer."""
    first = args[0] if args else None
    return not isinstance(first, Tensor) or first.dtype == torch.float64 or not first.is_floating_point()


def _widened_dtype(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_double() -> Iterator[None]:
    """Make float64 the default dtype in the block, and turn casts of float64 tensors to float32 into no-ops.

    This includes `Tensor.to`, `float` and `type`, and float32 as the dtype argument of any function (softmax, zeros,
    arange). Hugging Face models contain such casts in norms, softmax, rotary embeddings and routers; they would round a
    float64 model to float32 precision. Tensors of float32 and smaller are unchanged. Effective in this thread, and in
    backward on the CPU.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Double():
            yield
    finally:
        torch.set_default_dtype(before)
