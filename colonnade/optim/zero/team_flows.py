"""The flows of one team: which are under way, and what its ranks tell each other about a step's gradients."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence

import torch.distributed as dist

from colonnade.errors import GradientError
from colonnade.optim.zero.flow import Flow
from colonnade.optim.zero.gather import Gather, spread
from colonnade.optim.zero.team import Team


class TeamFlows:
    """Starts, lands and settles the buckets of one team, the same ones in the same order on all its ranks."""

    def __init__(self, team: Team, flows: Sequence[Flow], gather: Gather) -> None:
        self.team = team
        self.flows = list(flows)
        self.gather = gather
        self._under_way: deque[tuple[Flow, int]] = deque()
        self._turn = self._step = 0

    def start(self, flow: Flow) -> None:
        """Fill the room whose turn it is; first wait until every rank has read what was in it."""
        at = 0
        if not flow.keeps:
            # In shared memory a rank that is told of a full room learns that the room before it is free.
            most = 1 if flow.rooms[0].every is not None else len(flow.rooms)
            while len(self._under_way) >= most:
                self._land_first()
            at, self._turn = self._turn % len(flow.rooms), self._turn + 1
        flow.fill(at)
        flow.sums[at].start()
        self._under_way.append((flow, at))

    def finish(self) -> None:
        """End all sums, those that need a meeting after it. Collective; notes about absent gradients are joined."""
        early = [entry for entry in self._under_way if not entry[0].prompt]
        prompt = [entry for entry in self._under_way if entry[0].prompt]
        self._under_way.clear()
        for flow, at in early:
            flow.land(at)
        for flow, notes in zip(self.flows, self._meet(), strict=True):
            flow.take(notes)
        for flow, at in prompt:
            flow.land(at)
        for flow in self.flows:
            if flow.late:
                self._add_late(flow)

    def give_back(self) -> None:
        """Bring the final gradients to every rank, as `.grad`. Collective."""
        works = [] if self.team.alone else [spread(self.team, flow.rooms[0], flow.bucket.own) for flow in self.flows]
        for work in works:
            if work is not None:
                work.wait()
        if any(flow.rooms[0].every is not None for flow in self.flows):
            self.team.exchange(b"g")
        for flow in self.flows:
            flow.show_grads()

    def _land_first(self) -> None:
        flow, at = self._under_way.popleft()
        flow.land(at)

    def _meet(self) -> list[bytes]:
        """Wait for the other ranks; per flow, the notes of all ranks joined."""
        own = b"".join(flow.notes() for flow in self.flows)
        digest = hashlib.blake2b(own, digest_size=8).digest()
        heard = self.team.exchange(self._step.to_bytes(8, "little") + digest)
        self._check_steps(heard)
        self._step += 1
        alike = all(message == heard[0] for message in heard)
        joined = own if alike else bytes(map(_any_bit, zip(*self.team.party.gather_bytes(own), strict=True)))
        parts, start = [], 0
        for flow in self.flows:
            parts.append(joined[start : start + len(flow.parameters)])
            start += len(flow.parameters)
        return parts

    def _add_late(self, flow: Flow) -> None:
        """Sum the gradients that lie beside the bucket. Collective."""
        bucket, room = flow.bucket, flow.late_room()
        if not self.team.alone:
            dist.all_reduce(room, group=self.team.group)
        mine = room[bucket.own][: bucket.used]
        bucket.grads.add_(mine.to(bucket.grads.device, bucket.grads.dtype), alpha=1.0 / flow.divisor)

    def _check_steps(self, heard: list[bytes]) -> None:
        steps = [int.from_bytes(message[:8], "little") for message in heard]
        if len(set(steps)) > 1:
            at = ", ".join(f"rank {rank}: {step}" for rank, step in zip(self.team.ranks, steps, strict=True))
            raise GradientError(
                f"ranks are not in the same gradient synchronisation ({at}); a rank has skipped or repeated one"
            )


def _any_bit(notes: tuple[int, ...]) -> int:
    joined = 0
    for note in notes:
        joined |= note
    return joined
