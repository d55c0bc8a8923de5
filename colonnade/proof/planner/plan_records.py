"""What a plan holds: plain records, all of them frozen, that become JSON by `to_dict()`.

Bytes are bytes, times are seconds, and everything "per step" is of one optimizer step of one rank, unless it says
otherwise. Ranks that differ only in coordinates that do not matter are one `RankClass`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

Link = Literal["node", "network"]
"""Where a message goes: inside one node, or between nodes. A group that is in several nodes is "network"."""

When = Literal["forward", "backward", "pipeline", "gradients", "step"]
"""In which part of a step a collective is called."""


@dataclass(frozen=True)
class Hardware:
    """The stated model of the machines: what one device computes, and what links carry. From a TOML file."""

    name: str
    devices_per_node: int
    memory: int
    """Bytes of one device that a job may use."""
    matmul_flops: dict[str, float]
    """Peak of a matrix product, in flop/s, by dtype ("bfloat16", "float32", ...)."""
    matmul_efficiency: float
    """The part of that peak that large products reach."""
    memory_bandwidth: float
    """Bytes/s that an operator which only moves memory reads and writes."""
    operator_latency: float
    """Seconds that any operator takes at least."""
    node_bandwidth: float
    """Bytes/s that a device sends to another of its node, and receives at once."""
    node_latency: float
    network_bandwidth: float
    """Bytes/s of a device's part of what goes out of its node."""
    network_latency: float
    overlap: float = 1.0
    """The part of a collective that may run behind computation and costs no time there: 1 with engines of its own."""
    at_once: int = 0
    """How many devices of a node compute at full speed at once, where they share cores; 0: all."""
    backend: str = "nccl"
    device: str = "cuda"
    source: str = ""
    """Where the numbers are from."""


@dataclass(frozen=True)
class ModeGroups:
    """The groups of one mode.

    `digits` say all of them: (stride, size) slowest first; a rank's group are the ranks that differ from it in these digits
    only. Where groups are no such product `digits` is None, and `groups` lists all; else the first few.
    """

    mode: str
    size: int
    count: int
    data: str
    """"same" or "distinct": what the ranks of a group see; "" for the world."""
    digits: tuple[tuple[int, int], ...] | None
    groups: tuple[tuple[int, ...], ...]
    link: Link
    communicator: bool
    """Whether a run makes a communicator for each of these groups (equal sets of ranks share one)."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank of a class, on its device, at the fullest moment of a step."""

    parameters: int
    gradients: int
    state: int
    """The optimizer's, with master copies."""
    activations: int
    """What is kept for backward by all micro-batches in flight, and the most that operators hold beyond that; or what the
    optimizer's step holds, where that is the fullest moment."""
    communication: int
    """Buffers of gradients on their way that are no gradients, and what collectives of the model keep."""
    buffers: int = 0
    """Of the model: running means, masks, tables."""
    host: int = 0
    """On the host, beside the device: what was offloaded."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.state + self.activations + self.communication + self.buffers


@dataclass(frozen=True)
class PlannedCollective:
    """Calls of one kind that one rank of a class makes in a step.

    `bytes` are those of one call: the tensor that is reduced, the whole that is gathered or scattered, what is sent point
    to point. `seconds` is the time of all `count` calls by the stated model, of which `exposed` is not hidden behind
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
    """What it is for, in words: the layer's call, the handler, the clip."""


@dataclass(frozen=True)
class Work:
    """What one micro-batch costs on one stage: seconds (with the collectives that nothing hides), and what they are of."""

    stage: int
    forward: float
    backward_input: float
    backward_weight: float
    flops: float
    """Of forward and backward."""
    recomputed: float
    """Of these, what backward computes a second time."""
    moved: float
    """Bytes that operators read and write, forward and backward."""
    kept: int
    """Bytes kept from forward to backward."""
    peak: int
    """Bytes that backward or forward hold for a moment, beyond what is kept."""
    output: int
    """Bytes that go to the next stage."""


