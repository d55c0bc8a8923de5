"""Putting a handler's own state back after it was run for a look."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.checkpoint.random_state import random_state, set_random_state
from colonnade.context.parallel_context import ParallelContext


@contextmanager
def state_put_back(handler: Any, context: ParallelContext) -> Iterator[None]:
    """After the block, the attributes of the handler and all random streams are as they were before it.

    Tensors (but not parameters), random generators, and dicts, lists, sets, deques and tuples of such get their content
    back in place. Of other objects (the model, the optimizer, process groups) only the reference is put back.
    """
    put_back = _keep(vars(handler), {})
    streams = random_state(context)
    try:
        yield
    finally:
        put_back()
        set_random_state(streams, context)


def _keep(value: Any, known: dict[int, Any]) -> Callable[[], Any]:
    """A function that gives `value` the content back that it has now."""
    if id(value) in known:
        return _nothing
    known[id(value)] = value
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        data, copy = value.data, value.detach().clone()
        # Through `data` it is the same memory again, even if the handler gave the tensor another size.
        return lambda: setattr(value, "data", data.copy_(copy))
    if isinstance(value, dict):
        return _refill(value, dict(value), list(value.values()), value.update, known)
    if isinstance(value, (list, deque)):
        return _refill(value, list(value), list(value), value.extend, known)
    if isinstance(value, set):
        return _refill(value, set(value), [], value.update, known)
    if isinstance(value, tuple):
        return _refill(None, value, list(value), _nothing, known)
    return _nothing


def _refill(
    container: Any, content: Any, values: list[Any], fill: Callable[[Any], Any], known: dict[int, Any]
) -> Callable[[], None]:
    inside = [_keep(value, known) for value in values]

    def put_back() -> None:
        if container is not None:
            container.clear()
        fill(content)
        for one in inside:
            one()

    return put_back


def _nothing(*_: Any) -> None:
    """Nothing is to be put back."""
