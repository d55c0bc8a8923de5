"""Whole tensors out of what four ranks hold: uneven and empty parts, ties, experts, buffers; to all, to one, into files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from colonnade.checkpoint import storage
from colonnade.checkpoint.full_weights import FullTensors, save_full, save_pretrained
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.errors import CheckpointError
from colonnade.testing import run_world
from tests.checkpoint.models import ALIAS, WAYS, Way, build, launched, whole, zero


def wrong(found: dict[str, Tensor]) -> list[str]:
    """The names that do not have the bits of state 3."""
    truth = {name: whole(ALIAS[1] if name == ALIAS[0] else name, 3) for name in found}
    return [name for name in found if found[name].dtype != truth[name].dtype or not found[name].equal(truth[name])]


class Config:
    """As much of a config of transformers as is used."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")


def test_one_process_needs_no_world() -> None:
    context = ParallelContext()
    tensors = FullTensors(build(WAYS["one"], context, 3).model, context)
    assert wrong({name: tensors.gather(record) for record in tensors.records for name in record.names}) == []
    assert wrong({name: found for record, found in tensors.gather_all() for name in record.names}) == []
    for record in tensors.records:
        found = tensors.gather_to_ranks([(record, 0)])
        assert found is not None
        assert wrong({record.names[0]: found}) == []


def check(folder: Path) -> None:
    for number, way in enumerate((WAYS["tensor 2 x pipeline 2"], zero(4), WAYS["expert 2 in data 4"])):
        with launched(way) as context:
            model, rank = build(way, context, 3).model, context.get_global_rank()
            tensors = FullTensors(model, context)
            names = [name for record in tensors.records for name in record.names]
            assert len(names) == len(set(names)) == 9
            everywhere = {name: tensors.gather(record) for record in tensors.records for name in record.names}
            assert wrong(everywhere) == []
            assert wrong({name: at_once for record, at_once in tensors.gather_all() for name in record.names}) == []
            turns = [tensors.records[at : at + 4] for at in range(0, 8, 4)]
            for turn in turns:  # each rank gets another one
                found = tensors.gather_to_ranks([(record, to) for to, record in enumerate(turn)])
                assert (found is None) == (rank >= len(turn))
                assert found is None or wrong({turn[rank].names[0]: found}) == []
            save_full(tensors, folder / f"{number}.safetensors", context)
            model.config, model.can_generate = Config(), lambda: False
            save_pretrained(model, folder / str(number), context, max_shard_size=200)
            check_failure(model, folder, context)


def check_failure(model: torch.nn.Module, folder: Path, context: ParallelContext) -> None:
    """A disk that fails one rank is an error on all, and leaves nothing."""

    def fail(point: str) -> None:
        if context.get_global_rank() == 1 and point == "tensor written":
            raise OSError("the disk is gone")

    storage.hook = fail
    with pytest.raises(CheckpointError, match="the disk is gone"):
        save_pretrained(model, folder / "never", context, max_shard_size=200)
    storage.hook = None
    torch.distributed.barrier()  # one rank takes it away while the others are told
    assert list(folder.glob("*never*")) == []
    torch.distributed.barrier()


def check_idle(folder: Path) -> None:
    """Of three ranks one holds a weight for the others, and one writes: some have nothing to send, to write, or both."""
    with launched(Way(3)) as context:
        model = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1.0, 2.0]]))
        model.config, model.can_generate = Config(), lambda: False  # type: ignore[assignment]
        engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=context)[0]
        for to in (1, 2, 0):
            found = FullTensors(model, context).gather_to_ranks([(FullTensors(model, context).records[0], to)])
            assert (found is not None) == (context.get_global_rank() == to)
        assert bool(engine.full_state_dict("first")) == (context.get_global_rank() == 0)
        engine.full_state_dict(folder / "all.safetensors")
        engine.save_pretrained(folder / "model")


def test_ranks_without_anything_to_send_or_to_write_take_part(tmp_path: Path) -> None:
    run_world(3, check_idle, tmp_path, timeout=30)
    for file in ("all.safetensors", "model/model.safetensors"):
        assert load_file(tmp_path / file)["weight"].tolist() == [[1.0, 2.0]]


@pytest.mark.slow
def test_tensors_of_every_layout_are_whole(tmp_path: Path) -> None:
    run_world(4, check, tmp_path)
    for number in range(3):
        found = load_file(tmp_path / f"{number}.safetensors")
        assert len(found) == 9
        assert wrong(found) == []
        files = sorted((tmp_path / str(number)).glob("model-*.safetensors"))
        assert len(files) > 4  # so that a rank writes several
        found = {key: value for file in files for key, value in load_file(file).items()}
        assert len(found) == 8
        assert ALIAS[1] in found  # the tied weight once
        assert wrong(found) == []
