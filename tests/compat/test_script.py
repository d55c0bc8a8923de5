"""The ancestor's names at work on two ranks, as its scripts use them, against one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from colonnade import compat
from colonnade.errors import CheckpointError, ConfigError, ContextError, PlacementError
from colonnade.testing import compare, run_world


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _data_parallel(folder) -> list[int]:
    compat.install()
    import colossalai
    from colossalai.communication import all_gather, all_reduce, broadcast, reduce_scatter, ring_forward
    from colossalai.context import ParallelMode
    from colossalai.core import global_context as gpc
    from colossalai.nn.lr_scheduler import StepLR
    from colossalai.testing import assert_equal, assert_equal_in_group, assert_not_equal
    from colossalai.utils import (
        DataParallelSampler,
        clip_grad_norm_fp32,
        is_dp_rank_0,
        is_no_pp_or_last_stage,
        is_tp_rank_0,
        is_using_ddp,
        is_using_pp,
        report_memory_usage,
        save_checkpoint,
        sync_model_param,
    )
    from colossalai.utils.checkpointing import load_checkpoint

    colossalai.launch({}, verbose=False)
    rank, data = gpc.get_global_rank(), ParallelMode.DATA
    assert (is_using_ddp(), is_using_pp(), is_no_pp_or_last_stage()) == (True, False, True)
    assert (is_dp_rank_0(), is_tp_rank_0()) == (rank == 0, True)

    model = nn.Linear(3, 2, dtype=torch.float64)
    nn.init.constant_(model.weight, rank)
    sync_model_param(model, data)
    assert model.weight.sum() == 0
    assert_equal_in_group(model.bias.data, gpc.get_group(data))
    nn.init.constant_(model.weight, 1.0)

    mine = torch.full((2,), float(rank))
    assert_equal(all_gather(mine, 0, data), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert_equal(reduce_scatter(torch.tensor([1.0, 2.0]), 0, data), torch.tensor([2.0 + 2 * rank]))
    assert_equal(ring_forward(mine, data), torch.full((2,), 1.0 - rank))
    assert_equal(broadcast(mine.clone(), 1, data), torch.ones(2))
    summed, work = all_reduce(mine, data, async_op=True)
    work.wait()
    assert_equal(summed, torch.ones(2))
    with pytest.raises(ConfigError, match="async_op=True"):
        all_gather(mine, 0, data, async_op=True)

    model.weight.grad, model.bias.grad = torch.full((2, 3), 2.0).double(), torch.zeros(2).double()
    assert clip_grad_norm_fp32(model.parameters(), max_norm=1.0) == pytest.approx(24**0.5)
    assert model.weight.grad.norm().item() == pytest.approx(1.0, rel=1e-5)
    report_memory_usage("after the first step", report_cpu=True)

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler = StepLR(optimizer, total_steps=10, step_size=1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    weight, file = model.weight.detach().clone(), folder / "model.pt"
    save_checkpoint(file, 3, model, optimizer, scheduler)
    optimizer.step()
    scheduler.step()
    assert_not_equal(model.weight.detach(), weight)
    assert load_checkpoint(file, model, optimizer, scheduler) == 3
    assert_equal(model.weight.detach(), weight)
    assert scheduler.last_epoch == 1
    with pytest.raises(ConfigError, match="strict=False"):
        load_checkpoint(file, model, strict=False)
    (folder / f"weights{rank}.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is a file, but save_checkpoint writes folders"):
        load_checkpoint(folder / f"weights{rank}.pt", model)

    _seeds()
    found = list(DataParallelSampler(range(8), shuffle=True, seed=3))
    gpc.destroy()
    return found


def _seeds() -> None:
    from colossalai.context import ParallelMode, add_seed, reset_seeds, seed, set_mode
    from colossalai.context.random import with_seed

    data, tensor = ParallelMode.DATA, ParallelMode.TENSOR
    with pytest.raises(ContextError, match="already has a random stream"):
        add_seed(data, 7)
    drawn = []
    for chosen in (7, 7, 8):
        add_seed(data, chosen, overwrite=True)
        torch.manual_seed(1)
        drawn.append(with_seed(lambda: torch.rand(1).item(), data)())
        torch.manual_seed(1)
        with seed(data):
            drawn.append(torch.rand(1).item())
    torch.manual_seed(1)
    set_mode(data)
    drawn.append(torch.rand(1).item())
    set_mode(tensor)
    assert torch.rand(1).item() not in drawn
    assert drawn == [drawn[0]] * 4 + [drawn[4]] * 3
    assert drawn[0] != drawn[4]
    reset_seeds()
    with pytest.raises(ContextError, match="no random stream"), seed(data):
        pass


class Stage(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.shared = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.linear.weight.data = numbers(3, 3, seed=seed)
        self.shared.weight.data = numbers(3, 3, seed=5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.linear(x).tanh())


def _truth(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of both stages in one process; the shared weight is one."""
    first, second = Stage(1), Stage(2)
    second.shared = first.shared
    F.mse_loss(second(first(x)), y).backward()
    return {"0": first.linear.weight.grad, "1": second.linear.weight.grad, "shared": first.shared.weight.grad}


