"""All config keys as dataclasses: name, type, default, allowed values and purpose of a key in one place.

A section is a frozen dataclass whose fields are `key(default, rule, purpose)`. The check of a config, `colonnade config --keys`,
the reference page, the comparison between ranks and the settings objects (`ZeroSettings.read(config.get("zero"))`) all use it. A
new key is one new field. Combinations of values are checked in `conflicts` (when the config is loaded) or `refuse` (when the
section is read). All ranks must have the same values, which `launch` compares, except for keys with `may_differ=True`.

`Settings`, after the sections, contains the top-level keys. `require_valid`, at the end, checks a complete config.
No torch at the top: a config is checked before torch is imported.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from math import inf, prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, cast

from colonnade.config.fields import (
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
    AnySection,
    Rule,
    Section,
    SwitchedSection,
    any_of,
    check_value,
    choice,
    int_from,
    int_within,
    key,
    keys_of,
    number_above,
    number_from,
    only_dict,
    with_dict,
)
from colonnade.config.problems import UNSAID, ConfigSource, Problem, config_error, foreign_word, near_miss, squeezed
from colonnade.errors import ConfigError, did_you_mean, listed

if TYPE_CHECKING:
    import torch

_NAMES = any_of(TEXT, TEXTS, NONE)


def as_names(value: Any) -> tuple[str, ...]:
    """Convert a name or a list of names to a tuple."""
    return (value,) if isinstance(value, str) else tuple(value)


# --- Choices by a registered name ---


@dataclass(frozen=True)
class NamedChoice(Section, required=("type",), short="type", further="options"):
    """The registered name and the arguments of a gradient handler, a schedule or a clip method."""

    type: str | None = key(None, TEXT, "registered name")
    options: Mapping[str, Any] = field(default_factory=dict)


_NAMED = with_dict(Rule("a registered name", TEXT.accepts), NamedChoice, "dict(type='Name', ...)")
_HANDLERS = Rule("a list: [dict(type='Name', ...), ...]", items=_NAMED)


# --- parallel ---


_REST = any_of(COUNT, NONE, choice(-1), choice("auto"))
_AXIS_FORM = "dict(size=..., mode=..., ...)"


@dataclass(frozen=True)
class DataAxis(Section, required=("size",)):
    """The keys of `parallel.data`, if it is a dict."""

    size: int | None = key(None, _REST, "number of ranks")


@dataclass(frozen=True)
class PipelineAxis(Section, required=("size",)):
    """The keys of `parallel.pipeline`, if it is a dict."""

    size: int = key(1, COUNT, "number of stages")


@dataclass(frozen=True)
class AxisSpec(Section, required=("size",), short="size", further="kwargs"):
    """One axis: its name in `parallel`, its size, its mode, and the arguments of the initializer of the mode."""

    name: str = ""
    size: int = key(1, COUNT, "ranks per group", read=int)
    mode: str | None = key(
        None, any_of(TEXT, NONE), "initializer of the groups; for tensor the scheme: '1d', '2d', '2.5d', '3d'"
    )
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExpertAxis(AxisSpec, required=("size",), short="size", further="kwargs"):
    """The keys of `parallel.expert`, if it is a dict. Read as an `AxisSpec` whose initializer gets the argument `over`."""

    over: tuple[str, ...] = key((), _NAMES, "axes over which experts are sharded", read=as_names)


@dataclass(frozen=True)
class ParallelSizes(
    Section,
    others=only_dict(AxisSpec, _AXIS_FORM),
    renamed=dict(
        data="dp ddp data_parallel data_parallel_size dp_size",
        pipeline="pp pipe pipeline_parallel pipeline_parallel_size pp_size",
        tensor="tp model tensor_parallel tensor_parallel_size tp_size",
        expert="ep moe expert_parallel expert_parallel_size ep_size",
        sequence="sp cp context sequence_parallel sequence_parallel_size context_parallel",
    ),
    refused={
        word: f"belongs to an axis: parallel = dict(tensor=dict(size=..., {word}=...))" for word in ("mode", "depth")
    },
):
    """The parallel sizes of a config; an unset key or None means size 1.

    `data` is None if the config does not set it: then it is the number of ranks divided by the other sizes. `axes` has `sequence`
    and the custom axes, in the order of the config.
    """

    data: int | None = key(
        None,
        with_dict(_REST, DataAxis, "dict(size=...)"),
        "data-parallel size; None, -1 or 'auto': all remaining ranks",
    )
    pipeline: int = key(1, with_dict(any_of(COUNT, NONE), PipelineAxis, "dict(size=...)"), "number of pipeline stages")
    tensor: int = key(
        1,
        with_dict(any_of(COUNT, NONE), AxisSpec, _AXIS_FORM),
        "tensor parallelism; further keys are arguments of the initializer",
    )
    tensor_mode: str | None = None
    tensor_kwargs: dict[str, Any] = field(default_factory=dict)
    expert: AxisSpec | None = key(
        None, with_dict(any_of(COUNT, NONE), ExpertAxis, "dict(size=..., over=..., ...)"), "expert parallelism"
    )
    sequence: AxisSpec | None = key(None, with_dict(any_of(COUNT, NONE), AxisSpec, _AXIS_FORM), "context parallelism")
    axes: tuple[AxisSpec, ...] = ()

    @classmethod
    def read(cls, given: Any) -> Self:
        values = {name: value for name, value in (given or {}).items() if value is not None}
        data = values.pop("data", None)
        size = data["size"] if isinstance(data, Mapping) else data
        axes = {name: replace(AxisSpec.read(value), name=name) for name, value in values.items()}
        unset = AxisSpec()
        pipeline, tensor, expert = (axes.pop(name, None) for name in ("pipeline", "tensor", "expert"))
        return cls(
            data=None if size in (None, -1, "auto") else int(size),
            pipeline=(pipeline or unset).size,
            tensor=(tensor or unset).size,
            tensor_mode=(tensor or unset).mode,
            tensor_kwargs=(tensor or unset).kwargs,
            expert=expert,
            sequence=axes.get("sequence"),
            axes=tuple(axes.values()),
        )


def parallel_sizes(config: Mapping[str, Any]) -> ParallelSizes:
    """Check and read `config["parallel"]`. Raises ConfigError as `load_config` does."""
    require_valid({"parallel": config.get("parallel")}, ConfigSource())
    return ParallelSizes.read(config.get("parallel"))


def least_world(config: Mapping[str, Any]) -> int:
    """The smallest useful number of ranks for a config: two data-parallel replicas, or as many as experts need."""
    sizes = parallel_sizes(config)
    rest = sizes.pipeline * sizes.tensor * prod(axis.size for axis in sizes.axes)
    expert = sizes.expert.size if sizes.expert is not None else 1
    return rest * (sizes.data or max(2, expert))


# --- clip_grad_norm ---


NonFinite = Literal["skip", "raise", "propagate"]
Per = Literal["group", "layer", "parameter"]
_GROUP_FORM = "dict(params=<name patterns>, max_norm=..., counted=..., clipped=...)"


@dataclass(frozen=True)
class ClipGroup(Section, required=("params",), renamed=dict(max_norm="max")):
    """A named group of parameters, chosen by the name patterns in `params`.

    `counted`: its gradients are part of the total norm. `clipped`: its gradients are scaled. A group with `max_norm` is clipped by
    its own norm, any other by the total norm and the clip method.
    """

    name: str = ""
    params: tuple[str, ...] = key(
        (), any_of(TEXT, SOME_TEXTS), "name patterns of the parameters", read=as_names, compare=False
    )
    max_norm: float | None = key(
        None, any_of(POSITIVE, NONE), "limit for the norm of this group; None: clipped with the rest", read=float
    )
    counted: bool = key(True, BOOL, "whether the group is part of the total norm")
    clipped: bool = key(True, BOOL, "whether the group is clipped")

    def __post_init__(self) -> None:
        if self.max_norm is not None:
            positive(f"max_norm of clip group {self.name!r}", self.max_norm)


@dataclass(frozen=True)
class ClipGroups(Section, others=only_dict(ClipGroup, _GROUP_FORM)):
    """`clip_grad_norm.groups`: the groups by name."""


def positive(name: str, value: float) -> float:
    """Convert `value` to a float. Raises ConfigError unless it is above 0 (inf is allowed); `name` is the key in the message."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not value > 0
        or (isinstance(value, int) and value >= 2**63)
    ):
        raise ConfigError(f"{name} must be a number > 0 (inf measures without clipping), not {value!r}", code="C003")
    return float(value)


