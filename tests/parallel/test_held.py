"""Start-up agreements: placements that add up, and weights that are equal where they are shared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from colonnade._launch import launch
from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.errors import PlacementError
from colonnade.parallel import held
from colonnade.parallel.demand import Holding
from colonnade.parallel.held import broadcast_shared, check_placements, checksum, words_of
from colonnade.parallel.placement import Placement, Replicate, Shard, Tied, place
from colonnade.proof.planner.ranks import fake_rank
from colonnade.testing import run_world
from tests.ranks import on_ranks

TENSOR, PIPELINE, DATA = ParallelMode.TENSOR, ParallelMode.PIPELINE, ParallelMode.DATA


class One(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(*shape))


@on_ranks(4)
def test_placements_must_add_up_to_the_whole():
    told = dict.fromkeys(CASES, "")
    for case, (parallel, build, _) in CASES.items():
        with launch({"parallel": parallel}, context=ParallelContext(), verbose=False) as gpc:
            try:
                check_placements(build(gpc), gpc)
            except PlacementError as error:
                told[case] = str(error)
    for case, (*_, part) in CASES.items():
        assert (part in told[case]) if part else told[case] == "", case


def even(gpc):
    model = One(4, 2)
    place(model.w, {TENSOR: Shard(0)})
    return model


def uneven(gpc):
    at = gpc.get_local_rank(TENSOR)
    model = One([3, 0][at], 2)
    place(model.w, {TENSOR: Shard(0)}, shape=(3, 2))
    return model


def uneven_undeclared(gpc):
    model = One([3, 1][gpc.get_local_rank(TENSOR)], 2)
    place(model.w, {TENSOR: Shard(0)})
    return model


def wrong_whole(gpc):
    model = One(2, 2)
    place(model.w, {TENSOR: Shard(0)}, shape=(7, 2))
    return model


def sharded_but_not_said(gpc):
    # Sharded by hand, unevenly, and left unplaced: the wholes differ.
    return One([3, 1][gpc.get_local_rank(TENSOR)], 2)


def tied(gpc):
    model = One(3, 3)
    if gpc.get_local_rank(PIPELINE) in (1, 3):
        place(model.w, {PIPELINE: Tied((1, 3), "w")})
    return model


def other_names(gpc):
    model = One(2)
    if gpc.get_global_rank() == 1:
        model.other = nn.Parameter(torch.zeros(2))
    return model


CASES = {
    "even": ({"tensor": 2}, even, ""),
    "uneven": ({"tensor": 2}, uneven, ""),
    "tied": ({"pipeline": 4}, tied, ""),
    "replicated": ({"tensor": 2, "pipeline": 2}, lambda gpc: One(5), ""),
    "uneven, not declared": (
        {"tensor": 2},
        uneven_undeclared,
        "'w': (6, 2) torch.float32 on rank 0, (2, 2) torch.float32 on rank 1",
    ),
    "wrong whole": ({"tensor": 2}, wrong_whole, "w: 8 elements found, 14 expected"),
    "sharded, not placed": (
        {"tensor": 2},
        sharded_but_not_said,
        "'w': (3, 2) torch.float32 on rank 0, (1, 2) torch.float32 on rank 1",
    ),
    "other names": ({"tensor": 2}, other_names, "must have the same parameters"),
}


def _start_different() -> tuple[float, float, float]:
    with launch({"parallel": {"tensor": 2}}, context=ParallelContext(), verbose=False) as gpc:
        rank = float(gpc.get_global_rank())
        model = nn.Module()
        model.shared = nn.Parameter(torch.full((3,), rank))
        model.split = nn.Parameter(torch.full((3,), rank))
        place(model.split, {TENSOR: Shard(0)})
        place(model.shared, {TENSOR: Replicate()})
        model.register_buffer("count", torch.tensor([int(rank)]))
        broadcast_shared(model, gpc)
        return model.shared[0].item(), model.split[0].item(), model.count.item()


def test_the_first_holder_gives_everyone_its_weights():
    assert run_world(4, _start_different).values == [(0, 0, 0), (0, 1, 0), (0, 0, 0), (0, 1, 0)]


def _in_pieces() -> list[float]:
    """Broadcasts of at most 64 bytes: a tensor alone where it is larger, several where they are small."""
    held._BROADCAST_BYTES = 64
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)), nn.Linear(3, 40))
        for parameter in model.parameters():
            nn.init.constant_(parameter, float(gpc.get_global_rank() + 1))
        held.broadcast_shared(model, gpc)
        return sorted({float(value) for parameter in model.parameters() for value in parameter.flatten()})


def test_weights_are_made_equal_in_pieces():
    assert run_world(2, _in_pieces).values == [[1.0], [1.0]]


def _marked(gpc: ParallelContext, mark: str, value: object, specs: dict) -> str:
    """What initialize says of a model whose rank 0 alone marks a parameter, as the ancestor's layers do."""
    model = One(4, 2)
    if gpc.get_global_rank() == 0:
        setattr(model.w, mark, value)
    if specs:
        place(model.w, specs)
    try:
        initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0].close()
    except PlacementError as error:
        return str(error)
    return ""


