"""The layouts of the clipping tests: worlds of 1 to 8 ranks and the pieces that lie on them, placed by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from colonnade.context.parallel_mode import ParallelMode
from colonnade.parallel.placement import Replicate, Shard, Tied
from tests.optim.field_pieces import Piece

OWN = ParallelMode.register("FIELD_OWN", "field_own", data="distinct")
"""A mode of the tests' own, of distinct data: as an axis beside data it makes hybrid sharding."""

FINAL = Shard(0, owes="nothing")
"""A shard whose gradient was reduced by whoever cut it, as ZeRO and FSDP do."""


@dataclass(frozen=True)
class Case:
    """A world, what its config says of parallelism, and the pieces on it. `engine`: whether an engine runs it too."""

    world: int
    parallel: Mapping[str, Any]
    pieces: tuple[Piece, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)
    engine: bool = True
    kind: torch.dtype = torch.float64
    """The dtype in which the engine runs it."""
    with_context: bool = True
    """Whether the function is told of the context, or has to go by the DTensors alone."""


DENSE = (Piece("dense", (7, 5)), Piece("norm", (5,)))
EXPERTS = (Piece("experts", (4, 6, 3), {"expert": Shard(0)}), Piece("expert_bias", (4, 3), {"expert": Shard(0)}))
COLUMN = (Piece("up", (8, 6), {"tensor": Shard(0)}), Piece("up_bias", (8,), {"tensor": Shard(0)}))
ROW = (Piece("down", (6, 8), {"tensor": Shard(1)}), Piece("down_bias", (6,)))
TIED = Piece("embed", (9, 4), {"pipe": Tied((0, 1), "embed")})
STAGES = (Piece("first", (4, 4), stage=0), Piece("last", (4, 3), stage=1))
# Of a size that is several slices for every replica.
WIDE = Piece("wide", (70, 11))


def flat_shards(name: str, length: int, *parts: int) -> Piece:
    """A flat parameter cut over the data ranks, as ZeRO does: uneven, perhaps empty."""
    return Piece(name, (length,), {"data": FINAL}, parts={"data": parts} if parts else {})


