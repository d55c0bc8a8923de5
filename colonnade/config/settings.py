"""Every key of a config, as dataclasses: name, type, default, what it may be and what it is for, in one place.

A section is a frozen dataclass whose fields are `key(default, rule, purpose)`. The check of a config, `colonnade config --keys`,
the reference page, the comparison between ranks and the object that the code reads (`ZeroSettings.read(config.get("zero"))`)
are all this class. A new key is one more field; whether values fit together stands in `conflicts` (told when the config is
loaded) or `refuse` (raised where the section is read) of its section. All ranks must have the same values, which is compared at
launch, but for keys with `may_differ=True`.

`Settings` below the sections has the top-level keys. `require_valid` at the end is the check of a whole config.
No torch at the top: a config is checked before torch is imported.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import inf, prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

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
    """A name, or a list of them, as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value)


# --- What is chosen by a registered name ---


@dataclass(frozen=True)
class NamedChoice(Section, required=("type",), short="type", further="options"):
    """A registered name and the arguments of what it names: of a gradient handler, a schedule, a clip method."""

    type: str | None = key(None, TEXT, "its registered name")
    options: Mapping[str, Any] = field(default_factory=dict)


_NAMED = with_dict(Rule("a registered name", TEXT.accepts), NamedChoice, "dict(type='Name', ...)")
_HANDLERS = Rule("a list: [dict(type='Name', ...), ...]", items=_NAMED)


# --- parallel ---


_REST = any_of(COUNT, NONE, choice(-1), choice("auto"))
_AXIS_FORM = "dict(size=..., mode=..., ...)"


@dataclass(frozen=True)
class DataAxis(Section, required=("size",)):
    """`parallel.data` as a dict."""

    size: int | None = key(None, _REST, "how many ranks")


@dataclass(frozen=True)
class PipelineAxis(Section, required=("size",)):
    """`parallel.pipeline` as a dict."""

    size: int = key(1, COUNT, "how many stages")


@dataclass(frozen=True)
class AxisSpec(Section, required=("size",), short="size", further="kwargs"):
    """One axis: its name in `parallel`, its size, its mode, and the arguments of the mode's initializer."""

    name: str = ""
    size: int = key(1, COUNT, "how many ranks a group of it has", read=int)
    mode: str | None = key(None, any_of(TEXT, NONE), "which initializer makes the groups: a key of INITIALIZER_MAPPING")
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExpertAxis(AxisSpec, required=("size",), short="size", further="kwargs"):
    """`parallel.expert` as a dict; it is read as an `AxisSpec`, whose initializer takes `over`."""

    over: tuple[str, ...] = key((), _NAMES, "the axes that experts lie on", read=as_names)


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
    """The sizes that a config asks for; a key left out or None has size 1.

    `data` is None where it is whatever the other axes leave. `axes` are the further ones in the order they
    were written: `sequence` and the user's own.
    """

    data: int | None = key(
        None,
        with_dict(_REST, DataAxis, "dict(size=...)"),
        "data-parallel size; None, -1 or 'auto': what the other axes leave",
    )
    pipeline: int = key(1, with_dict(any_of(COUNT, NONE), PipelineAxis, "dict(size=...)"), "number of pipeline stages")
    tensor: int = key(
        1,
        with_dict(any_of(COUNT, NONE), AxisSpec, _AXIS_FORM),
        "tensor parallelism; further keys go to the mode's initializer",
    )
    tensor_mode: str | None = None
    tensor_kwargs: dict[str, Any] = field(default_factory=dict)
    expert: AxisSpec | None = key(
        None, with_dict(any_of(COUNT, NONE), ExpertAxis, "dict(size=..., over=..., ...)"), "expert parallelism"
    )
    sequence: AxisSpec | None = key(None, with_dict(any_of(COUNT, NONE), AxisSpec, _AXIS_FORM), "sequence parallelism")
    axes: tuple[AxisSpec, ...] = ()

    @classmethod
    def read(cls, given: Any) -> Self:
        asked = {name: value for name, value in (given or {}).items() if value is not None}
        data = asked.pop("data", None)
        size = data["size"] if isinstance(data, Mapping) else data
        axes = {name: replace(AxisSpec.read(value), name=name) for name, value in asked.items()}
        alone = AxisSpec()
        pipeline, tensor, expert = (axes.pop(name, None) for name in ("pipeline", "tensor", "expert"))
        return cls(
            data=None if size in (None, -1, "auto") else int(size),
            pipeline=(pipeline or alone).size,
            tensor=(tensor or alone).size,
            tensor_mode=(tensor or alone).mode,
            tensor_kwargs=(tensor or alone).kwargs,
            expert=expert,
            sequence=axes.get("sequence"),
            axes=tuple(axes.values()),
        )


