"""The table of keys that Colonnade reads from a config: what each may hold, and what it means.

A new key is one more entry here; checking, suggestions and the list of all keys follow from it. All ranks must have the same values, which is
compared at launch, but for keys in `differing(...)`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from colonnade.config.problems import ConfigSource, Problem, config_error, foreign_word, near_miss
from colonnade.config.rules import (
    AMP_MODE,
    ANYTHING,
    BOOL,
    COUNT,
    DTYPE,
    FRACTION,
    INT,
    LOSS_SCALE,
    NO_KEY,
    NONE,
    ORDER,
    POSITIVE,
    SHAPE,
    SOME_TEXTS,
    TEXT,
    TEXTS,
    Rule,
    Section,
    any_of,
    check_value,
    choice,
    differing,
    int_from,
    int_within,
    number_above,
    number_from,
    only_dict,
    with_dict,
)


def _words(**by_key: str) -> dict[str, str]:
    """Turn key="word word" into {word: key}."""
    return {word: key for key, words in by_key.items() for word in words.split()}


_SPEC = Section({"type": TEXT.means("its registered name")}, required=("type",), is_open=True)
_NAMED = with_dict(Rule("a registered name", TEXT.accepts), _SPEC, "dict(type='Name', ...)")
_HANDLERS = Rule("a list: [dict(type='Name', ...), ...]", items=_NAMED)

_AXIS = {
    "size": COUNT.means("how many ranks a group of it has"),
    "mode": any_of(TEXT, NONE).means("which initializer makes the groups: a key of INITIALIZER_MAPPING"),
}
_REST = any_of(COUNT, NONE, choice(-1), choice("auto"))
_OWN_AXIS = Section(_AXIS, required=("size",), is_open=True)
_OVER = any_of(TEXT, TEXTS, NONE).means("the axes that experts lie on")
_EXPERT = Section({**_AXIS, "over": _OVER}, required=("size",), is_open=True)
_PARALLEL = Section(
    {
        "data": with_dict(_REST, Section({"size": _REST.means("how many ranks")}, ("size",)), "dict(size=...)").means(
            "data-parallel size; None, -1 or 'auto': what the other axes leave"
        ),
        "pipeline": with_dict(
            any_of(COUNT, NONE), Section({"size": COUNT.means("how many stages")}, ("size",)), "dict(size=...)"
        ).means("number of pipeline stages"),
        "tensor": with_dict(any_of(COUNT, NONE), _OWN_AXIS, "dict(size=..., mode=..., ...)").means(
            "tensor parallelism; further keys go to the mode's initializer"
        ),
        "expert": with_dict(any_of(COUNT, NONE), _EXPERT, "dict(size=..., over=..., ...)").means("expert parallelism"),
        "sequence": with_dict(any_of(COUNT, NONE), _OWN_AXIS, "dict(size=..., mode=..., ...)").means(
            "sequence parallelism"
        ),
    },
    others=only_dict(_OWN_AXIS, "dict(size=..., mode=..., ...)"),
    renamed=_words(
        data="dp ddp data_parallel data_parallel_size dp_size",
        pipeline="pp pipe pipeline_parallel pipeline_parallel_size pp_size",
        tensor="tp model tensor_parallel tensor_parallel_size tp_size",
        expert="ep moe expert_parallel expert_parallel_size ep_size",
        sequence="sp cp context sequence_parallel sequence_parallel_size context_parallel",
    ),
    refused={
        word: f"belongs to an axis: parallel = dict(tensor=dict(size=..., {word}=...))" for word in ("mode", "depth")
    },
)

_GROUP = Section(
    {
        "params": any_of(TEXT, SOME_TEXTS).means("names of its parameters, as patterns"),
        "max_norm": any_of(POSITIVE, NONE).means("a limit of its own; None: clipped with the rest"),
        "counted": BOOL.means("whether it is part of the total norm"),
        "clipped": BOOL.means("whether it is clipped at all"),
    },
    required=("params",),
    renamed=_words(max_norm="max"),
)
_GROUP_FORM = "dict(params=<name patterns>, max_norm=..., counted=..., clipped=...)"
_CLIP = Section(
    {
        "max_norm": any_of(number_from(0), NONE).means("largest global norm; 0: off, inf: only measure"),
        "norm_type": ORDER.means("p of the norm"),
        "groups": Rule(
            f"a dict of {_GROUP_FORM} by name or None", NONE.accepts, Section({}, others=only_dict(_GROUP, _GROUP_FORM))
        ).means("parameters that are clipped apart"),
        "nonfinite": any_of(choice("skip", "raise", "propagate"), NONE).means("what to do when the norm is nan or inf"),
        "method": with_dict(any_of(TEXT, NONE), _SPEC, "dict(type='Name', ...)").means("how the threshold is found"),
        "per": choice("group", "layer", "parameter").means(
            "what is clipped by its own norm; group: the whole, and groups with a max_norm"
        ),
        "report": choice("group", "layer", "parameter").means(
            "what engine.grad_norms() tells apart; the same as `per` by itself"
        ),
    },
    renamed=_words(
        max_norm="max_grad_norm clip_grad_norm clip_norm norm value max",
        norm_type="p",
        nonfinite="error_if_nonfinite",
    ),
)

_FP16 = Section(
    {
        "mode": any_of(choice("torch", "apex", "naive"), AMP_MODE, NONE).means("kind of mixed precision"),
        "init_scale": LOSS_SCALE.means("loss scale to start from"),
        "growth_factor": number_above(1).means("the scale grows by this factor"),
        "backoff_factor": FRACTION.means("the scale shrinks by this factor after an overflow"),
        "growth_interval": COUNT.means("steps without overflow before the scale grows"),
        "min_scale": any_of(LOSS_SCALE, NONE).means("smallest loss scale"),
        "max_scale": any_of(LOSS_SCALE, NONE).means("largest loss scale"),
        "hysteresis": COUNT.means("overflows before the scale shrinks"),
        "enabled": BOOL.means("False: as if fp16 were left out"),
        "dynamic_grad_scale": BOOL.means("whether the scale moves at all"),
    },
    renamed=_words(
        init_scale="initial_scale loss_scale initial_scale_power scale",
        growth_interval="loss_scale_window",
        min_scale="min_loss_scale",
        max_scale="max_loss_scale",
        mode="opt_level type",
    ),
    refused={"verbose": "is not read: changes of the scale are not logged. Leave it out"},
)
_BF16 = Section({"master_weights": BOOL.means("the optimizer steps on fp32 weights")})
_FLOAT8 = Section(
    {
        "recipe": choice("tensorwise", "rowwise", "rowwise_with_gw_hp").means("how torchao scales values"),
        "skip": any_of(TEXT, TEXTS, NONE).means("layers that keep their dtype, by name"),
        "emulate": BOOL.means("try it out where there is no float8 hardware"),
    }
)

_OLD_ZERO = (
    "is an older form. Write zero = dict(stage=3, offload='cpu'); settings of the loss scale go to fp16 = dict(...)"
)
_STAGE = choice(0, 1, 2, 3)
_ZERO = Section(
    {
        "stage": _STAGE.means("1: optimizer state is sharded, 2: and gradients, 3: and parameters"),
        "reduce_scatter": BOOL.means("reduce-scatter gradients instead of all-reduce"),
        "offload": any_of(BOOL, TEXT, NONE).means("device that keeps the shards between steps"),
        "bucket_mb": POSITIVE.means("bucket size in MiB"),
        "gather_ahead": BOOL.means("stages 1, 2: gather parameters while the next forward pass runs"),
        "prefetch": int_from(0).means("stage 3: how many modules are gathered ahead"),
        "master_weights": BOOL.means("the optimizer steps on fp32 weights"),
        "replicate": any_of(TEXT, NONE).means("stage 3: the axis on which shards are replicas (HSDP)"),
        "wrap": any_of(TEXT, TEXTS, NONE).means("stage 3: names of the modules that are gathered one by one"),
        "reshard": BOOL.means("stage 3: give parameters back after their forward pass"),
    },
    required=("stage",),
    renamed=_words(
        stage="zero_stage level",
        offload="cpu_offload offload_optimizer offload_param",
        bucket_mb="reduce_bucket_size bucket_cap_mb reduce_scatter_bucket_size_mb",
    ),
    refused={"model_config": _OLD_ZERO, "optimizer_config": _OLD_ZERO},
)

_MODES = choice("none", "full", "selective")
_ACTIVATIONS = Section(
    {
        "mode": _MODES.means("what a block computes again in backward: nothing, everything, all but the ops of `keep`"),
        "every": COUNT.means("of the blocks, every n-th one"),
        "blocks": any_of(TEXT, TEXTS, NONE).means(
            "their classes, or patterns of module names; left out, they are looked for"
        ),
        "keep": any_of(TEXTS, NONE).means("mode 'selective': ops whose results are kept, such as 'aten.mm'"),
        "offload": BOOL.means("what is kept for backward lies in the host's memory"),
    },
    renamed=_words(
        mode="type policy granularity", blocks="modules layers wrap", every="every_n interval", offload="cpu_offload"
    ),
)

_SYNC = Section(
    {
        "bucket_mb": POSITIVE.means("bucket size in MiB"),
        "first_bucket_mb": POSITIVE.means("size of the bucket that is ready first"),
        "overlap": any_of(BOOL, choice("auto")).means("reduce while backward runs"),
        "reduce_dtype": any_of(DTYPE, TEXT, NONE).means("dtype of the reduction, at every stage of zero"),
        "compress": any_of(choice("bf16", "fp16"), NONE).means("dtype in which gradients are sent"),
        "fixed_order": BOOL.means("the same order of sums in every run"),
        "shared_memory": any_of(BOOL, choice("auto"), NONE).means("reduce in shared memory on one host"),
        "automatic": BOOL.means("attach handlers for what no named handler does"),
        "waive": any_of(TEXT, TEXTS, NONE).means("parameters that nobody need synchronise, by name"),
    },
    renamed=_words(
        bucket_mb="bucket_cap_mb bucket_size_mb bucket_size bucket",
        overlap="overlap_comm overlap_grad_reduce",
        compress="comm_hook",
        reduce_dtype="dtype",
        fixed_order="deterministic",
    ),
)

_GUARD = Section(
    {"every": COUNT.means("steps between two comparisons")}, renamed=_words(every="interval every_n steps")
)

_MODEL = Section({"num_chunks": COUNT.means("model chunks per pipeline rank")}, is_open=True)

_COMPILE = Section({"blocks": BOOL.means("False: the model in one piece")}, is_open=True)

KEYS: dict[str, Rule] = {
    "parallel": only_dict(_PARALLEL, "a dict of data, pipeline, tensor, expert, sequence and axes of your own").means(
        "how the ranks are divided into axes"
    ),
    "gradient_handler": _HANDLERS.means("gradient handlers to add to what the placements demand"),
    "gradient_handlers": _HANDLERS.means("another name of gradient_handler"),
    "clip_grad_norm": with_dict(number_from(0), _CLIP).means("clip to this global norm; 0: off"),
    "gradient_accumulation": COUNT.means("batches per optimizer step"),
    "fp16": with_dict(BOOL, _FP16).means("fp16 mixed precision with a loss scale"),
    "bf16": with_dict(BOOL, _BF16).means("bf16 mixed precision"),
    "float8": with_dict(BOOL, _FLOAT8).means("linear layers in float8, by torchao"),
    "zero": with_dict(_STAGE, _ZERO).means("sharding over the data axis"),
    "schedule": _NAMED.means("how one step's passes run; further keys go to the schedule"),
    "sync": only_dict(_SYNC).means("how gradients are reduced"),
    "compare_stages": BOOL.means(
        "False: pipeline stages that `split` has not made may be alike in names, shapes and values of their parameters"
    ),
    "guard": with_dict(BOOL, _GUARD).means(
        "compare replicas and the calls of handlers between ranks every so many steps"
    ),
    "compare_batches": BOOL.means("compare the first batches of ranks that see the same data; on unless False"),
    "activation_checkpoint": with_dict(any_of(BOOL, _MODES), _ACTIVATIONS).means(
        "which activations are computed again in backward, or kept on the host; True: 'full'"
    ),
    "flat_step": BOOL.means("run the optimizer on flat buffers"),
    "graph_step": BOOL.means("run the flat step and the clipping as CUDA graphs"),
    "compile": with_dict(BOOL, _COMPILE, "dict of torch.compile's options").means(
        "torch.compile the model, block by block"
    ),
    "seed": INT.means("seed of every random stream"),
    "cudnn_benchmark": BOOL.means("let cuDNN search for the fastest algorithm"),
    "cudnn_deterministic": BOOL.means("let cuDNN use deterministic algorithms only"),
    "compare_weights": BOOL.means(
        "False: ranks that have the same seed may start with other weights; the first's are taken"
    ),
    "model": differing(Rule("anything", ANYTHING.accepts, _MODEL)).means("your own, but for num_chunks"),
    "num_microbatches": int_within(1, 1 << 16).means("micro-batches per step of a pipeline"),
    "TENSOR_SHAPE": SHAPE.means("shape sent between stages; left out, the stages ask each other"),
}
"""Every top-level key that is ours. Under each of them None stands for "not set"."""

REFUSED: dict[str, str] = {
    "torch_ddp": "is not read: torch DDP is never wrapped around a model. "
    "Write sync = dict(bucket_mb=..., overlap=...)",
    "max_ep_size": "is not read. Write parallel = dict(expert=...), the number of ranks that experts are divided over",
}
"""Keys that mean something elsewhere and nothing here, with what to write instead."""


# --------------------------------------------------------------------------------------------------
# All keys of the schema in one list: what `colonnade config --keys` and the reference page show.
# --------------------------------------------------------------------------------------------------


class Key(NamedTuple):
    """One key: its path in a config (`zero.stage`; `NAME` stands for a name of yours), and what the schema says of it."""

    path: str
    allows: str
    means: str
    required: bool = False


def all_keys() -> list[Key]:
    """Every key that is ours, in the order of the schema, each section after its own key."""
    return list(_of(Section(KEYS), ()))


def _of(section: Section, path: tuple[str, ...]) -> Iterator[Key]:
    for name, rule in section.keys.items():
        yield Key(".".join((*path, name)), rule.allows, rule.purpose, name in section.required)
        yield from _below(rule, (*path, name))
    if section.others is not None:
        yield from _below(section.others, (*path, "NAME"))


def _below(rule: Rule, path: tuple[str, ...]) -> Iterator[Key]:
    if rule.section is not None:
        yield from _of(rule.section, path)
    if rule.items is not None:
        yield from _below(rule.items, (*path[:-1], f"{path[-1]}[]"))


# --------------------------------------------------------------------------------------------------
# The check of a whole config: every problem at once, before any process group exists.
# --------------------------------------------------------------------------------------------------


def require_valid(values: Mapping[str, Any], source: ConfigSource) -> None:
    """Raise one ConfigError that tells every problem of `values`; return when there is none."""
    found = [*_keys(values), *_combinations(values)]
    if found:
        raise config_error(found, source)


def _keys(values: Mapping[Any, Any]) -> Iterator[Problem]:
    for key, value in values.items():
        if not isinstance(key, str) or not key:
            yield Problem((key,), NO_KEY, value)
        elif value is None and key in KEYS:
            continue
        elif key in KEYS:
            yield from check_value(KEYS[key], (key,), value)
        else:
            yield from _others(key, value, values)


def _others(key: str, value: Any, values: Mapping[str, Any]) -> Iterator[Problem]:
    """A key that is not ours is the user's own, unless it was meant to be ours."""
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        return  # a helper of the config file: nobody means a setting by a function
    text = REFUSED.get(key) or foreign_word(key, value, values)
    if text is None and (close := near_miss(key, KEYS)):
        text = f"unknown key. Did you mean `{close}`? A key of your own needs a less similar name"
    if text is not None:
        yield Problem((key,), text, value)


