"""Waived parameters: replicas that differ on purpose are clipped by their own norms, as processes of their own would be."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import colonnade
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine import build
from colonnade.engine.build import initialize
from colonnade.testing import run_world
from tests.gradients.scenarios import numbers
from tests.ranks import on_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Linear(4, 3)).double()


def _truth(
    replica: int, waived: tuple[str, ...], max_norm: float, p: float, steps: int
) -> tuple[list[float], dict[str, Any]]:
    """One process per replica: gradients of waived parameters are its own, the others' means over both.

    Where there are others, both are clipped by the larger norm.
    """
    nets, norms = [_net(), _net()], []
    for step in range(steps):
        for at, net in enumerate(nets):
            net.zero_grad()
            (net(numbers(3, 4, seed=10 * step + at)).square().mean() * 10 ** (at + 1)).backward()
        common = [name for name, _ in nets[0].named_parameters() if not name.startswith(waived)]
        for name in common:
            first, second = (net.get_parameter(name) for net in nets)
            assert torch.equal(first, second)
            mean = (first.grad + second.grad) / 2
            first.grad, second.grad = mean.clone(), mean.clone()
        found = [_norm(net, p) for net in nets]
        if common:
            found = [max(found)] * 2
        norms.append(found[replica])
        with torch.no_grad():
            for net, norm in zip(nets, found, strict=True):
                for parameter in net.parameters():
                    parameter -= 0.1 * parameter.grad / max(1.0, (norm + 1e-6) / max_norm)
    return norms, {name: p.detach() for name, p in nets[replica].named_parameters()}


def _norm(net: nn.Module, p: float) -> float:
    return torch.nn.utils.get_total_norm([parameter.grad for parameter in net.parameters()], p).item()


def _local(config: dict[str, Any], waive: tuple[str, ...], p: float, steps: int) -> None:
    patterns = [f"{name}*" for name in waive]
    sync = {"automatic": bool(waive != ("",)), "waive": patterns, **config.pop("sync", {})}
    settings = {"clip_grad_norm": {"max_norm": 0.05, "norm_type": p}, "sync": sync, **config}
    with launch(settings, context=ParallelContext(), verbose=False) as gpc:
        model = _net()
        if "parallel" in config:
            model = colonnade.parallelize(model, {"*.up": "colwise", "*.down": "rowwise"}, context=gpc)
        engine = initialize(model, lambda q: torch.optim.SGD(q, lr=0.1), context=gpc)[0]
        replica = gpc.get_local_rank(ParallelMode.DATA)
        norms, truth = _truth(replica, waive, 0.05, p, steps)
        for step, norm in enumerate(norms):
            engine.zero_grad()
            engine.backward(engine(numbers(3, 4, seed=10 * step + replica)).square().mean() * 10 ** (replica + 1))
            engine.step()
            assert engine.grad_norm.item() == pytest.approx(norm, rel=1e-12)
        tensor, size = gpc.get_local_rank(ParallelMode.TENSOR), gpc.tensor_parallel_size
        for name, parameter in engine.model.named_parameters():
            value = truth[name]
            if size > 1 and parameter.shape != value.shape:
                dim = next(d for d in range(value.dim()) if value.shape[d] != parameter.shape[d])
                value = value.chunk(size, dim)[tensor]
            torch.testing.assert_close(parameter.detach(), value, rtol=1e-12, atol=1e-14)
        engine.close()


def _layouts(configs: list[tuple[dict[str, Any], tuple[str, ...], float]]) -> None:
    for config, waive, p in configs:
        _local(dict(config), waive, p, 3)


PLAIN = {"sync": {"shared_memory": False}}


def test_waived_parameters_are_clipped_by_the_norm_of_their_own_replica():
    run_world(
        2,
        _layouts,
        [({}, ("",), 2.0), (PLAIN, ("",), math.inf), ({}, ("0.up", "1"), 2.0), ({"flat_step": False}, ("",), 3.0)],
    )


def test_waived_parameters_beside_tensor_parallelism():
    tensor = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
    run_world(4, _layouts, [(tensor, ("",), 2.0), (tensor, ("0",), 2.0)])


@on_ranks(2)
def test_a_gradient_that_is_not_finite_drops_the_step_of_all_replicas():
    config = {"clip_grad_norm": 1.0, "sync": {"automatic": False, "waive": ["*"]}}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        engine = initialize(_net(), lambda q: torch.optim.SGD(q, lr=0.1), context=gpc)[0]
        found = []
        for factor in (math.inf, 1.0):
            engine.zero_grad()
            engine.backward(engine(numbers(3, 4, seed=0)).square().mean() * (factor if gpc.get_global_rank() else 1.0))
            engine.step()
            found.append(engine.last_step_skipped)
        engine.close()
        assert tuple(found) == (True, False)


def _warned(configs: list[dict[str, Any]]) -> list[list[str]]:
    found = []
    for config in configs:
        said: list[str] = []
        logger = SimpleNamespace(
            info=lambda text: None, debug=lambda text: None, warning=lambda text, ranks, said=said: said.append(text)
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "get_dist_logger", lambda logger=logger: logger)
            with launch({"clip_grad_norm": 1.0, **config}, context=ParallelContext(), verbose=False) as gpc:
                build.initialize(_net(), lambda q: torch.optim.SGD(q, lr=0.1), context=gpc)[0].close()
        found.append(said)
    return found


def test_stage_3_which_sums_waived_gradients_too_says_so():
    configs = [{"zero": 3, "sync": {"waive": ["0.*"]}}, {"zero": 3}, {"zero": 2, "sync": {"waive": ["*"]}}]
    for waived, plain, stage_2 in run_world(2, _warned, configs).values:
        (text,) = waived
        assert "waive=['0.*']) has no effect on 0.down.bias, 0.down.weight, 0.up.bias" in text
        assert plain == stage_2 == []
