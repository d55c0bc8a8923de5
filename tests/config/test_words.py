"""Typos of our keys and other frameworks' words for them get the right name; ordinary names of users pass."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.config import load_config
from colonnade.config.fields import AnySection, keys_of
from colonnade.config.problems import near
from colonnade.config.settings import KEYS, Settings
from colonnade.errors import ConfigError


def words(*lines: str) -> list[str]:
    return [word for line in lines for word in line.split()]


ORDINARY = words(
    "epochs num_epochs lr learning_rate min_lr max_lr batch_size micro_batch_size train_batch_size",
    "eval_batch_size local_batch_size global_batch_size dropout hidden_size hidden_dim hidden_sizes",
    "vocab_size embed_dim num_layers num_heads n_head n_layer depth width seq_len seq_length",
    "max_seq_len sequence_length block_size patch_size img_size num_classes num_experts top_k",
    "weight_decay momentum betas eps warmup_steps warmup_epochs total_steps max_steps train_steps",
    "eval_steps save_steps log_steps log_interval log_dir log_level logs logger logging verbose",
    "optimizer optim scheduler lr_scheduler lr_schedule schedules loss loss_fn criterion metric metrics",
    "model models mode model_name model_type model_config module data dataset datasets data_dir",
    "data_path dataloader train_data val_data num_workers pin_memory prefetch_factor seeds random_seed",
    "speed need feed device devices dtype torch_dtype fp32 fp8 tf32 param_dtype backend host port rank",
    "world_size local_rank zeros zero_grad hero async synced resume checkpoint checkpoint_dir ckpt",
    "save_dir output_dir name project run_name tags notes debug profile compile tokenizer temperature",
    "label_smoothing ema_decay hooks callbacks trainer engine config cfg args options flags path root",
    "cache_dir transforms augment mixup cutmix gradient_checkpointing activation_checkpoint freeze",
    "layers blocks heads bias norm activation init last_step first_step flat_steps max_tp_size steps",
    "step stage stages tensor shape sizes parallelism distributed clip value_clip clip_range grad_norm",
    "gradient grads handler handlers model2 seed1 seed_2 _private _seed _precision model_ mode1 x y i n k dt",
)

UPPER = words(
    "BATCH_SIZE NUM_EPOCHS LEARNING_RATE WEIGHT_DECAY WARMUP_EPOCHS HIDDEN_DIM HIDDEN_SIZE SEQ_LENGTH GLOBAL_BATCH_SIZE DEPTH",
    "NUM_HEADS IMG_SIZE PATCH_SIZE NUM_CLASSES CHECKPOINT SUMMA_DIM VOCAB_SIZE NUM_CHUNKS LOG_PATH",
    "TRAIN_ITERS DECAY_ITERS EVAL_ITERS WARMUP_FRACTION NUM_GPUS LOCAL_BATCH_SIZE TOTAL_BATCH_SIZE",
    "MICRO_BATCH_SIZE SEQ_LEN MAX_SEQ_LENGTH NUM_BATCHES NUM_MINI_BATCHES SEED LOG MODEL PARALLEL",
    "CLIP_GRAD_NORM TENSOR_MODE SHAPE INPUT_SHAPE CLIP LR DATA DROPOUT",
)


def test_ordinary_names_pass() -> None:
    assert len(set(ORDINARY)) > 150
    values = {name: 0 for name in (*ORDINARY, *UPPER) if name not in KEYS}
    values["model"] = 0
    assert load_config(values) == values


@pytest.mark.parametrize("value", [1, "text", [1], {"size": 2}])
def test_ordinary_names_pass_whatever_they_hold(value: object) -> None:
    load_config({name: value for name in (*ORDINARY, *UPPER) if name not in KEYS})


@pytest.mark.parametrize("name", ["clipGradNorm", "ClipGradNorm", "clip-grad-norm", "clipgradnorm", "Parallel"])
def test_other_spellings_of_a_key_are_errors(name: str) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean `(clip_grad_norm|parallel)`\?"):
        load_config({name: 1})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("clip_grad_nrom", "clip_grad_norm"),
        ("gradient_acumulations", "gradient_accumulation"),
        ("gradient_hander", "gradient_handler"),
        ("paralel", "parallel"),
        ("shedule", "schedule"),
        ("zeor", "zero"),
        ("fp_16", "fp16"),
        ("cudnn_benchmrak", "cudnn_benchmark"),
        ("NUM_MICROBATCHES", "num_microbatches"),
        ("TENSOR_SHPAE", "TENSOR_SHAPE"),
    ],
)
def test_near_misses_are_errors_with_the_right_name(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"`{meant}`"):
        load_config({name: 1})


def edits(name: str) -> Iterator[str]:
    """Every name one deletion, swap, substitution or insertion away."""
    letters = (string.ascii_uppercase if name.isupper() else string.ascii_lowercase) + "_"
    for i in range(len(name) + 1):
        before, after = name[:i], name[i:]
        yield from (before + letter + after for letter in letters)
        if after:
            yield before + after[1:]
            yield from (before + letter + after[1:] for letter in letters)
        if len(after) > 1:
            yield before + after[1] + after[0] + after[2:]


def places() -> Iterator[tuple[tuple[str, ...], str]]:
    """Every key of ours, with the keys of the dicts around it, where a wrong name is never somebody's own."""

    def walk(outer: tuple[str, ...], section: type[AnySection]) -> Iterator[tuple[tuple[str, ...], str]]:
        for name, key in keys_of(section).items():
            if section.further is None:
                yield outer, name
            if key.section is not None:
                yield from walk((*outer, name), key.section)

    yield from walk((), Settings)


