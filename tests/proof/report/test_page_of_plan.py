"""The page and the pictures of a plan."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest

from colonnade.cli import plan_command
from colonnade.proof.report import page_of_plan, plan_page, write_plan_pictures
from colonnade.proof.report.plan_tables import collectives, groups, slowest_kind
from tests.proof.report.plans import groups_of_a_hundred_thousand

slow = pytest.mark.slow  # a plan of a model is made by a command


def data_of(text: str) -> dict:
    (found,) = re.findall(r'id="plan-data">(.*?)</script>', text, flags=re.S)
    return json.loads(found)


@slow
def test_a_plan_is_on_the_page(planned):
    plan, folder = planned
    text = (folder / "p" / "plan.html").read_text()
    assert text == plan_page(plan)
    assert "<h1>Plan: data 2 x pipeline 2 x tensor 2</h1>" in text
    for title in ("Mesh", "Pipeline", "Memory", "Communication by mode", "Ledger", "Groups"):
        assert f">{title}<" in text
    data = data_of(text)
    assert data["world_size"] == 8
    assert len(data["timeline"]["rows"]) == 2
    assert all(
        0 <= start < end <= data["timeline"]["parts"] for row in data["timeline"]["rows"] for *_, start, end in row
    )
    assert not re.findall(r'(?:src|href)="(?!data:)', text)
    bubble = f"{plan['timeline']['bubble']:.1%}"
    assert f"<b>{bubble}</b><span>pipeline bubble" in text
    assert f"pipeline bubble {bubble} (" in text  # above the timeline: the same
    totals = plan["totals"]
    for name in ("mfu", "hfu"):
        assert f"<b>{totals[name]:.1%}</b><span>{name.upper()}" in text
    assert "MFU = model flops (without recomputed products) / (step x ranks x peak)" in text
    assert "HFU = all flops (with recomputed products) / (step x ranks x peak)" in text


@slow
def test_a_terminal_of_80_columns_shows_whole_words(planned, monkeypatch, capsys):
    plan, _ = planned
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    plan_command.show(plan)
    lines = capsys.readouterr().out.splitlines()
    tables = lines[: next(at for at, line in enumerate(lines) if line.startswith("- "))]  # notes follow
    assert max(map(len, tables)) <= 80
    words = {word for line in tables for word in line.split()}
    calls = collectives([slowest_kind(plan)], 24)
    cells = [cell for row in [*calls.rows, *groups(plan).rows] for cell in row]
    assert [word for cell in cells for word in cell.split() if word not in words] == []


def test_columns_of_the_ledger_have_their_heads_on_a_phone():
    plan = groups_of_a_hundred_thousand()
    line = {
        "parameters": "*.weight",
        "placement": "{TENSOR: Shard(0)}",
        "count": 2,
        "elements": 10,
        "stages": [0],
        "mode": "DATA",
        "ranks": 2,
        "divisor": 2.0,
        "done_by": "DataParallelGradientHandler",
    }
    text = page_of_plan._ledger({**plan, "ledger": [line]})
    heads = re.findall(r"<th[^>]*>([^<]*)</th>", text)
    assert heads == ["parameters", "elements on a rank", "stages", "placement", "DATA"]
    assert re.findall(r'<td[^>]* data-head="([^"]*)"', text) == heads


def test_a_hundred_thousand_ranks_are_a_small_page():
    plan = groups_of_a_hundred_thousand()
    row = [
        [kind, 0, micro, micro * 2.0 + at, micro * 2.0 + at + 1] for micro in range(256) for at, kind in enumerate("FB")
    ]
    timeline = {
        "schedule": "1f1b",
        "num_microbatches": 256,
        "rows": [row] * 16,
        "makespan": 512.0,
        "bubble": 0.1,
        "equal_bubble": 0.1,
    }
    text = plan_page({**plan, "timeline": timeline})
    assert len(text.encode()) < 3 * 2**20
    assert data_of(text)["world_size"] == 102_400


@slow
def test_a_search_shows_what_fits_and_why_others_were_cut(planned):
    plan, _ = planned
    numbers = dict(step_seconds=0.25, peak_memory=10**9, bubble=0.1, exposed_seconds=0.01, mfu=0.3, hfu=0.4)
    fitting = [{"layout": {"tensor": 2, "pipeline": 2}, "reason": "", **numbers}]
    cut = [{"layout": {"tensor": 8}, "reason": "needs 99 GB of 75 GB", **dict.fromkeys(numbers)}]
    search = dict(
        world_size=8,
        hardware=plan["hardware"],
        fitting=fitting,
        cut=cut,
        config="parallel = 1",
        verify="colonnade verify x",
        notes=[],
    )
    text = plan_page({**search, "best": plan})
    for told in (
        "tensor 2, pipeline 2",
        "needs 99 GB of 75 GB",
        "parallel = 1",
        "colonnade verify x",
        "250 ms",
        ">Mesh<",
        '<th class="number">MFU</th>',
        "30.0%",
        "40.0%",
    ):
        assert told in text
    assert "no layout fits" in plan_page({**search, "fitting": [], "best": None})


def test_what_would_be_refused_stands_first():
    text = plan_page({**groups_of_a_hundred_thousand(), "problems": ["blocks.0.weight is <owed>"]})
    assert "blocks.0.weight is &lt;owed&gt;" in text
    assert text.index("This would not start") < text.index(">Mesh<")


@slow
def test_pictures_of_a_plan_are_files(planned):
    found = sorted((planned[1] / "svg").iterdir())
    assert [path.stem for path in found] == ["communication", "ledger", "memory", "mesh", "timeline"]
    for path in found:
        ET.fromstring(path.read_text())


def test_the_picture_of_a_large_mesh_shows_its_beginning(tmp_path):
    (path,) = write_plan_pictures(groups_of_a_hundred_thousand(), tmp_path / "pictures")
    ET.fromstring(path.read_text())
    assert "the first 256 of 102,400 ranks" in path.read_text()
    assert path.stat().st_size < 400_000
