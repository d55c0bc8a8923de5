"""URLs are refused by name wherever a path is taken, and nothing is made of them on disk."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import colonnade
from colonnade.checkpoint import CheckpointManager
from colonnade.checkpoint.export import export_checkpoint, export_full, find_checkpoint, import_checkpoint
from colonnade.checkpoint.storage import verify
from colonnade.cli import main
from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.schedule.actions import read_csv
from colonnade.errors import CheckpointError, ColonnadeError, ConfigError
from colonnade.logging import get_dist_logger
from colonnade.paths import local_path
from colonnade.proof.planner.hardware import load_hardware
from colonnade.proof.report import write_plan_pictures, write_run_page
from colonnade.proof.report.runs import read_run
from colonnade.proof.report.traces import merge_traces
from colonnade.trainer import hooks
from tests.ranks import on_ranks

PACKAGE = Path(__file__).parents[1] / "colonnade"
URLS = (
    "s3://bucket/run",
    "gs://bucket/run",
    "hf://datasets/x",
    "https://host/x",
    "file:///tmp/x",
    "a::s3://b/x",
    "arrow_hdfs://b/x",
    " s3://b/x",
    "'s3://b/x'",
    Path("s3://b"),
)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """The test runs in an empty folder, and leaves it empty."""
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", URLS)
def test_a_url_is_no_path(url):
    with pytest.raises(ConfigError, match=r"the log is ['\"].*['\"], a URL with the scheme '.*\[C120\]$"):
        local_path(url, "the log")


@pytest.mark.parametrize(
    "given", ["run", "/tmp/s3://run", "./a/b", "C:/run", "C:\\run", "a:b/c", "", "run.s3/x", Path("x")]
)
def test_a_path_stays_as_it_is(given):
    assert local_path(given, "the log") == Path(given)


def test_a_file_url_is_told_its_path_and_no_path_at_all_is_named():
    with pytest.raises(ConfigError, match="Give only the path: '/tmp/x'"):
        local_path("file:///tmp/x", "the log")
    with pytest.raises(ConfigError, match=r"\(str or pathlib.Path\), not None"):
        local_path(None, "the log")  # type: ignore[arg-type]


TAKES_A_PATH = {
    "manager": lambda url: CheckpointManager(url, ParallelContext()),
    "manager that reads": lambda url: CheckpointManager(url, ParallelContext(), read_only=True),
    "verify": verify,
    "find": find_checkpoint,
    "import from": lambda url: import_checkpoint(url, "x", "safetensors"),
    "export to": lambda url: export_checkpoint("x", url, "hf"),
    "export of": lambda url: export_full(url, "x"),
    "export file": lambda url: export_full("x", url),
    "save hook": lambda url: hooks.SaveCheckpointHook(folder=url),
    "load hook": lambda url: hooks.LoadCheckpointHook(folder=url),
    "jsonl": hooks.JsonlHook,
    "csv": hooks.CsvHook,
    "profiler": hooks.ProfilerHook,
    "tensorboard": hooks.TensorBoardHook,
    "log": lambda url: get_dist_logger().log_to_file(url),
    "config": lambda url: load_config(f"{url}/config.py"),
    "hardware": lambda url: load_hardware(f"{url}/x.toml"),
    "table": read_csv,
    "run": read_run,
    "page": lambda url: write_run_page([], url),
    "pictures": lambda url: write_plan_pictures({}, url),
    "traces": lambda url: merge_traces(url, "x"),
}


@pytest.mark.parametrize("what", TAKES_A_PATH)
def test_everything_that_takes_a_path_refuses_a_url(what):
    with pytest.raises(ColonnadeError, match=r"a URL with the scheme 's3'.*\[C120\]$"):
        TAKES_A_PATH[what]("s3://bucket/run")


@pytest.mark.parametrize(
    "words",
    [
        "ckpt ls s3://b/run",
        "ckpt export run --out s3://b/x.safetensors",
        "ckpt export run --out x --format hf --config s3://b/x",
        "ckpt import s3://b/x --out run",
        "report s3://b/run",
        "report run s3://b/run",
        "report run --out s3://b/x.html",
        "plan s3://b/config.py",
        "plan config.py --html s3://b/x.html",
        "plan config.py --svg s3://b/x",
        "plan --measure s3://b/x.toml",
        "explain s3://b/config.py",
        "config s3://b/config.py",
        "new parallelism mine --folder s3://b/x",
        "demo --output s3://b/x",
        "demo --copy s3://b/x",
        "run s3://b/train.py",
        "run --log-dir s3://b/x train.py",
        "verify s3://b/train.py",
    ],
)
def test_every_command_refuses_a_url(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert "a URL with the scheme 's3'" in capsys.readouterr().err


@on_ranks(2)
def test_an_engine_writes_to_no_url():
    """What two ranks are told that write to a URL with everything an engine writes."""
    gpc = colonnade.launch(dict(zero=dict(stage=1)), verbose=False)
    model = nn.Linear(2, 2)
    engine, *_ = colonnade.initialize(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss())
    from colonnade import from_pretrained

    told = []
    for write in (
        lambda: CheckpointManager("s3://bucket/run", gpc),
        lambda: engine.full_state_dict("s3://bucket/w.safetensors"),
        lambda: engine.save_pretrained("s3://bucket/w"),
        lambda: from_pretrained("s3://bucket/w"),
    ):
        with pytest.raises(CheckpointError) as found:
            write()
        told.append(str(found.value))
    engine.close()
    assert all("a URL with the scheme 's3'" in text and text.endswith("[C120]") for text in told)


def test_no_function_makes_a_path_of_what_it_is_given_by_itself():
    """`Path(parameter)`, where the parameter is text or a path by its annotation, goes by the check."""
    wrong = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef) or file.name == "paths.py":
                continue
            given = [*function.args.args, *function.args.kwonlyargs]
            paths = {one.arg for one in given if one.annotation and "str | Path" in ast.unparse(one.annotation)}
            wrong += [
                f"{file.relative_to(PACKAGE)}:{call.lineno}"
                for call in ast.walk(function)
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "Path"
                for argument in call.args
                if isinstance(argument, ast.Name) and argument.id in paths
            ]
    assert wrong == []
