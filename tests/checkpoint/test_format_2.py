"""Format 2 stays what it is: the same state gives the same bytes as the files in `format_2`, and those are read.

The files were written by `write` below with the code of Colonnade before the restructure of issue 30.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.checkpoint import CheckpointManager, save, verify
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode as M
from colonnade.errors import CheckpointError
from colonnade.parallel.flat import FlatShard
from colonnade.parallel.placement import Shard, place
from colonnade.testing import run_world

STORED = Path(__file__).parent / "format_2/step-00000003"
CUT = ("rows", "uneven", "packed", "empty")


def numbers(shape: tuple[int, ...], start: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(start, start + torch.Size(shape).numel()).reshape(shape).to(dtype)


WHOLE = {
    "rows": numbers((6, 4), 0),
    "uneven": numbers((5, 3), 100, torch.bfloat16),
    "packed": numbers((3, 12), 200, torch.float64),
    "empty": numbers((1, 2), 300),
    "images": numbers((2, 3, 2, 2), 400).contiguous(memory_format=torch.channels_last),
    "scalar": numbers((), 500),
}


class Sharded:
    """An optimizer whose state is cut over the data ranks, by elements as they lie in memory."""

    def __init__(self, parameters: dict[str, nn.Parameter], context: ParallelContext) -> None:
        self.param_groups: list[dict[str, Any]] = [
            {"params": list(parameters.values())[:3], "lr": 0.5, "betas": (0.9, 0.99)},
            {"params": list(parameters.values())[3:], "lr": 0.25, "betas": (0.9, 0.99)},
        ]
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.at, self.count = context.get_local_rank(M.DATA), context.get_world_size(M.DATA)
        self.ranks = context.get_ranks_in_group(M.DATA) if context.is_launched else [0]
        self.loaded: dict[str, Any] = {}

    def flat_shard(self, parameter: Tensor) -> FlatShard | None:
        size = parameter.numel()
        start, stop = (size * at // self.count + (at % self.count and size % 3) for at in (self.at, self.at + 1))
        start, stop = min(start, size), min(stop, size)
        order = sorted(range(parameter.dim()), key=lambda dim: -parameter.stride(dim))
        flat = (parameter.detach().float() + 0.5).permute(order).flatten()[start:stop]
        state = {"moment": flat, "square": flat * 2, "step": torch.tensor(7.0), "note": "kept"}
        return FlatShard(start, stop, tuple(self.ranks), state)

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("flat_shard gives the state")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


class Counter(nn.Module):
    """A module with state that is no tensor."""

    calls = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "sum": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def model_on(context: ParallelContext, known: bool) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """This rank's part of the model; with `known` of its values, else of zeros."""
    at, count = context.get_local_rank(M.TENSOR), context.get_world_size(M.TENSOR)
    model, parameters = nn.Module(), {}
    for name, value in WHOLE.items():
        part, modes, shape = value, {}, None
        if count > 1 and name in CUT:
            cut = {"rows": (3, 3), "uneven": (3, 2), "empty": (1, 0)}
            if name == "packed":
                part = torch.cat([section.chunk(count, 1)[at] for section in value.split((4, 8), 1)], 1)
                modes = {M.TENSOR: Shard(1, sections=(4, 8))}
            else:
                part, modes = value.split(cut[name])[at], {M.TENSOR: Shard(0)}
                shape = tuple(value.shape) if name != "rows" else None
        parameter = nn.Parameter((part if known else torch.zeros_like(part)).clone())
        parameters[name] = place(parameter, modes, shape)
        model.register_parameter(name, parameters[name])
    model.tied = nn.Module()
    model.tied.weight = parameters["rows"]
    model.register_buffer("seen", torch.tensor(5 * known))
    drift = torch.full((3,), float(context.get_global_rank()))
    model.register_buffer("drift", drift if known else torch.zeros(3))
    model.counter = Counter()
    model.counter.calls = 11 * known
    return model, parameters


