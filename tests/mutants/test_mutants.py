"""The tool that changes the package at random: what it changes, which tests it picks, and that its list is true."""

from __future__ import annotations

import ast
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mutants.__main__ import choose, is_entry, read_equivalent, unknown_equivalents
from tests.mutants.changes import find_changes
from tests.mutants.executed import Executed, statements
from tests.mutants.matching import Matching
from tests.mutants.running import NO_IMPORT, BrokenTestsError, Known, OutOfTimeError, working_copies

ROOT = Path(__file__).parents[2]


def changed(text: str, folder: Path) -> set[str]:
    """Every way in which the tool changes a module with this text."""
    path = folder / "module.py"
    path.write_text(text)
    source = path.read_bytes()
    results = [change.apply(source).decode() for change in find_changes(path, folder)]
    for result in results:
        ast.parse(result)
    return set(results)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = a < b", {"x = a <= b"}),
        ("x = (a) is not (b)", {"x = (a) is (b)"}),
        ("x = a not  in b", {"x = a in b"}),
        ("x = a and b and c", {"x = a or b and c", "x = a and b or c"}),
        ("x = any(y)", {"x = all(y)"}),
        ("x = a + b", {"x = a - b"}),
        ("x -= a", {"x += a"}),
        ("x = 'ä', a - b", {"x = 'ä', a + b"}),
        ("x = 3", {"x = 4", "x = 2"}),
        ("x = not (a)", {"x = (a)"}),
        ("def f(x=True): pass", {"def f(x=False): pass"}),
        ("def f(): return a", {"def f(): return None"}),
        ("def f(): return False", {"def f(): return True"}),
        ("f(a)", {"pass"}),
        ("x = a if b else c", {"x = a if not b else c"}),
        ("x = (\n    a  # + is not it\n    + b\n)", {"x = (\n    a  # + is not it\n    - b\n)"}),
    ],
)
def test_what_is_changed(text, expected, tmp_path):
    assert changed(text, tmp_path) == expected


@pytest.mark.parametrize(
    "text",
    [
        '"""What 1 + 1 is."""',
        "x: Literal[1, 2]",
        "def f(x: Literal[1]) -> Literal[2]: ...",
        "raise ValueError(1 + 1)",
        "x = f'{1 + 1}'",
        "x = SomeError(1)",
        "x = zip(a, b, strict=True)",
        "logger.info(1)",
        "warnings.warn('a', stacklevel=2)",
        "def __repr__(self): return 1 + 1",
        "def reason() -> str: return 'several words' if a == 1 else 'none'",
        "if TYPE_CHECKING: x = 1",
        "x = a + 'text'",
        "@decorated(1)\ndef f(): ...",
    ],
)
def test_words_types_and_logging_are_left_alone(text, tmp_path):
    assert changed(text, tmp_path) == set()


def test_the_same_seed_chooses_the_same_changes():
    places = ["colonnade/gradients"]
    assert choose(places, 9, 3) == choose(places, 9, 3) != choose(places, 9, 4)
    assert {change.line for change in choose(["colonnade/gradients/sums.py:1"], 0, 0)} <= {1}
    with pytest.raises(SystemExit, match="there is no colonnade/nowhere"):
        choose(["colonnade/nowhere"], 1, 0)


def test_the_nearest_file_leads_quick_ones_follow_and_the_budget_cuts():
    known = Known({"fast": {"a": 9, "b": 5, "c": 1}, "slow": {"a": 7, "c": 30, "d": 2}}, dict.fromkeys("abcd", 1))
    whole = [("fast", "a"), ("slow", "a"), ("fast", "d"), ("fast", "c"), ("fast", "b"), ("slow", "b"), ("slow", "c")]
    assert known.plan("abcd", math.inf) == [*whole, ("slow", "d")]
    assert known.plan("abcd", 40) == whole
    assert known.plan("abcd", 60) == [*whole, ("slow", "d")]
    assert known.plan("abcd", 23) == whole  # as far as it comes
    assert known.plan("abcd", 1)[0] == ("fast", "a")


