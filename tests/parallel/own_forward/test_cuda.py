"""Stages by the forward pass on a GPU: what stands for other stages' results lies there too."""

from __future__ import annotations

import pytest
import torch

from colonnade.parallel.split import split
from tests.parallel.own_forward.models import Decoder, Outer, ids, run_all

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("kind", [Decoder, Outer])
def test_a_model_that_is_there_before_it_is_cut_and_one_that_is_moved_after(kind: type[torch.nn.Module]) -> None:
    torch.manual_seed(0)
    model, data = kind().cuda(), ids().cuda()
    stages = split(model, num_stages=3, sample=data)
    torch.testing.assert_close(run_all(stages.stages, data), model(data), rtol=0, atol=0)
    moved = [stage.cuda().bfloat16() for stage in split(kind(), num_stages=3, sample=ids())]
    assert run_all(moved, data).dtype is torch.bfloat16
