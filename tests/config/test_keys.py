"""The table of keys: complete, and the only place that knows them."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import colonnade
from colonnade.config import load_config
from colonnade.config.fields import Rule, check_value, keys_of
from colonnade.config.settings import KEYS, Settings, all_keys
from colonnade.errors import ConfigError

TOP_LEVEL = (
    "parallel gradient_handler gradient_handlers clip_grad_norm gradient_accumulation fp16 bf16 zero "
    "float8 schedule sync compare_batches compare_stages guard activation_checkpoint flat_step cuda_graph seed compile cudnn_benchmark "
    "cudnn_deterministic compare_weights model num_microbatches TENSOR_SHAPE"
)


def test_every_promised_key_is_there() -> None:
    assert set(KEYS) == set(TOP_LEVEL.split())


def test_a_key_added_to_the_table_is_checked_and_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KEYS, "replay_buffer", Rule("a string", lambda value: isinstance(value, str)))
    assert load_config({"replay_buffer": "yes"}).replay_buffer == "yes"
    for wrong in ({"replay_buffer": 3}, {"replay_bufer": "yes"}):
        with pytest.raises(ConfigError, match="replay_buffer"):
            load_config(wrong)


PACKAGE = Path(colonnade.__file__).parent
READERS = {
    "parallel": "config/settings.py context/dist_group_initializer.py",
    "parallel.data": "config/settings.py",
    "parallel.pipeline": "config/settings.py",
    "parallel.tensor": "config/settings.py",
    "parallel.expert": "config/settings.py context/dist_group_initializer.py",
    "parallel.sequence": "config/settings.py",
    "parallel.*": "config/settings.py",
    "gradient_handler[]": "gradients/handler.py",
    "gradient_handlers[]": "gradients/handler.py",
    "clip_grad_norm": "config/settings.py optim/clip.py engine/stepper.py",
    "clip_grad_norm.groups.*": "config/settings.py optim/clip.py",
    "clip_grad_norm.method": "config/settings.py",
    "fp16": "config/settings.py engine/precision.py",
    "bf16": "engine/precision.py",
    "float8": "engine/precision.py",
    "zero": "engine/prepare.py optim/zero/zero_optimizer.py optim/zero/fsdp.py",
    "schedule": "parallel/split.py",
    "activation_checkpoint": "engine/activations.py",
    "sync": "config/settings.py gradients/handler.py gradients/sums.py gradients/bucket.py gradients/synchroniser.py gradients/transport.py",
    "compile": "engine/compile.py",
    "guard": "engine/checks.py",
    "model": "parallel/split.py",
}
"""Which files read what stands in a section."""


def _words(file: Path) -> set[str]:
    """Names and texts of a file that do something: no comments, no docstrings."""
    tree = ast.parse(file.read_text())
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return attributes | arguments | texts


def _keys(rule: Rule, path: str) -> Iterator[tuple[str, str]]:
    """(path of the section, key) of everything below a rule."""
    for key, inner in keys_of(rule.section).items() if rule.section is not None else ():
        yield path, key
        yield from _keys(inner, f"{path}.{key}")
    for inner, end in ((rule.section and rule.section.others, ".*"), (rule.items, "[]")):
        if inner is not None:
            yield from _keys(inner, path + end)


def test_every_top_level_key_is_read_by_some_code() -> None:
    sources = [file.read_text() for file in PACKAGE.rglob("*.py") if file.name not in ("settings.py",)]
    read = {key for text in sources for key in re.findall(r"""config(?:\.get\(|\[)"(\w+)\"""", text)}
    assert [key for key in KEYS if key not in read] == []


def test_every_key_of_a_section_is_read_by_some_code() -> None:
    unread = [
        f"{path}.{key}"
        for name, rule in KEYS.items()
        for path, key in _keys(rule, name)
        if not any(key in _words(PACKAGE / file) for file in READERS[path].split())
    ]
    assert unread == []


def test_every_key_says_what_it_means() -> None:
    assert [key.path for key in all_keys() if not key.means] == []


VALUES = {
    "None": None, "True": True, "-1": -1, "0": 0, "1": 1, "3": 3, "4": 4, "0.5": 0.5, "33": 33, "inf": math.inf,
    "nan": math.nan, "''": "", "'x'": "x", "'inf'": "inf", "'cpu'": "cpu", "'auto'": "auto", "'full'": "full",
    "'bf16'": "bf16", "'group'": "group", "'skip'": "skip", "'torch'": "torch", "'rowwise'": "rowwise", "[]": [],
    "['a']": ["a"], "[2]": [2], "{}": {}, "{type}": {"type": "X"}, "{size}": {"size": 2}, "{own}": {"own": 1},
    "{a: {params}}": {"a": {"params": "x"}}, "dtype": torch.float32, "2**63": 2**63,
}  # fmt: skip
"""What is tried as the value of every key, by the name it has in keys.txt."""


def _accepted(rule: Rule, path: str) -> Iterator[str]:
    """A line for each key: which of the values it takes."""
    taken = [name for name, value in VALUES.items() if not any(check_value(rule, (path,), value))]
    yield f"{path}: {' '.join(taken)}"
    for inner, end in ((rule.section and rule.section.others, ".NAME"), (rule.items, "[]")):
        if inner is not None:
            yield from _accepted(inner, path + end)
    for name, inner in keys_of(rule.section).items() if rule.section is not None else ():
        yield from _accepted(inner, f"{path}.{name}")


def test_what_every_key_takes_is_what_it_took_before() -> None:
    """A value that is refused from now on, or taken, is a decision: write it into keys.txt."""
    lines = [line for name, rule in KEYS.items() for line in _accepted(rule, name)]
    assert "\n".join(lines) + "\n" == Path(__file__).with_name("keys.txt").read_text()


def test_defaults_are_read_from_a_config_that_sets_nothing() -> None:
    assert Settings.read({}) == Settings()
    asked = Settings.read({"zero": 2, "clip_grad_norm": 1.0, "sync": {"waive": "a"}, "bf16": {}, "model": {"width": 3}})
    assert (asked.zero.stage, asked.sync.waive, asked.bf16, asked.model) == (2, ("a",), None, {"width": 3})
    assert asked.clip_grad_norm is not None
    assert asked.clip_grad_norm.method_options == {"max_norm": 1.0}