def _marks() -> dict[str, str]:
    said = {}
    with launch({"parallel": {"tensor": 2}}, context=ParallelContext(), verbose=False) as gpc:
        said["tensor"] = _marked(gpc, "is_tensor_parallel", True, {})
        said["placed"] = _marked(gpc, "is_tensor_parallel", True, {TENSOR: Shard(0)})
        said["off"] = _marked(gpc, "is_tensor_parallel", False, {})
        said["alone"] = _marked(gpc, "pipeline_shared_module_pg", object(), {})
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        said["experts"] = _marked(gpc, "moe_info", object(), {})
    with launch({"parallel": {"pipeline": 2}, "num_microbatches": 2}, context=ParallelContext(), verbose=False) as gpc:
        said["shared"] = _marked(gpc, "pipeline_shared_module_pg", object(), {})
    return said


def test_marks_of_the_ancestor_are_refused_by_name_on_every_rank():
    for rank, said in enumerate(run_world(2, _marks).values):
        assert said["placed"] == said["off"] == said["alone"] == ""
        assert "w is marked is_tensor_parallel" in said["tensor"]
        assert "place(parameter, {ParallelMode.TENSOR: Shard(dim)})" in said["tensor"]
        assert "w is marked moe_info" in said["experts"]
        assert "w is marked pipeline_shared_module_pg" in said["shared"]
        assert "ParallelMode.PIPELINE: Tied(" in said["shared"]
        assert ("on rank 0" in said["shared"]) == (rank == 1)


@contextmanager
def rank_of(world: int, rank: int, **parallel: object) -> Iterator[ParallelContext]:
    """One rank of a world that is not there."""
    context = ParallelContext()
    with fake_rank(load_config({"parallel": parallel}), world, rank, context):
        yield context


SHARED_OUT: dict[str, tuple[dict, bool]] = {
    "plain": ({}, False),
    "split": ({TENSOR: Shard(0)}, True),
    "owing": ({TENSOR: Replicate("sum")}, True),
    "final": ({TENSOR: Replicate("nothing")}, False),
    "elsewhere": ({DATA: Shard(0)}, False),
    "both": ({DATA: Shard(0), TENSOR: Shard(0)}, True),
    "the world": ({ParallelMode.GLOBAL: Shard(0)}, True),
}


def test_parameters_that_the_ranks_of_a_mode_do_not_share_out():
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in SHARED_OUT})
    for name, (specs, _) in SHARED_OUT.items():
        place(model[name], specs)
    with rank_of(4, 1, tensor=2) as context:
        found = held.replicated_parameters(model, context, TENSOR)
    assert found == {id(model[name]): name for name, (_, shared) in SHARED_OUT.items() if not shared}


