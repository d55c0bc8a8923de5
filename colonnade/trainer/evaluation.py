"""Evaluation and prediction: forward passes over test data, for the metrics of hooks or for the outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler

from colonnade.checkpoint.values import is_stateful
from colonnade.engine.engine import Engine
from colonnade.engine.schedule.micro_batch import join
from colonnade.errors import ConfigError, TrainerError
from colonnade.hf.model_loss import IGNORED
from colonnade.trainer.data import NO_BATCH, Lengths, moves_together, read_lengths
from colonnade.trainer.hooks.hook import HookList
from colonnade.trainer.records import Exchange, gather_values, is_first_with_data, weigh
from colonnade.utils.sampler import DistinctDataSampler

if TYPE_CHECKING:
    from colonnade.trainer.trainer import Trainer


def run_test(trainer: Trainer, loader: Iterable[Any], hooks: HookList, exchange: Exchange) -> None:
    """Run all test batches and call the test points of the hooks. Collective over the world.

    Ranks may have different numbers of batches. Samples that a sampler repeats to give all ranks the same number count
    once. An error of a hook stays pending until the caller raises it on all ranks together.
    """
    engine = trainer.engine
    lengths = read_lengths(loader, trainer.context)
    with_loss = engine.gives_loss or any(hook.needs_loss for hook in hooks.hooks)
    hooks.call("before_test")
    hooks.call("before_test_epoch")
    try:
        with _evaluating(engine), _each_once(loader) as repeated:
            for number, batch in enumerate(_batches_of(trainer, loader, lengths, hooks, exchange)):
                # A batch that consists of one repeated sample does not count, but other ranks may need its forward pass.
                counts = number != repeated
                if counts:
                    hooks.call("before_test_iter")
                output, label, loss = engine.execute_schedule(
                    iter((batch,)),
                    forward_only=True,
                    return_loss=with_loss,
                    return_output_label=trainer.returns_output,
                )
                if counts:
                    trainer.batch_weight = weigh(loss, engine.loss_count, engine.schedule.batch_size)
                    hooks.call("after_test_iter", output, label, loss)
    except BaseException:
        hooks.call("after_test")  # undoes changes for the test, such as the weights of EMAHook
        raise
    hooks.call("after_test_epoch")
    hooks.call("after_test")


def predict(trainer: Trainer, loader: Iterable[Any], hooks: HookList, exchange: Exchange) -> Any:
    """Return the outputs of all ranks, on the host of every rank. Collective over the world."""
    lengths = read_lengths(loader, trainer.context)
    pieces: list[Any] = []
    own = trainer.engine.own_loss
    fit = join if own is None else _join_padded
    with _evaluating(trainer.engine), _whole_epoch(_sampler_of(loader)[0]):
        indices = _indices(loader)
        for batch in _batches_of(trainer, loader, lengths, hooks, exchange):
            output, _, _ = trainer.engine.execute_schedule(iter((batch,)), forward_only=True, return_loss=False)
            if output is not None:
                output = own.predictions(output) if own is not None else output
                pieces.append(tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), output))
    trainer.agree()
    local = {"indices": indices, "output": fit(pieces) if pieces else None}
    found = gather_values(local, bool(pieces) and is_first_with_data(trainer.context), trainer.context)
    return _in_dataset_order(found, fit)


@contextmanager
def _evaluating(engine: Engine) -> Iterator[None]:
    """Put the engine into evaluation mode without gradients; restore it afterwards."""
    was_training = engine.training
    engine.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        if was_training:
            engine.train()


@contextmanager
def _each_once(loader: Iterable[Any]) -> Iterator[int | None]:
    """Make the sampler of a loader yield each sample of an epoch once; restore it afterwards.

    Samplers repeat at most one sample per rank, the last. It is removed before the batch is built, so that collators and
    models never see it. A batch that consists only of this sample is kept, because other ranks may need its forward
    pass; then its number is yielded, else None.
    """
    sampler, batches = _sampler_of(loader)
    with _whole_epoch(sampler):
        # The last sample is a repeat if it only makes the numbers of samples of all ranks equal.
        repeats = False
        if isinstance(sampler, DistinctDataSampler):
            repeats = sampler.repeats_last
        elif type(sampler) is DistributedSampler and not sampler.drop_last:
            repeats = (len(sampler) - 1) * sampler.num_replicas + sampler.rank >= len(sampler.dataset)  # type: ignore[arg-type]
        if not repeats:
            yield None
            return
        size, last = (1 if batches is None else batches.batch_size), len(sampler) - 1
        if batches is None or last % size == 0:
            yield last // size
            return
        drop_last = batches.drop_last
        batches.sampler = _AllButLast(sampler)
        batches.drop_last = drop_last and len(sampler) % size != 0  # a full last batch stays, one sample shorter
        try:
            yield None
        finally:
            batches.sampler, batches.drop_last = sampler, drop_last


@contextmanager
def _whole_epoch(sampler: Any) -> Iterator[None]:
    """Make a sampler start at the beginning of its epoch; restore its position afterwards, for example within training."""
    if not isinstance(sampler, DistinctDataSampler):
        yield
        return
    state = sampler.state_dict()
    sampler.load_state_dict({**state, "position": 0})
    try:
        yield
    finally:
        sampler.load_state_dict(state)


def _sampler_of(loader: Iterable[Any]) -> tuple[Any, Any]:
    """(sampler, batch sampler) of a loader; None for a missing one."""
    batches = getattr(loader, "batch_sampler", None)
    if type(batches) is BatchSampler:
        return batches.sampler, batches
    plain = isinstance(loader, DataLoader) and batches is None  # every sample is a batch
    return getattr(loader, "sampler", None) if plain else None, None


class _AllButLast:
    """The samples of a sampler except the last. The length is unchanged, and so is that of the loader."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        return islice(iter(self._sampler), len(self._sampler) - 1)


