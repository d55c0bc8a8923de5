"""The page of a run, from its log."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

import pytest

from colonnade.errors import ConfigError
from colonnade.proof.report import page_of_run, run_page, write_run_page
from colonnade.proof.report.charts import MOST_POINTS, band
from colonnade.proof.report.runs import read_run
from tests.proof.report.logs import FACTS, step, write_log


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


def test_single_spikes_of_a_long_run_are_seen(tmp_path):
    log = write_log(tmp_path, 3)
    layers = {f"grad_norm/layer{layer}": 0.5 for layer in range(65)}
    with log.open("w") as file:
        for number in range(1, 20_001):
            line = step(number, loss=6.0 if number == 7777 else 2.0, **layers)
            line["samples"] = 1 if number == 5555 else 8
            line["grad_norm/layer17"] = None if number % 3 == 0 else 77.7 if number == 9999 - 1 else 0.5
            file.write(json.dumps(line) + "\n")
    run = read_run(log)
    loss = page_of_run._loss_chart([run], several=False)
    assert "training, smallest to largest" in loss
    assert 'serie-0 is-band color-0"' in loss
    assert ">6</text>" in loss  # the axis reaches to the spike
    outline = band(run.column("loss"))
    assert max(value for _, value in outline) == 6.0
    assert len(outline) == 2 * MOST_POINTS
    text = run_page([log])
    assert "samples/s, median" in text
    rows, values = page_of_run._cells(run, [[f"layer{at}"] for at in range(65)])
    assert len(rows) == len(values[17]) == page_of_run.MOST_COLUMNS
    assert max(value for value in values[17] if value is not None) == 77.7
    assert all(value == 0.5 for value in values[16])
    assert text.count("<text") > 65
    assert all(f'data-hint="layer{at}\n' in text for at in range(65))
    assert "in a row" not in text


def test_layers_beyond_what_a_page_holds_share_rows_with_their_largest(tmp_path):
    layers = {f"grad_norm/layer{layer}": 99.0 if layer == 101 else 0.5 for layer in range(170)}
    text = run_page([write_log(tmp_path, 5, [step(6, **layers)])])
    assert "182 layers, 3 in a row" in text
    (told,) = [hint for hint in re.findall(r'data-hint="([^"]*)"', text) if hint.endswith(": 99")]
    assert re.match(r"layer(99|100|101) and 2 more\nstep 6", told)


END = {"kind": "end", "step": 40, "epoch": 0, "time": 1.7e9, "reason": ""}


@pytest.mark.parametrize(
    ("more", "age", "tile"),
    [
        ([{**END, "how": "finished"}], 10_000, '<div class="tile"><b>finished'),
        ([{**END, "how": "failed"}], 0, '<div class="tile bad"><b>failed'),
        ([{**END, "how": "stopped", "reason": "SIGTERM"}], 0, "stopped 20[^<]* \\(SIGTERM\\)"),
        ([], 0, '<div class="tile"><b>no end yet'),
        ([], 10_000, '<div class="tile bad"><b>killed'),
        ([{**END, "how": "finished"}, step(41)], 10_000, '<div class="tile bad"><b>killed'),  # resumed, and killed then
    ],
)
def test_a_run_that_was_killed_looks_so(tmp_path, more, age, tile):
    log = write_log(tmp_path, more=more)
    os.utime(log, (time.time() - age,) * 2)
    text = run_page([log])
    assert re.search(tile, text)
    assert ("it was killed, or its host was lost; last line 20" in text) == (tile.endswith("killed"))
    assert ", inside a line" in text or "killed" not in tile
    assert tile.rpartition(">")[2].partition(" ")[0] in run_page([log, log])


def test_memory_is_in_one_unit(tmp_path):
    """The log has MiB: 100 MiB are 104.9 MB on the chart and among the figures."""
    text = run_page([write_log(tmp_path)])
    assert ">105 MB</b><span>peak memory" in text
    assert '<desc class="value">step 1: 104.9</desc>' in text


@pytest.mark.long
def test_a_run_of_a_million_steps_is_read_in_little_memory(tmp_path):
    log = tmp_path / "log.jsonl"
    with log.open("w") as file:
        for number in range(1, 1_000_001):
            values = f'"loss": {1 / number}, "lr": 0.001, "grad_norm": 0.5, "samples": 8, "seconds": 0.5, "time/forward": 0.2'
            file.write(f'{{"kind": "step", "step": {number}, "epoch": 0, {values}}}\n')
    script = "import sys, resource; from colonnade.proof.report import run_page; print(len(run_page(sys.argv[1:])));"
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
