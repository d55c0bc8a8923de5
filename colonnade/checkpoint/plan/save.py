"""What one rank writes of its state. Each distinct block is written once, by the first of the ranks that hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from colonnade.checkpoint.format.boxes import whole_box
from colonnade.checkpoint.format.manifest import GroupRecord
from colonnade.checkpoint.format.values import Encoded, encode, is_stateful
from colonnade.checkpoint.plan.notes import Outline, RankNote, entry_key
from colonnade.checkpoint.plan.optimizer import ParameterGroup, ParameterState, read_groups, read_state
from colonnade.checkpoint.plan.pieces import SavePlan, plan_pieces, plan_shard, plan_weight
from colonnade.checkpoint.plan.tensors import LocalTensor, extra_states
from colonnade.checkpoint.plan.values import BUFFER, RANDOM
from colonnade.checkpoint.random_state import random_state
from colonnade.context.parallel_context import ParallelContext
from colonnade.parallel.dtensor import local_part


class LocalState:
    """The state of this rank: its model, its optimizer, and everything that is a value. Refuses what cannot be saved."""

    def __init__(
        self,
        tensors: Sequence[LocalTensor],
        model: nn.Module,
        optimizer: Any,
        extra: Mapping[str, Any] | None,
        context: ParallelContext,
    ) -> None:
        self.tensors = tensors
        self.buffers = [
            (tensor, encode(tensor.local, tensor.label))
            for tensor in tensors
            if len(tensor.holders) > 1 and not isinstance(tensor.tensor, nn.Parameter)
        ]
        self.items = {RANDOM: encode(random_state(context), "the random state")}
        for name, value in extra_states(model).items():
            self.items[f"model/{name}"] = encode(value, f"the model's {name}")
        for name, value in (extra or {}).items():
            state = value.state_dict() if is_stateful(value) else value
            self.items[f"extra/{name}"] = encode(state, f"extra[{name!r}]")
        self.optimizer = read_state(optimizer, tensors) if optimizer is not None else []
        self.groups = read_groups(optimizer, tensors) if optimizer is not None else None

    def note(self) -> dict[str, Any]:
        """What the other ranks must know, to agree with this one on who writes what."""
        stepped = {state.parameter.label for state in self.optimizer}
        members = {one.label: one.label in stepped for group in self.groups or () for one in group.members}
        values = [*self.items.items(), *((f"{BUFFER}{tensor.label}", item) for tensor, item in self.buffers)]
        return {"optimizer": members, "items": {name: item.digest() for name, item in values}}


def plan_save(state: LocalState, notes: Sequence[Mapping[str, Any]], rank: int) -> SavePlan:
    """What this rank writes, now that every rank's note is known. Pure; the same choice on every rank."""
    plan = SavePlan(RankNote(rank, None if state.groups is None else []))
    for tensor in state.tensors:
        plan_weight(plan, tensor, tensor.local)
    with_state = [{label for label, stepped in note["optimizer"].items() if stepped} for note in notes]
    for kept in state.optimizer:
        _plan_optimizer(plan, kept, [at for at in kept.parameter.sharers if kept.parameter.label in with_state[at]])
    for group in state.groups or ():
        _plan_group(plan, group, [note["optimizer"] for note in notes])
    for tensor, item in state.buffers:
        _plan_buffer(plan, tensor, item, [note["items"].get(f"{BUFFER}{tensor.label}") for note in notes])
    for name, item in state.items.items():
        ranks = [at for at, note in enumerate(notes) if note["items"].get(name) == notes[rank]["items"][name]]
        if next(iter(ranks)) == rank:
            plan.note.items.append(plan.add_item(name, tuple(ranks), item))
    plan.close()
    return plan


def _plan_buffer(plan: SavePlan, tensor: LocalTensor, item: Encoded, digests: Sequence[str | None]) -> None:
    """Of a buffer that has drifted apart, what `plan_weight` leaves out: each value that the first holder has not."""
    rank, name = plan.note.rank, f"{BUFFER}{tensor.label}"
    ranks = [at for at in tensor.holders if digests[at] == digests[rank]]
    if next(iter(ranks)) == rank != tensor.holders[0]:
        plan.note.items.append(plan.add_item(name, tuple(ranks), item))


def _plan_optimizer(plan: SavePlan, kept: ParameterState, stepped: Sequence[int]) -> None:
    """`stepped` are the ranks that keep state for the parameter."""
    parameter, first = kept.parameter, next(iter(stepped)) == plan.note.rank
    if not isinstance(kept.value, Tensor):
        if first:
            key = entry_key(parameter.label, kept.name)
            plan.note.items.append(plan.add_item(key, (plan.note.rank,), encode(kept.value, str(kept))))
        return
    value = local_part(kept.value).detach()
    if not kept.like_parameter:
        if first:
            box = whole_box(value.shape)
            plan.add_box(Outline.of_rows(parameter.label, (), box.shape, box), box, kept.name, value, writes=True)
    elif kept.shard is None:
        holder = next(at for at in stepped if at in parameter.holders)
        writes = holder == plan.note.rank
        if writes or first:
            plan_pieces(plan, parameter, (), kept.name, value, writes)
    elif next(iter(parameter.holders)) in kept.shard.ranks:  # the team of the first of all that hold the parameter
        plan_shard(plan, parameter, kept.shard, kept.name, value)


def _plan_group(plan: SavePlan, group: ParameterGroup, members: Sequence[Mapping[str, bool]]) -> None:
    """Each member is named by the first rank whose optimizer has it; `members` are those of every rank."""
    names = tuple(
        one.label
        for one in group.members
        if plan.note.rank == next(at for at in one.sharers if one.label in members[at])
    )
    if names and plan.note.groups is not None:
        options = plan.add_item(f"optimizer/options/{group.index}", (plan.note.rank,), group.options)
        digest = f"{group.optimizer} {group.options.digest()}"
        plan.note.groups.append((digest, GroupRecord(group.index, names, options, group.optimizer)))