CASES: dict[str, Case] = {
    "one rank": Case(1, {}, (*DENSE, WIDE)),
    "data 2": Case(2, {}, (*DENSE, WIDE)),
    "data 8": Case(8, {}, (*DENSE, WIDE)),
    # -- tensor
    "tensor 2": Case(2, {"tensor": 2}, (*DENSE, *COLUMN, *ROW)),
    "tensor 8": Case(8, {"tensor": 8}, (*DENSE, *COLUMN, *ROW, WIDE)),
    "data 2 x tensor 2": Case(4, {"tensor": 2}, (*DENSE, *COLUMN, *ROW, WIDE)),
    "tensor 2, uneven heads": Case(2, {"tensor": 2}, (Piece("sinks", (5,), {"tensor": Shard(0)}), *DENSE)),
    "tensor 2, sum pending": Case(
        4, {"tensor": 2}, (Piece("norm", (5,), {"tensor": Replicate(owes="sum")}), *COLUMN, *ROW)
    ),
    "tensor 2d": Case(
        4,
        {"tensor": {"size": 4, "mode": "2d"}},
        (
            Piece("weight", (6, 8), {"2d_col": Shard(0), "2d_row": Shard(1)}),
            Piece("bias", (8,), {"2d_row": Shard(0)}),
            *DENSE,
        ),
    ),
    "tensor 2.5d": Case(
        8,
        {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}},
        (
            Piece("weight", (6, 8), {"2p5d_col": Shard(0), "2p5d_row": Shard(1)}),
            Piece("bias", (9,), {"2p5d_row": Shard(0)}),
            Piece("table", (10, 3), {"2p5d_dep": Shard(0), "2p5d_col": Shard(0)}),
            *DENSE,
        ),
    ),
    "tensor 3d": Case(
        8,
        {"tensor": {"size": 8, "mode": "3d"}},
        (
            Piece("weight", (9, 8), {"3d_input": Shard(0), "3d_weight": Shard(0), "3d_output": Shard(1)}),
            Piece("bias", (8,), {"3d_output": Shard(0)}),
            Piece("scale", (8,), {"3d_input_x_weight": Shard(0)}),
            *DENSE,
        ),
    ),
    # -- pipeline
    "pipeline 2, tied": Case(2, {"pipeline": 2}, (TIED, *STAGES)),
    "pipeline 2, two chunks each": Case(
        2, {"pipeline": 2}, tuple(Piece(f"chunk{n}", (4, n + 2), stage=n % 2) for n in range(4))
    ),
    "pipeline 4, tied at 1 and 3, data 2": Case(
        8,
        {"pipeline": 4},
        (
            *(Piece(f"stage{n}", (5, 4), stage=n) for n in range(4)),
            Piece("shared", (70, 3), {"pipe": Tied((1, 3), "shared")}),
        ),
    ),
    "pipeline 2, an idle stage": Case(2, {"pipeline": 2}, (Piece("first", (4, 4), stage=0),), engine=False),
    "pipeline 2, a frozen stage": Case(
        2, {"pipeline": 2}, (Piece("first", (4, 4), stage=0), Piece("last", (4, 3), stage=1, frozen=True))
    ),
    "pipeline 2 x data 2, tied, flat shards": Case(
        4,
        {"pipeline": 2},
        (
            Piece("embed", (37,), {"pipe": Tied((0, 1), "embed"), "data": FINAL}, parts={"data": (30, 7)}),
            Piece("first", (11,), {"data": FINAL}, stage=0),
            Piece("last", (7, 4), stage=1),
        ),
    ),
    # -- experts
    "expert 2 in data 4": Case(4, {"expert": 2}, (*DENSE, *EXPERTS)),
    "expert 4 in data 4": Case(4, {"expert": 4}, (*DENSE, *EXPERTS)),
    "no experts in data 4": Case(4, {}, (*DENSE, *(Piece(piece.name, piece.shape) for piece in EXPERTS))),
    "expert 2 over data 2 x tensor 2": Case(
        4, {"tensor": 2, "expert": {"size": 2, "over": "data*tensor"}}, (*COLUMN, *ROW, *DENSE, *EXPERTS)
    ),
    "experts cut over expert and tensor": Case(
        8,
        {"tensor": 2, "expert": {"size": 2, "over": "data"}},
        (*COLUMN, *DENSE, Piece("experts", (4, 6, 3), {"expert": Shard(0), "tensor": Shard(1)}), *EXPERTS[1:]),
    ),
    "experts 2 + 1": Case(2, {"expert": 2}, (*DENSE, Piece("experts", (3, 6), {"expert": Shard(0)}))),
    "experts 3 + 0": Case(
        2, {"expert": 2}, (*DENSE, Piece("experts", (3, 6), {"expert": Shard(0)}, parts={"expert": (3, 0)}))
    ),
    "experts 3 + 0, fp16": Case(
        2,
        {"expert": 2},
        (*DENSE, Piece("experts", (3, 6), {"expert": Shard(0)}, parts={"expert": (3, 0)})),
        dtypes=(torch.float16,),
        engine=False,
    ),
    # -- sequence, own modes, everything at once
    "sequence 2 x data 2": Case(4, {"tensor": {"size": 2, "mode": "sequence"}}, (*DENSE, WIDE)),
    "own mode 2 x data 2": Case(
        4, {"own": {"size": 2, "mode": "field_own"}}, (*DENSE, Piece("cut", (7, 3), {"field_own": Shard(0)}), WIDE)
    ),
    "data 2 x pipeline 2 x tensor 2, experts": Case(
        8,
        {"pipeline": 2, "tensor": 2, "expert": 2},
        (
            TIED,
            Piece("up", (8, 6), {"tensor": Shard(0)}, stage=0),
            Piece("norm", (6,), stage=0),
            Piece("experts", (2, 5, 4), {"expert": Shard(0), "tensor": Shard(1)}, stage=1),
            Piece("head", (4, 9), stage=1),
        ),
    ),
    # -- flat shards of ZeRO
    "flat shards over data 4": Case(4, {}, (flat_shards("flat", 150, 100, 37, 13, 0), flat_shards("few", 3), *DENSE)),
    "silent and frozen": Case(
        2,
        {},
        (*DENSE, Piece("adapter", (3, 3)), Piece("base", (9, 9), frozen=True), Piece("unused", (4,), silent=True)),
    ),
    # -- dtypes
    "mixed dtypes": Case(
        2,
        {},
        (
            Piece("brain", (90,), dtype=torch.bfloat16),
            Piece("single", (7, 3), dtype=torch.float32),
            Piece("other", (70,), dtype=torch.float16),
            Piece("table", (40, 3), {"data": FINAL}, dtype=torch.bfloat16),
        ),
        dtypes=(torch.float32,),
        kind=torch.float32,
    ),
    "halves beyond their squares": Case(
        2,
        {"tensor": 2},
        (Piece("cut", (700, 3), {"tensor": Shard(0)}, scale=300.0), Piece("copy", (500,), scale=300.0)),
        dtypes=(torch.bfloat16, torch.float16),
        kind=torch.bfloat16,
    ),
    "tiny, in 8 shards": Case(
        8, {}, (Piece("tiny", (40,), {"data": FINAL}, scale=1e-6),), dtypes=(torch.float64,), engine=False
    ),
    # -- DTensor
    "HSDP 2 x 2 beside no shard": Case(
        4,
        {"own": {"size": 2, "mode": "field_own"}},
        (
            Piece("hybrid", (7, 5), {"field_own": FINAL}, mesh=("data", "field_own")),
            Piece("full", (9, 3), {"data": FINAL, "field_own": FINAL}, mesh=("data", "field_own")),
            Piece("none", (5,), mesh=("data", "field_own")),
        ),
    ),
    "FSDP dense beside plain experts": Case(
        4,
        {"expert": 2},
        (
            Piece("dense", (70, 5), {"data": FINAL}, mesh=("data",)),
            Piece("bias", (3,), {"data": FINAL}, mesh=("data",)),
            *EXPERTS,
        ),
        engine=False,
    ),
    "DTensors on three meshes beside plain": Case(
        4,
        {"tensor": 2},
        (
            Piece("sharded", (6, 5), {"data": FINAL}, mesh=("data",)),
            Piece("column", (8, 3), {"tensor": Shard(0)}, mesh=("tensor",)),
            Piece("both", (7, 6), {"data": FINAL, "tensor": Shard(1)}, mesh=("data", "tensor")),
            Piece("copy", (5,), mesh=("tensor",)),
            *DENSE,
            *COLUMN,
        ),
        engine=False,
    ),
    "DTensors on three meshes beside replicas": Case(
        4,
        {"tensor": 2},
        (
            Piece("sharded", (6, 5), {"data": FINAL}, mesh=("data",)),
            Piece("column", (8, 3), {"tensor": Shard(0)}, mesh=("tensor",)),
            Piece("both", (7, 6), {"data": FINAL, "tensor": Shard(1)}, mesh=("data", "tensor")),
            Piece("copy", (5,), mesh=("tensor",)),
            *DENSE,
        ),
        engine=False,
        with_context=False,
    ),
    "DTensor of 3 elements over 4": Case(4, {}, (Piece("tiny", (3,), {"data": FINAL}, mesh=("data",)),)),
}
