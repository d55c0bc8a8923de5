"""Problems found in a config, the error message that lists them, and the suggestions for unknown keys."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from colonnade.errors import ConfigError

KeyPath = tuple[Any, ...]
"""The path of a value: dict keys and list indices, from the outside in."""

UNSAID: Any = object()
"""The value of a problem that does not concern one value."""

_LONGEST = 60


@dataclass(frozen=True)
class Problem:
    """One problem: its path, its description with the next step, and the value found."""

    path: KeyPath
    text: str
    value: Any = UNSAID


@dataclass(frozen=True)
class ConfigSource:
    """The source of a config: its name in the first line of a message, its file name, and its text."""

    name: str = "the config"
    file: str = ""
    text: str = ""

    def where(self, path: KeyPath) -> str:
        """`file:line` of the key at `path`, or of the closest key around it that is found in the text.

        A top-level key starts its line, in `.py` and `.toml`; a nested key follows the key that contains it. Elements of a
        list have the line of the list; an imported key has no line.
        """
        position = -1
        for depth, key in enumerate(path):
            name = re.escape(str(key))
            form = rf"""\b{name}["']?\s*[]=:.]""" if depth else rf"""^(?:\[+ *)?["']?{name}\b"""
            found = re.compile(form, re.MULTILINE).search(self.text, position + 1)
            if found is None or isinstance(key, int):
                break
            position = found.start()
        return self.file if position < 0 else f"{self.file}:{self.text.count(chr(10), 0, position) + 1}"


def config_error(problems: Sequence[Problem], source: ConfigSource) -> ConfigError:
    """Make the error that lists all problems, each with its line in the source."""
    rows = [(source.where(_present(problem)), _described(problem)) for problem in problems]
    width = max(len(where) for where, _ in rows)
    lines = [f"  {where:<{width}}  {text}" if width else f"  {text}" for where, text in rows]
    return ConfigError("\n".join([_head(len(rows), source.name), *lines]), code="C001")


def file_error(name: str, file: str, text: str, *, line: int | None = None, shown: str = "") -> ConfigError:
    """Make the error for a config file that cannot be read; `shown` is source text that is printed below the message."""
    where = file if line is None else f"{file}:{line}"
    below = [f"      {row}" for row in shown.splitlines()]
    # The code ends the message, not the quoted source below it.
    error = ConfigError("\n".join([_head(1, name), f"  {where}  {text} [C002]", *below]))
    error.code = "C002"
    return error


def dotted(path: KeyPath) -> str:
    """Format the path of a key as text: `gradient_handler[0].type`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part or repr(part)}"
    return text.removeprefix(".")


def _head(count: int, name: str) -> str:
    return f"colonnade: {count} problem{'' if count == 1 else 's'} in {name}"


def _present(problem: Problem) -> KeyPath:
    """The path of an existing key.

    If a nested problem has no value, its key is missing, so the path of the parent is returned.
    """
    return problem.path[:-1] if problem.value is UNSAID and len(problem.path) > 1 else problem.path


def _described(problem: Problem) -> str:
    value = "" if problem.value is UNSAID else f" = {shortened(problem.value)}"
    return f"{dotted(problem.path)}{value}   {problem.text}"


def shortened(value: object) -> str:
    """Format `value` as one line of limited length, for a message."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a custom class, or an int of thousands of digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


# --- Suggestions: names that are nearly a Colonnade key, and the corresponding words of other frameworks ---
#
# All of these are errors: a clipping value under a name that no code reads would silently train without clipping.

# Ordinary names within one edit of a Colonnade key. A user who writes one of these means it.
_ORDINARY_WORDS = (
    "mode modes model models modal module node nodes size sizes resize cover type types seeds speed feed need zeros",
    "zeroed hero async syncs synced schedules scheduler scheduled reschedule flat_steps last_step TENSOR_SHAPES",
    "Model Schedule Seed Sync Zero",
)
_ORDINARY = frozenset(word for line in _ORDINARY_WORDS for word in line.split())
_SHORTEST = 4  # shorter keys are within one edit of too many words
_LONG = 12  # from this length on, two edits still identify the key


def squeezed(name: str) -> str:
    """Convert `name` to lower case, without underscores and hyphens."""
    return name.lower().replace("_", "").replace("-", "")


def near(name: str, known: Iterable[str], edits: int = 1) -> str | None:
    """The known name most similar to `name`, if at most about `edits` letters differ."""

    def likeness(candidate: str) -> float:
        return SequenceMatcher(None, name, candidate, autojunk=False).ratio()

    found = [
        candidate
        for candidate in known
        if abs(len(candidate) - len(name)) <= edits
        and likeness(candidate) >= 1 - (edits + 0.01) / max(len(candidate), len(name))
    ]
    return max(found, key=likeness, default=None)


def is_ordinary(name: str, known: Collection[str]) -> bool:
    """Whether `name` is probably a custom name in spite of a similar known name. Examples: `seeds`, `model2`, `_zero`."""
    word = name.rstrip("_0123456789")
    numbered = name[-1:].isdigit() and word in known
    marked = "_" not in word and name.rstrip("_") in known
    return name.startswith("_") or word in _ORDINARY or numbered or marked


def near_miss(name: str, known: Collection[str]) -> str | None:
    """The Colonnade key that the user probably meant by the top-level key `name`; None if `name` is probably a custom key.

    Case and underscores are ignored (`clipGradNorm`). Otherwise only keys of the same case are compared. Short and UPPER_CASE
    keys need a closer match, because users have many of their own.
    """
    if is_ordinary(name, known):
        return None
    if not name.islower() and not name.isupper():
        return next((key for key in known if squeezed(key) == squeezed(name)), None)
    alike = [key for key in known if key.isupper() == name.isupper() and len(key) >= _SHORTEST]
    return near(name, alike) or near(name, [key for key in alike if key.islower() and len(key) >= _LONG], edits=2)


@dataclass(frozen=True)
class Foreign:
    """The names that other frameworks use for the key at `target`, and the text to write instead (`{}` stands for the value
    found)."""

    target: KeyPath
    write: str
    words: str


_FOREIGN = (
    Foreign(
        ("activation_checkpoint",),
        "activation_checkpoint = 'full' or 'selective', or dict(mode=..., every=..., offload=...)",
        "activation_checkpointing activation_ckpt checkpoint_activations recompute_activations recompute_granularity "
        "activation_offload offload_activations cpu_offload_activations",
    ),
    Foreign(
        ("clip_grad_norm",),
        "clip_grad_norm = {}",
        "gradient_clipping gradient_clip gradient_clip_val gradient_clip_value gradient_clip_norm grad_clip "
        "grad_clip_norm grad_clip_val grad_clipping grad_norm_clip grad_norm_clipping gradient_norm_clipping "
        "clip_grad clip_grads clip_norm clip_gradient clip_gradients clip_gradient_norm clip_gradients_norm "
        "max_grad_norm max_gradient_norm gradient_max_norm grad_max_norm",
    ),
    Foreign(
        ("gradient_accumulation",),
        "gradient_accumulation = {}",
        "grad_accum grad_accum_steps grad_acc grad_acc_steps grad_accumulation grad_accumulation_steps "
        "gradient_accumulation_steps gradient_accumulation_step gradient_accumulate "
        "gradient_accumulate_steps gradient_accumulate_every gradient_accum gradient_accum_steps "
        "accumulate_grad accumulate_grads accumulate_grad_batches accumulate_gradient accumulate_gradients "
        "accumulate_steps accumulate_size "
        "accumulation_steps accum_steps num_accumulation_steps",
    ),
    Foreign(("gradient_handler",), "gradient_handler = [dict(type='...')]", "grad_handler grad_handlers"),
    Foreign(
        ("zero",),
        "zero = 1, 2 or 3, or zero = dict(stage=...)",
        "zero_optimization zero_optimisation zero_optimizer zero_stage zero_level zero_config use_zero "
        "zero1 zero2 zero3 fsdp fsdp_config fully_shard",
    ),
    Foreign(
        ("parallel", "tensor"),
        "parallel = dict(tensor=dict(size=..., mode=...))",
        "tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel "
        "tensor_model_parallel_size model_parallel model_parallel_size tp tp_size tp_degree",
    ),
    Foreign(
        ("parallel", "pipeline"),
        "parallel = dict(pipeline=...)",
        "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel "
        "pipeline_model_parallel_size pipeline_size pp pp_size pp_degree",
    ),
    Foreign(
        ("parallel", "data"),
        "parallel = dict(data=...)",
        "data_parallel data_parallel_size data_parallel_degree dp dp_size dp_degree",
    ),
    Foreign(
        ("parallel", "data"),
        "nothing: the remaining ranks are data parallel automatically (parallel = dict(data=...) requires a number)",
        "ddp use_ddp ddp_config distributed_data_parallel",
    ),
    Foreign(
        ("parallel", "sequence"),
        "parallel = dict(sequence=...)",
        "sequence_parallel sequence_parallel_size sequence_parallel_degree context_parallel "
        "context_parallel_size context_parallel_degree sp sp_size cp cp_size",
    ),
    Foreign(
        ("parallel", "expert"),
        "parallel = dict(expert=...)",
        "expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size ep ep_size",
    ),
    Foreign(
        ("fp16",),
        "fp16 = dict(...) or bf16 = True",
        "precision mixed_precision mixed_precision_training amp use_amp amp_backend amp_level autocast "
        "half_precision use_fp16 fp16_enabled enable_fp16",
    ),
    Foreign(("bf16",), "bf16 = True", "use_bf16 bf16_enabled enable_bf16 use_bfloat16"),
    Foreign(("schedule",), "schedule = dict(type='...')", "pipeline_schedule"),
    Foreign(
        ("num_microbatches",),
        "num_microbatches = {}",
        "num_micro_batches n_microbatches micro_batches",
    ),
    Foreign(
        ("model", "num_chunks"),
        "model = dict(num_chunks=...)",
        "num_model_chunks virtual_pipeline_size virtual_pipeline_model_parallel_size",
    ),
    Foreign(
        ("sync", "bucket_mb"),
        "sync = dict(bucket_mb=...)",
        "bucket_cap_mb reduce_bucket_size ddp_bucket_size",
    ),
    Foreign(("sync", "overlap"), "sync = dict(overlap=...)", "overlap_comm overlap_grad_reduce"),
)
ALIASES: dict[str, str] = {}
"""Valid aliases of top-level keys: `colonnade.compat` adds those of Colossal-AI."""

_BY_WORD = {squeezed(word): entry for entry in _FOREIGN for word in entry.words.split()}


def foreign_word(name: str, value: Any, config: Mapping[str, Any]) -> str | None:
    """The message for a key name of another framework; None if `name` is no such name.

    A name whose value equals that of the corresponding key in the same config is a helper variable, and returns None:
    `TP_SIZE = 2` before `parallel = dict(tensor=dict(size=TP_SIZE))`.
    """
    entry = _BY_WORD.get(squeezed(name))
    if entry is None or name.startswith("_") or name in entry.target or _has_value(config, entry.target, value):
        return None
    write = entry.write.format(shortened(value))
    return f"is not read: it is another framework's word for `{'.'.join(entry.target)}`. Write {write}"


def _has_value(config: Mapping[str, Any], target: KeyPath, value: Any) -> bool:
    """Whether the key at `target` has this value, directly or as the main entry of its dict."""
    found: Any = config
    for key in target:
        if not isinstance(found, Mapping) or key not in found:
            return False
        found = found[key]
    if isinstance(found, Mapping):
        found = next((found[key] for key in ("size", "max_norm", "stage") if key in found), None)
    return found is not None and type(found) is type(value) and bool(found == value)