def _pipeline() -> None:
    compat.install()
    import colossalai
    from colossalai.core import global_context as gpc
    from colossalai.engine import PipelineSchedule
    from colossalai.nn.layer.wrapper import PipelineSharedModuleWrapper
    from colossalai.utils import is_no_pp_or_last_stage, is_using_pp

    colossalai.launch({"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2}, verbose=False)
    rank = gpc.get_global_rank()
    assert (is_using_pp(), is_no_pp_or_last_stage()) == (True, rank == 1)
    x, y = numbers(4, 3, seed=8), numbers(4, 3, seed=9)
    _by_hand(x, y)
    stage = Stage(rank + 1)
    if rank == 1:
        nn.init.zeros_(stage.shared.weight)  # the tie gives it the first stage's
    PipelineSharedModuleWrapper([0, 1]).register_module(stage.shared)
    with pytest.raises(PlacementError, match=rf"stage {rank} is not in pipeline_ranks=\(5, 6\)"):
        PipelineSharedModuleWrapper([5, 6]).register_module(stage.shared)
    engine = colossalai.initialize(stage, torch.optim.SGD(stage.parameters(), lr=0.1), F.mse_loss)[0]
    engine.schedule = PipelineSchedule(2)
    engine.zero_grad()
    engine.execute_schedule(iter([(x, y)]))
    engine.step()
    truth = _truth(x, y)
    found = {str(rank): stage.linear.weight.grad, "shared": stage.shared.weight.grad}
    compare({name: truth[name] for name in found}, found, 1e-10)
    engine.close()
    gpc.destroy()


def _by_hand(x: torch.Tensor, y: torch.Tensor) -> None:
    """Forward and backward of a schedule of one's own: shapes, activations and gradients between the stages."""
    from colossalai.communication import p2p, recv_obj_meta, send_obj_meta
    from colossalai.core import global_context as gpc

    rank, stage, wide = gpc.get_global_rank(), Stage(gpc.get_global_rank() + 1), torch.float64
    if gpc.is_pipeline_first_stage():
        assert p2p.recv_forward((4, 3)) is None
        output = stage(x)
        assert send_obj_meta(output) is False
        gradient = p2p.send_forward_recv_backward(output, output.shape, dtype=wide)
        output.backward(gradient)
        p2p.send_backward(gradient)  # nobody is before it
    else:
        arrived = p2p.recv_forward(recv_obj_meta(None), dtype=wide)
        assert arrived.requires_grad
        F.mse_loss(stage(arrived), y).backward()
        assert p2p.recv_backward((4, 3)) is None
        p2p.send_backward(arrived.grad)
    round_the_ring = p2p.send_forward_recv_forward([torch.full((2,), float(rank))], [(2,)])
    assert round_the_ring[0].tolist() == [1.0 - rank] * 2
    back = p2p.send_backward_recv_backward(torch.full((1,), float(rank)), (1,))
    assert back.tolist() == [1.0 - rank]
    compare({"w": _truth(x, y)[str(rank)]}, {"w": stage.linear.weight.grad}, 1e-10)


def _tensor_parallel() -> None:
    compat.install()
    import colossalai
    from colossalai.core import global_context as gpc
    from colossalai.nn import Linear1D_Col, Linear1D_Row

    whole = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    colossalai.launch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, verbose=False)
    layers = []
    for make, plain in ((Linear1D_Col, whole[0]), (Linear1D_Row, whole[2])):
        # Every rank draws the same whole weights and keeps its block, as with Linear.
        torch.manual_seed(3)
        layers.append(make(plain.in_features, plain.out_features, dtype=torch.float64))
        torch.manual_seed(3)
        plain.reset_parameters()
    x = numbers(5, 4)
    assert layers[0].weight.shape == (3, 4)
    compare({"y": whole(x)}, {"y": layers[1](layers[0](x).tanh())}, 1e-10)
    gpc.destroy()


def _all(folder) -> list[int]:
    _pipeline()
    _tensor_parallel()
    return _data_parallel(folder)


@pytest.mark.slow
def test_names_of_the_ancestor_do_their_work_on_two_ranks(tmp_path) -> None:
    first, second = run_world(2, _all, tmp_path).values
    assert sorted([*first, *second]) == list(range(8))
