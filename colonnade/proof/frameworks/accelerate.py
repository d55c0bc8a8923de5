"""Scripts on Hugging Face Accelerate: `Accelerator.prepare` does what `colonnade.watch` does for plain torch.

Accelerate divides each loss by `gradient_accumulation_steps` in `Accelerator.backward`, in both runs. Its schedulers step once for each
rank, so learning rates depend on the number of ranks: the single process uses those of the ranks, like for plain torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch import nn

from colonnade.proof.watch import watch

if TYPE_CHECKING:
    from colonnade.proof.frameworks import Replacement
    from colonnade.proof.script_job import ScriptRecorder


def replacements(script: ScriptRecorder) -> Iterator[Replacement]:
    """Yield the functions of Accelerate that are replaced under `verify`."""
    from accelerate.accelerator import Accelerator
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
    from accelerate.optimizer import AcceleratedOptimizer

    is_double = script.part.dtype == "fp64"

    # In fp64, autocast would round activations, and the results are cast to fp32 for the loss.
    def make(own: Callable[..., None]) -> Callable[..., None]:
        @wraps(own)
        def init(accelerator: Any, *args: Any, **kwargs: Any) -> None:
            given = inspect.signature(own).bind(accelerator, *args, **kwargs).arguments
            own(**given)
            if is_double and accelerator.mixed_precision != "no":
                script.notes.append(
                    f"mixed_precision={str(accelerator.mixed_precision)!r} of Accelerate was left out: both runs are in fp64 "
                    f"(--dtype own keeps the dtype)"
                )
                accelerator.state._mixed_precision = "no"
                accelerator.scaler = None
                accelerator.native_amp = False

        return init

    # A script may prepare its model and its optimizer in separate calls.
    prepared: dict[str, Any] = {}

    def prepare(own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own)
        def prepare(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            for module in args:
                if is_double and isinstance(module, nn.Module):
                    module.double()
            found = own(accelerator, *args, **kwargs)
            for one in found if isinstance(found, tuple) else (found,):
                if isinstance(one, nn.Module):
                    prepared.setdefault("model", one)
                elif isinstance(one, AcceleratedOptimizer):
                    prepared.setdefault("optimizer", one.optimizer)
            if len(prepared) == 2 and script.recorder is None:
                watch(prepared["model"], prepared["optimizer"])
            return found

        return prepare

    yield Accelerator, "__init__", make
    yield Accelerator, "prepare", prepare
    if not script.part.keeps_checkpoints:
        yield Accelerator, "save_state", lambda own: lambda *args, **kwargs: None
    # These loaders shard, dispatch and pad, so their batches are recorded as the script gets them.
    yield DataLoaderShard, "__iter__", script.fed_loader
    yield DataLoaderDispatcher, "__iter__", script.fed_loader