def _batches_of(
    trainer: Trainer, loader: Iterable[Any], lengths: Lengths, hooks: HookList, exchange: Exchange
) -> Iterator[Any]:
    """The batches of this rank. If a forward pass spans several ranks, all of them must have the same number."""
    gathers = trainer.engine.gathers_weights
    # Whether a rank can run a forward pass without the other ranks.
    independent = not (moves_together(Lengths((None,)), trainer.context) or gathers)
    if gathers and lengths.known and not lengths.equal:
        raise ConfigError(
            f"{lengths}, but at ZeRO stage 3 every forward pass needs all ranks. Give all ranks the same number of "
            "batches. colonnade.utils.get_dataloader makes loaders of equal length.",
            code="C090",
        )
    iterator = iter(loader)
    while True:
        try:
            batch = next(iterator, NO_BATCH)
        except Exception as error:
            if not independent:  # other ranks wait in this forward pass; they notice the error when this process ends
                raise
            failure = TrainerError(f"the data loader failed: {type(error).__name__}: {error}", code="C090")
            failure.__cause__ = error
            hooks.hold(failure)
            return
        if not independent and not lengths.known:
            have, have_not = exchange.sum([float(batch is not NO_BATCH), float(batch is NO_BATCH)])
            if have and have_not:
                raise TrainerError(
                    f"{int(have_not)} of {trainer.context.world_size} ranks have run out of batches before the "
                    "others, but in this layout every forward pass needs all ranks. Give all ranks the same number "
                    "of batches.",
                    code="C090",
                )
        if batch is NO_BATCH:
            return
        yield batch


def _join_padded(pieces: list[Any]) -> Any:
    """Concatenate outputs of different padded lengths, filled with -100 as the trainer of transformers does."""
    leaves, (spec, *others) = zip(*map(tree_flatten, pieces), strict=True)
    if any(other != spec for other in others):
        return join(pieces)
    columns = [_filled(*column) for column in zip(*leaves, strict=True)]
    return join([tree_unflatten([column[at] for column in columns], spec) for at in range(len(pieces))])


def _filled(first: Any, *others: Any) -> Sequence[Any]:
    """Tensors of different sizes, padded with -100 to the largest size; other values unchanged."""
    tensors = [first, *others]
    if not all(isinstance(tensor, Tensor) and tensor.dim() == first.dim() for tensor in tensors):
        return tensors
    sizes = [max(column) for column in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    missing = [[size - has for size, has in zip(sizes, tensor.shape[1:], strict=True)] for tensor in tensors]
    fills = [[side for size in reversed(lacks) for side in (0, size)] for lacks in missing]
    return [
        F.pad(tensor, fill, value=IGNORED) if any(fill) else tensor for tensor, fill in zip(tensors, fills, strict=True)
    ]


def _indices(loader: Iterable[Any]) -> Tensor | None:
    """The sample indices that a loader is going to yield, if they are known beforehand."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return None
    if isinstance(loader.sampler, (RandomSampler, WeightedRandomSampler)):
        raise ConfigError(
            "predict returns outputs in dataset order, so it needs a loader with shuffle=False. Set shuffle=False.",
            code="C090",
        )
    before = loader.sampler.state_dict() if is_stateful(loader.sampler) else None  # type: ignore[attr-defined]
    flat = [index for batch in loader.batch_sampler for index in batch]
    if before is not None:
        loader.sampler.load_state_dict(before)  # type: ignore[attr-defined]
    return torch.tensor(flat, device="cpu") if all(isinstance(index, int) for index in flat) else None


def _in_dataset_order(found: list[dict[str, Any]], fit: Callable[[list[Any]], Any]) -> Any:
    """The outputs of all ranks in dataset order; in rank order if a rank does not know its indices."""
    if not found:
        return None
    output = fit([part["output"] for part in found])
    if any(part["indices"] is None for part in found):
        return output
    indices = torch.cat([part["indices"] for part in found])
    # Samplers repeat samples to give every rank the same number; the first output of each is kept.
    order = torch.argsort(indices, stable=True)
    first = torch.ones(len(order), dtype=torch.bool, device="cpu")
    first[1:] = indices[order][1:] != indices[order][:-1]
    return tree_map_only(
        Tensor, lambda tensor: tensor[order[first]] if tensor.shape[:1] == indices.shape else tensor, output
    )
