"""One process is the truth: whole tensors rebuilt from placements, compared with the plain model's.

gradients = gather_gradients(engine.model, context)           # on every rank: name -> whole tensor
truth = plain_gradients(plain_model, loss_of_the_joined_batch)
compare(truth, gradients, rtol=1e-12)                         # a table per parameter; raises if they differ
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colonnade.checkpoint.collective import gather_json
from colonnade.checkpoint.format.values import Encoded
from colonnade.checkpoint.plan.tensors import LocalTensor
from colonnade.checkpoint.whole import WholeTensors
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ParityError
from colonnade.parallel.dtensor import local_part

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
    for rank, found in enumerate(gather_json(mine, context)):
        for name, (places, digest) in found.items():
            other, expected = first.setdefault((name, places), (rank, digest))
            if digest != expected:
                raise ParityError(
                    f"{name}: ranks {other} and {rank} hold the same part with different values", code="C100"
                )
