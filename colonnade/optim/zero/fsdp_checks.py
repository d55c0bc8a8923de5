"""Checks of stage 3: optimizers that can step on shards, and ranks that run the same modules in the same order.

FSDP2 pairs the collectives of modules by their order alone. A rank that skips a module would be given another
module's weights, and the sums would mix their gradients. In the first step the ranks agree on every collective before it
is issued. What was seen becomes the plan of later steps, which are compared once each, while nobody waits. A rank that is
about to leave the plan takes part in the rest of it with zeros, so that nobody hangs, and then says so; ranks that all
leave it in the same way (an evaluation) go on.
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

from colonnade.comm.rank_group import gather_json_by, gloo_beside
from colonnade.comm.torch_versions import all_gather_flat, reduce_scatter_flat
from colonnade.errors import GradientError, listed
from colonnade.optim.zero.zero_optimizer import kinds_of_groups, two_steps
from colonnade.parallel.split import Chunks
from colonnade.texts import digest_of

_ADVICE = "Run every module on every rank (multiply by zero what is not wanted), or use zero stage 2."


@dataclass(frozen=True)
class Event:
    """A collective of a module, or the optimizer's step; `parts` has a bit for each of `names` that has a gradient."""

    text: str
    parts: int = 0
    names: Sequence[str] = field(default=(), compare=False)

    @property
    def code(self) -> int:
        """The same number on every rank."""
        return digest_of(f"{self.text} {self.parts}")

    def __str__(self) -> str:
        has = [name for at, name in enumerate(self.names) if self.parts >> at & 1]
        return f"{self.text}, of it {listed(has[:8])}" if 0 < len(has) < len(self.names) else self.text


STEP = Event("steps the optimizer")
_FOLLOWED = 0
_Planned = tuple[Event, Callable[[], None]]