TESTS = """
import time, pytest
from colonnade.number import one, three, two
def test_that_fails_anyway():
    assert one() == 3
def test_one():
    assert one() == 1
@pytest.mark.slow
def test_two():
    assert two() == 2
@pytest.mark.slow
@pytest.mark.parametrize("case", [0, 1, 2])
def test_cases(case):
    time.sleep(case == 1)
    assert case < 2 or three() == 3
@pytest.mark.slow
@pytest.mark.parametrize("case", [0, 1])
def test_three(case):
    assert case < 1 or three() == 3
"""


@pytest.mark.slow
@pytest.mark.timeout(400)  # starts pytest a dozen times
def test_noticed_means_that_a_test_fails_which_passes_without_the_change(tmp_path):
    root, known = tmp_path / "root", Known()
    for name, text in {
        "colonnade/__init__.py": "",
        "colonnade/proof/__init__.py": "",
        "colonnade/proof/plugin.py": "",  # pytest finds it by the installed package
        "colonnade/number.py": "def one(): return 1\ndef two(): return 2\ndef three(): return 3\nfour = [4][0]",
        "tests/__init__.py": "",
        "tests/conftest.py": "import colonnade.number",
        "tests/test_number.py": TESTS,
        "pytest.ini": "[pytest]\nmarkers =\n  slow\n  long",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    shutil.copytree(ROOT / "tests" / "mutants", root / "tests" / "mutants")
    changes = {
        change.apply(b"." * change.start).decode()[change.start :] + f" on {change.line}": change
        for change in find_changes(root / "colonnade" / "number.py", root)
    }
    file = "tests/test_number.py"
    with working_copies(root, 1, known, math.inf) as workshop:
        budgets = {"2 on 1": math.inf, "3 on 2": math.inf, "4 on 3": math.inf, "2 on 3": 1.0, "1 on 4": math.inf}
        outcomes = {name: workshop.judge(changes[name], [file], budget) for name, budget in budgets.items()}
    assert {name: (outcome.noticed, outcome.by) for name, outcome in outcomes.items()} == {
        "2 on 1": ("fast", f"{file}::test_one"),
        "3 on 2": ("slow", f"{file}::test_two"),
        "4 on 3": ("slow", f"{file}::test_three[1]"),  # the second case of each test comes before the third of any
        "2 on 3": ("", ""),  # a test takes the budget
        "1 on 4": ("fast", NO_IMPORT),
    }
    assert known.failing == [f"{file}::test_that_fails_anyway"]
    assert (root / "colonnade" / "number.py").read_text().startswith("def one(): return 1")
    with working_copies(root, 1, known, time.monotonic()) as workshop, pytest.raises(OutOfTimeError):
        workshop.judge(changes["2 on 1"], [file], math.inf)
    (root / "tests" / "conftest.py").write_text("import colonnade.missing")
    with (
        working_copies(root, 1, known, math.inf) as workshop,
        pytest.raises(BrokenTestsError, match=r"colonnade\.missing"),
    ):
        workshop.judge(changes["2 on 1"], [file], math.inf)


@pytest.mark.slow
def test_the_mirrored_test_comes_first_and_users_follow():
    matching = Matching(ROOT)
    tests = matching.tests_for("colonnade/gradients/uneven.py")
    assert tests[0] == "tests/gradients/test_uneven.py"
    assert "tests/gradients/test_synchroniser.py" in tests  # the module that uses it is tested there
    assert matching.tests_for("colonnade/trainer/data.py")[0] == "tests/trainer/test_data.py"
    assert "tests/test_defaults.py" in matching.tests_for("colonnade/engine/build.py")[:9]  # its table names it
    assert "tests/nn/moe/test_layer.py" in matching.tests_for("colonnade/nn/moe/router.py")
    for module in (ROOT / "colonnade").rglob("*.py"):
        assert matching.tests_for(str(module.relative_to(ROOT))), module


def test_the_tests_that_execute_a_statement_are_known_after_other_edits(tmp_path):
    module = tmp_path / "colonnade" / "number.py"
    module.parent.mkdir()
    module.write_text("LIMIT = 3\n\ndef low(x):\n    if (\n        x < 1\n    ):\n        return 1\n    return 2\n")
    for name in ("low", "high", "new"):
        (tmp_path / f"test_{name}.py").write_text("")
    measured = Executed(tmp_path / "lines.json", tmp_path)
    measured.add("test_low.py", {"colonnade/number.py": {1, 3, 5, 7}})
    measured.add("test_high.py", {"colonnade/number.py": {1, 3, 5, 8}})
    module.write_text("# A line more.\n" + module.read_text())
    statements.cache_clear()
    executed = Executed(tmp_path / "lines.json", tmp_path)
    changes = {change.line: change for change in find_changes(module, tmp_path)}
    assert executed.choose(changes[6], ["test_high.py"]) == ["test_high.py", "test_low.py"]  # the matched one first
    assert executed.choose(changes[8], ["test_high.py"]) == ["test_low.py"]
    assert executed.choose(changes[9], ["test_new.py", "test_low.py"]) == [
        "test_new.py",
        "test_high.py",
    ]  # a new one may
    assert executed.choose(changes[2], ["test_low.py"]) == ["test_low.py"]  # outside of functions: by the match alone
    (tmp_path / "test_low.py").write_text("def test_more(): ...")
    assert executed.choose(changes[9], ["test_low.py"]) == ["test_low.py", "test_high.py"]
    (tmp_path / "test_high.py").unlink()
    assert executed.choose(changes[6], []) == ["test_low.py"]


def test_a_listed_line_stands_for_all_changes_but_those_to_nothing():
    line, diff = {"module": "a.py", "line": "_CHUNK = 1 << 20"}, {"module": "a.py", "diff": ["-x = 1", "+x = 2"]}
    for made, is_listed in (("2 << 20", True), ("1 << 19", True), ("0 << 20", False)):
        assert is_entry(line, ("a.py", "-_CHUNK = 1 << 20", f"+_CHUNK = {made}")) is is_listed
    assert not is_entry(line, ("b.py", "-_CHUNK = 1 << 20", "+_CHUNK = 2 << 20"))
    assert is_entry(diff, ("a.py", "-x = 1", "+x = 2"))
    assert not is_entry(diff, ("a.py", "-x = 1", "+x = 0"))


def test_every_change_that_is_listed_as_equivalent_exists_and_has_a_reason():
    entries = read_equivalent()
    assert unknown_equivalents(entries) == []
    assert all(len(entry["why"]) > 20 for entry in entries)


def test_a_file_that_is_left_in_the_middle_fails_no_test_of_the_next_one(tmp_path):
    (tmp_path / "test_a.py").write_text(
        "import time\n\ndef test_slow():\n    time.sleep(0.3)\n\ndef test_late():\n    assert False\n"
    )
    (tmp_path / "test_b.py").write_text("def test_next():\n    pass\n")
    plan = {"order": [["fast", "test_a.py"], ["fast", "test_b.py"]], "skip": [], "limits": {}, "budget": 0.5}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    words = ["-q", "-p", "no:cacheprovider", "-p", "tests.mutants.plugin", f"--plan={tmp_path / 'plan.json'}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "--rootdir", tmp_path, tmp_path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    events = [json.loads(line) for line in (tmp_path / "plan.events").read_text().splitlines()]
    assert [event["test"] for event in events if event.get("failed") is False] == [
        "test_a.py::test_slow",
        "test_b.py::test_next",
    ], done.stdout
    assert not any(event.get("failed") for event in events), done.stdout
