"""What a script sees when it is run as a rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import colonnade

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_a_module_runs_as_main_with_its_arguments(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "work.py").write_text(
        "import sys\nif __name__ == '__main__':\n    print(__spec__.name, sys.argv[1:], sys.path[0])\n"
    )
    done = colonnade("run", "-m", "package.work", "a", "--b", cwd=tmp_path)
    assert done.stdout == f"package.work ['a', '--b'] {tmp_path}\n", done.stderr


def test_a_script_is_main_and_imports_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n")
    (tmp_path / "script.py").write_text(
        "import pickle, sys\nimport neighbour\n"
        "class Thing: ...\n"
        "print(__name__, neighbour.VALUE, type(pickle.loads(pickle.dumps(Thing()))) is Thing, sys.argv)\n"
    )
    done = colonnade("run", tmp_path / "script.py", "--nproc", "3")
    assert done.stdout == f"__main__ 7 True ['{tmp_path / 'script.py'}', '--nproc', '3']\n", done.stderr


@pytest.mark.long
def test_a_script_that_cannot_be_compiled_is_shown_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("def broken(:\n")
    done = colonnade("run", "-n", 2, tmp_path / "script.py")
    assert done.returncode == 1
    assert done.stderr.count("SyntaxError: ") <= 2
    assert done.stderr.splitlines()[-1].startswith("SyntaxError: ")


def test_as_colossalai_makes_the_ancestors_name_importable(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import colossalai\nfrom colossalai.context.parallel_mode import ParallelMode\nprint(ParallelMode.__module__)\n"
    )
    done = colonnade("run", "--as-colossalai", tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
    assert "colonnade" in done.stdout
    plain = colonnade("run", tmp_path / "script.py")
    assert plain.returncode == 1
    assert plain.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'colossalai'"


@pytest.mark.long
def test_groups_a_script_left_are_destroyed_before_the_interpreter_ends(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import atexit, sys\nimport torch, torch.distributed as dist\n"
        "atexit.register(lambda: print('left' if dist.is_initialized() else 'destroyed'))\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "sys.exit(0)\n"
    )
    done = colonnade("run", "--no-prefix", "-n", 2, tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "destroyed\ndestroyed\n"
