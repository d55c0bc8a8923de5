"""Weights of models of transformers: into every layout and out of it again, to the bit; and folders that do not fit."""

from __future__ import annotations

import ctypes
import gc
import json
import shutil
import threading
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import colonnade
from colonnade.checkpoint import storage
from colonnade.checkpoint.full_weights import tensors_in
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError, ConfigError
from colonnade.hf.weights import Converted, StoredParts, from_pretrained
from colonnade.parallel.meta import value_source_of
from colonnade.parallel.placement import local_part
from colonnade.testing import run_world
from tests.hf.zoo import BY_NAME

pytestmark = pytest.mark.slow

TENSOR = {"tensor": {"size": 2, "mode": "1d"}}
PIPELINE = {"pipeline": 2}
STAGED = {"num_microbatches": 2}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama/tied", TENSOR, {}),
    ("phi3 (phi4)/float32", TENSOR, {"zero": 3}),
    ("mixtral", TENSOR, {}),
    ("mixtral/float32", {"expert": 2}, {"zero": 3}),
    ("gpt2/tied/float32", {}, {"zero": 3}),
    ("deepseek_v3", {}, {"zero": 2}),
    ("llama/tied", {**PIPELINE, **TENSOR}, STAGED),
    ("phi3 (phi4)/tied", {**PIPELINE, **TENSOR}, STAGED),
    ("mixtral", {**PIPELINE, **TENSOR}, STAGED),
    ("gpt2/tied/float32", PIPELINE, {**STAGED, "zero": 3}),
    ("llama/tied", PIPELINE, {"schedule": {"type": "Interleaved1F1B", "num_microbatches": 2, "num_chunks": 2}}),
]
"""(architecture, parallel, the rest of the config), on four ranks."""


def build(name: str) -> Any:
    """The model in one process, with weights that are nobody's start."""
    name, *words = name.split("/")
    model: Any = BY_NAME[name].build(True if "tied" in words else None)
    if "even" in words:  # as many heads of keys as of queries
        model = type(model)(type(model.config)(**{**model.config.to_diff_dict(), "num_key_value_heads": 4}))
    model = model.to(torch.float32 if "float32" in words else torch.bfloat16)
    with torch.no_grad():
        for at, value in enumerate(model.state_dict().values()):
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(at)))
    return model


def state_of(model: Any) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def same(found: dict[str, Tensor], truth: dict[str, Tensor]) -> list[str]:
    """The names that are not the same to the bit."""
    return [
        key
        for key in truth.keys() | found.keys()
        if key not in found
        or key not in truth
        or found[key].dtype != truth[key].dtype
        or not found[key].equal(truth[key])
    ]


def drawn(gpc: ParallelContext) -> dict[str, Tensor]:
    """The weights of a config, whole."""
    model = from_pretrained(BY_NAME["llama"].build().config, dtype=torch.float32, context=gpc)
    return started(model, gpc).full_state_dict()


def started(model: Any, gpc: ParallelContext) -> Any:
    return colonnade.initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]


def round_trip(folder: Path, truth: dict[str, Tensor]) -> list[tuple[int, list[str]]]:
    """On each rank: every case's weights, whole, are those of the folder; they are saved again."""
    wrong: list[Any] = []
    check_memory(folder / "large")
    for parallel, rest in (({**PIPELINE, **TENSOR}, STAGED), ({}, {"zero": 3})):
        with colonnade.launch({"parallel": parallel, **rest}, context=ParallelContext(), verbose=False) as gpc:
            assert same(drawn(gpc), truth) == []
    with colonnade.launch({}, context=ParallelContext(), verbose=False) as gpc:
        check_refused(folder, gpc)
    for number, (name, parallel, rest) in enumerate(CASES):
        with colonnade.launch({"parallel": parallel, **rest}, context=ParallelContext(), verbose=False) as gpc:
            model = from_pretrained(folder / name, context=gpc)
            engine = started(model, gpc)
            wrong.append((number, same(engine.full_state_dict(), torch.load(folder / name / "truth.pt"))))
            engine.save_pretrained(folder / f"out {number}", max_shard_size="8kB")
            engine.close()
    return wrong