def _groups(given: Mapping[str, Any]) -> tuple[ClipGroup, ...]:
    return tuple(replace(ClipGroup.read(group), name=name) for name, group in given.items())


@dataclass(frozen=True)
class ClipSettings(
    SwitchedSection,
    short="max_norm",
    renamed=dict(
        max_norm="max_grad_norm clip_grad_norm clip_norm norm value max",
        norm_type="p",
        nonfinite="error_if_nonfinite",
    ),
):
    """Gradient clipping.

    `engine.stepper.Stepper` creates a `optim.clip.ClipPolicy` from it, which does the clipping.

    `max_norm` and `options` are the arguments of the clip method: inf measures without clipping, None is the default of
    the method. `per` chooses the norm groups: the full gradient (and groups with their own limit), each layer, or each
    parameter. `report` chooses the norm groups of `engine.grad_norms()`; None: those of `per`.

    `verify` interprets clipping a second time, so that no code of the engine is part of the reference. A key that
    changes the divisor must also be handled in these places of `colonnade.proof`:

    | place | what it takes from clipping |
    |---|---|
    | `api._limit_of` | reads these settings and builds the `Limit` of the single-process run of `verify(engine)` |
    | `reference.Limit.divisors` | computes the divisors of a step from the gradients of the single process |
    | `record.info_of` | reads these settings and copies `max_norm` and `norm_type` to `RunInfo` |
    | `compare.Evidence.max_norm` | the limit of all gradients, which `assemble` copies from `RunInfo` for the hypotheses |
    | `case.ClipCase` | computes the clip coefficient for a norm (`limit`, `due`, `by`) |
    | `mutation.limit_of`, `clip_by` | read these settings, and compute the divisor of injected bugs |

    State that depends on earlier steps: the state of a clip method other than "norm" belongs to `ClipMethod.state`
    only, because `verify` takes the recorded divisors of the run (`RecordedStep.divisors`, `Limit.factors`). If "norm"
    itself gets such state: `Limit` is frozen and is shared by the reference and its perturbed runs, so the state starts
    anew in `OneProcess.run`, which passes the number of the step to `Limit.divisors`. A limit that differs between
    steps moves from `Evidence` to `StepEvidence`, and `clip_by` reads it in each step.
    """

    max_norm: float | None = key(
        None, any_of(number_from(0), NONE), "maximum global norm; 0: off, inf: only measure", read=float
    )
    norm_type: float = key(2.0, ORDER, "p of the p-norm", read=float)
    groups: tuple[ClipGroup, ...] = key(
        (),
        Rule(f"a dict of {_GROUP_FORM} by name or None", NONE.accepts, ClipGroups),
        "parameter groups with their own limits",
        read=_groups,
    )
    nonfinite: NonFinite = key(
        "skip", any_of(choice("skip", "raise", "propagate"), NONE), "action if the norm is nan or inf"
    )
    method: str = key(
        "norm",
        with_dict(any_of(TEXT, NONE), NamedChoice, "dict(type='Name', ...)"),
        "clip method, which determines the threshold",
    )
    options: Mapping[str, Any] = field(default_factory=dict)
    per: Per = key(
        "group",
        choice("group", "layer", "parameter"),
        "norm groups; group: all parameters, and groups with a max_norm",
    )
    report: Per | None = key(
        None,
        choice("group", "layer", "parameter"),
        "norm groups of engine.grad_norms(); default: those of `per`",
    )

    @classmethod
    def conflicts(cls, given: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
        if given.keys() <= {"norm_type", "nonfinite", "per", "report"}:
            yield "max_norm", "is missing: a number >= 0, or give groups or a method", UNSAID

    @classmethod
    def read(cls, given: Any) -> Self | None:
        """Read a number or a dict; None if clipping is off: no value, 0, or a dict with max_norm=0."""
        settings = super().read(given)
        if settings is None or settings._is_off:
            return None
        # With groups, a missing max_norm or 0 means inf for the rest, which is then only measured.
        return replace(settings, max_norm=inf) if settings.method == "norm" and not settings.max_norm else settings

    @classmethod
    def completed(cls, values: dict[str, Any]) -> dict[str, Any]:
        method = NamedChoice.read(values.pop("method", None))
        options = dict(method.options)
        # clip_grad_norm.max_norm takes precedence over a max_norm among the arguments of the method.
        max_norm = values.pop("max_norm", options.pop("max_norm", None))
        # AdaGC has one threshold per parameter.
        values.setdefault("per", "parameter" if method.type == "adagc" else "group")
        return {**values, "method": method.type or "norm", "options": options, "max_norm": max_norm}

    def refuse(self, given: Mapping[str, Any]) -> None:
        if self.report not in (None, self.per) and self.per != "group" and not self._is_off:
            raise ConfigError(
                f"clip_grad_norm has report={self.report!r} and per={self.per!r}, but norms can be reported only for "
                "the groups that are clipped. Remove report.",
                code="C003",
            )

    @property
    def _is_off(self) -> bool:
        return self.method == "norm" and self.max_norm == 0 and not self.groups

    @property
    def method_options(self) -> dict[str, Any]:
        """The arguments of the clip method."""
        return dict(self.options) if self.max_norm is None else {**self.options, "max_norm": self.max_norm}

    def group_of(self, name: str) -> int:
        """The index of the group of a parameter; the last group is "rest"."""
        for number, group in enumerate(self.groups):
            if any(fnmatchcase(name, pattern) for pattern in group.params):
                return number
        return len(self.groups)

    def clip_groups(self) -> list[ClipGroup]:
        """The named groups, followed by the rest."""
        return [*self.groups, ClipGroup("rest" if self.groups else "all")]


# --- fp16, bf16, float8 ---


@dataclass(frozen=True)
class Fp16Settings(
    SwitchedSection,
    renamed=dict(
        init_scale="initial_scale loss_scale initial_scale_power scale",
        growth_interval="loss_scale_window",
        min_scale="min_loss_scale",
        max_scale="max_loss_scale",
        mode="opt_level type",
    ),
    refused={"verbose": "is not read: changes of the scale are not logged. Leave it out"},
):
    """fp16 mixed precision with a loss scale. `mode` comes from Colossal-AI: all values mean the same, None turns fp16 off."""

    mode: Any = key(None, any_of(choice("torch", "apex", "naive"), AMP_MODE, NONE), "kind of mixed precision")
    init_scale: float = key(2.0**16, LOSS_SCALE, "initial loss scale")
    growth_factor: float = key(2.0, number_above(1), "growth factor of the scale")
    backoff_factor: float = key(0.5, FRACTION, "factor of the scale after an overflow")
    growth_interval: int = key(2000, COUNT, "steps without overflow before the scale grows")
    min_scale: float | None = key(None, any_of(LOSS_SCALE, NONE), "smallest loss scale")
    max_scale: float | None = key(None, any_of(LOSS_SCALE, NONE), "largest loss scale")
    hysteresis: int = key(1, COUNT, "overflows before the scale shrinks")
    enabled: bool = key(True, BOOL, "False: fp16 is off")
    dynamic_grad_scale: bool = key(True, BOOL, "False: the scale stays at its initial value")

    @classmethod
    def conflicts(cls, given: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
        low, first, high = (
            value if isinstance(value, (int, float)) else None
            for value in (given.get("min_scale"), given.get("init_scale", 2**16), given.get("max_scale"))
        )
        if low is not None and high is not None and low > high:
            yield "min_scale", f"must not be above max_scale = {high}", low
        elif low is not None and first is not None and low > first:
            yield "min_scale", f"must not be above init_scale = {first}: give a larger init_scale too", low
        elif high is not None and first is not None and high < first:
            yield "max_scale", f"must not be below init_scale = {first}: give a smaller init_scale too", high

    @classmethod
    def read(cls, given: Any) -> Self | None:
        settings = super().read(given)
        return settings if settings is not None and settings.enabled else None

    @classmethod
    def spelled_out(cls, given: Any) -> Mapping[str, Any]:
        values = super().spelled_out(given)
        return {**values, "enabled": False} if values.get("mode", "any") is None else values

    def refuse(self, given: Mapping[str, Any]) -> None:
        if self.enabled and self.hysteresis != 1:
            raise ConfigError(
                "fp16.hysteresis must be 1, because the loss scale shrinks after every skipped step. Remove it or "
                "set it to 1.",
                code="C003",
            )


@dataclass(frozen=True)
class Bf16Settings(SwitchedSection):
    """bf16 mixed precision. The section `zero` also accepts `master_weights`: see `Precision.read`."""

    master_weights: bool = key(True, BOOL, "the optimizer steps on fp32 weights")


_NOT_IN_FLOAT8 = ("lm_head", "head", "classifier", "output", "router", "gate")


@dataclass(frozen=True)
class Float8Settings(SwitchedSection):
    """Options for linear layers with float8 matrix products.

    `skip`: names or patterns of layers that keep their dtype, in place of the default list. `emulate`: emulate float8 with wider
    dtypes, on any device.
    """

    recipe: str = key("tensorwise", choice("tensorwise", "rowwise", "rowwise_with_gw_hp"), "scaling recipe of torchao")
    skip: tuple[str, ...] = key(_NOT_IN_FLOAT8, _NAMES, "layers that keep their dtype, by name", read=as_names)
    emulate: bool = key(False, BOOL, "emulate float8 on other hardware")


# --- zero ---


_OLD_ZERO = (
    "is an obsolete form. Write zero = dict(stage=3, offload='cpu'); loss scale settings belong to fp16 = dict(...)"
)
_STAGE = choice(0, 1, 2, 3)


def _offload(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value == "cpu":
        return True
    raise ConfigError(f"zero.offload is {value!r}; allowed are True, False and 'cpu'", code="C003")


@dataclass(frozen=True)
class ZeroSettings(
    Section,
    required=("stage",),
    short="stage",
    renamed=dict(
        stage="zero_stage level",
        offload="cpu_offload offload_optimizer offload_param",
        bucket_mb="reduce_bucket_size bucket_cap_mb reduce_scatter_bucket_size_mb",
    ),
    refused={"model_config": _OLD_ZERO, "optimizer_config": _OLD_ZERO},
):
    """The `zero` section: the ZeRO stage, which sets the kinds of state that are sharded, and options.

    All stages use `offload` and `master_weights`; Other keys need certain stages, which `refuse` checks. `gather_dtype`
    (all-gather of fp32 weights) and `reduce_dtype` (reduction of gradients) of stage 3 come from other sections.
    """

    stage: int = key(0, _STAGE, "0: off, 1: optimizer state is sharded, 2: and gradients, 3: and parameters", read=int)
    reduce_scatter: bool = key(True, BOOL, "reduce-scatter gradients instead of all-reduce")
    offload: bool = key(
        False, any_of(BOOL, TEXT, NONE), "'cpu' or True: keep the shards on the host between steps", read=_offload
    )
    bucket_mb: float | None = key(None, POSITIVE, "bucket size in MiB; None: 4 to 100, depending on the transport")
    gather_ahead: bool = key(False, BOOL, "stages 1, 2: all-gather parameters during the next forward pass")
    prefetch: int = key(0, int_from(0), "stage 3: number of modules to all-gather ahead; 0: chosen by torch", read=int)
    master_weights: bool = key(True, BOOL, "the optimizer steps on fp32 weights")
    replicate: str | None = key(None, any_of(TEXT, NONE), "stage 3: axis over which shards are replicated (HSDP)")
    wrap: tuple[str, ...] = key(
        (), _NAMES, "stage 3: names of the modules that are all-gathered separately", read=as_names
    )
    reshard: bool = key(True, BOOL, "stage 3: reshard parameters after their forward pass")
    gather_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def refuse(self, given: Mapping[str, Any]) -> None:
        only = {3: ("replicate", "wrap", "reshard", "prefetch"), 1: ("reduce_scatter",)}
        for stage, names in only.items():
            for name in names:
                if name in given and self.stage != stage and not (name == "reduce_scatter" and self.reduce_scatter):
                    raise ConfigError(
                        f"zero.{name}={given[name]!r} requires ZeRO stage {stage}, not {self.stage}", code="C003"
                    )
        if self.stage == 3:
            for name in ("bucket_mb", "gather_ahead"):
                if name in given:
                    raise ConfigError(
                        f"zero.{name} requires ZeRO stage 1 or 2. At stage 3, FSDP2 groups parameters by module. "
                        f"Remove zero.{name}, or change the stage.",
                        code="C003",
                    )


# --- activation_checkpoint ---


_MODES = choice("none", "full", "selective")


@dataclass(frozen=True)
class ActivationSettings(
    Section,
    short="mode",
    renamed=dict(
        mode="type policy granularity", blocks="modules layers wrap", every="every_n interval", offload="cpu_offload"
    ),
):
    """Activation checkpointing (`mode`, `keep`), activation offloading, and the blocks to which both apply."""

    mode: str = key("none", _MODES, "recomputation in backward: nothing, everything, or all but the ops of `keep`")
    every: int = key(1, COUNT, "apply to every n-th block")
    blocks: tuple[str, ...] = key(
        (), _NAMES, "classes or name patterns of the blocks; default: detected", read=as_names
    )
    keep: tuple[str, ...] = key(
        (), any_of(TEXTS, NONE), "mode 'selective': ops whose results are stored, such as 'aten.mm'", read=as_names
    )
    offload: bool = key(False, BOOL, "keep the values stored for backward in host memory")

    @classmethod
    def spelled_out(cls, given: Any) -> Mapping[str, Any]:
        if isinstance(given, Mapping):
            # A dict without a mode asks for recomputing, unless it asks for the host's memory.
            return {"mode": "none" if given.get("offload") else "full", **given}
        return super().spelled_out({True: "full", False: "none"}.get(given, given))

    def refuse(self, given: Mapping[str, Any]) -> None:
        if self.keep and self.mode != "selective":
            raise ConfigError(
                f"activation_checkpoint.keep requires mode='selective', but mode is {self.mode!r}. Remove keep, or "
                "set mode='selective'.",
                code="C003",
            )


# --- sync ---


_DTYPES = dict(
    fp64="float64", float64="float64", fp32="float32", float32="float32",
    bf16="bfloat16", bfloat16="bfloat16", fp16="float16", float16="float16",
)  # fmt: skip
_HALVES = ("bfloat16", "float16")


def half_dtypes() -> tuple[torch.dtype, torch.dtype]:
    """The half-precision dtypes: bfloat16 and float16."""
    import torch

    return torch.bfloat16, torch.float16


def _dtype(name: str, value: Any) -> Any:
    """The dtype for a name; other values are returned unchanged."""
    if not isinstance(value, str):
        return value
    import torch

    known = [text for text, dtype in _DTYPES.items() if name != "compress" or dtype in _HALVES]
    if value not in known:
        raise ConfigError(f"{name} is {value!r}; allowed are {listed(known)}.{did_you_mean(value, known)}", code="C003")
    return getattr(torch, _DTYPES[value])


@dataclass(frozen=True)
class SyncOptions(Section):
    """Options of the gradient reductions, of all handlers (`sync`) or of a single named handler.

    Attributes:
        bucket_mb: bucket size; None: the size that suits the transport.
        first_bucket_mb: size of the bucket that is ready first; None: the size that suits the transport.
        overlap: reduce while backward runs.
        reduce_dtype: dtype of the reduction. A dtype wider than that of the gradients is used for adding only, a narrower dtype
            for sending. ZeRO stage 3 uses this option, too.
        compress: "bf16" or "fp16": dtype for sending, together with a wider `reduce_dtype`.
        fixed_order: add in rank order, so that results do not depend on bucket sizes, bit for bit.
        shared_memory: True: an error if shared memory is not available; "auto": fall back.
    """

    bucket_mb: float | None = key(None, POSITIVE, "bucket size in MiB")
    first_bucket_mb: float | None = key(None, POSITIVE, "size of the bucket that is ready first")
    overlap: bool | Literal["auto"] = key("auto", any_of(BOOL, choice("auto")), "reduce while backward runs")
    reduce_dtype: torch.dtype | None = key(
        None,
        any_of(DTYPE, TEXT, NONE),
        "dtype of the reduction, at every stage of zero",
        read=lambda value: _dtype("reduce_dtype", value),
    )
    compress: torch.dtype | None = key(
        None,
        any_of(choice("bf16", "fp16"), NONE),
        "dtype in which gradients are sent",
        read=lambda value: _dtype("compress", value),
    )
    fixed_order: bool = key(False, BOOL, "reduce in rank order: the same bits in every run")
    shared_memory: bool | Literal["auto"] = key(
        "auto", any_of(BOOL, choice("auto"), NONE), "reduce in shared memory on one host"
    )

    @classmethod
    def spelled_out(cls, given: Any) -> Mapping[str, Any]:
        # The options of a handler may come from a script, so their names have not been checked.
        known = keys_of(cls)
        for name in given or ():
            if name not in known:
                raise ConfigError(
                    f"{name!r} is not an option of a gradient handler; allowed are "
                    f"{listed(known)}.{did_you_mean(name, known)}",
                    code="C003",
                )
        return super().spelled_out(given)

    def __post_init__(self) -> None:
        import torch

        for name in ("bucket_mb", "first_bucket_mb"):
            size = getattr(self, name)
            if size is not None and not size > 0:
                raise ConfigError(f"{name} must be a number > 0, not {size!r}", code="C003")
        for name in ("overlap", "shared_memory"):
            if getattr(self, name) not in (True, False, "auto"):
                raise ConfigError(f'{name} must be True, False or "auto", not {getattr(self, name)!r}', code="C003")
        dtype, halves = self.reduce_dtype, half_dtypes()
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"reduce_dtype must be a floating point dtype, not {dtype!r}", code="C003")
        if self.compress not in (None, *halves):
            raise ConfigError(f'compress must be "bf16", "fp16" or None, not {self.compress!r}', code="C003")
        if self.compress is not None and dtype in halves and dtype is not self.compress:
            raise ConfigError(
                f"compress={self.compress} and reduce_dtype={dtype} both set the dtype for sending. Remove one of "
                "the two, or give a wider reduce_dtype.",
                code="C003",
            )

    @property
    def narrow(self) -> torch.dtype | None:
        """The half-precision dtype for sending wider gradients, if it is set."""
        return self.compress or (self.reduce_dtype if self.reduce_dtype in half_dtypes() else None)

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of `dtype` are added: never narrower than `dtype`, and at least fp32 for fp16, which
        could overflow."""
        import torch

        least = torch.float32 if dtype is torch.float16 else _real(dtype)
        wanted = self.reduce_dtype or least
        return wanted if not dtype.is_complex and wanted.itemsize > least.itemsize else least

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of `dtype` are sent: never wider than `dtype`."""
        real, narrow = _real(dtype), self.narrow
        return narrow if narrow is not None and narrow.itemsize < real.itemsize else real


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


@dataclass(frozen=True)
class SyncSettings(
    SyncOptions,
    renamed=dict(
        bucket_mb="bucket_cap_mb bucket_size_mb bucket_size bucket",
        overlap="overlap_comm overlap_grad_reduce",
        compress="comm_hook",
        reduce_dtype="dtype",
        fixed_order="deterministic",
    ),
):
    """The `sync` section: options of all reductions, and the parameters that are exempt from them."""

    automatic: bool = key(True, BOOL, "attach handlers for required reductions without a named handler")
    waive: tuple[str, ...] = key((), _NAMES, "names of parameters exempt from the ledger check", read=as_names)


# --- guard, model, compile ---


@dataclass(frozen=True)
class GuardSettings(SwitchedSection, renamed=dict(every="interval every_n steps")):
    """Periodic comparison of replicas during training (`engine.guard`). `every` is None for the default interval."""

    every: int | None = key(None, COUNT, "steps between two comparisons")


@dataclass(frozen=True)
class ModelSettings(Section, further="own"):
    """The `model` section. It belongs to the user; Colonnade reads a single key of it."""

    num_chunks: int | None = key(None, COUNT, "model chunks per pipeline rank")
    own: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CompileSettings(SwitchedSection, further="options"):
    """Options of torch.compile. Keys that are not listed here are passed to torch.compile as arguments."""

    blocks: bool = key(True, BOOL, "compile block by block; False: the full model")
    options: dict[str, Any] = field(default_factory=dict)


# --- All of a config ---


@dataclass(frozen=True)
class Settings(Section):
    """The top-level keys of a config. None means that a key is not set."""

    parallel: ParallelSizes = key(
        ParallelSizes,
        only_dict(ParallelSizes, "a dict of data, pipeline, tensor, expert, sequence and your own axes"),
        "parallel sizes",
        read=ParallelSizes.read,
    )
    gradient_handler: tuple[Any, ...] = key(
        (), _HANDLERS, "gradient handlers, in addition to the automatic ones", read=tuple
    )
    gradient_handlers: tuple[Any, ...] = key((), _HANDLERS, "alias of gradient_handler", read=tuple)
    clip_grad_norm: ClipSettings | None = key(
        None, with_dict(number_from(0), ClipSettings), "maximum global gradient norm; 0: off", read=ClipSettings.read
    )
    gradient_accumulation: int = key(1, COUNT, "batches per optimizer step", read=int)
    fp16: Fp16Settings | None = key(
        None, with_dict(BOOL, Fp16Settings), "fp16 mixed precision with a loss scale", read=Fp16Settings.read
    )
    bf16: Bf16Settings | None = key(None, with_dict(BOOL, Bf16Settings), "bf16 mixed precision", read=Bf16Settings.read)
    float8: Float8Settings | None = key(
        None, with_dict(BOOL, Float8Settings), "float8 linear layers (torchao)", read=Float8Settings.read
    )
    zero: ZeroSettings = key(
        ZeroSettings,
        with_dict(_STAGE, ZeroSettings),
        "ZeRO: sharding over the data axis; 0 or not set: off",
        read=ZeroSettings.read,
    )
    schedule: NamedChoice | None = key(
        None, _NAMED, "pipeline schedule; further keys are its arguments", read=NamedChoice.read
    )
    sync: SyncSettings = key(
        SyncSettings, only_dict(SyncSettings), "options of the gradient reduction", read=SyncSettings.read
    )
    compare_stages: bool = key(
        True,
        BOOL,
        "False: pipeline stages may have parameters of equal names, shapes and values",
    )
    guard: GuardSettings | None = key(
        None,
        with_dict(BOOL, GuardSettings),
        "compare replicas, and the collectives of handlers, periodically",
        read=GuardSettings.read,
    )
    compare_batches: bool = key(True, BOOL, "compare the first batches of ranks that need the same data")
    activation_checkpoint: ActivationSettings = key(
        ActivationSettings,
        with_dict(any_of(BOOL, _MODES), ActivationSettings),
        "activation checkpointing and offloading; True: 'full'",
        read=ActivationSettings.read,
    )
    flat_step: bool | None = key(None, BOOL, "run the optimizer on flat buffers; default: if possible")
    cuda_graph: bool | str = key(
        False,
        any_of(BOOL, choice("step")),
        "run steps as CUDA graphs: True: forward, backward, clipping and optimizer; 'step': clipping and optimizer",
    )
    compile: CompileSettings | None = key(
        None,
        with_dict(BOOL, CompileSettings, "a dict of torch.compile arguments"),
        "torch.compile the model",
        read=CompileSettings.read,
    )
    seed: int = key(0, INT, "seed of all random streams", read=int)
    cudnn_benchmark: bool | None = key(None, BOOL, "let cuDNN benchmark its algorithms")
    cudnn_deterministic: bool | None = key(None, BOOL, "restrict cuDNN to deterministic algorithms")
    compare_weights: bool = key(
        True, BOOL, "False: replicas may start with different weights; those of the first are used"
    )
    model: Any = key(
        None,
        Rule("anything", ANYTHING.accepts, ModelSettings),
        "num_chunks (model chunks per pipeline rank), and your own keys",
        may_differ=True,
    )
    num_microbatches: int | None = key(None, int_within(1, 1 << 16), "micro-batches per step of a pipeline")
    TENSOR_SHAPE: Any = key(None, SHAPE, "shape of activations sent between stages; default: exchanged by the stages")


KEYS: dict[str, Rule] = keys_of(Settings)
"""The top-level keys with their rules."""

REFUSED: dict[str, str] = {
    "torch_ddp": "is not read: models are not wrapped in torch DDP. Write sync = dict(bucket_mb=..., overlap=...)",
    "max_ep_size": "is not read. Write parallel = dict(expert=...), the number of ranks over which experts are sharded",
}
"""Keys of other frameworks without a counterpart, with the replacement."""


# --- The list of all keys, for `colonnade config --keys` and the reference page ---


class Key(NamedTuple):
    """The description of one config key: its path (`zero.stage`; `NAME` stands for a custom name), allowed values, meaning and
    default.

    `default` is empty if the key is not set by default, or if its default depends on other keys.
    """

    path: str
    allows: str
    means: str
    required: bool = False
    default: str = ""


def all_keys() -> list[Key]:
    """All keys in the order of the fields, each section after its own key."""
    return list(_keys_below(Settings, ()))


def _keys_below(section: type[AnySection], path: tuple[str, ...]) -> Iterator[Key]:
    defaults = {item.name: item.default for item in fields(cast(Any, section))}
    for name, rule in keys_of(section).items():
        required = name in section.required
        default = "" if required or defaults[name] in (MISSING, None, ()) else repr(defaults[name])
        yield Key(".".join((*path, name)), rule.allows, rule.purpose, required, default)
        yield from _keys_in(rule, (*path, name))
    if section.others is not None:
        yield from _keys_in(section.others, (*path, "NAME"))


def _keys_in(rule: Rule, path: tuple[str, ...]) -> Iterator[Key]:
    if rule.section is not None:
        yield from _keys_below(rule.section, path)
    if rule.items is not None:
        yield from _keys_in(rule.items, (*path[:-1], f"{path[-1]}[]"))


# --- The check of a complete config ---


def require_valid(values: Mapping[str, Any], source: ConfigSource) -> None:
    """Raise one ConfigError that lists all problems of `values`, before any process group exists."""
    found = [*_wrong_keys(values)]

    # Values that are valid alone but contradict each other: between top-level keys, then within each section.
    if values.get("gradient_handler") is not None and values.get("gradient_handlers") is not None:
        found.append(Problem(("gradient_handlers",), "is an alias of gradient_handler, which is set too: remove one"))
    if _is_on(values.get("fp16")) and _is_on(values.get("bf16")):
        found.append(Problem(("bf16",), "is on together with fp16: remove one"))
    for name, rule in KEYS.items():
        given = values.get(name)
        if isinstance(given, dict) and rule.section is not None:
            found += [Problem((name, inner), text, value) for inner, text, value in rule.section.conflicts(given)]
    if found:
        raise config_error(found, source)


_WHOLE_CONFIGS = ("config", "cfg", "conf", "colonnadeconfig")


def _wrong_keys(values: Mapping[Any, Any]) -> Iterator[Problem]:
    for name, value in values.items():
        if not isinstance(name, str) or not name:
            yield Problem((name,), NO_KEY, value)
        elif name in KEYS:
            if value is not None:
                yield from check_value(KEYS[name], (name,), value)
        elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
            continue  # a helper function of the config file, not a setting
        else:
            # An unknown key is the user's own, unless it is probably meant as a Colonnade key.
            text = REFUSED.get(name) or foreign_word(name, value, values)
            if text is None and (close := near_miss(name, KEYS)):
                text = f"unknown key. Did you mean `{close}`? To use it as your own key, rename it"
            if text is None and squeezed(name) in _WHOLE_CONFIGS and isinstance(value, Mapping):
                # `config = dict(...)` as a script passes it to launch. If no other key of the file is known, the file would
                # pass as a config of nothing but the user's own keys, and none of it would be read.
                inside = [inner for inner in value if inner in KEYS]
                if inside and not any(other in KEYS for other in values):
                    text = (
                        f"is not read: the keys of a config file are variables at its top level. Write "
                        f"{', '.join(f'{inner} = ...' for inner in inside[:3])} without the dict around them"
                    )
            if text is not None:
                yield Problem((name,), text, value)


def _is_on(setting: Any) -> bool:
    switched_off = isinstance(setting, dict) and setting.get("enabled") is False
    return setting is not None and setting is not False and not switched_off
