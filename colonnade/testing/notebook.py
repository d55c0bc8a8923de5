"""Training from a notebook: a function of a cell runs on several ranks of this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colonnade.testing.world import run_world


def run_in_notebook(fn: Callable[..., Any], *args: Any, nproc: int = 2, timeout: float = 86_400, **kwargs: Any) -> Any:
    """Run `fn(*args, **kwargs)` on `nproc` ranks, show the output of rank 0 live, and return its result.

    Each rank is a copy of this process: it sees all definitions of earlier cells, and changes none of them here. Interrupting
    the cell stops all ranks.

    Args:
        fn: a function, which may be defined in a cell. It calls `colonnade.launch(config)` like a script.
        args: positional arguments of `fn`.
        nproc: the number of ranks.
        timeout: seconds after which all ranks are stopped.
        kwargs: keyword arguments of `fn`.

    Raises:
        WorldError: a rank failed; with its traceback.
        LaunchError: the notebook has already used a GPU, which cannot be shared with copies of the process.

    Notebook cell::

        def train():
            with colonnade.launch(dict(clip_grad_norm=1.0)) as gpc:
                return gpc.world_size

        colonnade.run_in_notebook(train, nproc=2)
    """
    plain = {"TORCH_DISTRIBUTED_DEBUG": "OFF"}
    return run_world(nproc, fn, *args, timeout=timeout, backend=None, env=plain, show=True, **kwargs).values[0]