def check_refused(folder: Path, gpc: ParallelContext) -> None:
    """What one rank alone finds wrong is an error on every rank: there, it sees another folder."""
    path = folder / ("nowhere" if gpc.get_global_rank() == 1 else "mixtral")
    with pytest.raises(CheckpointError, match=r"nowhere has no config\.json"):
        from_pretrained(path, context=gpc)


def anonymous() -> int:
    """The bytes of this process's own memory that are in use."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def check_memory(path: Path) -> None:
    """At its peak a rank holds its share, one tensor, and a little that does not depend on the size."""
    largest, little = 8192 * 1024 * 4, 32 << 20  # what is imported meanwhile is in it
    # Without flat steps, for which `initialize` makes memory for the gradients too.
    for config in ({"parallel": {"tensor": {"size": 4, "mode": "1d"}}, "flat_step": False}, {"zero": 3}):
        with colonnade.launch(config, context=ParallelContext(), verbose=False) as gpc:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # else memory that was freed before is used again, and not seen
            before, done, peak = anonymous(), threading.Event(), [0]

            def watch(before: int = before, done: threading.Event = done, peak: list[int] = peak) -> None:
                while not done.wait(0.001):
                    peak[0] = max(peak[0], anonymous() - before)

            watcher = threading.Thread(target=watch)
            watcher.start()
            engine = started(from_pretrained(path, context=gpc), gpc)
            done.set()
            watcher.join()
            share = sum(local_part(parameter).nbytes for parameter in engine.model.parameters())
            whole = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors_in(path).values())
            assert whole > 240 << 20
            assert share < 1.01 * whole / 4
            assert share < peak[0] < share + largest + little, (config, share >> 20, peak[0] >> 20)
            engine.close()


def write_large(path: Path) -> None:
    """A Llama of 256 MiB, all zeros."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": False}
    config = LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"], dtype="float32")
    config.save_pretrained(path)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in LlamaForCausalLM(config).state_dict().items()}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path / "model.safetensors")


