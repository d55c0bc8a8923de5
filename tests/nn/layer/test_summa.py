"""The three products on a square of ranks, their gradients and the gradients of those, against whole matrices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.nn.layer.modes import Square, ab, abt, atb
from colonnade.parallel.wire import members_of
from tests.nn.layer.cases import numbers
from tests.ranks import on_ranks

FORMS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[int, int], tuple[int, int]]] = {
    "ab": (ab, lambda a, b: a @ b, (4, 6), (6, 8)),
    "abt": (abt, lambda a, b: a @ b.t(), (4, 6), (8, 6)),
    "atb": (atb, lambda a, b: a.t() @ b, (6, 4), (6, 8)),
}


def _block(x: Tensor, square: Square) -> Tensor:
    return x.chunk(2, 0)[square.col.at].chunk(2, 1)[square.row.at].contiguous()


def _derivatives(product: Callable[..., Tensor], inputs: list[Tensor], outward: Tensor) -> list[Tensor]:
    """The product, its gradients, and the gradients of a function of those."""
    a, b = (x.clone().requires_grad_() for x in inputs)
    y = product(a, b)
    first = torch.autograd.grad(y, (a, b), outward * y, create_graph=True)
    second = torch.autograd.grad(first, (a, b), [gradient.detach() for gradient in first])
    return [y.detach(), *(gradient.detach() for gradient in first), *second]


@on_ranks(4)
def test_blocks_of_products_and_of_their_derivatives():
    config = {"parallel": {"tensor": {"size": 4, "mode": "2d"}}}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        row, col = (members_of(mode, gpc) for mode in (ParallelMode.PARALLEL_2D_ROW, ParallelMode.PARALLEL_2D_COL))
        square = Square(row, col)
        for name, (product, plain, left, right) in FORMS.items():
            inputs = [numbers(*left, seed=1), numbers(*right, seed=2)]
            outward = numbers(*plain(*inputs).shape, seed=3)
            wanted = _derivatives(plain, inputs, outward)
            found = _derivatives(
                lambda a, b, product=product: product(a, b, square),
                [_block(x, square) for x in inputs],
                _block(outward, square),
            )
            for at, (one, other) in enumerate(zip(wanted, found, strict=True)):
                torch.testing.assert_close(
                    other,
                    _block(one, square),
                    rtol=1e-12,
                    atol=1e-12,
                    msg=lambda m, at=at, name=name: f"{name} {at}: {m}",
                )
