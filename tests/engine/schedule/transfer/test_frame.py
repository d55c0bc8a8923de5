"""Frames: what was packed comes out, every tensor on its own, whatever its form."""

from __future__ import annotations

import torch

from colonnade.engine.schedule.transfer.frame import empty_frame, header_of, pack, payload_bytes, unpack
from colonnade.engine.schedule.transfer.values import describe, metas

KINDS = [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.bool]


def test_every_kind_of_tensor_comes_out_as_it_went_in() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(5).to(kind) for kind in KINDS]
    tensors += [torch.empty(0, 3), torch.tensor(7), torch.randn(4, 3).T, torch.randn(3, dtype=torch.complex64).conj()]
    frame = pack((12, -3), tensors)
    assert header_of(frame) == (12, -3)
    assert frame.numel() == empty_frame(payload_bytes(tensors)).numel()
    found = unpack(frame, metas(describe(tensors, "value")[0]))
    torch.testing.assert_close(found, tensors, rtol=0, atol=0)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in found)


def test_both_ends_count_the_same_bytes() -> None:
    tensors = [torch.randn(3, 5), torch.zeros(7, dtype=torch.int8)]
    assert payload_bytes(tensors) == payload_bytes(metas(describe(tensors, "value")[0])) == 64 + 64


def test_a_tensor_changed_in_place_spoils_no_other_one() -> None:
    """A stage may fill a mask that came beside the activation it differentiates through."""
    sent = [torch.randn(4), torch.zeros(4)]
    activation, mask = unpack(pack((0, 0), sent), metas(describe(sent, "value")[0]))
    activation.requires_grad_()
    loss = (activation * activation).sum()
    mask.fill_(1.0)
    loss.backward()
    assert activation.grad is not None
    torch.testing.assert_close(activation.grad, 2 * sent[0], rtol=0, atol=0)
