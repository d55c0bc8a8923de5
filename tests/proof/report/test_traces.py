"""Traces of several ranks as one, on one clock."""

from __future__ import annotations

import gzip
import json

import pytest

from colonnade.errors import ConfigError
from colonnade.proof.report import merge_traces


def write_trace(folder, rank: int, clock: float) -> None:
    """A rank that does `work` 100 µs after all have met; its clock is ahead by `clock` µs, and was held up once."""
    met = [1e12 + at * 10 + clock + (5e5 if at == rank else 0) for at in range(5)]
    begun = 1e12 + clock
    events = [
        {"ph": "M", "name": "process_name", "pid": 77, "args": {"name": "python"}},
        {"ph": "X", "name": "work", "pid": 77, "tid": 1, "ts": 100.0, "dur": 50.0},
        {"ph": "s", "name": "arrow", "pid": 77, "tid": 1, "ts": 100.0, "id": 3},
    ]
    trace = {
        "baseTimeNanoseconds": begun * 1000,
        "traceEvents": events,
        "colonnade": {"rank": rank, "met_us": met, "place": f"data {rank}"},
    }
    (folder / f"trace-rank-{rank:05d}.json").write_text(json.dumps(trace))


def test_clocks_that_differ_are_put_right(tmp_path):
    write_trace(tmp_path, 0, 0.0)
    write_trace(tmp_path, 1, 5e6)  # five seconds ahead
    merged = json.loads(gzip.decompress(merge_traces(tmp_path, tmp_path / "all.json.gz").read_bytes()))
    work = [event for event in merged["traceEvents"] if event["name"] == "work"]
    assert [event["ts"] for event in work] == pytest.approx([0.0, 0.0], abs=1.0)
    assert work[0]["pid"] != work[1]["pid"]
    names = {event["pid"]: event["args"]["name"] for event in merged["traceEvents"] if event["name"] == "process_name"}
    assert names[work[1]["pid"]] == "rank 1 (data 1): 77"
    assert len({event["id"] for event in merged["traceEvents"] if event["name"] == "arrow"}) == 2


@pytest.mark.parametrize("text", ['{"traceEvents": [', "[]", "{}"])
def test_a_trace_that_is_not_whole_is_named(tmp_path, text):
    write_trace(tmp_path, 0, 0.0)
    (tmp_path / "trace-rank-00001.json").write_text(text)
    with pytest.raises(ConfigError, match=r"trace-rank-00001\.json is incomplete"):
        merge_traces(tmp_path, tmp_path / "all.json")


def test_a_folder_without_traces_is_said(tmp_path):
    with pytest.raises(ConfigError, match="ProfilerHook"):
        merge_traces(tmp_path, tmp_path / "all.json")
