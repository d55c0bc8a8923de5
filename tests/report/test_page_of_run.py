"""The page of a run, from its log."""

from __future__ import annotations

import re

import pytest

from colonnade.errors import ConfigError
from colonnade.report import run_page, write_run_page
from tests.report.logs import FACTS, step, write_log


def test_what_was_clipped_skipped_resumed_and_warned_of_is_on_the_page(tmp_path):
    more = [
        {"kind": "run", "step": 40, "epoch": 0, **FACTS, "made_again": 7},
        step(41, grad_norm=None, skipped=1.0),
        {"kind": "event", "step": 41, "epoch": 0, "level": "warning", "text": "step dropped <here>", "time": 1.7e9},
    ]
    text = write_run_page([write_log(tmp_path / "mine", more=more)], tmp_path / "deep" / "page.html").read_text()
    assert "<h1>mine</h1>" in text
    assert "data 2 x pipeline 2 · 4 ranks · cpu" in text
    assert "clip_grad_norm = 1" in text
    assert "clipped (4 of 41)" in text
    assert "skipped (1)" in text
    assert "resumed on data 2 x pipeline 2, 7 steps made again" in text
    assert "step dropped &lt;here&gt;" in text
    assert "test data" in text
    assert "DataParallelGradientHandler" in text
    assert "<b>mine</b>" not in text
    assert "16 samples" not in text
    assert ">16</b><span>samples/s, median" in text


def test_the_page_needs_no_network(tmp_path):
    text = run_page([write_log(tmp_path)])
    assert not re.findall(r'(?:src|href)="(?!data:)', text)
    assert not re.findall(r"https?://(?!www\.w3\.org/)", text)


def test_where_the_time_goes_and_the_layers_are_drawn(tmp_path):
    text = run_page([write_log(tmp_path)])
    for name in ("forward", "communication", "optimizer"):
        assert f"</i>{name}</button>" in text
    assert text.count('data-hint="blocks.11\n') == 40  # a cell for each step
    assert text.index("blocks.2<") < text.index("blocks.10<")


def test_a_long_run_is_a_small_page(tmp_path):
    assert len(run_page([write_log(tmp_path, steps=20_000)])) < 1_000_000


def test_several_runs_stand_beside_each_other(tmp_path):
    logs = [write_log(tmp_path / name, steps) for name, steps in (("one", 20), ("two", 30))]
    text = run_page([log.parent for log in logs])
    assert "<h1>Runs: one, two</h1>" in text
    assert text.count("</i>one</button>") >= 4
    assert re.search(r"<td>two</td><td>data 2 x pipeline 2</td><td class=\"number\">30</td>", text)
    same = [write_log(tmp_path / name / "log", 5) for name in ("a", "b")]
    assert "a/log" not in run_page([same[0]])


def test_what_is_no_run_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no log"):
        run_page([tmp_path / "empty"])
    with pytest.raises(ConfigError, match="neither a folder of a run nor a log"):
        run_page([tmp_path / "nowhere"])
    (tmp_path / "a.jsonl").write_text('{"kind": "test", "step": 4}\n')
    with pytest.raises(ConfigError, match="no finished step"):
        run_page([tmp_path])
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"several logs \(a.jsonl, b.jsonl\)"):
        run_page([tmp_path])


def test_a_log_of_steps_alone_has_a_page(tmp_path):
    (tmp_path / "log.jsonl").write_text(
        '{"kind": "step", "step": 1, "epoch": 0, "loss": 1.0, "samples": 8, "seconds": 2.0}\n'
    )
    text = run_page([tmp_path])
    assert "this log has no times" in text
    assert "nothing was measured" in text
