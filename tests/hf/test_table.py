"""The table of docs/evidence/models.md: what it says is true, and cells do not get worse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import colonnade
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import PlacementError
from colonnade.testing import in_double, run_world
from tests.hf.runs import LAYOUTS, TENSOR, Layout, run_all, truth_file
from tests.hf.table import BEGIN, DOCUMENT, END, QUIET, documented, make, write, written
from tests.hf.zoo import ARCHITECTURES, BY_NAME, MAX_NORM, STEPS, batch_of, reference

pytest.importorskip("transformers", reason="needs transformers")

CELLS = {
    "tensor 2": ["gpt2", "deepseek_v2"],
    "pipeline 2": ["t5"],
    "tensor 2 x pipeline 2": ["qwen3_moe"],
    "expert 2": ["gpt_oss"],
    "sequence 2": ["qwen3"],
    "ZeRO 3": ["falcon"],
    "tied": ["gpt_oss"],
    "weights": ["qwen3_moe"],
}
"""Of every layout one or two that differ: packed weights, experts, an encoder and a decoder. The long test has all."""

SHARES = 6
"""A layout with all architectures takes minutes: the long test of it is cut, so that a tenth of `make long` stays short."""


# -- the page ---------------------------------------------------------------------------------------------


def test_the_page_has_a_row_for_every_architecture_and_no_cell_is_wrong() -> None:
    cells = documented(DOCUMENT.read_text(encoding="utf-8"))
    expected = {(each.name, layout.name) for each in ARCHITECTURES for layout in LAYOUTS if layout.fits(each)}
    assert set(cells) == expected
    assert {cell.partition(":")[0] for cell in cells.values()} <= {"ok", "refused"}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}{END}after\n")
    cells = {("llama", "tensor 2"): "ok", ("t5", "sequence 2"): "refused: it has | two", ("vit", "ZeRO 3"): "ok"}
    write(page, cells)
    write(page, {("vit", "ZeRO 3"): "refused: it has | two"})
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert documented(text) == {**cells, ("vit", "ZeRO 3"): "refused: it has | two"}
    assert written(documented(text)) in text


# -- ranks ------------------------------------------------------------------------------------------------


def on_ranks(folder: str) -> None:
    for layout in LAYOUTS:
        run_all(layout, CELLS[layout.name], folder)
    upstream_plans_are_refused()


def upstream_plans_are_refused() -> None:
    """Where upstream's plan leaves out a norm of each head, the first pass says so before a step is made."""
    with colonnade.launch({"parallel": TENSOR}, context=ParallelContext(), verbose=False) as gpc:
        said = {"phi, qk_layernorm": "q_layernorm", "cohere, use_qk_norm": "size of tensor", "glm4_moe": "k_norm"}
        for name, message in said.items():
            model: Any = BY_NAME[name].build()
            model = colonnade.parallelize(model, dict(model.tp_plan), context=gpc)
            engine = colonnade.initialize(model, torch.optim.AdamW(model.parameters()), context=gpc)[0]
            with pytest.raises((PlacementError, RuntimeError), match=message), in_double():
                engine(**batch_of("causal", 0))
            engine.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_architectures_equal_one_process_and_upstream_does_not(tmp_path: Path) -> None:
    """One world for all layouts: what they leave of its ranks is data parallel."""
    for layout in LAYOUTS:
        for name in CELLS[layout.name]:
            torch.save(reference(BY_NAME[name], layout.tied), truth_file(str(tmp_path), name, layout.tied))
    run_world(4, on_ranks, str(tmp_path), timeout=280, env=QUIET)
    for layout in LAYOUTS:
        lines = Path(tmp_path, f"{layout.name}.jsonl").read_text().splitlines()
        assert lines == [f'["{name}", "ok"]' for name in CELLS[layout.name]]


TOGETHER = [Layout(f"all with ZeRO {stage}", 8, {"pipeline": 2, **TENSOR}, {"zero": stage}) for stage in (1, 3)]


def train_together(folder: str) -> None:
    for layout in TOGETHER:
        run_all(layout, ["llama"], folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tensor_pipeline_and_data_parallelism_with_zero_equal_one_process(tmp_path: Path) -> None:
    """The layout of the README, for which the page has no column."""
    torch.save(reference(BY_NAME["llama"]), truth_file(str(tmp_path), "llama", None))
    run_world(8, train_together, str(tmp_path), timeout=280, env=QUIET)
    for layout in TOGETHER:
        assert Path(tmp_path, f"{layout.name}.jsonl").read_text() == '["llama", "ok"]\n'


@pytest.mark.slow
def test_the_truth_is_the_loss_of_the_model() -> None:
    for architecture in ARCHITECTURES:
        truth, model = reference(architecture), architecture.build()
        with in_double():
            loss = model(**batch_of(architecture.kind, 0)).loss.item()
        assert abs(loss - truth["losses"][0]) <= 1e-14 * abs(loss), architecture.name
        assert len(truth["norms"]) == STEPS
        assert min(truth["norms"]) > MAX_NORM, f"{architecture.name} is not clipped"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_no_cell_is_worse_than_the_page_says(layout: Any, share: int) -> None:
    """With data parallelism on top, where the page has none."""
    data = 1 if layout.runs == "round_trip" or layout.settings else 2
    said = documented(DOCUMENT.read_text(encoding="utf-8"))
    found = make(ARCHITECTURES[share::SHARES], [layout], data)
    assert {place: cell for place, cell in found.items() if cell != "ok" and said[place] == "ok"} == {}
    assert {place: cell for place, cell in found.items() if cell.startswith(("wrong", "failed"))} == {}
