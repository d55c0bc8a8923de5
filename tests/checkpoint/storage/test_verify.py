"""No changed byte, file or name loads in silence: hundreds of mutations of a checkpoint of four ranks."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade.checkpoint import CheckpointManager, verify
from colonnade.checkpoint.manifest import FORMAT, MANIFEST
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError
from tests.checkpoint.models import WAYS, build, truth_after
from tests.checkpoint.test_load import STEPS

NAME = "step-00000001"


@pytest.fixture
def copy(four_ranks, tmp_path) -> Path:
    return shutil.copytree(four_ranks, tmp_path / "copy")


def _load(folder: Path) -> list[str]:
    """Load into noise; returns what differs from the truth."""
    built = build(WAYS["one"], ParallelContext(), 99)
    with CheckpointManager(folder, ParallelContext(), read_only=True) as manager:
        manager.load(built.model, built.optimizer)
    return built.differs_from(truth_after(STEPS))


def test_the_original_loads(copy):
    assert _load(copy) == []


def _mutate(folder: Path, pick: random.Random) -> str:
    """Change one thing in the checkpoint; returns what."""
    files = sorted(path for path in (folder / NAME).iterdir())
    path = pick.choice(files)
    content = path.read_bytes()
    kind = pick.choice(
        ["cut 1", "cut half", "cut all", "grow", "flip", "flip", "flip", "flip", "zero", "delete", "swap", "edit"]
    )
    if kind.startswith("cut"):
        path.write_bytes(content[: {"1": len(content) - 1, "half": len(content) // 2, "all": 0}[kind[4:]]])
    elif kind == "grow":
        path.write_bytes(content + b"\0")
    elif kind == "flip":
        at = pick.randrange(len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << pick.randrange(8)]) + content[at + 1 :])
    elif kind == "zero":
        at = pick.choice([at for at in range(len(content)) if content[at : at + 8].strip(b"\0")])
        path.write_bytes(content[:at] + bytes(len(content[at : at + 8])) + content[at + 8 :])
    elif kind == "delete":
        path.unlink()
    elif kind == "swap":
        other = pick.choice([other for other in files if other != path])
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
    else:
        kind = _edit_manifest(folder, pick)
    return f"{kind} {path.name}"


def _edit_manifest(folder: Path, pick: random.Random) -> str:
    """Change one value somewhere in the manifest, and write it as valid JSON."""
    path = folder / NAME / MANIFEST
    content = json.loads(path.read_bytes())
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            places.append((value, key))
            if isinstance(entry, (dict, list)):
                walk(entry)

    walk(content)
    holder, key = pick.choice(places)
    before = holder[key]
    holder[key] = before + 1 if isinstance(before, (int, float)) else f"{before}x" if isinstance(before, str) else None
    if holder[key] == before:
        holder[key] = 0
    path.write_text(json.dumps(content))
    return f"edit {key}={before!r:.40}"


def test_none_of_200_mutations_loads_in_silence(four_ranks, tmp_path):
    for seed in range(200):
        folder = shutil.copytree(four_ranks, tmp_path / str(seed))
        what = _mutate(folder, random.Random(seed))
        with pytest.raises(CheckpointError) as caught:
            pytest.fail(f"mutation {seed} loaded: {what}, differs: {_load(folder)}")
        assert NAME in str(caught.value), what
        shutil.rmtree(folder)


@pytest.mark.slow
def test_no_single_bit_of_a_manifest_may_change(four_ranks, tmp_path):
    folder = shutil.copytree(four_ranks, tmp_path / "copy")
    path = folder / NAME / MANIFEST
    content = path.read_bytes()
    for at in range(0, len(content), 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        with pytest.raises(CheckpointError):
            verify(folder / NAME, content=False)


# -- crafted manifests, whose digest is right -------------------------------------------------------------


def _craft(folder: Path, change: Any) -> None:
    path = folder / NAME / MANIFEST
    content = json.loads(path.read_bytes())
    content.pop("digest")
    change(content)
    path.write_bytes(with_digest(content))


def with_digest(content: Any) -> bytes:
    """The manifest of this content, as somebody writes it who knows how the digest is made."""
    text = json.dumps(content).encode()
    digest = hashlib.sha256(text + b"\n").hexdigest()
    return text[:-1] + f', "digest": "{digest}"}}\n'.encode()


def _set(*path: Any, to: Any) -> Any:
    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = to

    return change


def _cut(**changes: list[int]) -> Any:
    """Change the one cut of the embedding, which has ten rows: five in each of the first two files."""

    def change(content: Any) -> None:
        (cut,) = [cut for cut in content["cuts"] if cut == {"stops": [5, 10], "files": [0, 1]}]
        cut.update(changes)

    return change


def _rename_file(to: str) -> Any:
    def change(content: Any) -> None:
        content["files"][0]["name"] = to

    return change


CRAFTED = [
    (_set("format", to=FORMAT + 1), r"has format 3, .* reads format 2. Update Colonnade"),
    (_rename_file("/etc/passwd"), "'/etc/passwd'. A file name must be plain"),
    (_set("files", 0, "size", to=1 << 40), "expected 1099511627776"),
    (_set("files", 0, "sha256", to="0" * 64), "expected 0000"),
    (_set("step", to=2), "contains the checkpoint of step 2, so its folder was renamed"),
    (_set("tensors", 0, "parts", 0, "order", to=[0, 1]), "do not tile the full tensor of shape"),
    (_set("tensors", 0, "parts", 0, "key", to="nothing"), "cannot be read|does not contain"),
    (_cut(stops=[5, 11]), "do not tile the full tensor of shape"),
    (_cut(files=[0, 9]), "refers to file number 9, but lists only 4 files"),
    (_cut(files=[0, 2]), "rank-00002.safetensors cannot be read"),
    (_set("items", 0, "tensors", to=10**4), "declares 10000 tensors, but contains"),
    (_set("layout", to=None), "layout is a NoneType"),
    (_set("layout", "axes", to=[["data"]]), "cannot be read"),
]
"""What a load refuses; the contradictions of a manifest itself are in format/test_manifest.py."""


@pytest.mark.parametrize(("change", "message"), CRAFTED, ids=[message[:30] for _, message in CRAFTED])
def test_a_manifest_is_not_taken_at_its_word(copy, change, message):
    _craft(copy, change)
    with pytest.raises(CheckpointError, match=message):
        _load(copy)


def test_two_blocks_may_not_be_one_entry(copy):
    def change(content: Any) -> None:
        first, second = [tensor for tensor in content["tensors"] if tensor["shape"] == [8, 6]][:2]
        second["parts"] = first["parts"]

    _craft(copy, change)
    with pytest.raises(CheckpointError, match="uses an entry of a file twice"):
        _load(copy)


def test_a_newer_format_is_not_passed_over_for_an_older_checkpoint(copy):
    shutil.copytree(copy / NAME, copy / "step-00000000")
    _craft(copy, _set("format", to=9))
    with pytest.raises(CheckpointError, match="Update Colonnade"):
        _load(copy)


MANY = 1 << 15
TENSOR = {"label": "w", "slot": "", "names": ["w"], "dtype": "U8"}


def _staircase(dims: int) -> Any:
    """A cube of side 2 in blocks that fit together: half of it, half of the rest, and so on along every dimension."""

    def change(content: Any) -> None:
        boxes = [([0] * at + [1] + [0] * (dims - at - 1), [1] * (at + 1) + [2] * (dims - at - 1)) for at in range(dims)]
        boxes.append(([0] * dims, [1] * dims))
        parts = [
            {"offset": offset, "shape": shape, "order": None, "key": f"{at}", "cut": len(content["cuts"])}
            for at, (offset, shape) in enumerate(boxes)
        ]
        content["cuts"].append({"stops": [1], "files": [0]})
        content["tensors"][0] = {**TENSOR, "shape": [2] * dims, "parts": parts}

    return change


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


HOSTILE = {
    "a billion tensors in a value": _set("items", 0, "tensors", to=10**9),
    "2^n corners": _staircase(60),
    "2^n corners that memory would hold": _staircase(22),
    "a huge product": _set("tensors", 0, "shape", to=[1 << 61] * MANY),
    "a huge part": _set("tensors", 0, "parts", 0, "shape", to=[1 << 61] * MANY),
    "a huge order": _set("tensors", 0, "parts", 0, "order", to=list(range(MANY))),
    "a deep value": _set("items", 0, "value", to=_nested(900)),
    "65 dimensions": _staircase(65),
    "many parts": lambda content: content["tensors"][0].update(parts=content["tensors"][0]["parts"] * MANY),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_manifest_that_asks_for_endless_work_is_refused_at_once(copy, change):
    _craft(copy, change)
    began = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        verify(copy / NAME, content=False)
    assert "was changed" not in str(caught.value)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b'{"format": 1',
        b"[" * 100_000,
        b'{"format": NaN}',
        b'{"format": 1' + b"0" * 5000 + b"}",
        b"\x80\x04K\x01.",
    ],
    ids=["empty", "list", "null", "cut", "deep", "nan", "long number", "pickle"],
)
def test_a_manifest_that_is_none_is_damaged(copy, text):
    (copy / NAME / MANIFEST).write_bytes(text)
    with pytest.raises(CheckpointError, match=NAME):
        _load(copy)


def test_whitespace_is_a_change(copy):
    path = copy / NAME / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_bytes()), indent=1))
    with pytest.raises(CheckpointError, match="it does not end with a digest"):
        _load(copy)


def test_links_are_not_followed(copy, tmp_path):
    victim = copy / NAME / "rank-00001.safetensors"
    shutil.move(victim, tmp_path / "outside")
    victim.symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match=r"rank-00001.safetensors is a link or a folder"):
        _load(copy)
    victim.unlink()
    os.mkfifo(victim)
    with pytest.raises(CheckpointError, match="is a link or a folder"):
        _load(copy)


def test_a_link_to_a_checkpoint_is_not_a_checkpoint(copy, tmp_path):
    shutil.move(copy / NAME, tmp_path / "outside")
    (copy / NAME).symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        _load(copy)


@pytest.mark.parametrize("name", ["state.pt", ".hidden", "rank-00000.part"])
def test_unknown_files_are_refused(copy, name):
    (copy / NAME / name).write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CheckpointError, match=f"'{name}' is not in the manifest"):
        _load(copy)


def test_a_renamed_checkpoint_is_found_out(copy):
    os.rename(copy / NAME, copy / "step-00000005")
    with pytest.raises(CheckpointError, match="contains the checkpoint of step 1"):
        _load(copy)


def test_nothing_is_unpickled_while_loading(copy, monkeypatch):
    import pickle

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle was read")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert _load(copy) == []


def test_checkpoints_have_no_way_to_read_a_pickle():
    import colonnade.checkpoint

    unsafe = re.compile(r"pickle|\btorch\.(load|save)\b|_object(_list)?\(|\b(eval|exec)\(")
    for path in Path(colonnade.checkpoint.__path__[0]).glob("**/*.py"):
        if path.name in ("export.py", "full_weights.py"):
            continue  # files of others, and only those that the user trusts (their own tests)
        assert unsafe.search(path.read_text()) is None, path


def test_a_manifest_longer_than_a_quarter_of_a_gib_is_not_read(tmp_path):
    (tmp_path / MANIFEST).write_bytes(b"")
    os.truncate(tmp_path / MANIFEST, (1 << 28) + 1)  # takes no room on the disk
    with pytest.raises(CheckpointError, match=f"is larger than {1 << 28} bytes"):
        verify(tmp_path)


def test_renames_syncs_and_locks_stand_in_one_file():
    import colonnade.checkpoint

    calls = re.compile(r"os\.(rename|replace|fsync)|flock|\.(rename|replace)\(\w+\)")
    files = [path for path in Path(colonnade.checkpoint.__path__[0]).glob("*.py") if calls.search(path.read_text())]
    assert [path.name for path in files] == ["storage.py"]
