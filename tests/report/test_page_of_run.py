"""The page of a run, from its log."""

from __future__ import annotations

import json
import re
import subprocess
import sys

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


@pytest.mark.long
def test_a_run_of_a_million_steps_is_read_in_little_memory(tmp_path):
    log = tmp_path / "log.jsonl"
    with log.open("w") as file:
        for number in range(1, 1_000_001):
            values = f'"loss": {1 / number}, "lr": 0.001, "grad_norm": 0.5, "samples": 8, "seconds": 0.5, "time/forward": 0.2'
            file.write(f'{{"kind": "step", "step": {number}, "epoch": 0, {values}}}\n')
    script = "import sys, resource; from colonnade.report import run_page; print(len(run_page(sys.argv[1:])));"
    script += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    done = subprocess.run([sys.executable, "-c", script, str(log)], capture_output=True, text=True, check=True)
    page, kilobytes = map(int, done.stdout.split())
    assert page < 500_000
    assert kilobytes < 1_000_000


DAMAGED = [
    '{"kind": "step", "step": 2, "epoch": 0, "loss": NaN, "grad_norm": Infinity, "samples": 8, "seconds": 0}',
    '{"kind": "step", "step": "three"}',
    '{"kind": "step", "step": 4, "loss": "high"}',
    '{"kind": "event", "step": 4}',
    '{"kind": "run", "step": 4}',
    '{"kind": ["step"], "step": 5}',
    "[1, 2]",
    "\xff\x00 no text",
]


def test_damaged_lines_are_left_out_and_said(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(
        "\n".join([*DAMAGED, json.dumps(step(5))]).encode("latin-1") + b'\n{"kind": "st'
    )
    text = run_page([tmp_path])
    assert "6 of its lines could not be read" in text
    assert "it was not finite" in text
    assert ">5</b><span>steps" in text
    assert not re.search(r"\bnan\b|\binf\b", text)


def test_a_loss_that_is_not_finite_at_the_end_is_said_first(tmp_path):
    text = run_page([write_log(tmp_path, 5, [step(6, loss=None)])])
    assert '<div class="tile bad"><b>not finite</b><span>loss of the last step' in text


def test_steps_that_were_made_again_count_once(tmp_path):
    text = run_page([write_log(tmp_path, 20, [step(number, loss=7.5) for number in range(11, 16)])])
    assert "clipped (2 of 15)" in text  # steps 3 and 13
    assert ">7.5</b><span>loss of the last step" in text


def test_names_are_text_and_no_markup(tmp_path):
    bad = '<img src=x onerror="alert(1)">'
    line = step(41, **{f"grad_norm/{bad}": 1.0})
    event = {"kind": "event", "step": 41, "epoch": 0, "level": bad, "text": bad, "time": 1.7e9}
    facts = {**FACTS, "config": {bad: bad}, "layout": {bad: 2}, "device": bad}
    text = run_page(
        [write_log(tmp_path / "<img src=x>", 40, [{"kind": "run", "step": 40, "epoch": 0, **facts}, line, event])]
    )
    assert "<img" not in text


def test_runs_of_one_name_are_told_apart(tmp_path):
    logs = [write_log(tmp_path / place / "mine", 3) for place in ("left", "right")]
    assert "<h1>Runs: left/mine, right/mine</h1>" in run_page(logs)


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