class RunOrder:
    """Compares the order of collectives among the ranks of `group` (a group for this alone is made: collective)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self._gather = gloo_beside(group)
        self._plan: list[_Planned] = []
        self._seen: list[_Planned] = []
        self._at: int  # the place in the plan, once there is one
        self._careful = True
        self._missed: int  # how often in a row, from the first plan on
        self._steps = 0
        self._stepped = self._said_step = False
        self._pending: tuple[Tensor, Any] | None = None

    def issue(self, event: Event, replay: Callable[[], None]) -> None:
        """Before a collective; `replay` does the same one with zeros. Raises on all ranks where they differ."""
        if not self._careful:
            if self._at == len(self._plan):  # a whole step's collectives, and no step: it was dropped
                self._read_followed()
                self._at = 0
            if self._plan[self._at][0] == event:
                self._at += 1
                if self._at == len(self._plan):
                    self._pending = self._send(_FOLLOWED, 0)
                    _at_end_of_backward(self._read_followed)
                return
            self._leave_plan(event)
        else:
            self._compare(event)
        self._seen.append((event, replay))

    def step(self) -> None:
        """Before weights change: returns if all ranks have issued the same collectives up to here."""
        if self._careful:
            self._compare(STEP)
        elif self._at == len(self._plan):
            self._read_followed()
            self._missed = 0
        else:
            self._leave_plan(STEP)
        if self._careful and (not self._plan or self._missed > 1):
            # What happens just once, such as an evaluation between two steps, is no plan.
            self._plan, self._missed = self._seen, 0
        self._careful = not self._plan
        self._seen, self._at, self._stepped = [], 0, True
        self._steps += 1

    # -- inside -------------------------------------------------------------------------------------------

    def _compare(self, event: Event) -> None:
        rows = self._receive(self._send(1 + len(self._seen), event.code))
        if len(set(rows)) > 1:
            self._refuse(len(self._seen), event)

    def _leave_plan(self, event: Event) -> None:
        """Free the ranks that keep to the plan, then see whether there are any."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # collectives of other streams come first
        try:
            for _, replay in self._plan[self._at :]:
                replay()
        except RuntimeError as error:  # they wait for this rank in some collective of the model's own, or are gone
            raise GradientError(
                f"zero stage 3, step {self._steps + 1}: this rank {event}, where earlier steps have: "
                f"{self._plan[self._at][0]}, and the others did not come along. {_ADVICE}",
                code="C070",
            ) from error
        rows = self._receive(self._send(1 + self._at, event.code))
        if len(set(rows)) > 1:
            self._refuse(self._at, event)
        self._careful, self._seen, self._missed = True, self._plan[: self._at], self._missed + 1

    def _read_followed(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            if len(set(self._receive(pending))) > 1:
                self._refuse(None, None)

    def _send(self, at: int, code: int) -> tuple[Tensor, Any]:
        mine = torch.tensor([[at, code, int(self._stepped)]], device="cpu")
        self._said_step, self._stepped = self._stepped, False
        everyone = mine.new_empty(len(self.ranks), 3)
        return everyone, self._gather(everyone, mine)

    def _receive(self, sent: tuple[Tensor, Any]) -> list[tuple[int, ...]]:
        everyone, work = sent
        try:
            work.wait()
        except RuntimeError as error:
            raise GradientError(
                f"zero stage 3, step {self._steps + 1}: a rank of {listed(self.ranks)} left before all had compared the "
                f"modules they run; look at its own output for the cause",
                code="C070",
            ) from error
        return [tuple(row) for row in everyone.tolist()]

    def _refuse(self, at: int | None, event: Event | None) -> NoReturn:
        """Say what each rank was about to do where the first one parted. Collective."""
        mine = [at, str(event)[:1000], self._said_step]
        everyone = gather_json_by(self._gather, len(self.ranks), mine)
        first = min((place for place, *_ in everyone if place is not None), default=None)
        told = "another number of optimizer steps has been taken"
        if first is not None:
            planned = str(self._plan[first][0] if first < len(self._plan) else STEP)
            doing: dict[str, list[int]] = {}
            for rank, (place, text, stepped) in zip(self.ranks, everyone, strict=True):
                after = (
                    "" if len({said for *_, said in everyone}) == 1 else f", {'after' if stepped else 'without'} a step"
                )
                doing.setdefault((text if place == first else planned) + after, []).append(rank)
            told = "; ".join(f"rank{'s' * (len(ranks) > 1)} {listed(ranks)} {text}" for text, ranks in doing.items())
        raise GradientError(
            f"zero stage 3, step {self._steps + 1}: the ranks {listed(self.ranks)} do not run the same modules in the same "
            f"order, and weights are gathered from all of them at once. First difference: {told}. This step changes no "
            f"weights. {_ADVICE}",
            code="C070",
        )


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class WatchedGather(_Allocates):
    """FSDP2's all-gather of one module, announced first."""

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
    """FSDP2's reduce-scatter of one module, announced first by what `event` gives then.

    `replicas` is the group of the sum that follows it where shards are replicas on another axis.
    """

    def __init__(self, order: RunOrder, event: Callable[[], Event], replicas: dist.ProcessGroup | None) -> None:
        self._order, self._event, self._replicas = order, event, replicas

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        out, own, dtype, device = output_tensor.shape, input_tensor.shape, input_tensor.dtype, input_tensor.device

        def replay() -> None:
            part = torch.empty(out, dtype=dtype, device=device)
            reduce_scatter_flat(part, torch.zeros(own, dtype=dtype, device=device), group=group, op=op)
            if self._replicas is not None:
                kind = dist.ReduceOp.AVG if op == dist.ReduceOp.AVG else dist.ReduceOp.SUM
                dist.all_reduce(part, group=self._replicas, op=kind)

        self._order.issue(self._event(), replay)
        return reduce_scatter_flat(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def _at_end_of_backward(act: Callable[[], None]) -> None:
    """Run `act` when the backward pass that runs now is over: before gradients that others sum are waited for."""
    if torch._C._current_graph_task_id() != -1:
        torch.autograd.Variable._execution_engine.queue_callback(act)


class Member:
    """A parameter of a unit: `shard` between passes, and gathered inside them, where its gradient hooks belong.

    Hooks of `register_hook` get the whole gradient of this rank, as without sharding. Those that run after accumulation
    get the shard with its final gradient, which is where FSDP2 accumulates.
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
        """The whole parameter while its unit is gathered; `note` is called when it has a gradient."""
        whole: Any = self._owner._parameters[self._attribute]
        if whole.requires_grad:
            if not self._ready:
                whole.register_post_accumulate_grad_hook(note)
                self._ready = True
            if not self._hooked and (self._old_hooks or self._shard._backward_hooks):
                whole.register_hook(self._run_hooks)
                self._hooked = True
        return whole

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
                    f"zero stage 3: a register_post_accumulate_grad_hook of {self.name} failed ({error}). It is given this "
                    f"rank's shard, a DTensor, with the final gradient; use register_hook for whole gradients, or stage 2.",
                    code="C070",
                ) from error


def _owner(model: nn.Module, path: str, attribute: str, shard: Any) -> nn.Module:
    """The module that has this parameter. Several stages of a rank may have one of that name, the model itself say."""
    for root in model if isinstance(model, Chunks) else [model]:
        with suppress(AttributeError):
            owner = root.get_submodule(path)
            if owner._parameters.get(attribute) is shard:
                return owner
    raise GradientError(f"zero stage 3: no module of the model holds {attribute!r} as {path!r}", code="C070")


class Unit:
    """A module whose parameters are gathered together, while it is used."""

    def __init__(self, module: nn.Module, name: str, members: Sequence[Member]) -> None:
        self.name, self._members = name, members
        self._names = [member.name for member in members]
        self._have_grad: list[Tensor] = []
        self._places: dict[int, int] = {}
        module.register_forward_pre_hook(self._enter)  # after FSDP2's own, which gathers

    def reduction(self) -> Event:
        """What is about to be reduced."""
        parts, self._have_grad[:] = {1 << self._places[id(p)] for p in self._have_grad}, []
        return Event(f"reduces {self.name}", sum(parts), self._names)

    def _enter(self, *_: Any) -> None:
        for at, member in enumerate(self._members):
            self._places[id(member.gathered(self._have_grad.append))] = at


class ForwardGuard:
    """Sees to it that no forward pass of `root` uses weights that were gathered before they changed.

    FSDP2 keeps the root's parameters, and what was gathered ahead, for a backward pass, also where none comes. So an
    evaluation gives everything back, a pass that raised is forgotten, and `give_back` is called before weights change.
    """

    def __init__(self, root: Any, units: Sequence[Any]) -> None:
        self._root, self._units = root, units
        self._has_run = self._running = False
        root.register_forward_pre_hook(self._make_memory, prepend=True)
        root.register_forward_pre_hook(self._enter)
        root.register_forward_hook(self._leave)
        root.register_forward_hook(self._leave_always, always_call=True)

    def give_back(self) -> None:
        """Have nothing gathered, nor under way."""
        if not self._has_run:
            return
        if hasattr(self._root, "reset_iter_state"):  # of newer torch
            self._root.reset_iter_state()
        for unit in self._units:
            unit.reshard()

    def _make_memory(self, *_: Any) -> None:
        """FSDP2 makes what it gathers into in the first pass; in inference mode no training pass could write to it."""
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
                "zero stage 3: a DTensor in a forward pass is a weight that is used outside the module that holds it, "
                "where it is not gathered. Name in zero.wrap modules that hold all they use, or use zero stage 2."
            )
        self.give_back()


def check_optimizer(optimizer: Any, mesh: Any) -> None:
    """Refuse an optimizer that cannot step on shards, or steps otherwise on them: two steps on a small matrix tell."""
    if not isinstance(optimizer, Optimizer):
        return
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    *replicas, shards = mesh.shape
    name, specs = type(optimizer).__name__, [*(Replicate() for _ in replicas), Shard(0)]

    def cut(tensor: Tensor) -> list[Any]:
        return [distribute_tensor(tensor.clone(), mesh, specs, src_data_rank=None)]  # all have the same

    try:
        apart = []
        for first, *_ in kinds_of_groups(optimizer):
            whole, (stepped,) = two_steps(optimizer, first, (2 * shards, 4), cut, mesh.device_type)
            (truth,) = cut(whole)
            apart.append((stepped.to_local() - truth.to_local()).abs().max().item())
    except Exception as error:
        raise GradientError(
            f"{name} could not step on a shard of a matrix, as zero stage 3 has it: {error}. Use AdamW, SGD or another "
            f"optimizer that takes DTensors, or zero stage 0.",
            code="C070",
        ) from error
    for far in [far for far in apart if not far < 0.05]:  # some, such as Muon, round to bf16 on the way
        raise GradientError(
            f"zero stage 3: {name} steps otherwise on the shards of a matrix than on the whole (by {far:g}). Use AdamW, SGD "
            f"or another optimizer that takes DTensors, or zero stage 0.",
            code="C070",
        )
