"""The log of a run on several ranks: tokens, the parameters of all stages, and the rank that the others wait for."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colonnade
from colonnade.engine.build import initialize
from colonnade.nn import Linear
from colonnade.testing import run_world
from colonnade.trainer import Trainer, hooks
from colonnade.trainer.records import is_first_with_data

pytestmark = pytest.mark.slow
ROWS, LENGTH, WORDS, WIDTH = 4, 6, 11, 8


class Late(nn.Module):
    """Sleeps on one rank of the world."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def forward(self, x: Tensor) -> Tensor:
        if torch.distributed.get_rank() == self._rank:
            time.sleep(0.2)
        return x


class Tokens(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        row = (torch.arange(LENGTH) + at) % WORDS
        return row, row


def train(config: dict[str, Any], path: Path, late: int) -> None:
    gpc = colonnade.launch(config, verbose=False)
    torch.manual_seed(1)
    layers = [Late(late), nn.Embedding(WORDS, WIDTH), Linear(WIDTH, 2 * WIDTH)]
    layers += [Linear(2 * WIDTH, WIDTH, split="row"), nn.Linear(WIDTH, WORDS)]
    model: Any = nn.Sequential(*layers)
    if gpc.pipeline_parallel_size > 1:
        model = colonnade.split(model, num_stages=2)
    loss = nn.CrossEntropyLoss()
    engine, *_ = initialize(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda output, label: loss(output.flatten(0, 1), label.flatten()),
    )
    loader = colonnade.utils.get_dataloader(Tokens(), batch_size=ROWS)
    Trainer(engine).fit(loader, max_steps=3, hooks=[hooks.JsonlHook(path, report=False)])
    gpc.destroy()


@pytest.mark.parametrize(
    ("config", "late", "replicas"),
    [
        ({"parallel": {"pipeline": 2}, "schedule": {"type": "OneFOneB", "num_microbatches": 2}}, 2, 2),
        ({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, 3, 2),
    ],
)
def test_the_log_counts_tokens_and_parameters_once_and_names_the_slowest_rank(tmp_path, config, late, replicas):
    path = tmp_path / "log.jsonl"
    run_world(4, train, config, path, late)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (begun,) = (line for line in lines if line["kind"] == "run")
    steps = [line for line in lines if line["kind"] == "step"]
    whole = nn.Sequential(
        nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.Linear(WIDTH, WORDS)
    )
    assert begun["elements"] == sum(each.numel() for each in whole.parameters())
    assert begun["devices"] == 4
    assert begun["experts"] is False
    assert begun["dtype"] == "float32"
    assert [line["tokens"] for line in steps] == [replicas * ROWS * LENGTH] * 3
    assert [line["samples"] for line in steps] == [replicas * ROWS] * 3
    if "pipeline" in config["parallel"]:
        # Rank 0 and rank 2 compute the first stages of two replicas: the second one sleeps.
        assert {line["busy/slowest_rank"] for line in steps[1:]} == {late}
    assert all(line["busy/slowest"] >= line["busy/fastest"] >= 0 for line in steps)


def counted_rows() -> bool:
    gpc = colonnade.launch({"parallel": {"pipeline": 2, "sequence": 2}}, verbose=False)
    counts = is_first_with_data(gpc, rows=True)
    gpc.destroy()
    return counts


def test_rows_of_one_sequence_group_count_once():
    """The ranks of a sequence group load the same rows, of which each computes a part."""
    assert run_world(4, counted_rows).values == [True, False, False, False]
