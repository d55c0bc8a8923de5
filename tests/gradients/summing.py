"""What the synchroniser's tests share: a training loop on every rank beside its one-process truth, in fp64.

The truth is the plain model in one process on the mean of all ranks' losses, with the same optimizer; gradients
(None included) are compared after every step and weights at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.gradients import bucket as bucket_module
from colonnade.gradients.sums import Sum, SyncOptions
from colonnade.gradients.synchroniser import Synchroniser
from colonnade.gradients.uneven import PiggybackedFlags
from tests.ranks import on_ranks

RTOL = 1e-12
TINY = SyncOptions(bucket_mb=2e-4, first_bucket_mb=1e-4)
"""Buckets of a few parameters, so that small models have several."""

Loss = Callable[[nn.Module, int, int], Tensor]
"""The loss of a model on the data of (rank, step)."""


def data(rank: int, step: int, *shape: int) -> Tensor:
    """This rank's batch: the same wherever it is asked for."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank), dtype=torch.float64)


def reduce_all(model: nn.Module, options: SyncOptions = TINY, log: Any = None, **changes: Any) -> Synchroniser:
    """One reduction: the mean over the world."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    size = dist.get_world_size()
    chosen = replace(options, **changes)
    whole = Sum(names, parameters, tuple(range(size)), dist.group.WORLD, float(size), chosen)
    return Synchroniser([whole], **({"log": log} if log else {}))


def on_the_cpu(stepper: Any, synchroniser: Synchroniser) -> PiggybackedFlags:
    """In place of `Stepper._piggybacked_flags`: flags as with NCCL, over gloo."""
    flags = PiggybackedFlags(torch.device("cpu"))
    synchroniser.agree_by(flags)
    return flags


def both(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The model and its truth, with equal weights."""
    torch.manual_seed(7)
    model = build().double()
    torch.manual_seed(7)
    return model, build().double()


def mean_loss(model: nn.Module, loss: Loss, step: int) -> Tensor:
    """The loss of one process on the joined batch."""
    size = dist.get_world_size()
    return torch.stack([loss(model, rank, step) for rank in range(size)]).mean()


def same_gradients(model: nn.Module, truth: nn.Module, rtol: float = RTOL) -> None:
    """Equal to the truth in every parameter, with None where it has None."""
    for (name, parameter), expected in zip(model.named_parameters(), truth.parameters(), strict=True):
        close(parameter.grad, expected.grad, name, rtol)


def close(got: Tensor | None, expected: Tensor | None, name: str = "", rtol: float = RTOL) -> None:
    """Equal relative to the largest element, or both None."""
    assert (got is None) == (expected is None), f"{name}: got {got}, expected {expected}"
    if got is None or expected is None:
        return
    assert got.is_sparse == expected.is_sparse, f"{name}: {got.layout}, expected {expected.layout}"
    got, expected = got.to_dense(), expected.to_dense()
    error = (got - expected).abs().max() / expected.abs().max().clamp_min(1e-300)
    assert error <= rtol, f"{name}: relative error {error:.2e}"


def same_weights(model: nn.Module, truth: nn.Module) -> None:
    for (name, parameter), expected in zip(model.named_parameters(), truth.parameters(), strict=True):
        close(parameter.detach(), expected.detach(), name)


def train(
    build: Callable[[], nn.Module],
    loss: Loss,
    options: SyncOptions = TINY,
    *,
    steps: int = 4,
    micro_batches: int = 1,
    zero: str = "none",
    before: Callable[[nn.Module, int], None] | None = None,
    log: Any = None,
) -> Synchroniser:
    """Steps of SGD with momentum and weight decay on this rank and on the truth, compared all along.

    `zero` is how gradients are zeroed: to "none" or to "zeros".
    """
    model, truth = both(build)
    reducer = reduce_all(model, options, log)
    kinds = {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.1}
    optimizers = [torch.optim.SGD(m.parameters(), **kinds) for m in (model, truth)]
    for step in range(steps):
        for optimizer, one in zip(optimizers, (model, truth), strict=True):
            optimizer.zero_grad(set_to_none=zero != "zeros")
            if before is not None:
                before(one, step)
        for micro in range(micro_batches):
            at = micro_batches * step + micro
            reducer.prepare(last=micro == micro_batches - 1)
            loss(model, dist.get_rank(), at).backward()
            mean_loss(truth, loss, at).backward()
        reducer.wait()
        same_gradients(model, truth)
        for optimizer in optimizers:
            optimizer.step()
    same_weights(model, truth)
    return reducer


LARGE = 200
"""From how many bytes on a gradient counts as large, where a test wants some: the weights, not the biases."""
OVERLAPPED: dict[str, Any] = {"shared_memory": False, "overlap": True}
WAYS: list[tuple[dict[str, Any], int]] = [
    ({"shared_memory": True}, bucket_module.LARGE_BYTES),
    ({"shared_memory": False, "overlap": False}, LARGE),
    (OVERLAPPED, bucket_module.LARGE_BYTES),
    (OVERLAPPED, LARGE),
]
"""Options, and the size of large gradients: by the default small models have none."""


def everywhere(act: Callable[[SyncOptions], Any], ways: Sequence[tuple[dict[str, Any], int]] = WAYS) -> None:
    """Run `act` over shared memory and over gloo, during backward or at its end, with and without large gradients."""
    for changes, large in ways:
        bucket_module.LARGE_BYTES = large
        try:
            act(replace(TINY, **changes))
        except Exception as error:
            raise AssertionError(f"with {changes}, large from {large}: {error}") from error


def in_all_ways(n: int, ways: Sequence[tuple[dict[str, Any], int]] = WAYS, **options: Any) -> Any:
    """Run the decorated test `everywhere` on `n` ranks; it takes the options of its sums. Its `body_of` takes them, too."""

    def decorate(act: Callable[[SyncOptions], Any]) -> Callable[..., None]:
        def test(*given: SyncOptions) -> None:
            act(*given) if given else everywhere(act, ways)

        test.__module__, test.__name__, test.__doc__ = act.__module__, act.__name__, act.__doc__
        return on_ranks(n, **options)(test)

    return decorate
