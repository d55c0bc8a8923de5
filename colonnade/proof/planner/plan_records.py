"""The records of a plan: frozen dataclasses that `to_dict()` converts to JSON values.

Memory is in bytes and times are in seconds. Everything "per step" is of one optimizer step of one rank, unless stated
otherwise. Ranks that differ only in coordinates without influence on the plan are one `RankClass`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

Link = Literal["node", "network"]
"""The slowest link of a message: inside one node, or between nodes. A group with ranks in several nodes is "network"."""

Fit = Literal["fits", "fits with expandable segments", "does not fit"]
"""Whether a rank has enough memory: by the allocator's replay, or by `MemoryPlan.total` if there is none."""

When = Literal["forward", "backward", "pipeline", "gradients", "step"]
"""The part of a step in which a collective is called."""


@dataclass(frozen=True)
class Hardware:
    """The time model of the machines: the speed of one device and of the links. Read from a TOML file."""

    name: str
    devices_per_node: int
    memory: int
    """Bytes of one device that a job may use."""
    matmul_flops: dict[str, float]
    """Peak of matrix products in flop/s, by dtype ("bfloat16", "float32", ...)."""
    matmul_efficiency: float
    """The fraction of this peak that large products reach."""
    memory_bandwidth: float
    """Bytes/s that an operator without matrix products reads and writes."""
    operator_latency: float
    """The shortest time of any operator in seconds."""
    node_bandwidth: float
    """Bytes/s that a device sends to another device of its node, while it receives as many."""
    node_latency: float
    network_bandwidth: float
    """Bytes/s that one device sends to other nodes."""
    network_latency: float
    overlap: float = 1.0
    """The fraction of a collective that may overlap with computation at no cost; 1: communication has its own hardware."""
    contention: float = 1.0
    """The factor on the time of kernels if other ranks use the same device at the same time (CUDA MPS)."""
    at_once: int = 0
    """The number of devices of a node that compute at full speed concurrently, if they share cores; 0: all."""
    backend: str = "nccl"
    device: str = "cuda"
    source: str = ""
    """The origin of the numbers."""
    kernels: dict[str, list[list[float]]] = field(default_factory=dict)
    """Samples of a calibration sweep: table -> rows of (sizes ..., seconds); see `sweep.py`. Empty: a roofline by the numbers above."""


@dataclass(frozen=True)
class ModeGroups:
    """The groups of one mode.

    `digits` describe all groups: (stride, size), slowest first. The group of a rank are the ranks that differ from it
    only in these digits. If the groups are no such product, `digits` is None and `groups` lists all of them; otherwise
    `groups` has the first few.
    """

    mode: str
    size: int
    count: int
    data: str
    """Whether the ranks of a group see the "same" or "distinct" data; "" for the world."""
    digits: tuple[tuple[int, int], ...] | None
    groups: tuple[tuple[int, ...], ...]
    link: Link
    communicator: bool
    """Whether a run makes a communicator for each of these groups (equal sets of ranks share one)."""


@dataclass(frozen=True)
class MemoryPlan:
    """Device memory of one rank of a class, in bytes, at the peak of a step."""

    parameters: int
    gradients: int
    state: int
    """Optimizer state, with master copies."""
    activations: int
    """Activations for backward of all micro-batches in flight, and temporary memory.

    Temporary memory is the largest of the operators or, if the peak is there, that of the optimizer's step.
    """
    communication: int
    """Communication buffers that are no gradients, and memory that the model's collectives keep."""
    buffers: int = 0
    """Buffers of the model: running means, masks, tables."""
    host: int = 0
    """Offloaded memory on the host, not part of `total`."""
    workspace: int = 0
    """Memory that the libraries of matrix products take for themselves."""
    reserved: int = 0
    """The most that torch's caching allocator reserves; 0 if it is not estimated (no calibration sweep)."""
    expandable: int = 0
    """The same with expandable segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)."""
    fit: Fit = "fits"

    @property
    def total(self) -> int:
        held = self.parameters + self.gradients + self.state + self.buffers + self.workspace
        return held + self.activations + self.communication


@dataclass(frozen=True)
class PlannedCollective:
    """Calls of one kind that one rank of a class makes in a step.

    `bytes` is the size of one call: the reduced tensor, the full gathered or scattered tensor, or the sent message.
    `seconds` is the estimated time of all `count` calls; `exposed` is the part of it that does not overlap with
    computation.
    """

    mode: str
    op: str
    bytes: int
    count: int
    ranks: int
    link: Link
    seconds: float
    exposed: float
    when: When
    what: str = ""
    """The purpose in words: the layer's call, the handler, the clip."""


@dataclass(frozen=True)
class Work:
    """The cost of one micro-batch on one stage.

    The seconds include collectives that do not overlap with computation.
    """

    stage: int
    forward: float
    backward_input: float
    backward_weight: float
    flops: float
    """Flops of forward and backward."""
    recomputed: float
    """The part of `flops` that backward recomputes (activation checkpointing)."""
    moved: float
    """Bytes that operators read and write in forward and backward."""
    kept: int
    """Bytes kept from forward to backward."""
    peak: int
    """The largest temporary memory of forward or backward in addition to `kept`, in bytes."""
    output: int
    """Bytes sent to the next stage."""