def alone() -> Any:
    return colonnade.launch({}, context=ParallelContext(), verbose=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> Path:
    """A folder for each architecture, as transformers writes it."""
    folder: Path = tmp_path_factory.mktemp("folders")
    for name in dict.fromkeys([*(name for name, *_ in CASES), "llama/even"]):
        model = build(name)
        model.save_pretrained(folder / name)
        torch.save(state_of(type(model).from_pretrained(folder / name)), folder / name / "truth.pt")
    return folder


def test_weights_survive_every_layout_to_the_bit(folders: Path) -> None:
    import transformers

    write_large(folders / "large")
    with alone() as gpc:
        truth = drawn(gpc)
    for found in run_world(4, round_trip, folders, truth, timeout=240).values:
        assert [(CASES[number], wrong) for number, wrong in found if wrong] == []
    for number, (name, *_) in enumerate(CASES):
        out = folders / f"out {number}"
        assert len(list(out.glob("*.safetensors"))) > 2
        there = json.loads((out / "config.json").read_text())
        assert there == json.loads((folders / name / "config.json").read_text())
        model = getattr(transformers, there["architectures"][0]).from_pretrained(out)
        assert same(state_of(model), torch.load(folders / name / "truth.pt")) == [], CASES[number]
        if "tied" in name:
            assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def edited(folder: Path, target: Path, change: Any) -> Path:
    """A copy of a folder whose tensors were changed."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def test_a_folder_that_does_not_fit_is_told_by_name(folders: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["strange"] = tensors.pop("model.norm.weight")
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 4)
        tensors["model.layers.0.rotary_emb.inv_freq"] = torch.zeros(4)  # which old folders have

    path = edited(folders / "llama/tied", tmp_path / "changed", change)
    told = (
        r"(?s)does not fit LlamaForCausalLM:\n  missing in the folder \(1\): model\.norm\.weight\n.*not in the model \(1\): "
        r"strange\n.*shape \(1\): model\.layers\.0\.mlp\.up_proj\.weight: \[3, 4\] in the folder, \[48, 32\] in the model"
    )
    with alone() as gpc:
        with pytest.raises(CheckpointError, match=told):
            from_pretrained(path, context=gpc)
        path = edited(folders / "llama/tied", tmp_path / "less", lambda tensors: tensors.pop("model.norm.weight"))
        with pytest.raises(CheckpointError, match=r"missing in the folder \(1\)"):
            from_pretrained(path, context=gpc)
        found = started(from_pretrained(path, allow_missing=["model.norm.*"], context=gpc), gpc).full_state_dict()
        truth = torch.load(folders / "llama/tied" / "truth.pt")
        assert same(found, {**truth, "model.norm.weight": torch.ones(32, dtype=torch.bfloat16)}) == []
        path = edited(folders / "llama/tied", tmp_path / "more", lambda tensors: tensors.update(more=torch.ones(1)))
        with pytest.raises(CheckpointError, match="not in the model"):
            from_pretrained(path, context=gpc)
        found = started(from_pretrained(path, allow_unexpected=["mo*"], context=gpc), gpc).full_state_dict()
        assert same(found, truth) == []


def test_two_values_for_one_tied_weight_are_refused_by_name(folders: Path, tmp_path: Path) -> None:
    """The config ties them; a folder may have the same bits twice, but not two weights for one parameter."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"

    def other(tensors: dict[str, Tensor]) -> None:
        tensors[head] = tensors[embedding].clone()
        tensors[head][-1, -1] += 1

    def twice(tensors: dict[str, Tensor]) -> None:
        tensors["norm.weight"] = tensors["model.norm.weight"] + 1  # which transformers takes for the same name

    truth = torch.load(folders / "llama/tied" / "truth.pt")
    same_twice = edited(folders / "llama/tied", tmp_path / "same", lambda t: t.update({head: t[embedding].clone()}))
    apart = edited(folders / "llama/tied", tmp_path / "apart", other)
    with alone() as gpc:
        assert same(started(from_pretrained(same_twice, context=gpc), gpc).full_state_dict(), truth) == []
        told = (
            r"two weights in the folder \(1\): model\.embed_tokens\.weight and lm_head\.weight\n.*tie_word_embeddings"
        )
        with pytest.raises(CheckpointError, match=f"(?s){told}"):
            from_pretrained(apart, context=gpc)
        found = started(from_pretrained(apart, allow_unexpected=[head], context=gpc), gpc).full_state_dict()
        assert same(found, truth) == []
        found = started(from_pretrained(apart, allow_unexpected=[embedding], context=gpc), gpc).full_state_dict()
        assert found[embedding][-1, -1] == truth[embedding][-1, -1] + 1
        with pytest.raises(
            CheckpointError,
            match=r"several tensors for model\.norm\.weight: model\.norm\.weight in .* and norm\.weight in",
        ):
            from_pretrained(edited(folders / "llama/tied", tmp_path / "twice", twice), context=gpc)


def test_pickles_are_read_only_where_they_are_trusted(folders: Path, tmp_path: Path) -> None:
    path = tmp_path / "pickled"
    shutil.copytree(folders / "llama/tied", path)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    with alone() as gpc:
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle, .* pass trust=True"):
            from_pretrained(path, context=gpc)
        found = started(from_pretrained(path, trust=True, context=gpc), gpc).full_state_dict()
    assert same(found, torch.load(folders / "llama/tied" / "truth.pt")) == []


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    import transformers

    with alone() as gpc:
        with pytest.raises(ConfigError, match="takes the folder of a model or a transformers config, but got a dict"):
            from_pretrained({}, context=gpc)
        with pytest.raises(ConfigError, match=r"model_class must be a class of transformers, .* not 3"):
            from_pretrained(transformers.LlamaConfig(), model_class=3, context=gpc)
        with pytest.raises(ConfigError, match="quantized"):
            from_pretrained(transformers.LlamaConfig(quantization_config={"bits": 4}), context=gpc)
        transformers.LlamaConfig().save_pretrained(tmp_path)
        with pytest.raises(CheckpointError, match=r"has no weights: it has neither model\.safetensors"):
            from_pretrained(tmp_path, context=gpc)


def test_older_forms_are_read_by_slices_where_they_can_be(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor for each expert, as transformers writes mixtral, is read as such; what is computed, from wholes."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Chunk, WeightConverter

    with alone() as gpc:
        model: Any = from_pretrained(folders / "mixtral", context=gpc)
        experts = value_source_of(model.model.layers[1].mlp.experts.gate_up_proj)
        assert isinstance(experts, StoredParts)
        assert len(experts.parts) == 8
        part = torch.empty(2, 30, 7, dtype=torch.bfloat16)
        experts.read_into(part, (1, 40, 20))
        truth = torch.load(folders / "mixtral" / "truth.pt")
        assert part.equal(truth["model.layers.1.mlp.experts.gate_up_proj"][1:3, 40:70, 20:27])

        def pack(tensors: dict[str, Tensor]) -> None:
            parts = [tensors.pop(f"model.layers.2.self_attn.{name}_proj.weight") for name in "qkv"]
            tensors["model.layers.2.self_attn.packed.weight"] = torch.cat(parts)

        path = edited(folders / "llama/even", tmp_path / "packed", pack)
        chunks = WeightConverter("self_attn.packed", [f"self_attn.{name}_proj" for name in "qkv"], [Chunk(0)])
        monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "LlamaForCausalLM", [chunks])
        model = from_pretrained(path, context=gpc)
        assert isinstance(value_source_of(model.model.layers[2].self_attn.k_proj.weight), Converted)
        assert same(started(model, gpc).full_state_dict(), torch.load(folders / "llama/even" / "truth.pt")) == []


def test_a_save_that_fails_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any point; and what else lies in the folder, such as a tokenizer, stays when it is replaced."""
    out, passed = tmp_path / "out", []

    def files() -> dict[str, bytes]:
        return {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    with alone() as gpc:
        engine = started(build("gpt2/tied/float32"), gpc)
        monkeypatch.setattr(storage, "hook", passed.append)
        engine.save_pretrained(out, max_shard_size="20kB")
        (out / "tokenizer.json").write_text("{}")
        (out / "model-00009-of-00009.safetensors").write_text("of an earlier save")
        engine.save_pretrained(out, max_shard_size="20kB")
        before = files()
        assert "out/tokenizer.json" in before
        assert "out/model-00009-of-00009.safetensors" not in before
        for point in dict.fromkeys(passed):
            if point != "renamed":  # from then on it is the new one

                def fail(name: str, point: str = point) -> None:
                    if name == point:
                        raise OSError("the disk is gone")

                monkeypatch.setattr(storage, "hook", fail)
                with pytest.raises(CheckpointError, match="the disk is gone"):
                    engine.save_pretrained(out)
                assert files() == before, point
        monkeypatch.setattr(storage, "hook", None)
        engine.save_pretrained(out, dtype=torch.float16)
        assert 'dtype": "float16' in (out / "config.json").read_text()
        assert {value.dtype for value in load_file(out / "model.safetensors").values()} == {torch.float16}
        truth = engine.full_state_dict()
        assert engine.full_state_dict(tmp_path / "new/all.safetensors", dtype=torch.float64) == {}
        found = load_file(tmp_path / "new/all.safetensors")
        assert same(found, {name: value.double() for name, value in truth.items()}) == []
        with pytest.raises(
            CheckpointError, match=r"to is 'frist'; pass 'all', 'first' or the name of a \.safetensors file"
        ):
            engine.full_state_dict("frist")
        with pytest.raises(
            CheckpointError, match=r"max_shard_size is '5 parrots'; pass a number of bytes, or text such as '5GB'"
        ):
            engine.save_pretrained(out, max_shard_size="5 parrots")
        with pytest.raises(CheckpointError, match="is a file; give the name of a folder"):
            engine.save_pretrained(out / "config.json")
        with pytest.raises(CheckpointError, match="Linear has no transformers config"):
            started(torch.nn.Linear(2, 2), gpc).save_pretrained(tmp_path / "linear")
