"""Checks of ZeRO stage 3: the optimizer can step on shards, and all ranks run the same modules in the same order.

FSDP2 pairs the collectives of modules by their order only. A rank that skips a module would receive another module's weights,
and reductions would mix their gradients. In the first step the ranks agree on every collective before they issue it. The
recorded sequence becomes the plan of later steps, which are compared once each, without waiting. A rank that is about to leave
the plan first takes part in the rest of it with zeros, so that no rank hangs, and reports afterwards. If all ranks leave the
plan in the same way (for an evaluation), training continues.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from colonnade.comm.groups import gather_json_by, separate_gloo_gather
from colonnade.comm.torch_versions import all_gather_flat, reduce_scatter_flat
from colonnade.errors import GradientError, listed
from colonnade.optim.engine_optimizer import groups_by_options, run_trial_steps
from colonnade.parallel.split import Chunks
from colonnade.texts import digest_of

_ADVICE = "Run every module on every rank (multiply unwanted results by zero), or use zero stage 2."


@dataclass(frozen=True)
class Event:
    """A collective of a module, or the optimizer's step.

    In `parts`, a bit is set for each parameter of `names` that has a gradient.
    """

    text: str
    parts: int = 0
    names: Sequence[str] = field(default=(), compare=False)

    @property
    def code(self) -> int:
        """A digest of the event, equal on all ranks for the same event."""
        return digest_of(f"{self.text} {self.parts}")

    def __str__(self) -> str:
        has = [name for at, name in enumerate(self.names) if self.parts >> at & 1]
        return f"{self.text}, of these {listed(has[:8])}" if 0 < len(has) < len(self.names) else self.text


STEP = Event("steps the optimizer")
_FOLLOWED = 0
_Planned = tuple[Event, Callable[[], None]]


class RunOrder:
    """Compares the order of collectives between the ranks of `group`.

    Creates its own gloo group, so all these ranks must create it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self._gather = separate_gloo_gather(group)
        self._plan: list[_Planned] = []
        """The collectives of a step, each with a function that takes part in it with zeros; empty before the first step."""
        self._seen: list[_Planned] = []
        """The collectives of this step so far, in careful mode."""
        self._at: int  # the position in the plan, once there is one
        self._careful = True
        """Whether ranks compare every collective before they issue it, or only compare once that the plan was followed."""
        self._missed: int  # the number of steps in a row that have left the plan
        self._steps = 0
        self._stepped = self._sent_step = False
        self._pending: tuple[Tensor, Any] | None = None

    def issue(self, event: Event, replay: Callable[[], None]) -> None:
        """Announce the collective `event`; `replay` can issue it with zeros. Raises on all ranks if their collectives differ."""
        if not self._careful:
            if self._at == len(self._plan):  # all collectives of a step, but no optimizer step: it was skipped
                self._read_followed()
                self._at = 0
            if self._plan[self._at][0] == event:
                self._at += 1
                # After the last collective of the plan, ranks exchange that they have followed it. The answers are read at the end of
                # backward: by then they have arrived, and gradients that handlers reduce are not waited for yet.
                if self._at == len(self._plan):
                    self._pending = self._send(_FOLLOWED, 0)
                    if torch._C._current_graph_task_id() != -1:
                        torch.autograd.Variable._execution_engine.queue_callback(self._read_followed)
                return
            self._leave_plan(event)
        else:
            self._compare(event)
        self._seen.append((event, replay))

    def step(self) -> None:
        """Raise unless all ranks have issued the same collectives in this step. Called before weights change. Collective."""
        if self._careful:
            self._compare(STEP)
        elif self._at == len(self._plan):
            self._read_followed()
            self._missed = 0
        else:
            self._leave_plan(STEP)

        # The collectives of a careful step become the plan if there is none, or if two steps in a row have left it. One deviation,
        # such as an evaluation between two steps, does not replace the plan.
        if self._careful and (not self._plan or self._missed > 1):
            self._plan, self._missed = self._seen, 0
        self._careful = not self._plan
        self._seen, self._at, self._stepped = [], 0, True
        self._steps += 1

    def _compare(self, event: Event) -> None:
        rows = self._receive(self._send(1 + len(self._seen), event.code))
        if len(set(rows)) > 1:
            self._refuse(len(self._seen), event)

    def _leave_plan(self, event: Event) -> None:
        """Complete the plan with zeros, which frees ranks that follow it, then compare with them."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # collectives on other streams come first
        try:
            for _, replay in self._plan[self._at :]:
                replay()
        except RuntimeError as error:  # the other ranks have failed, or wait in a collective of the model itself
            raise GradientError(
                f"ZeRO stage 3, step {self._steps + 1}: this rank {event}, but in earlier steps it "
                f"{self._plan[self._at][0]} at this point. The other ranks did not take part. {_ADVICE}",
                code="C070",
            ) from error
        rows = self._receive(self._send(1 + self._at, event.code))
        if len(set(rows)) > 1:
            self._refuse(self._at, event)
        self._careful, self._seen, self._missed = True, self._plan[: self._at], self._missed + 1

    def _read_followed(self) -> None:
        """Read the answers of the other ranks about the plan, if there are any to read."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            if len(set(self._receive(pending))) > 1:
                self._refuse(None, None)

    def _send(self, at: int, code: int) -> tuple[Tensor, Any]:
        own = torch.tensor([[at, code, int(self._stepped)]], device="cpu")
        self._sent_step, self._stepped = self._stepped, False
        rows = own.new_empty(len(self.ranks), 3)
        return rows, self._gather(rows, own)

    def _receive(self, sent: tuple[Tensor, Any]) -> list[tuple[int, ...]]:
        rows, work = sent
        try:
            work.wait()
        except RuntimeError as error:
            raise GradientError(
                f"ZeRO stage 3, step {self._steps + 1}: a rank of {listed(self.ranks)} exited before the ranks had "
                "compared the modules that they run. Read the output of that rank for the cause.",
                code="C070",
            ) from error
        return [tuple(row) for row in rows.tolist()]

    def _refuse(self, at: int | None, event: Event | None) -> NoReturn:
        """Raise an error with the first collective in which ranks differ, and what each rank issued there. Collective."""
        own = [at, str(event)[:1000], self._sent_step]
        answers = gather_json_by(self._gather, len(self.ranks), own)
        first = min((place for place, *_ in answers if place is not None), default=None)
        difference = "the numbers of optimizer steps differ"
        if first is not None:
            # Ranks that are at a later place, or follow the plan, issue what the plan has at the first one.
            planned = str(self._plan[first][0] if first < len(self._plan) else STEP)
            steps_differ = len({stepped for *_, stepped in answers}) > 1
            ranks_by_text: dict[str, list[int]] = {}
            for rank, (place, text, stepped) in zip(self.ranks, answers, strict=True):
                after = f", {'after' if stepped else 'without'} a step" if steps_differ else ""
                ranks_by_text.setdefault((text if place == first else planned) + after, []).append(rank)
            difference = "; ".join(
                f"rank{'s' * (len(ranks) > 1)} {listed(ranks)} {text}" for text, ranks in ranks_by_text.items()
            )
        raise GradientError(
            f"ZeRO stage 3, step {self._steps + 1}: the ranks {listed(self.ranks)} do not run the same modules in "
            f"the same order, but all-gathers of weights require this. The first difference is: {difference}. No "
            f"weights were changed in this step. {_ADVICE}",
            code="C070",
        )


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class WatchedGather(_Allocates):
    """FSDP2's all-gather of one module, which is first announced to `order`."""

    def __init__(self, order: RunOrder, name: str) -> None:
        self._order, self._event = order, Event(f"gathers {name}")

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        out, own, dtype, device = output_tensor.shape, input_tensor.shape, input_tensor.dtype, input_tensor.device

        def replay() -> None:
            zeros = torch.zeros(own, dtype=dtype, device=device)
            all_gather_flat(torch.empty(out, dtype=dtype, device=device), zeros, group=group)

        self._order.issue(self._event, replay)
        return all_gather_flat(output_tensor, input_tensor, group=group, async_op=async_op)


