"""`colossalai.testing`: assertions and decorators of its tests; `colonnade.testing.run_world` starts the ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Function = Callable[..., Any]


def assert_equal(a: Tensor, b: Tensor) -> None:
    assert torch.equal(a, b), f"expected a and b to be equal, but they are {a} and {b}"


def assert_not_equal(a: Tensor, b: Tensor) -> None:
    assert not torch.equal(a, b), f"expected a and b to differ, but both are {a}"


def assert_close(a: Tensor, b: Tensor, rtol: float = 1e-5, atol: float = 1e-8) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def assert_close_loose(a: Tensor, b: Tensor, rtol: float = 1e-3, atol: float = 1e-3) -> None:
    assert_close(a, b, rtol, atol)


def assert_equal_in_group(tensor: Tensor, process_group: dist.ProcessGroup | None = None) -> None:
    """That every rank of the group has the same tensor. Collective over it."""
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(others, tensor.contiguous(), group=process_group)
    for other in others:
        assert_equal(tensor, other)


def parameterize(argument: str, values: Iterable[Any]) -> Callable[[Function], Function]:
    """Call the function once for each value of the argument; its other arguments are keywords."""
    chosen = list(values)

    def around(function: Function) -> Function:
        @wraps(function)
        def run(**options: Any) -> None:
            for value in chosen:
                function(**{argument: value, **options})

        # It has no such argument any more: pytest must not look for a fixture of that name.
        del run.__wrapped__
        return run

    return around


def rerun_on_exception(
    exception_type: type[BaseException] = Exception, pattern: str | None = None, max_try: int | None = 5
) -> Callable[[Function], Function]:
    """Call the function again, up to `max_try` times in all, when it raises such an error; the last one is raised."""

    def around(function: Function) -> Function:
        @wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            tries = 0
            while True:
                tries += 1
                try:
                    return function(*args, **options)
                except exception_type as error:
                    if tries == max_try or (pattern is not None and not re.match(pattern, str(error))):
                        raise

        return run

    return around


def rerun_if_address_is_in_use() -> Callable[[Function], Function]:
    return rerun_on_exception(pattern=r"(.*\n)*.*[Aa]ddress already in use")


def skip_if_not_enough_gpus(min_gpus: int) -> Callable[[Function], Function]:
    """Call the function only where there are so many CUDA devices."""

    def around(function: Function) -> Function:
        @wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            return function(*args, **options) if torch.cuda.device_count() >= min_gpus else None

        return run

    return around
