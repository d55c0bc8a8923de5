"""Weights of models of transformers: into every layout and out of it again, to the bit; and folders that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import colonnade
from colonnade.context.parallel_context import ParallelContext
from colonnade.hf.weights import from_pretrained
from colonnade.testing import run_world
from tests.hf.zoo import BY_NAME

TENSOR = {"tensor": {"size": 2, "mode": "1d"}}
PIPELINE = {"pipeline": 2}
STAGED = {"num_microbatches": 2}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama/tied", TENSOR, {}),
    ("phi3 (phi4)/float32", TENSOR, {"zero": 3}),
    ("mixtral", TENSOR, {}),
    ("mixtral/float32", {"expert": 2}, {"zero": 3}),
    ("gpt2/tied/float32", {}, {"zero": 3}),
    ("deepseek_v3", {}, {"zero": 2}),
]
"""(architecture, parallel, the rest of the config), on four ranks."""


def build(name: str) -> Any:
    """The model in one process, with weights that are nobody's start."""
    name, *words = name.split("/")
    model: Any = BY_NAME[name].build(True if "tied" in words else None)
    model = model.to(torch.float32 if "float32" in words else torch.bfloat16)
    with torch.no_grad():
        for at, value in enumerate(model.state_dict().values()):
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(at)))
    return model


def state_of(model: Any) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def same(found: dict[str, Tensor], truth: dict[str, Tensor]) -> list[str]:
    """The names that are not the same to the bit."""
    return [
        key
        for key in truth.keys() | found.keys()
        if key not in found
        or key not in truth
        or found[key].dtype != truth[key].dtype
        or not found[key].equal(truth[key])
    ]


def round_trip(folder: Path, cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[tuple[int, list[str]]]:
    """On each rank: every case's weights, whole, are those of the folder; they are saved again."""
    wrong = []
    for number, (name, parallel, rest) in enumerate(cases):
        with colonnade.launch({"parallel": parallel, **rest}, context=ParallelContext(), verbose=False) as gpc:
            model = from_pretrained(folder / name, context=gpc)
            engine = colonnade.initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
            wrong.append((number, same(engine.full_state_dict(), torch.load(folder / name / "truth.pt"))))
            engine.save_pretrained(folder / f"out {number}", max_shard_size="20kB")
            engine.close()
    return wrong


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> Path:
    """A folder for each architecture, as transformers writes it."""
    folder: Path = tmp_path_factory.mktemp("folders")
    for name in dict.fromkeys(name for name, *_ in CASES):
        model = build(name)
        model.save_pretrained(folder / name)
        torch.save(state_of(type(model).from_pretrained(folder / name)), folder / name / "truth.pt")
    return folder


@pytest.mark.slow
def test_weights_survive_every_layout_to_the_bit(folders: Path) -> None:
    import transformers

    for found in run_world(4, round_trip, folders, CASES, timeout=240).values:
        assert [(CASES[number], wrong) for number, wrong in found if wrong] == []
    for number, (name, *_) in enumerate(CASES):
        out = folders / f"out {number}"
        assert len(list(out.glob("*.safetensors"))) > 2
        there = json.loads((out / "config.json").read_text())
        assert there == json.loads((folders / name / "config.json").read_text())
        model = getattr(transformers, there["architectures"][0]).from_pretrained(out)
        assert same(state_of(model), torch.load(folders / name / "truth.pt")) == [], CASES[number]
        if "tied" in name:
            assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