class WatchedReduce(_Allocates):
    """FSDP2's reduce-scatter of one module, which is first announced to `order`.

    Args:
        order: The `RunOrder` of this rank.
        event: Returns the event to announce; called at the time of the collective.
        replicas: The group of the all-reduce that follows if shards are replicated.
    """

    def __init__(self, order: RunOrder, event: Callable[[], Event], replicas: dist.ProcessGroup | None) -> None:
        self._order, self._event, self._replicas = order, event, replicas

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        out, own, dtype, device = output_tensor.shape, input_tensor.shape, input_tensor.dtype, input_tensor.device

        def replay() -> None:
            shard = torch.empty(out, dtype=dtype, device=device)
            reduce_scatter_flat(shard, torch.zeros(own, dtype=dtype, device=device), group=group, op=op)
            if self._replicas is not None:
                kind = dist.ReduceOp.AVG if op == dist.ReduceOp.AVG else dist.ReduceOp.SUM
                dist.all_reduce(shard, group=self._replicas, op=kind)

        self._order.issue(self._event(), replay)
        return reduce_scatter_flat(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


class Member:
    """A parameter of an FSDP unit, with the gradient hooks of users.

    Between passes, the parameter is `shard`; inside a pass, it is gathered.

    Hooks of `register_hook` get this rank's gradient of the full parameter, as without sharding. Hooks of
    `register_post_accumulate_grad_hook` get the shard with its reduced gradient, which is what FSDP2 accumulates.
    """

    def __init__(self, name: str, model: nn.Module, old: nn.Parameter, shard: Any) -> None:
        self.name, self._shard = name, shard
        path, _, self._attribute = name.rpartition(".")
        self._owner = _owner(model, path, self._attribute, shard)
        self._old_hooks = old._backward_hooks or {}
        self._ready = self._hooked = False
        for key, value in vars(old).items():
            if not hasattr(shard, key):
                setattr(shard, key, value)
        later = getattr(old, "_post_accumulate_grad_hooks", None)
        if later and shard.requires_grad:
            shard.register_post_accumulate_grad_hook(lambda parameter: self._run_later(later, parameter))

    def gathered(self, note: Callable[[Tensor], None]) -> nn.Parameter:
        """The gathered parameter inside a pass; `note` is called with its gradient when there is one."""
        gathered: Any = self._owner._parameters[self._attribute]
        # FSDP2 reuses this object in every pass, so each hook is registered once.
        if gathered.requires_grad:
            if not self._ready:
                gathered.register_post_accumulate_grad_hook(note)
                self._ready = True
            if not self._hooked and (self._old_hooks or self._shard._backward_hooks):
                gathered.register_hook(self._run_hooks)
                self._hooked = True
        return gathered

    def _run_hooks(self, grad: Tensor) -> Tensor:
        for hook in [*self._old_hooks.values(), *(self._shard._backward_hooks or {}).values()]:
            changed = hook(grad)
            grad = grad if changed is None else changed
        return grad

    def _run_later(self, hooks: Mapping[int, Callable[[Any], None]], parameter: Any) -> None:
        for hook in list(hooks.values()):
            try:
                hook(parameter)
            except Exception as error:
                raise GradientError(
                    f"ZeRO stage 3: a register_post_accumulate_grad_hook of {self.name} failed ({error}). The "
                    "argument of the hook is the shard of this rank, a DTensor with the reduced gradient. For full "
                    "gradients use register_hook or ZeRO stage 2.",
                    code="C070",
                ) from error


def _owner(model: nn.Module, path: str, attribute: str, shard: Any) -> nn.Module:
    """The module that holds this parameter. With several model chunks on a rank, names may be ambiguous."""
    for root in model if isinstance(model, Chunks) else [model]:
        with suppress(AttributeError):
            owner = root.get_submodule(path)
            if owner._parameters.get(attribute) is shard:
                return owner
    raise GradientError(
        f"ZeRO stage 3: no module {path!r} of the model contains the parameter {attribute!r}.", code="C070"
    )


class Unit:
    """An FSDP unit: a module whose parameters are gathered together. Records which of these parameters get a gradient."""

    def __init__(self, module: nn.Module, name: str, members: Sequence[Member]) -> None:
        self.name, self._members = name, members
        self._names = [member.name for member in members]
        self._have_grad: list[Tensor] = []
        self._places: dict[int, int] = {}
        module.register_forward_pre_hook(self._enter)  # after FSDP2's own, which gathers

    def reduction(self) -> Event:
        """The event of the reduce-scatter that is about to start; called once per backward pass."""
        parts, self._have_grad[:] = {1 << self._places[id(p)] for p in self._have_grad}, []
        return Event(f"reduces {self.name}", sum(parts), self._names)

    def _enter(self, *_: Any) -> None:
        for at, member in enumerate(self._members):
            self._places[id(member.gathered(self._have_grad.append))] = at


class ForwardGuard:
    """Frees outdated gathered weights, so that a forward pass of `root` always uses the current weights.

    FSDP2 keeps the gathered parameters of the root, and prefetched ones, for a backward pass, even if none follows. So they are
    freed after a forward pass without gradients, after a forward pass that raised, and by `give_back` before weights change.
    """

    def __init__(self, root: Any, units: Sequence[Any]) -> None:
        self._root, self._units = root, units
        self._has_run = self._running = False
        root.register_forward_pre_hook(self._make_memory, prepend=True)
        root.register_forward_pre_hook(self._enter)
        root.register_forward_hook(self._leave)
        root.register_forward_hook(self._leave_always, always_call=True)

    def give_back(self) -> None:
        """Free all gathered parameters, including those whose all-gather is still running."""
        if not self._has_run:
            return
        if hasattr(self._root, "reset_iter_state"):  # newer versions of torch
            self._root.reset_iter_state()
        for unit in self._units:
            unit.reshard()

    def _make_memory(self, *_: Any) -> None:
        """Before a first pass in inference mode, make FSDP2 allocate its buffers outside of that mode, so that training
        can write to them.
        """
        if torch.is_inference_mode_enabled() and not self._has_run:
            with torch.inference_mode(False), torch.no_grad():
                for unit in self._units:
                    unit.unshard()
                    unit.reshard()

    def _enter(self, *_: Any) -> None:
        self._has_run = self._running = True

    def _leave(self, *_: Any) -> None:
        self._running = False
        if not torch.is_grad_enabled():
            self.give_back()

    def _leave_always(self, *_: Any) -> None:
        if not self._running:
            return
        error: Any = sys.exception()
        if "DTensor" in str(error):
            error.add_note(
                "ZeRO stage 3: a weight was used outside of its module. There the weight is a DTensor, because "
                "only its module gathers it. Name modules in zero.wrap that contain every weight they use, or "
                "use ZeRO stage 2."
            )
        self.give_back()


def check_optimizer(optimizer: Any, mesh: Any) -> None:
    """Raise GradientError if the optimizer cannot step on shards, or updates them differently from the full tensor, in a trial
    on a small matrix."""
    if not isinstance(optimizer, Optimizer):
        return
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    *replicas, shards = mesh.shape
    name, specs = type(optimizer).__name__, [*(Replicate() for _ in replicas), Shard(0)]

    def shards_of(tensor: Tensor) -> list[Any]:
        return [distribute_tensor(tensor.clone(), mesh, specs, src_data_rank=None)]  # equal on all ranks already

    try:
        differences = []
        for first, *_ in groups_by_options(optimizer):
            full, (stepped,) = run_trial_steps(optimizer, first, (2 * shards, 4), shards_of, mesh.device_type)
            (expected,) = shards_of(full)
            differences.append((stepped.to_local() - expected.to_local()).abs().max().item())
    except Exception as error:
        raise GradientError(
            f"{name} could not step on a shard of a matrix, but ZeRO stage 3 requires this: {error}. Use AdamW, SGD "
            "or another optimizer that supports DTensors, or ZeRO stage 0.",
            code="C070",
        ) from error
    for far in [far for far in differences if not far < 0.05]:  # some optimizers, such as Muon, compute in bf16
        raise GradientError(
            f"ZeRO stage 3: {name} updates the shards of a matrix differently than the full matrix (difference "
            f"{far:g}). Use AdamW, SGD or another optimizer that supports DTensors, or ZeRO stage 0.",
            code="C070",
        )