def test_weights_are_compared_among_holders_with_the_same_seed():
    """Ranks of another data or pipeline coordinate draw other numbers; those of another tensor coordinate the same."""
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in ("plain", "split", "tied")})
    model.register_buffer("count", torch.zeros(2))
    place(model["split"], {TENSOR: Shard(0)})
    place(model["tied"], {PIPELINE: Tied((0, 1), "tied")})
    with rank_of(8, 5, tensor=2, pipeline=2) as context:  # rank = 4 * data + 2 * pipeline + tensor
        entries = held.held_tensors(model, context, buffers=True)
        found = held._seeded_alike(entries, context)
    assert {entry.name: entry.holding.ranks for entry in entries} == {
        "plain": (0, 1, 4, 5),
        "split": (1, 5),
        "tied": tuple(range(8)),
        "count": (0, 1, 4, 5),
    }
    assert {ranks: [entry.name for entry in group] for ranks, group in found.items()} == {(4, 5): ["plain", "tied"]}


def test_weights_that_differ_are_shown_by_their_first_numbers_and_all_bits():
    tensors = [torch.tensor([-1]), torch.tensor([0.5, 2.0, -1.0, 7.0])]
    entries = [held.Held(name, each, Placement(), Holding((0, 1), 0)) for name, each in zip("ab", tensors, strict=True)]
    sums = {"a": "10", "b": "ff"}
    assert held._shown(entries, sums) == {"a": "[-1.0] ... (checksum 10)", "b": "[0.5, 2.0, -1.0] ... (checksum ff)"}
    tied = Placement({PIPELINE: Tied((0, 1), "the tie")})
    assert [held.Held("w", tensors[0], each, Holding((0,), 0)).label for each in (Placement(), tied)] == [
        "w",
        "the tie",
    ]


# -- checksum ---------------------------------------------------------------------------------------------
# Checksums: every bit counts, and equal bits give equal numbers wherever they lie.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (16, 4), (0, 3)])
def test_every_bit_of_every_element_counts(dtype, shape):
    generator = torch.Generator().manual_seed(0)
    whole = torch.rand(shape, generator=generator).mul(100).to(dtype)
    right = checksum(whole).tolist()
    assert right == checksum(whole.clone()).tolist()
    bits = whole.clone().reshape(-1).view(torch.uint8)
    for at in range(bits.numel()):
        for bit in (0, 5):
            bits[at] ^= 1 << bit
            changed = bits.view(dtype).reshape(shape) if whole.dim() else bits.view(dtype)[0]
            assert checksum(changed)[0].item() != right[0]
            bits[at] ^= 1 << bit


def test_two_changes_that_cancel_in_the_sum_do_not_in_the_squares():
    whole = torch.tensor([5, 9, 1, 7])
    other = torch.tensor([6, 8, 1, 7])
    first, second = checksum(whole), checksum(other)
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_where_a_tensor_lies_does_not_matter():
    whole = torch.randn(6, 5)
    memory = torch.zeros(200)
    for offset in (1, 2, 16):
        view = memory[offset : offset + 30].view(6, 5)
        view.copy_(whole)
        assert torch.equal(checksum(view), checksum(whole))
    turned = whole.t().contiguous().t()
    assert torch.equal(checksum(turned), checksum(whole))
    assert words_of(torch.ones(3)).shape == (2,)


def test_on_other_devices_it_is_two_numbers_too():
    assert checksum(torch.zeros(5, device="meta")).shape == (2,)


@pytest.mark.parametrize(("start", "count"), [(0, 16), (8, 8), (9, 8), (1, 7), (3, 5), (0, 0)])
def test_words_are_the_bytes_wherever_they_begin(start, count):
    raw = torch.arange(1, 33, dtype=torch.uint8)[start : start + count]
    words = words_of(raw)
    assert words.dtype is torch.int64
    expected = bytes(raw.tolist()) + bytes(-count % 8)
    assert words.numpy().tobytes() == expected
