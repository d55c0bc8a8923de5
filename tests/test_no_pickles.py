"""Nothing that a rank receives is unpickled, since reading a pickle can run code: the package is searched for what would."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import colonnade

PACKAGE = Path(colonnade.__file__).parent

PICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
OBJECTS = {
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list", "object_to_tensor", "_object_to_tensor", "_tensor_to_object"),
}
QUEUES = {"Queue", "SimpleQueue", "JoinableQueue", "Pipe", "Manager"}

_OWN_FOLDER = "files of `colonnade verify` in a temporary folder that only this user can read, written by the processes that the command started"
EXCEPTIONS = {
    "testing/world.py": "calls that run_world hands to its own processes and values that they return, in a folder that only this user can read",
    "testing/rank.py": "the same call read, and the value that is returned to the process that started this one, in that folder",
    "proof/scripts.py": _OWN_FOLDER,
    "proof/script_job.py": _OWN_FOLDER,
}


def found_in(source: str) -> list[str]:
    """What in a module pickles, or reads pickles."""
    found = []
    multiprocessing: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        names = [each.name for each in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        found += [name for name in [module, *names] if name.split(".")[0] in PICKLING]
        found += [name for name in names if name in OBJECTS]
        if "multiprocessing" in module:
            multiprocessing |= {*names} & QUEUES
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        owner = ast.unparse(node.value) if isinstance(node, ast.Attribute) else ""
        if name in OBJECTS or (
            name in QUEUES and ("multiprocessing" in owner or owner == "mp" or name in multiprocessing)
        ):
            found.append(name)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            told = {each.arg: ast.unparse(each.value) for each in node.keywords}
            if called in ("torch.load", "load_pickle") and told.get("weights_only") != "True":
                found.append("torch.load without weights_only=True")
            if called == "torch.save":
                found.append("torch.save")
            if told.get("allow_pickle") == "True":
                found.append("allow_pickle=True")
    return sorted(set(found))


def test_no_module_pickles_but_those_that_are_named_with_a_reason():
    modules = {str(file.relative_to(PACKAGE)): found_in(file.read_text()) for file in PACKAGE.rglob("*.py")}
    pickling = {name: found for name, found in modules.items() if found}
    assert {name: found for name, found in pickling.items() if name not in EXCEPTIONS} == {}
    assert {*EXCEPTIONS} <= {*pickling}, "an exception that is no longer needed"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "from torch.distributed import broadcast_object_list",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "import multiprocessing as mp\nmp.Queue()",
        "from multiprocessing import Pipe\nPipe()",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
    ],
)
def test_the_search_finds_what_pickles(source):
    assert found_in(source)


@pytest.mark.parametrize(
    "source", ["import json", "import queue\nqueue.SimpleQueue()", "import torch\ntorch.load('x', weights_only=True)"]
)
def test_the_search_leaves_the_rest_alone(source):
    assert found_in(source) == []
