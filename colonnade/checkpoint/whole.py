"""Whole weights at run time, out of what the ranks hold: one tensor at a time, to one rank, to all, or into files (`pretrained`).

It is a save without a folder: the ranks say what each would write, which makes the records of the whole tensors, and
the pieces then travel between ranks instead of lying in files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.checkpoint.collective import agreed, gather_json
from colonnade.checkpoint.format.boxes import Box, whole_box
from colonnade.checkpoint.format.entries import dtype_of, memory_for
from colonnade.checkpoint.format.manifest import FileRecord, LayoutRecord, Manifest, TensorRecord, tensors_file
from colonnade.checkpoint.plan.notes import RankNote, merge_tensors
from colonnade.checkpoint.plan.pieces import SavePlan, plan_weight
from colonnade.checkpoint.plan.tensors import LocalTensor, locate_tensors
from colonnade.comm.messages import message_device
from colonnade.comm.rank_group import own_gloo
from colonnade.context.parallel_context import ParallelContext

_CPU = torch.device("cpu")


class WholeTensors:
    """The parameters and persistent buffers of a model as wholes, on any layout. Collective over the world to make.

    `records` are the same on every rank, in the same order. `read` gives something else than the tensors themselves that
    is cut as they are, such as gradients; `keep` chooses among them.
    """

    def __init__(
        self,
        model: nn.Module,
        context: ParallelContext,
        read: Callable[[LocalTensor], Tensor] = lambda tensor: tensor.local,
        keep: Callable[[LocalTensor], bool] = lambda tensor: True,
        doing: str = "gathering the weights",
    ) -> None:
        self.tensors = [tensor for tensor in locate_tensors(model, context, doing) if keep(tensor)]
        self._context, self._rank = context, context.get_global_rank()
        # The name of a rank's file says whose a piece is; there is none.
        plan = SavePlan(RankNote(self._rank, None, file=FileRecord(tensors_file(self._rank), 0, "")))
        with agreed(context, doing):
            for tensor in self.tensors:
                plan_weight(plan, tensor, read(tensor))
            plan.close()
        notes = [RankNote.parse(text, "a rank's note") for text in gather_json(plan.note.dump(), context)]
        with agreed(context, doing):
            self.records, cuts = merge_tensors(notes)
        files = tuple(note.file for note in notes if note.file is not None)
        self._pieces = Manifest(0, 0.0, LayoutRecord.of(context.layout), files, cuts, self.records, None, ())
        self._owners = {file.name: rank for rank, file in enumerate(files)}
        self._mine = {entry.key: entry for entry in plan.entries}
        self._wires: Any = None

    def gather(self, record: TensorRecord) -> Tensor:
        """A whole tensor, on the CPU of every rank. Collective over the world."""
        whole = memory_for(record.shape, dtype_of(record))
        for owner, key, box in self._blocks(record):
            here = whole[box.slices_in(whole_box(record.shape))]
            if owner == self._rank:
                here.copy_(self._mine[key].read())
            if self._context.world_size > 1:
                sent = _raw(here, message_device(self._context.device))
                dist.broadcast(sent, src=owner)
                _take(here, sent)
        return whole

    def gather_all(self) -> Iterator[tuple[TensorRecord, Tensor]]:
        """Every whole tensor, on the CPU of every rank, by one message of each rank. Collective over the world.

        Faster than one after the other where they are small; a rank holds all of them and what one rank sends.
        """
        wholes = [memory_for(record.shape, dtype_of(record)) for record in self.records]
        pieces: dict[int, list[tuple[str, Tensor]]] = {}
        for record, whole in zip(self.records, wholes, strict=True):
            for owner, key, box in self._blocks(record):
                pieces.setdefault(owner, []).append((key, whole[box.slices_in(whole_box(record.shape))]))
        for owner, parts in pieces.items():
            if owner == self._rank:
                for key, here in parts:
                    here.copy_(self._mine[key].read())
            if self._context.world_size > 1:
                sent = torch.cat([_raw(here) for _, here in parts]).to(message_device(self._context.device))
                dist.broadcast(sent, src=owner)
                for (_, here), raw in zip(parts, sent.cpu().split([here.nbytes for _, here in parts]), strict=True):
                    _take(here, raw.clone())  # a copy begins where its numbers may
        yield from zip(self.records, wholes, strict=True)

    def gather_apart(self, wanted: Sequence[tuple[TensorRecord, int]]) -> Tensor | None:
        """The whole tensor of the pair that names this rank, of pairs of which no two name one rank. Collective.

        A rank holds no more than that tensor, one piece that it receives and one that it sends.
        """
        if self._context.world_size > 1:
            self._open_wires()
        whole: Tensor | None = None
        copy: Tensor | None = None
        works: list[Any] = []
        # All ranks go through the pieces in one order, so none waits for one that waits for it.
        for record, to in wanted:
            if to == self._rank:
                whole = memory_for(record.shape, dtype_of(record))
            for owner, key, box in self._blocks(record):
                if to == self._rank and whole is not None:
                    self._receive(whole[box.slices_in(whole_box(record.shape))], owner, key)
                elif owner == self._rank:
                    piece = self._mine[key].read()
                    if copy is not None:
                        works.pop().wait()
                    raw = _raw(piece)
                    copy = raw if raw.data_ptr() != piece.data_ptr() else None
                    works.append(self._wires.send([raw], to, 0))
        for work in works:
            work.wait()
        return whole

    def _receive(self, here: Tensor, owner: int, key: str) -> None:
        if owner == self._rank:
            here.copy_(self._mine[key].read())
            return
        raw = here.view(-1).view(torch.uint8) if here.is_contiguous() else _raw(torch.empty_like(here))
        self._wires.recv([raw], owner, 0).wait()
        _take(here, raw)

    def _blocks(self, record: TensorRecord) -> Iterator[tuple[int, str, Box]]:
        """Of a whole tensor: (rank, key there, box) of each piece."""
        for part in record.parts:
            for block in self._pieces.stored_boxes(part, part.box):
                yield self._owners[block.file], block.key, block.box

    def _open_wires(self) -> None:
        """Between any two ranks. Of their own: messages of two ranks would be missed among those of all others.

        Collective, so a rank that has nothing to send opens them too.
        """
        if self._wires is None:
            self._wires = own_gloo()


def _raw(tensor: Tensor, device: torch.device = _CPU) -> Tensor:
    """Its bytes on a device, a copy only where they are elsewhere or out of order."""
    return tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)


def _take(target: Tensor, raw: Tensor) -> None:
    """Give the tensor the bytes, unless they are its own."""
    if raw.data_ptr() != target.data_ptr():
        target.copy_(raw.view(target.dtype).view(target.shape))