@dataclass(frozen=True)
class RankClass:
    """Ranks with the same parameters, the same work and groups of the same shape.

    `rank` is the first of `count` ranks.
    """

    name: str
    rank: int
    count: int
    pipeline_rank: int
    stages: tuple[int, ...]
    parameters: int
    """The number of elements on one of these ranks."""
    memory: MemoryPlan
    collectives: tuple[PlannedCollective, ...]
    work: tuple[Work, ...]
    step_seconds: float
    """The time of the optimizer's step (clipping and update) without collectives."""
    live: float = 1.0
    """The largest number of micro-batches whose activations are kept at the same time."""


@dataclass(frozen=True)
class Interval:
    """One action of a pipeline rank. `kind` is F (forward), B (backward), I (input gradient) or W (weight gradient)."""

    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class PlannedTimeline:
    """The start and end of each action of each pipeline rank.

    `bubble` is the pipeline bubble as in `schedule.simulate.bubble_of`.
    """

    schedule: str
    num_microbatches: int
    rows: tuple[tuple[Interval, ...], ...]
    """One row for each pipeline rank, in order."""
    makespan: float
    bubble: float
    equal_bubble: float
    """The bubble of the same schedule if all passes took equally long and transfers took no time."""


@dataclass(frozen=True)
class LedgerLine:
    """One required gradient reduction of the parameters with a name pattern and a placement."""

    parameters: str
    count: int
    """The number of these parameters on the rank that has most of them."""
    elements: int
    """The number of elements of these parameters on that rank."""
    stages: tuple[int, ...]
    placement: str
    mode: str
    """"" if no reduction is required."""
    ranks: int
    """The size of the group over which the gradients are reduced."""
    divisor: float
    done_by: str


@dataclass(frozen=True)
class Totals:
    """The totals of a step.

    `step_seconds` is the sum of the four parts that follow. Times of passes are means over the pipeline ranks; times
    after the passes are those of the slowest class of ranks.
    """

    world_size: int
    parameters: int
    """The number of elements of the full model."""
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    """The time of collectives that do not overlap with computation."""
    bubble_seconds: float
    """Pipeline bubble: `Timeline.bubble` of the makespans of a step."""
    optimizer_seconds: float
    samples: int
    """Samples of all ranks in one step."""
    tokens: int
    """Tokens of all ranks in one step; 0 if the batch has no tokens."""
    flops: float
    """Flops of all ranks in one step, including recomputation."""
    model_flops: float
    """`flops` without recomputation."""
    mfu: float
    """Model flops utilisation: model_flops / (step_seconds x ranks x peak)."""
    hfu: float
    """Hardware flops utilisation: flops / (step_seconds x ranks x peak)."""
    peak_memory: int
    """The most that the fullest rank allocates."""
    fits: bool
    """Whether every rank has enough memory, if need be with expandable segments (`MemoryPlan.fit`)."""
    bytes_inside_nodes: int
    """Bytes that all ranks send in a step to ranks of the same node."""
    bytes_between_nodes: int
    communicators: int
    """The number of communicators that the whole world creates."""
    communicators_per_rank: int


@dataclass(frozen=True)
class Plan:
    """The result of `plan`: the estimate of a job."""

    config: dict[str, Any]
    axes: dict[str, int]
    hardware: Hardware
    modes: tuple[ModeGroups, ...]
    classes: tuple[RankClass, ...]
    timeline: PlannedTimeline | None
    ledger: tuple[LedgerLine, ...]
    totals: Totals
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    """The errors that `initialize` would raise."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON.

        `MemoryPlan.total` is included, and a row of the timeline is a list of lists.
        """
        plain = {each.name: _plain(getattr(self, each.name)) for each in fields(self) if each.name != "timeline"}
        for one, made in zip(self.classes, plain["classes"], strict=True):
            made["memory"]["total"] = one.memory.total
        return {**plain, "timeline": None if self.timeline is None else _timeline(self.timeline)}


@dataclass(frozen=True)
class Candidate:
    """One layout that `search` examined: its sizes, its estimated cost, and the reason for its rejection ("": it fits)."""

    layout: dict[str, Any]
    reason: str
    step_seconds: float | None = None
    peak_memory: int | None = None
    bubble: float | None = None
    exposed_seconds: float | None = None
    mfu: float | None = None
    hfu: float | None = None


@dataclass(frozen=True)
class SearchResult:
    """The layouts that fit, fastest first, and the rejected layouts (`cut`) with the reason of each."""

    world_size: int
    hardware: Hardware
    fitting: tuple[Candidate, ...]
    cut: tuple[Candidate, ...]
    config: str
    """The config of the fastest layout as text; "" if no layout fits."""
    verify: str
    """Shell commands that write the config of a small version of this layout, and verify it on this machine."""
    best: Plan | None = None
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        plain = {each.name: _plain(getattr(self, each.name)) for each in fields(self) if each.name != "best"}
        return {**plain, "best": None if self.best is None else self.best.to_dict()}


def _timeline(timeline: PlannedTimeline) -> dict[str, Any]:
    """Of many thousand actions: each is a list [kind, stage, micro-batch, start, end]."""
    rows = [[[one.kind, one.stage, one.micro_batch, one.start, one.end] for one in row] for row in timeline.rows]
    return {each.name: getattr(timeline, each.name) for each in fields(timeline)} | {"rows": rows}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if not hasattr(value, "__dataclass_fields__"):
        return value
    plain = asdict(value)
    plain.pop("kernels", None)  # the thousands of samples of a machine
    return plain
