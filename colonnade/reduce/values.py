"""The parameters of a sharded bucket: flat on every rank, and the slice of them that this rank steps on."""

from __future__ import annotations

import torch
from torch import Tensor

from colonnade.comm.memory import allocate
from colonnade.comm.rank_group import RankGroup
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.flat import flattened
from colonnade.parallel.placement import is_dtensor
from colonnade.reduce.bucket import Bucket
from colonnade.reduce.buffer import OwnedSpan


class BucketValues:
    """The parameters of `bucket` in flat memory, with its offsets; `owned` is the slice that is stepped on.

    `owned` is part of the parameters themselves, or (another dtype or device, as `shard` has) a master copy of it.
    Collective: the memory is shared where it can be.
    """

    @torch.no_grad()
    def __init__(self, bucket: Bucket, group: RankGroup) -> None:
        self.bucket, self.group = bucket, group
        share, layout = bucket.transport.shares_memory, bucket.layout
        self.memory = allocate(group, bucket.numel, layout.dtype, layout.device, share)
        self._elsewhere: list[tuple[Tensor, Tensor, OwnedSpan | None]] = []
        spans = {span.index: span for span in bucket.spans}
        self._spans = [spans.get(index) for index in range(len(bucket.parameters))]
        views = bucket.layout.views(self.memory.own[: bucket.layout.numel])
        for parameter, view, span in zip(bucket.parameters, views, self._spans, strict=True):
            part = local_part(parameter)
            view.copy_(part)
            if is_dtensor(parameter):
                # What made it (FSDP2) knows where its elements lie: they stay there, and are copied in and out.
                self._elsewhere.append((part, view, span))
            else:
                parameter.data = view
        self._views = views
        shard = bucket.gradient
        self.has_master = (shard.dtype, shard.device) != (bucket.layout.dtype, bucket.layout.device)
        self.owned = self._own_part
        if self.has_master:
            self.owned = torch.empty_like(shard, pin_memory=shard.is_pinned()).copy_(self._own_part)
        self.parts = [self.owned[span.at : span.at + span.numel] for span in bucket.spans]
        self.grads = [shard[span.at : span.at + span.numel] for span in bucket.spans]

    @property
    def _own_part(self) -> Tensor:
        return self.memory.own[self.bucket.own][: self.bucket.used]

    @torch.no_grad()
    def refresh(self) -> None:
        """Take up what somebody wrote to the parameters since the last step, in whatever way: loaded weights, say.

        A parameter that was given other memory gets the bucket's back, with its values. A master copy keeps its
        digits wherever the parameter still is what the copy rounds to.
        """
        # Only what this rank owns: the rest comes from its owner, who may be sending it at this moment.
        for part, view, span in self._elsewhere:
            if span is not None:
                flattened(view)[span.start : span.stop].copy_(flattened(part)[span.start : span.stop])
        if not self._elsewhere:
            for parameter, view, span in zip(self.bucket.parameters, self._views, self._spans, strict=True):
                if parameter.data_ptr() != view.data_ptr():
                    if span is not None:
                        as_here = torch.empty_like(view).copy_(parameter)  # its elements may lie in another order
                        flattened(view)[span.start : span.stop].copy_(flattened(as_here)[span.start : span.stop])
                    parameter.data = view
        if self.has_master and self.bucket.used:
            now = self._own_part.to(self.owned.device)
            self.owned.copy_(torch.where(now == self.owned.to(now.dtype), self.owned, now.to(self.owned.dtype)))

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the stepped slice to this rank's parameters; the other ranks still have to be sent it."""
        if self.has_master:
            self._own_part.copy_(self.owned)

    @torch.no_grad()
    def copy_out(self) -> None:
        """The parameters of all ranks have come: bring them to those that lie elsewhere."""
        for part, view, _ in self._elsewhere:
            part.copy_(view)