def parallel_sizes(config: Mapping[str, Any]) -> ParallelSizes:
    """Read `config["parallel"]`, which is checked once more: one that cannot be used is a ConfigError, as at loading."""
    require_valid({"parallel": config.get("parallel")}, ConfigSource())
    return ParallelSizes.read(config.get("parallel"))


def least_world(config: Mapping[str, Any]) -> int:
    """One replica of everything else, or two so that there is something to sum; more where experts lie on data ranks."""
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
    """A named set of parameters: those whose names fit one of the patterns in `params`.

    `counted`: its gradients are part of the total norm. `clipped`: its gradients are divided. With a
    `max_norm` of its own it is clipped by its own norm, else by the total norm and the clip method.
    """

    name: str = ""
    params: tuple[str, ...] = key(
        (), any_of(TEXT, SOME_TEXTS), "names of its parameters, as patterns", read=as_names, compare=False
    )
    max_norm: float | None = key(
        None, any_of(POSITIVE, NONE), "a limit of its own; None: clipped with the rest", read=float
    )
    counted: bool = key(True, BOOL, "whether it is part of the total norm")
    clipped: bool = key(True, BOOL, "whether it is clipped at all")

    def __post_init__(self) -> None:
        if self.max_norm is not None:
            positive(f"max_norm of clip group {self.name!r}", self.max_norm)


@dataclass(frozen=True)
class ClipGroups(Section, others=only_dict(ClipGroup, _GROUP_FORM)):
    """`clip_grad_norm.groups`: groups by names of the user's."""


