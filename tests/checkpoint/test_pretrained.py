"""A folder for transformers, written by one process: which files, which names, which types, and what is refused."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colonnade._launch import launch
from colonnade.checkpoint import full_weights
from colonnade.checkpoint.full_weights import (
    INDEX,
    FullTensors,
    _bytes_of,
    _file_name,
    _limit,
    save_full,
    save_pretrained,
)
from colonnade.checkpoint.tensor_files import FileEntry
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError


class Settings:
    """What is asked of a config of transformers."""

    architectures: list[str] | None = None

    def __init__(self, name: str) -> None:
        self.name, self.dtype = name, torch.float64

    def save_pretrained(self, folder: Path) -> None:
        told = {"architectures": self.architectures, "dtype": str(self.dtype)}
        (folder / f"{self.name}.json").write_text(json.dumps(told))


class Model(nn.Module):
    _tied_weights_keys = ("head.weight",)

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)
        self.head.weight = self.body.weight
        self.norm = nn.Linear(4, 4)
        self.register_buffer("seen", torch.tensor([7]))
        self.config, self.generation_config = Settings("config"), Settings("generation_config")

    def can_generate(self) -> bool:
        return True


@pytest.fixture
def context() -> Any:
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        yield gpc


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def test_a_folder_has_one_file_the_configs_and_each_weight_once(tmp_path, context):
    model, folder = Model(), tmp_path / "out"
    assert save_pretrained(model, folder, context) == folder
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    found = tensors(folder)
    assert found.keys() == {"body.weight", "norm.weight", "norm.bias", "seen"}
    assert all(torch.equal(found[name], model.state_dict()[name]) for name in found)
    assert json.loads((folder / "config.json").read_text()) == {"architectures": ["Model"], "dtype": "torch.float32"}
    assert (model.config.architectures, model.config.dtype) == (None, torch.float64)  # as it was
    assert list(tmp_path.iterdir()) == [folder]


def test_of_another_type_and_in_files_of_a_size(tmp_path, context):
    model, folder = Model(), tmp_path / "out"
    model.can_generate = lambda: False
    save_pretrained(model, folder, context, max_shard_size="72", dtype=torch.bfloat16)
    # 64, 32, 8 and 8 bytes
    names = [f"model-0000{at}-of-00002.safetensors" for at in (1, 2)]
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", *names, INDEX]
    index = json.loads((folder / INDEX).read_text())
    assert (folder / INDEX).read_text() == json.dumps(index, indent=2) + "\n"  # as transformers writes it
    assert index["metadata"] == {"total_size": 112}
    assert set(index["weight_map"].values()) == set(names)
    assert {name: tensor.dtype for name, tensor in tensors(folder).items()} == {
        **dict.fromkeys(("body.weight", "norm.weight", "norm.bias"), torch.bfloat16),
        "seen": torch.int64,
    }
    assert json.loads((folder / "config.json").read_text())["dtype"] == "torch.bfloat16"


def test_one_file_has_each_weight_under_all_its_names(tmp_path, context):
    model = Model()
    file = save_full(FullTensors(model, context), tmp_path / "all.safetensors", context, torch.float16)
    assert list(tmp_path.iterdir()) == [file]
    found = tensors(tmp_path)
    assert found.keys() == model.state_dict().keys()
    assert torch.equal(found["head.weight"], model.body.weight.detach().half())
    assert found["seen"].dtype == torch.int64


def test_of_several_stages_the_first_has_the_config(tmp_path, context):
    stages = nn.ModuleList([Model(), nn.Linear(1, 1)])
    save_pretrained(stages, tmp_path / "out", context)
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["Model"]


def test_what_cannot_be_written_is_said(tmp_path, context):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="file is a file; give the name of a folder"):
        save_pretrained(Model(), tmp_path / "file", context)
    for config in (None, "a text"):
        model = Model()
        model.config = config
        with pytest.raises(
            CheckpointError, match=r"^Model has no transformers config, so save_pretrained cannot write config\.json"
        ):
            save_pretrained(model, tmp_path / "out", context)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (1, 1),
        ("7", 7),
        (" 2 KB ", 2_000),
        ("3mb", 3_000_000),
        ("1.5GB", 1_500_000_000),
        ("2TB", 2_000_000_000_000),
        ("2KiB", 2_048),
        ("2MiB", 2_097_152),
        ("2GiB", 2_147_483_648),
    ],
)
def test_sizes_in_words(size, count):
    assert _bytes_of(size) == count


@pytest.mark.parametrize(
    ("total", "ranks", "limit"),
    [
        (10, 4, 1 << 26),
        ((1 << 28) - 3, 4, 1 << 26),
        ((1 << 28) + 1, 4, (1 << 26) + 1),
        (1 << 30, 4, 1 << 28),
        (10**12, 4, 5 * 10**9),
    ],
)
def test_every_rank_has_a_file_to_write_unless_they_are_small_or_very_large(total, ranks, limit):
    assert _limit(total, ranks) == limit


@pytest.mark.parametrize("size", [0, -1, True, False, "", "GB", "5 XB", "0.4", "1e9", None])
def test_nonsense_is_no_size(size):
    with pytest.raises(CheckpointError) as error:
        _bytes_of(size)
    assert str(error.value) == (
        f"max_shard_size is {size!r}; pass a number of bytes, or text such as '5GB' or '512MiB'"
    )


def test_which_name_a_tied_weight_has():
    record = SimpleNamespace(names=("a", "b"))
    assert _file_name(record, SimpleNamespace()) == "a"
    assert _file_name(record, SimpleNamespace(_tied_weights_keys=["a"])) == "b"
    assert _file_name(record, SimpleNamespace(all_tied_weights_keys={"b": "a"}, _tied_weights_keys=["a"])) == "a"
    assert _file_name(record, SimpleNamespace(_tied_weights_keys=["a", "b"])) == "a"


def test_the_config_names_the_class_behind_that_of_fsdp(tmp_path, context):
    kind = type("FSDPModel", (type("FSDPModule", (), {}), Model), {})
    save_pretrained(kind(), tmp_path / "out", context)
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["Model"]


@pytest.mark.parametrize(
    ("limit", "files"),
    [
        (100, {"model.safetensors": ["a", "b", "c"]}),
        (6, {"model.safetensors": ["a", "b", "c"]}),
        (5, {"model-00001-of-00002.safetensors": ["a", "b"], "model-00002-of-00002.safetensors": ["c"]}),
        (4, {"model-00001-of-00002.safetensors": ["a"], "model-00002-of-00002.safetensors": ["b", "c"]}),
        (3, {"model-00001-of-00002.safetensors": ["a"], "model-00002-of-00002.safetensors": ["b", "c"]}),
        (2, {f"model-0000{at}-of-00003.safetensors": [key] for at, key in enumerate("abc", 1)}),
        (1, {f"model-0000{at}-of-00003.safetensors": [key] for at, key in enumerate("abc", 1)}),
    ],
)
def test_a_new_file_begins_where_a_tensor_no_longer_fits(limit, files):
    assert full_weights.files_of(OrderedDict(a=3, b=2, c=1).items(), limit) == files
    assert full_weights.LARGEST == 5_000_000_000
    assert full_weights.files_of([], limit) == {"model.safetensors": []}


def test_what_is_no_weight_is_taken_from_another_folder(tmp_path):
    other = tmp_path / "other"
    (other / "folder.json").mkdir(parents=True)
    texts = ["config.json", "merges.txt", "tokenizer.model", "chat_template.jinja"]
    for name in (*texts, "training.bin", INDEX):
        (other / name).write_text("theirs")
    entries = [FileEntry.of("a", torch.ones(2))]
    full_weights.write_folder(entries, tmp_path / "staged", tmp_path / "out", other)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([*texts, "model.safetensors"])
    assert (tmp_path / "out/config.json").read_text() == "theirs"
    full_weights.write_folder(entries, tmp_path / "staged", tmp_path / "alone", None)
    assert tensors(tmp_path / "alone").keys() == {"a"}
