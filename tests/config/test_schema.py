"""The table of keys: complete, and the only place that knows them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import colonnade
from colonnade.config import load_config
from colonnade.config.rules import Rule, Section
from colonnade.config.schema import KEYS, all_keys
from colonnade.errors import ConfigError

TOP_LEVEL = (
    "parallel gradient_handler gradient_handlers clip_grad_norm gradient_accumulation fp16 bf16 zero "
    "float8 schedule sync compare_batches compare_stages guard activation_checkpoint flat_step graph_step seed compile cudnn_benchmark "
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
    "parallel": "config/schema.py context/dist_group_initializer.py",
    "parallel.data": "config/schema.py",
    "parallel.pipeline": "config/schema.py",
    "parallel.tensor": "config/schema.py",
    "parallel.expert": "config/schema.py context/dist_group_initializer.py",
    "parallel.sequence": "config/schema.py",
    "parallel.*": "config/schema.py",
    "gradient_handler[]": "gradients/handler.py",
    "gradient_handlers[]": "gradients/handler.py",
    "clip_grad_norm": "optim/clip.py",
    "clip_grad_norm.groups.*": "optim/clip.py",
    "clip_grad_norm.method": "optim/clip.py",
    "fp16": "engine/precision.py engine/precision.py",
    "bf16": "engine/precision.py",
    "float8": "engine/precision.py",
    "zero": "engine/prepare.py optim/zero/zero_optimizer.py optim/zero/fsdp.py",
    "schedule": "parallel/split.py",
    "activation_checkpoint": "engine/activations.py",
    "sync": "gradients/sum_plan.py gradients/sums.py gradients/transport.py",
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
    section = rule.section or Section({})
    for key, inner in section.keys.items():
        yield path, key
        yield from _keys(inner, f"{path}.{key}")
    for inner, end in ((section.others, ".*"), (rule.items, "[]")):
        if inner is not None:
            yield from _keys(inner, path + end)


def test_every_top_level_key_is_read_by_some_code() -> None:
    sources = [file.read_text() for file in PACKAGE.rglob("*.py") if file.name not in ("schema.py", "check.py")]
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