def _combinations(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Values that are right one by one and wrong together."""
    if values.get("gradient_handler") is not None and values.get("gradient_handlers") is not None:
        yield Problem(("gradient_handlers",), "is set beside gradient_handler, its other name: keep one")
    if _is_on(values.get("fp16")) and _is_on(values.get("bf16")):
        yield Problem(("bf16",), "is on beside fp16: keep one")
    clip = values.get("clip_grad_norm")
    if isinstance(clip, dict) and clip.keys() <= {"norm_type", "nonfinite", "per", "report"}:
        yield Problem(("clip_grad_norm", "max_norm"), "is missing: a number >= 0, or give groups or a method")
    fp16 = values.get("fp16")
    if isinstance(fp16, dict):
        yield from _scales(fp16)


def _scales(fp16: Mapping[str, Any]) -> Iterator[Problem]:
    low, first, high = (
        value if isinstance(value, (int, float)) else None
        for value in (fp16.get("min_scale"), fp16.get("init_scale", 2**16), fp16.get("max_scale"))
    )
    if low is not None and high is not None and low > high:
        yield Problem(("fp16", "min_scale"), f"must not be above max_scale = {high}", low)
    elif low is not None and first is not None and low > first:
        text = f"must not be above init_scale = {first}: give a larger init_scale too"
        yield Problem(("fp16", "min_scale"), text, low)
    elif high is not None and first is not None and high < first:
        text = f"must not be below init_scale = {first}: give a smaller init_scale too"
        yield Problem(("fp16", "max_scale"), text, high)


def _is_on(setting: Any) -> bool:
    switched_off = isinstance(setting, dict) and setting.get("enabled") is False
    return setting is not None and setting is not False and not switched_off


# --------------------------------------------------------------------------------------------------
# The typed reading of `parallel`: what the context asks of a config.
# --------------------------------------------------------------------------------------------------


_BUILT_IN = ("data", "pipeline", "tensor", "expert")


@dataclass(frozen=True)
class AxisSpec:
    """One axis: its name in `parallel`, its size, its mode, and the arguments of the mode's initializer."""

    name: str
    size: int
    mode: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ParallelSizes:
    """The sizes that a config asks for.

    `data` is None where it is whatever the other axes leave. `axes` are the further ones in the order they
    were written: `sequence` and the user's own.
    """

    data: int | None = None
    pipeline: int = 1
    tensor: int = 1
    tensor_mode: str | None = None
    tensor_kwargs: dict[str, Any] = field(default_factory=dict)
    expert: AxisSpec | None = None
    axes: tuple[AxisSpec, ...] = ()


def least_world(config: Mapping[str, Any]) -> int:
    """One replica of everything else, or two so that there is something to sum; more where experts lie on data ranks."""
    sizes = parallel_sizes(config)
    rest = sizes.pipeline * sizes.tensor * prod(axis.size for axis in sizes.axes)
    expert = sizes.expert.size if sizes.expert is not None else 1
    return rest * (sizes.data or max(2, expert))


def parallel_sizes(config: Mapping[str, Any]) -> ParallelSizes:
    """Read `config["parallel"]`; a key left out or None has size 1, and `data` takes what is left.

    A `parallel` that cannot be used is a ConfigError, as when the config was loaded.
    """
    parallel = config.get("parallel")
    require_valid({"parallel": parallel}, ConfigSource())
    parallel = parallel or {}
    tensor = _axis("tensor", parallel.get("tensor"))
    return ParallelSizes(
        data=_data_size(parallel.get("data")),
        pipeline=_axis("pipeline", parallel.get("pipeline")).size,
        tensor=tensor.size,
        tensor_mode=tensor.mode,
        tensor_kwargs=tensor.kwargs,
        expert=None if parallel.get("expert") is None else _axis("expert", parallel["expert"]),
        axes=tuple(
            _axis(name, value) for name, value in parallel.items() if name not in _BUILT_IN and value is not None
        ),
    )


def _axis(name: str, value: Any) -> AxisSpec:
    """An axis from its checked value: a size, None for size 1, or a dict."""
    if not isinstance(value, Mapping):
        return AxisSpec(name, 1 if value is None else int(value))
    kwargs = {key: item for key, item in value.items() if key not in ("size", "mode")}
    return AxisSpec(name, int(value["size"]), value.get("mode"), kwargs)


def _data_size(value: Any) -> int | None:
    size = value["size"] if isinstance(value, Mapping) else value
    return None if size in (None, -1, "auto") else int(size)