def told(outer: tuple[str, ...], name: str) -> str:
    """The message about `name` inside these dicts; empty when it passed."""
    values: dict[str, object] = {name: 1}
    for key in reversed(outer):
        values = {key: values}
    try:
        load_config(values)
    except ConfigError as error:
        return str(error)
    return ""


def suggested(message: str) -> str | None:
    """The last part of the first name in backticks."""
    found = re.search(r"`([\w.]+)`", message)
    return found[1].rpartition(".")[2] if found else None


SAME = {"gradient_handler": "gradient_handlers", "gradient_handlers": "gradient_handler"}


def test_single_edit_typos_get_the_right_name_first() -> None:
    chance = random.Random(0)
    right = total = 0
    by_key: dict[str, float] = {}
    for outer, key in places():
        typos = sorted({typo for typo in edits(key) if typo and typo != key and (typo not in KEYS or outer)})
        sample = chance.sample(typos, min(120, len(typos)))
        good = sum(suggested(told(outer, typo)) in (key, SAME.get(key, key)) for typo in sample)
        by_key[".".join((*outer, key))] = good / len(sample)
        right += good
        total += len(sample)
    assert total > 7000
    assert right / total >= 0.95, sorted(by_key.items(), key=lambda item: item[1])[:10]
    assert [key for key, share in by_key.items() if share < 0.7] == []


@given(st.sampled_from([key for key in KEYS if len(key) > 3]), st.data())
def test_one_edit_is_near(key: str, data: st.DataObject) -> None:
    typo = data.draw(st.sampled_from(sorted({typo for typo in edits(key) if typo != key})))
    assert near(typo, [key]) == key


def test_near_prefers_the_most_alike() -> None:
    assert near("handlerr", ["handler", "handlers"]) == "handler"
    assert near("zebra", ["handler"], edits=2) is None
    assert near("gradient_acumulations", ["gradient_accumulation"], edits=2) == "gradient_accumulation"
    assert near("gradient_acumulation_x", ["gradient_accumulation"]) is None


WORDS = {
    "clip_grad_norm": "gradient_clipping max_grad_norm grad_clip clip_grad clip_norm gradient_clip_val",
    "gradient_accumulation": "grad_accum gradient_accumulation_steps accumulate_grad_batches",
    "zero": "zero_optimization zero_stage zero3 fsdp",
    "parallel.tensor": "tensor_parallel tensor_model_parallel_size tp_size tp",
    "parallel.pipeline": "pipeline_model_parallel_size pipeline_parallel pp",
    "parallel.expert": "expert_model_parallel_size ep",
    "parallel.sequence": "context_parallel_size sequence_parallel sp cp",
    "parallel.data": "data_parallel_size dp ddp distributed_data_parallel",
    "fp16": "precision mixed_precision amp use_fp16",
    "bf16": "use_bf16 bf16_enabled",
    "num_microbatches": "NUM_MICRO_BATCHES num_micro_batches n_microbatches",
    "sync.bucket_mb": "bucket_cap_mb",
    "gradient_handler": "grad_handler grad_handlers",
}
PAIRS = [(word, key) for key, words in WORDS.items() for word in words.split()]


@pytest.mark.parametrize(("word", "key"), PAIRS)
def test_a_foreign_word_is_an_error_in_any_case(word: str, key: str) -> None:
    camel = word.title().replace("_", "")
    for spelling in {word, word.upper(), word.title(), camel, camel[0].lower() + camel[1:]} - {key}:
        with pytest.raises(ConfigError, match=f"{spelling} = 2 .*another framework's word for `{key}`"):
            load_config({spelling: 2})


def test_the_message_gives_the_line_to_write() -> None:
    with pytest.raises(ConfigError, match=r"Write clip_grad_norm = 2\.0 \[C001\]$"):
        load_config({"gradient_clipping": 2.0})
    with pytest.raises(ConfigError, match=r"Write gradient_accumulation = 4 \[C001\]$"):
        load_config({"grad_accum": 4})


def test_data_parallelism_is_said_to_need_no_key() -> None:
    with pytest.raises(ConfigError, match=r"ddp = True .*Write nothing: the remaining ranks are data parallel"):
        load_config({"ddp": True})


def test_a_typo_of_a_foreign_word_is_left_to_the_user() -> None:
    assert load_config({"gradient_chipping": 2.0}).gradient_chipping == 2.0


@pytest.mark.parametrize(
    "values",
    [
        {"MAX_GRAD_NORM": 1.0, "clip_grad_norm": 1.0},
        {"MAX_GRAD_NORM": 1.0, "clip_grad_norm": {"max_norm": 1.0}},
        {"TENSOR_PARALLEL_SIZE": 2, "parallel": {"tensor": {"size": 2, "mode": "1d"}}},
        {"tp": 2, "pp": 4, "parallel": {"tensor": 2, "pipeline": 4}},
        {"dp": 2, "ep": 4, "parallel": {"data": 2, "expert": 4}},
        {"zero_stage": 1, "zero": {"stage": 1}},
    ],
)
def test_a_helper_variable_of_our_key_passes(values: dict[str, Any]) -> None:
    assert load_config(values) == values


@pytest.mark.parametrize(
    "values",
    [
        {"max_grad_norm": 2.0, "clip_grad_norm": 1.0},
        {"tp": 2, "parallel": {"tensor": 4}},
        {"tp": True, "parallel": {"tensor": 1}},
        {"amp": True, "parallel": {"tensor": 1}},
    ],
)
def test_a_foreign_word_with_another_value_than_our_key_is_an_error(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="another framework's word"):
        load_config(values)