@dataclass(frozen=True)
class RankClass:
    """Ranks that have the same parameters, groups of the same shape and the same work: `rank` is the first of `count`."""

    name: str
    rank: int
    count: int
    pipeline_rank: int
    stages: tuple[int, ...]
    parameters: int
    """Elements on one of these ranks."""
    memory: MemoryPlan
    collectives: tuple[PlannedCollective, ...]
    work: tuple[Work, ...]
    step_seconds: float
    """The optimizer's step itself (clipping and update), without collectives."""
    live: float = 1.0
    """Of how many micro-batches activations are kept at once, at most."""


@dataclass(frozen=True)
class Interval:
    """One action of a pipeline rank: `kind` is F, B, I or W."""

    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class PlannedTimeline:
    """When each pipeline rank computes what. `bubble`: the pipeline bubble, as `schedule.simulate.bubble_of` has it."""

    schedule: str
    num_microbatches: int
    rows: tuple[tuple[Interval, ...], ...]
    """One row for each pipeline rank, in order."""
    makespan: float
    bubble: float
    equal_bubble: float
    """The bubble of this table were every pass of a stage as long as every other, and transfers free."""


@dataclass(frozen=True)
class LedgerLine:
    """Parameters of one pattern of names that lie alike, and one sum that their gradients owe."""

    parameters: str
    count: int
    """On one rank: the one that has most of them."""
    elements: int
    """On that rank, all `count` together."""
    stages: tuple[int, ...]
    placement: str
    mode: str
    """"" where nothing is owed."""
    ranks: int
    """The size of the group that is summed over."""
    divisor: float
    done_by: str


@dataclass(frozen=True)
class Totals:
    """The whole step. `step_seconds` is the sum of the four parts that follow; what the passes take is the mean of the pipeline's
    ranks, what comes after them that of the slowest class of ranks."""

    world_size: int
    parameters: int
    """Elements of the whole model."""
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    """Collectives that nothing hides."""
    bubble_seconds: float
    """Of the pipeline: `Timeline.bubble` of the makespans of a step."""
    optimizer_seconds: float
    samples: int
    """Samples of one step of the world."""
    tokens: int
    """Tokens of one step of the world; 0 where the batch has no tokens."""
    flops: float
    """Of all ranks, in one step, with what is computed a second time."""
    model_flops: float
    """Without it."""
    mfu: float
    """Model flops utilisation: model_flops / (step_seconds x ranks x peak)."""
    hfu: float
    """Hardware flops utilisation: flops / (step_seconds x ranks x peak)."""
    peak_memory: int
    fits: bool
    bytes_inside_nodes: int
    """Sent by all ranks in a step."""
    bytes_between_nodes: int
    communicators: int
    """To create, in the whole world."""
    communicators_per_rank: int


@dataclass(frozen=True)
class Plan:
    """A whole job, before it runs."""

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
    """What `initialize` would refuse."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `Memory.total` is written out, and a row of the timeline is a list of lists."""
        plain = {each.name: _plain(getattr(self, each.name)) for each in fields(self) if each.name != "timeline"}
        for one, made in zip(self.classes, plain["classes"], strict=True):
            made["memory"]["total"] = one.memory.total
        return {**plain, "timeline": None if self.timeline is None else _timeline(self.timeline)}


@dataclass(frozen=True)
class Candidate:
    """One layout that `search` looked at: its sizes, what it would take, and why it was cut (or "")."""

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
    """Layouts that fit, fastest first; and those that were cut, with the reason of each."""

    world_size: int
    hardware: Hardware
    fitting: tuple[Candidate, ...]
    cut: tuple[Candidate, ...]
    config: str
    """The winner as a config to paste; "" where nothing fits."""
    verify: str
    """Commands that write the config of its small twin, and verify it on this machine."""
    best: Plan | None = None
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain = {each.name: _plain(getattr(self, each.name)) for each in fields(self) if each.name != "best"}
        return {**plain, "best": None if self.best is None else self.best.to_dict()}


def _timeline(timeline: PlannedTimeline) -> dict[str, Any]:
    """Of many thousand actions: each is a list [kind, stage, micro-batch, start, end]."""
    rows = [[[one.kind, one.stage, one.micro_batch, one.start, one.end] for one in row] for row in timeline.rows]
    return {each.name: getattr(timeline, each.name) for each in fields(timeline)} | {"rows": rows}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value