def write(folder: Path) -> None:
    """Save on data 2 x tensor 2. The random streams are made up: torch and numpy decide what theirs look like."""
    save.random_state = lambda context: {"stream": torch.arange(4) + context.get_global_rank()}  # type: ignore[assignment]
    with (
        launch({"parallel": {"tensor": 2}}, context=ParallelContext(), verbose=False) as context,
        CheckpointManager(folder, context) as manager,
    ):
        model, parameters = model_on(context, known=True)
        extra = {
            "plain": {"a": (1, [None, True, "text"]), 5: float("inf")},
            "tensors": [torch.arange(3, dtype=torch.int16)],
            "rank": context.get_global_rank(),
        }
        manager.save(3, model, Sharded(parameters, context), extra)


def without_time(raw: bytes) -> bytes:
    """A manifest without what differs from save to save: the time, the version, and the digest of both."""
    raw = re.sub(rb'"time":[^,]+,', b"", raw)
    return re.sub(rb'"colonnade":"[^"]+","digest":"[0-9a-f]{64}"', b"", raw)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("format_2")
    run_world(4, write, folder)
    return folder / STORED.name


def test_the_same_state_gives_the_same_bytes(written):
    names = sorted(os.listdir(STORED))
    assert sorted(os.listdir(written)) == names == ["manifest.json", *(f"rank-0000{at}.safetensors" for at in range(4))]
    for name in names:
        found, expected = (written / name).read_bytes(), (STORED / name).read_bytes()
        if name == "manifest.json":
            found, expected = without_time(found), without_time(expected)
        assert found == expected, name


@pytest.mark.parametrize("background", [False, True])
def test_what_was_written_before_is_read(tmp_path, background):
    """On one rank; saved again there and read once more, it is the same."""
    shutil.copytree(STORED, tmp_path / STORED.name)
    verify(tmp_path / STORED.name)
    context = ParallelContext()
    with CheckpointManager(tmp_path, context, background=background) as manager:
        for step in (3, 4):
            model, parameters = model_on(context, known=False)
            optimizer = Sharded(parameters, context)
            info = manager.load(model, optimizer)
            assert (info.step, info.random) == (step, "re-derived" if step == 3 else "restored")
            assert info.extra["plain"] == {"a": (1, [None, True, "text"]), 5: float("inf")}
            assert info.extra["tensors"][0].equal(torch.arange(3, dtype=torch.int16))
            assert "rank" not in info.extra  # it was not the same on all ranks
            for name, value in WHOLE.items():
                assert parameters[name].equal(value), name
            assert (model.seen.item(), model.drift.tolist(), model.counter.calls) == (5, [0.0] * 3, 11)
            for number, parameter in enumerate(parameters.values()):
                shard = optimizer.flat_shard(parameter)
                assert shard is not None
                found = optimizer.loaded["state"][number]
                assert found.keys() == shard.state.keys()
                assert all(torch.as_tensor(found[key]).equal(shard.state[key]) for key in ("moment", "square", "step"))
            assert [group["lr"] for group in optimizer.loaded["param_groups"]] == [0.5, 0.25]
            manager.save(4, model, optimizer, {key: info.extra[key] for key in ("plain", "tensors")})


@pytest.mark.parametrize("form", [1, 3])
def test_another_format_is_no_damage_that_a_load_passes_over(tmp_path, form):
    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        for step in (1, 2):
            manager.save(step, nn.Linear(1, 1))
        manifest = tmp_path / "step-00000002/manifest.json"
        manifest.write_bytes(manifest.read_bytes().replace(b'"format":2', f'"format":{form}'.encode()))
        with pytest.raises(
            CheckpointError, match=f"step-00000002 cannot be loaded: the checkpoint has format {form}, written by"
        ):
            manager.load(nn.Linear(1, 1))
        assert manager.load(nn.Linear(1, 1), step=1).step == 1
