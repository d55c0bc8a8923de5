"""The page of a run, from its log."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from base64 import b64encode
from hashlib import sha256
from typing import Any

import pytest

from colonnade.comm.waits import PHASES
from colonnade.errors import ConfigError
from colonnade.proof.report import page_of_run, run_page, write_run_page
from colonnade.proof.report.charts import MOST_POINTS
from colonnade.proof.report.runs import read_run
from tests.proof.report.logs import FACTS, step, write_log


def charts(text: str) -> dict[str, Any]:
    """The JSON of all charts, by the label of their axis."""
    found = re.findall(r'<script type="application/json">(.*?)</script>', text)
    return {one["y"]: one for one in map(json.loads, found) if "series" in one}


def heat(text: str) -> dict[str, Any]:
    """The JSON of the norms of the layers."""
    (found,) = (one for one in map(json.loads, re.findall(r'"application/json">(.*?)</script>', text)) if "rows" in one)
    return found


def test_what_was_clipped_skipped_resumed_and_warned_of_is_on_the_page(tmp_path):
    more = [
        {"kind": "run", "step": 40, "epoch": 0, **FACTS, "made_again": 7},
        step(41, grad_norm=None, skipped=1.0),
        {"kind": "event", "step": 41, "epoch": 0, "level": "warning", "text": "step dropped <here>", "time": 1.7e9},
    ]
    text = write_run_page([write_log(tmp_path / "mine", more=more)], tmp_path / "deep" / "page.html").read_text()
    assert "<h1>mine</h1>" in text
    assert "data 2 x pipeline 2 · 4 ranks · cpu" in text
    assert "clip at 1" in text
    assert "clipped (4 of 41)" in text
    assert "skipped (1)" in text
    assert "resumed on data 2 x pipeline 2, 7 steps repeated" in text
    assert "step dropped &lt;here&gt;" in text
    (validation,) = (one for one in charts(text)["loss"]["series"] if one["name"] == "validation")
    assert (validation["kind"], validation["y"]) == ("curve", [1.25])
    assert "DataParallelGradientHandler" in text
    assert "<b>mine</b>" not in text
    assert "16 samples" not in text
    assert ">16</b><span>samples/s, median" in text


def test_the_page_needs_no_network(tmp_path):
    text = run_page([write_log(tmp_path)])
    assert not re.findall(r'(?:src|href)="(?!data:)', text)
    assert not re.findall(r"https?://(?!www\.w3\.org/|github\.com/leeoniya/uPlot \()", text)
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    (script,) = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    assert f"script-src 'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" in policy
    assert policy.startswith("default-src 'none'")
    assert not re.search(r"<[^>]* on\w+=", text)  # which the policy would not run


def test_where_the_time_goes_and_the_layers_are_drawn(tmp_path):
    text = run_page([write_log(tmp_path)])
    for name in ("forward", "communication", "optimizer"):
        assert f"</i>{name}</button>" in text
    layers = heat(text)
    assert len(layers["steps"]) == len(layers["rows"][11]) == 40  # a cell for each step
    assert layers["names"] == [f"blocks.{layer}" for layer in range(12)]
    time = charts(text)["ms in a step"]
    assert time["stacked"]
    colors = [one["color"] for one in time["series"]]
    assert len(set(colors)) == len(PHASES)
    assert {one["name"]: one["y"][0] for one in time["series"]} == {
        phase: 250 if phase == "forward" else 10 for phase in PHASES
    }


def test_a_long_run_is_a_small_page(tmp_path):
    assert len(run_page([write_log(tmp_path, steps=20_000)])) < 600_000


def test_single_spikes_of_a_long_run_are_seen(tmp_path):
    log = write_log(tmp_path, 3)
    layers = {f"grad_norm/layer{layer}": 0.5 for layer in range(65)}
    with log.open("w") as file:
        for number in range(1, 20_001):
            line = step(number, loss=6.0 if number == 7777 else 2.0, **layers)
            line["samples"] = 1 if number == 5555 else 8
            line["grad_norm/layer17"] = None if number % 3 == 0 else 77.7 if number == 9999 - 1 else 0.5
            file.write(json.dumps(line) + "\n")
    text = run_page([log])
    (loss,) = charts(text)["loss"]["series"]
    assert len(loss["y"]) == MOST_POINTS
    assert (max(loss["high"]), min(loss["low"])) == (6, 2)
    assert max(loss["y"]) == pytest.approx((6 + 9 * 2) / 10)
    assert f"20,000 steps as {MOST_POINTS:,} points: the line is the mean, the area spans the minimum" in text
    assert min(charts(text)["samples/s"]["series"][0]["low"]) == 2
    found = heat(text)
    rows = dict(zip(found["names"], found["rows"], strict=True))
    largest = [max(value for value in rows[f"layer{layer}"] if value is not None) for layer in range(65)]
    assert largest == [77.7 if layer == 17 else 0.5 for layer in range(65)]
    assert len(rows["layer17"]) == page_of_run.MOST_COLUMNS
    assert "in a row" not in text


def test_layers_beyond_what_a_page_holds_share_rows_with_their_largest(tmp_path):
    layers = {f"grad_norm/layer{layer}": 99.0 if layer == 101 else 0.5 for layer in range(340)}
    text = run_page([write_log(tmp_path, 5, [step(6, **layers)])])
    assert "352 layers, 3 in a row" in text
    found = heat(text)
    (row,) = (at for at, values in enumerate(found["rows"]) if 99.0 in values)
    assert re.match(r"layer(99|100|101) and 2 more", found["names"][row])
    assert found["steps"][found["rows"][row].index(99.0)] == 6


TOKENS = {"elements": 1_000_000, "experts": False, "dtype": "bfloat16", "device": "NVIDIA H100 80GB HBM3", "devices": 2}


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        (TOKENS, ("0.6%", "MFU: 6 flops per parameter and token")),  # 6e6 flops x 2e6 tokens/s of 2 x 989e12
        ({**TOKENS, "tflop_per_step": 98.9}, ("10.0%", "MFU: by tflop_per_step")),  # 197.8e12 flop/s
        ({**TOKENS, "device": "cpu"}, ("12 T", "flop/s: 6 flops per parameter and token")),
        ({**TOKENS, "device": "NVIDIA H100 PCIe"}, ("12 T", "flop/s: 6 flops per parameter and token")),
        ({**TOKENS, "dtype": "float32"}, ("12 T", "flop/s: 6 flops per parameter and token")),
        ({**TOKENS, "experts": True}, None),  # not all parameters see every token
        ({}, None),  # a log of an older version
    ],
)
def test_tokens_and_mfu_are_shown_where_the_log_has_them(tmp_path, facts, told):
    log = tmp_path / "log.jsonl"
    lines = [{"kind": "run", "step": 0, "epoch": 0, **FACTS, **facts}]
    lines += [step(number, tokens=1_000_000) for number in range(1, 11)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = run_page([log])
    assert "<b>2 M</b><span>tokens/s, median" in text
    assert 'data-axis="tokens"' in text
    assert ("MFU" in re.sub("<script.*?</script>", "", text, flags=re.S)) == (told is not None and "MFU" in told[1])
    if told is not None:
        assert f"<b>{told[0]}</b><span>{told[1]}" in text
    second = charts(text)["tokens/s"].get("second")
    assert (second is not None) == (told is not None and "MFU" in told[1])
    if second is not None:
        assert second[1] * 2e6 == pytest.approx(float(told[0].rstrip("%")), abs=0.05)


def test_the_x_axis_has_the_tokens_and_the_time_that_were_used_up(tmp_path):
    more = [step(number, tokens=100, seconds=2.0) for number in range(11, 1001)]
    run = read_run(write_log(tmp_path, 10, more))
    axes = run.axes()
    assert axes["step"][0] == 0
    assert axes["step"][-1] == 1000
    assert len(axes["step"]) < 500
    assert axes["tokens"][-1] == 99_000
    assert axes["time"][-1] == 10 * 0.5 + 990 * 2
    assert all(len(values) == len(axes["step"]) for values in axes.values())


def test_the_slowest_and_the_fastest_rank_are_shown(tmp_path):
    busy = {"busy/slowest": 0.4, "busy/fastest": 0.3, "busy/slowest_rank": 2.0}
    text = run_page([write_log(tmp_path, 1, [step(number, **busy) for number in range(2, 5)])])
    assert "<b>rank 2</b><span>slowest, in 75% of steps" in text
    chart = charts(text)["ms"]
    assert [(one["name"], one["y"]) for one in chart["series"]] == [
        ("slowest rank", [400] * 3),
        ("fastest rank", [300] * 3),
    ]


def test_metrics_and_own_numbers_have_charts(tmp_path):
    more = [{"kind": "train", "step": 40, "epoch": 0, "Loss": 1.0, "Accuracy": 0.5}]
    more += [{"kind": "test", "step": 40, "epoch": 0, "Accuracy": 0.25}, step(41, reward=7.0)]
    found = charts(run_page([write_log(tmp_path, more=more)]))
    assert [(one["name"], one["y"]) for one in found["Accuracy"]["series"]] == [
        ("training", [0.5]),
        ("validation", [0.25]),
    ]
    assert found["reward"]["series"][0]["y"] == [7]
    assert "busy/slowest" not in found


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
    assert ("killed, or its host was lost: the log has no end; last line 20" in text) == (tile.endswith("killed"))
    assert ('<p class="alert"' in text) == ("bad" in tile)
    assert ", inside a line" in text or "killed" not in tile
    word = tile.rpartition(">")[2].partition(" ")[0]
    assert f'<td data-head="state">{word}' in run_page([log, log])


def test_memory_is_in_one_unit(tmp_path):
    """The log has MiB: 100 MiB are 104.9 MB on the chart and among the figures."""
    text = run_page([write_log(tmp_path)])
    assert ">105 MB</b><span>peak memory" in text
    memory = charts(text)["MB"]
    assert memory["series"][0]["y"] == [pytest.approx(104.858, abs=0.001)]
    assert memory["zero"]  # ten MB more do not look like a leak


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
    assert page < 400_000
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
    assert "the loss was not finite" in text
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


def test_several_runs_are_compared(tmp_path):
    """Clip levels, skipped steps, layers and memory of both, and the keys of the configs that differ."""
    facts = {**FACTS, "clip": 0.5, "config": {**FACTS["config"], "zero": {"stage": 1}}}
    more = [{"kind": "run", "step": 30, "epoch": 0, **facts}, *(step(at, loss=None, skipped=1.0) for at in (31, 32))]
    logs = [write_log(tmp_path / "one", 20), write_log(tmp_path / "two", 30, more)]
    text = run_page([log.parent for log in logs])
    assert "<h1>Runs: one, two</h1>" in text
    assert text.count("</i>one</button>") >= 4
    cells = dict(re.findall(r'<td[^>]* data-head="([^"]*)">([^<]*)', text))  # of the last row
    assert cells["run"] == "two"
    assert (cells["state"], cells["layout"], cells["steps"]) == ("no end yet", "data 2 x pipeline 2", "32")
    assert (cells["clipped"], cells["skipped"]) == ("3 at 0.5", "2")
    names = [one["name"] for one in charts(text)["norm"]["series"]]
    assert {"one, clip at 1", "two, clip at 0.5", "one, clipped (2 of 20)", "two, skipped (2)"} <= set(names)
    assert "Gradient norm of each layer, one" in text
    assert "Gradient norm of each layer, two" in text
    assert "one: parameters 4.94 kB, gradients 4.94 kB, state 9.87 kB; two: parameters 4.94 kB" in text
    assert '<td class="name">zero.stage</td><td>-</td><td>1</td>' in text
    assert "clip_grad_norm</td>" not in text  # equal
    # Events are closed at first, and equal ones are one row.
    assert '<details class="card wide"><summary>Events: 4</summary>' in text
    assert "the gradient was not used, the loss was not finite (2 times)" in text
    same = [write_log(tmp_path / name / "log", 5) for name in ("a", "b")]
    assert "a/log" not in run_page([same[0]])
    assert '<h2>Differences of the configs</h2><p class="empty">none' in run_page(same)


def test_what_is_no_run_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no log"):
        run_page([tmp_path / "empty"])
    with pytest.raises(ConfigError, match="neither the folder of a run nor a log"):
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
    assert "no values in the log" in text
