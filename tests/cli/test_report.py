"""`colonnade report` as a user calls it."""

from __future__ import annotations

import pytest

from colonnade.cli import main
from tests.proof.report.logs import write_log
from tests.proof.report.test_traces import write_trace


def said(capsys, *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, words)])
    return (int(ended.value.code or 0), *capsys.readouterr())


def test_pages_are_written_beside_the_log_or_where_asked(capsys, tmp_path):
    for name in ("one", "two"):
        write_log(tmp_path / "runs" / name, 5)
    assert said(capsys, tmp_path / "runs" / "one") == (0, f"{tmp_path}/runs/one/log.html\n", "")
    assert "<h1>one</h1>" in (tmp_path / "runs" / "one" / "log.html").read_text()
    code, out, _ = said(capsys, tmp_path / "runs" / "one", tmp_path / "runs" / "two")
    assert (code, out) == (0, f"{tmp_path}/runs/one/compared.html\n")
    assert said(capsys, tmp_path / "runs" / "two", "-o", tmp_path / "x" / "page.html")[0] == 0
    assert (tmp_path / "x" / "page.html").exists()


def test_traces_are_joined(capsys, tmp_path):
    write_trace(tmp_path, 0, 0.0)
    assert said(capsys, tmp_path, "--trace") == (0, f"{tmp_path}/trace.json.gz\n", "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "neither the folder of a run nor a log"),
        (["x", "--trace", "--follow"], "Give only one of the two"),
        (["x", "--trace"], "ProfilerHook"),
    ],
)
def test_what_cannot_be_shown_is_said(capsys, tmp_path, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    code, _, error = said(capsys, *words)
    assert code == 2
    assert told in error