def positive(name: str, value: float) -> float:
    """A setting that must be above 0 (inf allowed)."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not value > 0
        or (isinstance(value, int) and value >= 2**63)
    ):
        raise ConfigError(f"{name} is a number above 0 (inf measures only), not {value!r}", code="C003")
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
    """How to clip. `optim.clip.ClipPolicy` carries it out in a run, and `engine.stepper.Stepper` makes that policy.

    A key that changes which divisor a step has must also be known to `verify`, which computes the divisor of one process from
    the same settings: `proof.api`, `proof.record.info_of`, `proof.reference.Limit`, `proof.case.ClipCase`; and to the planted
    mistakes (`proof.mutation`).

    `max_norm` and `options` are the arguments of the clip method: inf measures without clipping, None is the method's own
    default. `per` says what is clipped by a norm of its own: the whole gradient (or a group with a limit of its own), each
    layer, or each parameter. `report` says what gets a norm of its own to be looked at: as `per`, if it is None.
    """

    max_norm: float | None = key(
        None, any_of(number_from(0), NONE), "largest global norm; 0: off, inf: only measure", read=float
    )
    norm_type: float = key(2.0, ORDER, "p of the norm", read=float)
    groups: tuple[ClipGroup, ...] = key(
        (),
        Rule(f"a dict of {_GROUP_FORM} by name or None", NONE.accepts, ClipGroups),
        "parameters that are clipped apart",
        read=_groups,
    )
    nonfinite: NonFinite = key(
        "skip", any_of(choice("skip", "raise", "propagate"), NONE), "what to do when the norm is nan or inf"
    )
    method: str = key(
        "norm", with_dict(any_of(TEXT, NONE), NamedChoice, "dict(type='Name', ...)"), "how the threshold is found"
    )
    options: Mapping[str, Any] = field(default_factory=dict)
    per: Per = key(
        "group",
        choice("group", "layer", "parameter"),
        "what is clipped by its own norm; group: the whole, and groups with a max_norm",
    )
    report: Per | None = key(
        None,
        choice("group", "layer", "parameter"),
        "what engine.grad_norms() tells apart; the same as `per` by itself",
    )

    @classmethod
    def conflicts(cls, given: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
        if given.keys() <= {"norm_type", "nonfinite", "per", "report"}:
            yield "max_norm", "is missing: a number >= 0, or give groups or a method", UNSAID

    @classmethod
    def read(cls, given: Any) -> Self | None:
        """From a number, or a dict; None where nothing is clipped or measured: no value, 0, or a dict of max_norm=0."""
        settings = super().read(given)
        if settings is None or settings._is_off:
            return None
        # Beside groups, no max_norm or 0 is inf: the rest is measured only.
        return replace(settings, max_norm=inf) if settings.method == "norm" and not settings.max_norm else settings

    @classmethod
    def completed(cls, values: dict[str, Any]) -> dict[str, Any]:
        method = NamedChoice.read(values.pop("method", None))
        options = dict(method.options)
        # A max_norm beside the method wins over one among its arguments.
        max_norm = values.pop("max_norm", options.pop("max_norm", None))
        # AdaGC has a limit for every parameter.
        values.setdefault("per", "parameter" if method.type == "adagc" else "group")
        return {**values, "method": method.type or "norm", "options": options, "max_norm": max_norm}

    def refuse(self, given: Mapping[str, Any]) -> None:
        if self.report not in (None, self.per) and self.per != "group" and not self._is_off:
            raise ConfigError(
                f"clip_grad_norm: report={self.report!r} beside per={self.per!r}: what is clipped by a norm of its own is what norms are "
                f"reported of. Leave report out",
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
        """The number of the group that a parameter is in; the last is "rest"."""
        for number, group in enumerate(self.groups):
            if any(fnmatchcase(name, pattern) for pattern in group.params):
                return number
        return len(self.groups)

    def clip_groups(self) -> list[ClipGroup]:
        """The named groups, and last the rest."""
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
    """fp16 mixed precision with a loss scale. `mode` is Colossal-AI's: all kinds are the same here, and None turns fp16 off."""

    mode: Any = key(None, any_of(choice("torch", "apex", "naive"), AMP_MODE, NONE), "kind of mixed precision")
    init_scale: float = key(2.0**16, LOSS_SCALE, "loss scale to start from")
    growth_factor: float = key(2.0, number_above(1), "the scale grows by this factor")
    backoff_factor: float = key(0.5, FRACTION, "the scale shrinks by this factor after an overflow")
    growth_interval: int = key(2000, COUNT, "steps without overflow before the scale grows")
    min_scale: float | None = key(None, any_of(LOSS_SCALE, NONE), "smallest loss scale")
    max_scale: float | None = key(None, any_of(LOSS_SCALE, NONE), "largest loss scale")
    hysteresis: int = key(1, COUNT, "overflows before the scale shrinks")
    enabled: bool = key(True, BOOL, "False: as if fp16 were left out")
    dynamic_grad_scale: bool = key(True, BOOL, "whether the scale moves at all")

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
                "fp16.hysteresis: only 1 is known here: the scale falls after each dropped step", code="C003"
            )


@dataclass(frozen=True)
class Bf16Settings(SwitchedSection):
    """bf16 mixed precision. `master_weights` stands under `zero` as well: see `Precision.read`."""

    master_weights: bool = key(True, BOOL, "the optimizer steps on fp32 weights")


_NOT_IN_FLOAT8 = ("lm_head", "head", "classifier", "output", "router", "gate")


