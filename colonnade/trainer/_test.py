"""Evaluation: forward passes over test data, with the hooks that measure them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from colonnade.engine.engine import Engine
from colonnade.errors import TrainerError
from colonnade.trainer._lengths import Lengths, read_lengths
from colonnade.trainer._weigh import weigh

if TYPE_CHECKING:
    from colonnade.trainer.trainer import Trainer

_NO_BATCH = object()


def run_test(trainer: Trainer, loader: Iterable[Any], agree: Callable[[], None]) -> None:
    """Run the hooks' test points over all batches of all ranks, which need not have equally many. Collective."""
    hooks, engine = trainer._hooks, trainer.engine
    lengths = read_lengths(loader, trainer.context)
    with_loss = engine.criterion is not None
    hooks.call("before_test")
    hooks.call("before_test_epoch")
    trainer.time("start", "Test-epoch")
    with evaluating(engine):
        for batch in batches_of(trainer, loader, lengths):
            hooks.call("before_test_iter")
            trainer.time("start", "Test-step")
            output, label, loss = engine.execute_schedule(
                iter((batch,)),
                forward_only=True,
                return_loss=with_loss,
                return_output_label=trainer.returns_output,
            )
            trainer.time("stop", "Test-step")
            trainer.batch_weight = weigh(engine.schedule, loss)
            hooks.call("after_test_iter", output, label, loss)
    trainer.time("stop", "Test-epoch")
    hooks.call("after_test_epoch")
    hooks.call("after_test")
    agree()


@contextmanager
def evaluating(engine: Engine) -> Iterator[None]:
    """The engine in evaluation mode, without gradients, and then as it was."""
    was_training = engine.training
    engine.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        if was_training:
            engine.train()


def batches_of(trainer: Trainer, loader: Iterable[Any], lengths: Lengths) -> Iterator[Any]:
    """The batches of this rank. Ranks need each other's batches only where a forward pass goes over several ranks."""
    context = trainer.context
    by_itself = context.world_size == context.data_parallel_size
    iterator = iter(loader)
    while True:
        try:
            batch = next(iterator, _NO_BATCH)
        except Exception as error:
            if not by_itself:  # its peers wait for this batch: they learn of the error when this process ends
                raise
            told = TrainerError(f"the data loader failed: {type(error).__name__}: {error}")
            told.__cause__ = error
            trainer._hooks.hold(told)
            return
        if not by_itself and not lengths.known:
            _check_even(trainer, batch is not _NO_BATCH)
        if batch is _NO_BATCH:
            return
        yield batch


def _check_even(trainer: Trainer, has_batch: bool) -> None:
    have, have_not = trainer._exchange.sum([float(has_batch), float(not has_batch)])
    if have and have_not:
        raise TrainerError(
            f"{int(have_not)} of {trainer.context.world_size} ranks have run out of batches before the others, and this "
            f"layout needs all of them in every pass; give all ranks equally many batches"
        )