@dataclass(frozen=True)
class Float8Settings(SwitchedSection):
    """Linear layers in float8.

    `skip`: names or patterns of layers that keep their dtype, instead of the usual ones. `emulate`: compute as float8 would
    with the operations of wider dtypes, on any device, to try it out.
    """

    recipe: str = key("tensorwise", choice("tensorwise", "rowwise", "rowwise_with_gw_hp"), "how torchao scales values")
    skip: tuple[str, ...] = key(_NOT_IN_FLOAT8, _NAMES, "layers that keep their dtype, by name", read=as_names)
    emulate: bool = key(False, BOOL, "try it out where there is no float8 hardware")


# --- zero ---


_OLD_ZERO = (
    "is an older form. Write zero = dict(stage=3, offload='cpu'); settings of the loss scale go to fp16 = dict(...)"
)
_STAGE = choice(0, 1, 2, 3)


def _offload(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value == "cpu":
        return True
    raise ConfigError(f"zero.offload={value!r}; allowed are True, False and 'cpu'", code="C003")


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
    """What is sharded (`stage`) and how.

    All stages read `offload` and `master_weights`; the others are for the stages that `refuse` names. `gather_dtype` and
    `reduce_dtype` (stage 3) come from other sections: what fp32 weights are gathered in, and what gradients are reduced in.
    """

    stage: int = key(0, _STAGE, "1: optimizer state is sharded, 2: and gradients, 3: and parameters", read=int)
    reduce_scatter: bool = key(True, BOOL, "reduce-scatter gradients instead of all-reduce")
    offload: bool = key(False, any_of(BOOL, TEXT, NONE), "device that keeps the shards between steps", read=_offload)
    bucket_mb: float | None = key(None, POSITIVE, "bucket size in MiB")
    gather_ahead: bool = key(False, BOOL, "stages 1, 2: gather parameters while the next forward pass runs")
    prefetch: int = key(0, int_from(0), "stage 3: how many modules are gathered ahead", read=int)
    master_weights: bool = key(True, BOOL, "the optimizer steps on fp32 weights")
    replicate: str | None = key(None, any_of(TEXT, NONE), "stage 3: the axis on which shards are replicas (HSDP)")
    wrap: tuple[str, ...] = key((), _NAMES, "stage 3: names of the modules that are gathered one by one", read=as_names)
    reshard: bool = key(True, BOOL, "stage 3: give parameters back after their forward pass")
    gather_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def refuse(self, given: Mapping[str, Any]) -> None:
        only = {3: ("replicate", "wrap", "reshard", "prefetch"), 1: ("reduce_scatter",)}
        for stage, names in only.items():
            for name in names:
                if name in given and self.stage != stage and not (name == "reduce_scatter" and self.reduce_scatter):
                    raise ConfigError(
                        f"zero.{name}={given[name]!r} is for stage {stage}, not for stage {self.stage}", code="C003"
                    )
        if self.stage == 3:
            for name in ("bucket_mb", "gather_ahead"):
                if name in given:
                    raise ConfigError(
                        f"zero.{name} is for stages 1 and 2: at stage 3, FSDP2 groups by module", code="C003"
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
    """Which activations are computed again in backward (`mode`, `keep`), of which blocks, and whether they lie on the host."""

    mode: str = key(
        "none", _MODES, "what a block computes again in backward: nothing, everything, all but the ops of `keep`"
    )
    every: int = key(1, COUNT, "of the blocks, every n-th one")
    blocks: tuple[str, ...] = key(
        (), _NAMES, "their classes, or patterns of module names; left out, they are looked for", read=as_names
    )
    keep: tuple[str, ...] = key(
        (), any_of(TEXTS, NONE), "mode 'selective': ops whose results are kept, such as 'aten.mm'", read=as_names
    )
    offload: bool = key(False, BOOL, "what is kept for backward lies in the host's memory")

    @classmethod
    def spelled_out(cls, given: Any) -> Mapping[str, Any]:
        if isinstance(given, Mapping):
            # A dict without a mode asks for recomputing, unless it asks for the host's memory.
            return {"mode": "none" if given.get("offload") else "full", **given}
        return super().spelled_out({True: "full", False: "none"}.get(given, given))

    def refuse(self, given: Mapping[str, Any]) -> None:
        if self.keep and self.mode != "selective":
            raise ConfigError(
                f"activation_checkpoint.keep is for mode='selective', not for mode={self.mode!r}", code="C003"
            )


# --- sync ---


_DTYPES = dict(
    fp64="float64", float64="float64", fp32="float32", float32="float32",
    bf16="bfloat16", bfloat16="bfloat16", fp16="float16", float16="float16",
)  # fmt: skip
_HALVES = ("bfloat16", "float16")


def half_dtypes() -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of 16 bits: bfloat16 and float16."""
    import torch

    return torch.bfloat16, torch.float16


def _dtype(name: str, value: Any) -> Any:
    """A dtype by its name; anything else comes back as it is."""
    if not isinstance(value, str):
        return value
    import torch

    known = [text for text, dtype in _DTYPES.items() if name != "compress" or dtype in _HALVES]
    if value not in known:
        raise ConfigError(f"{name}={value!r}; allowed: {listed(known)}.{did_you_mean(value, known)}", code="C003")
    return getattr(torch, _DTYPES[value])


@dataclass(frozen=True)
class SyncOptions(Section):
    """How gradients are synchronised, for all or for one named handler; every default suits the device and the transport.

    `bucket_mb=None` is the size that suits the transport, `first_bucket_mb=None` (of the bucket that is full first)
    likewise. `reduce_dtype` is what they are reduced in: added in it where it is wider than they are, sent in it where it is
    narrower; stage 3 of ZeRO reads it too. `compress` ("bf16" or "fp16") is what they are sent in, beside a wider
    `reduce_dtype`. `fixed_order` adds in rank order, so that bits do not depend on bucket
    sizes. `shared_memory=True` is an error where it cannot be had; "auto" falls back.
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
    fixed_order: bool = key(False, BOOL, "the same order of sums in every run")
    shared_memory: bool | Literal["auto"] = key(
        "auto", any_of(BOOL, choice("auto"), NONE), "reduce in shared memory on one host"
    )

    @classmethod
    def spelled_out(cls, given: Any) -> Mapping[str, Any]:
        # The options of a handler come from whoever builds it, a config or a script: nothing has checked their names.
        known = keys_of(cls)
        for name in given or ():
            if name not in known:
                raise ConfigError(
                    f"unknown option {name!r} of a gradient handler; allowed: {listed(known)}.{did_you_mean(name, known)}",
                    code="C003",
                )
        return super().spelled_out(given)

    def __post_init__(self) -> None:
        import torch

        for name in ("bucket_mb", "first_bucket_mb"):
            size = getattr(self, name)
            if size is not None and not size > 0:
                raise ConfigError(f"{name} must be more than 0, not {size!r}", code="C003")
        for name in ("overlap", "shared_memory"):
            if getattr(self, name) not in (True, False, "auto"):
                raise ConfigError(f'{name} is True, False or "auto", not {getattr(self, name)!r}', code="C003")
        dtype, halves = self.reduce_dtype, half_dtypes()
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"reduce_dtype is a floating point dtype, not {dtype!r}", code="C003")
        if self.compress not in (None, *halves):
            raise ConfigError(f'compress is "bf16", "fp16" or None, not {self.compress!r}', code="C003")
        if self.compress is not None and dtype in halves and dtype is not self.compress:
            raise ConfigError(
                f"compress={self.compress} and reduce_dtype={dtype} are two dtypes to send in; give one of them, or a wider "
                f"reduce_dtype",
                code="C003",
            )

    @property
    def narrow(self) -> torch.dtype | None:
        """The half-precision dtype that wider gradients are sent in, if one was asked for."""
        return self.compress or (self.reduce_dtype if self.reduce_dtype in half_dtypes() else None)

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of `dtype` are added: never narrower; fp16 would overflow in its own."""
        import torch

        least = torch.float32 if dtype is torch.float16 else _real(dtype)
        wanted = self.reduce_dtype or least
        return wanted if not dtype.is_complex and wanted.itemsize > least.itemsize else least

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of `dtype` are sent: never wider."""
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
    """The `sync` section: the options of all sums, and which parameters are summed at all."""

    automatic: bool = key(True, BOOL, "attach handlers for what no named handler does")
    waive: tuple[str, ...] = key((), _NAMES, "parameters that nobody need synchronise, by name", read=as_names)


# --- guard, model, compile ---


@dataclass(frozen=True)
class GuardSettings(SwitchedSection, renamed=dict(every="interval every_n steps")):
    """Comparisons of ranks while training; None: as often as the guard does by itself."""

    every: int | None = key(None, COUNT, "steps between two comparisons")


@dataclass(frozen=True)
class ModelSettings(Section, further="own"):
    """`model`, which is the user's own but for one key."""

    num_chunks: int | None = key(None, COUNT, "model chunks per pipeline rank")
    own: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CompileSettings(SwitchedSection, further="options"):
    """torch.compile; further keys are its arguments."""

    blocks: bool = key(True, BOOL, "False: the model in one piece")
    options: dict[str, Any] = field(default_factory=dict)


# --- All of a config ---


@dataclass(frozen=True)
class Settings(Section):
    """The top-level keys that are ours. Under each of them None stands for "not set"."""

    parallel: ParallelSizes = key(
        ParallelSizes,
        only_dict(ParallelSizes, "a dict of data, pipeline, tensor, expert, sequence and axes of your own"),
        "how the ranks are divided into axes",
        read=ParallelSizes.read,
    )
    gradient_handler: tuple[Any, ...] = key(
        (), _HANDLERS, "gradient handlers to add to what the placements demand", read=tuple
    )
    gradient_handlers: tuple[Any, ...] = key((), _HANDLERS, "another name of gradient_handler", read=tuple)
    clip_grad_norm: ClipSettings | None = key(
        None, with_dict(number_from(0), ClipSettings), "clip to this global norm; 0: off", read=ClipSettings.read
    )
    gradient_accumulation: int = key(1, COUNT, "batches per optimizer step", read=int)
    fp16: Fp16Settings | None = key(
        None, with_dict(BOOL, Fp16Settings), "fp16 mixed precision with a loss scale", read=Fp16Settings.read
    )
    bf16: Bf16Settings | None = key(None, with_dict(BOOL, Bf16Settings), "bf16 mixed precision", read=Bf16Settings.read)
    float8: Float8Settings | None = key(
        None, with_dict(BOOL, Float8Settings), "linear layers in float8, by torchao", read=Float8Settings.read
    )
    zero: ZeroSettings = key(
        ZeroSettings, with_dict(_STAGE, ZeroSettings), "sharding over the data axis", read=ZeroSettings.read
    )
    schedule: NamedChoice | None = key(
        None, _NAMED, "how one step's passes run; further keys go to the schedule", read=NamedChoice.read
    )
    sync: SyncSettings = key(SyncSettings, only_dict(SyncSettings), "how gradients are reduced", read=SyncSettings.read)
    compare_stages: bool = key(
        True,
        BOOL,
        "False: pipeline stages that `split` has not made may be alike in names, shapes and values of their parameters",
    )
    guard: GuardSettings | None = key(
        None,
        with_dict(BOOL, GuardSettings),
        "compare replicas and the calls of handlers between ranks every so many steps",
        read=GuardSettings.read,
    )
    compare_batches: bool = key(
        True, BOOL, "compare the first batches of ranks that see the same data; on unless False"
    )
    activation_checkpoint: ActivationSettings = key(
        ActivationSettings,
        with_dict(any_of(BOOL, _MODES), ActivationSettings),
        "which activations are computed again in backward, or kept on the host; True: 'full'",
        read=ActivationSettings.read,
    )
    flat_step: bool | None = key(None, BOOL, "run the optimizer on flat buffers")
    graph_step: bool = key(False, BOOL, "run the flat step and the clipping as CUDA graphs")
    compile: CompileSettings | None = key(
        None,
        with_dict(BOOL, CompileSettings, "dict of torch.compile's options"),
        "torch.compile the model, block by block",
        read=CompileSettings.read,
    )
    seed: int = key(0, INT, "seed of every random stream", read=int)
    cudnn_benchmark: bool | None = key(None, BOOL, "let cuDNN search for the fastest algorithm")
    cudnn_deterministic: bool | None = key(None, BOOL, "let cuDNN use deterministic algorithms only")
    compare_weights: bool = key(
        True, BOOL, "False: ranks that have the same seed may start with other weights; the first's are taken"
    )
    model: Any = key(
        None,
        Rule("anything", ANYTHING.accepts, ModelSettings),
        "your own, but for num_chunks",
        may_differ=True,
    )
    num_microbatches: int | None = key(None, int_within(1, 1 << 16), "micro-batches per step of a pipeline")
    TENSOR_SHAPE: Any = key(None, SHAPE, "shape sent between stages; left out, the stages ask each other")


KEYS: dict[str, Rule] = keys_of(Settings)
"""Every top-level key that is ours."""

REFUSED: dict[str, str] = {
    "torch_ddp": "is not read: torch DDP is never wrapped around a model. "
    "Write sync = dict(bucket_mb=..., overlap=...)",
    "max_ep_size": "is not read. Write parallel = dict(expert=...), the number of ranks that experts are divided over",
}
"""Keys that mean something elsewhere and nothing here, with what to write instead."""


# --- All keys in one list: what `colonnade config --keys` and the reference page show ---


class Key(NamedTuple):
    """One key: its path in a config (`zero.stage`; `NAME` stands for a name of yours), and what its field says of it."""

    path: str
    allows: str
    means: str
    required: bool = False


def all_keys() -> list[Key]:
    """Every key that is ours, in the order of the fields, each section after its own key."""
    return list(_keys_below(Settings, ()))


def _keys_below(section: type[AnySection], path: tuple[str, ...]) -> Iterator[Key]:
    for name, rule in keys_of(section).items():
        yield Key(".".join((*path, name)), rule.allows, rule.purpose, name in section.required)
        yield from _keys_in(rule, (*path, name))
    if section.others is not None:
        yield from _keys_in(section.others, (*path, "NAME"))


def _keys_in(rule: Rule, path: tuple[str, ...]) -> Iterator[Key]:
    if rule.section is not None:
        yield from _keys_below(rule.section, path)
    if rule.items is not None:
        yield from _keys_in(rule.items, (*path[:-1], f"{path[-1]}[]"))


# --- The check of a whole config ---


def require_valid(values: Mapping[str, Any], source: ConfigSource) -> None:
    """Raise one ConfigError that tells every problem of `values`, before any process group exists."""
    found = [*_wrong_keys(values), *_conflicts(values)]
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
            continue  # a helper of the config file: nobody means a setting by a function
        else:
            # A key that is not ours is the user's own, unless it was meant to be ours.
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


def _conflicts(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Values that are right one by one and wrong together: between top-level keys, then within each section."""
    if values.get("gradient_handler") is not None and values.get("gradient_handlers") is not None:
        yield Problem(("gradient_handlers",), "is set beside gradient_handler, its other name: keep one")
    if _is_on(values.get("fp16")) and _is_on(values.get("bf16")):
        yield Problem(("bf16",), "is on beside fp16: keep one")
    for name, rule in KEYS.items():
        given = values.get(name)
        if isinstance(given, dict) and rule.section is not None:
            for inner, text, value in rule.section.conflicts(given):
                yield Problem((name, inner), text, value)


def _is_on(setting: Any) -> bool:
    switched_off = isinstance(setting, dict) and setting.get("enabled") is False
    return setting is not None and setting is not False and not switched_off
