"""MoE layers equal loops over tokens: in one process, and trained through the engine on many ranks, to 1e-10."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError, LayoutError, ScheduleError
from colonnade.models import MoEGPT
from colonnade.nn.layer import MLP, arrange
from colonnade.nn.moe import Experts, MoE, SwitchRouter, TopKRouter, auxiliary_loss, balance_experts, no_losses
from colonnade.parallel.wire import recorded
from colonnade.testing import run_world
from tests.nn.moe.naive import HIDDEN, Naive, Net, alone, batch
from tests.nn.sequence.training import close, give_weights, numbers, train

EXPERTS = 4
ROUTERS: dict[str, tuple[type[TopKRouter], dict[str, Any]]] = {
    "switch": (SwitchRouter, {"z_loss": 0.01}),
    "top 2": (TopKRouter, {"k": 2, "z_loss": 0.1, "balance_loss": 0.3}),
    "top 2, drops": (TopKRouter, {"k": 2, "capacity": 0.6}),
    "switch, drops": (SwitchRouter, {"capacity": 0.8}),
    "sigmoid, bias": (TopKRouter, {"k": 2, "score": "sigmoid", "balance_loss": 0.0, "bias_rate": 0.05}),
    "groups": (TopKRouter, {"k": 3, "groups": 4, "top_groups": 2, "scale": 2.5, "score": "sigmoid", "bias_rate": 0.05}),
    "all, not normalized": (TopKRouter, {"k": EXPERTS, "normalize": False}),
}
by_router = pytest.mark.parametrize("router", ROUTERS)


def _moe(router: str, context: ParallelContext, experts: int = EXPERTS, **settings: Any) -> MoE:
    kind, options = ROUTERS[router]
    experts = 2 * options.get("groups", experts // 2)
    made = kind(HIDDEN, experts, **options, context=context)
    settings["shared"] = MLP(HIDDEN, 10, arrangement=arrange(context)) if settings.pop("shared", False) else None
    return MoE(HIDDEN, experts, made, inner=settings.pop("inner", 8), context=context, **settings)


# -- one process ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"gated": True, "bias": False, "shared": True}], ids=str)
@by_router
def test_in_one_process_it_is_a_loop_over_tokens(router, settings):
    plain = Naive(_moe(router, alone(), **settings))
    give_weights(plain)
    x = numbers(7, 3, HIDDEN, seed=3).requires_grad_()
    results = []
    for model in (plain, _same(plain)):
        out = model(x)
        loss = model.loss if isinstance(model, Naive) else auxiliary_loss(model)
        parameters = [parameter for _, parameter in sorted(model.named_parameters())]
        grads = torch.autograd.grad((out**2).sum() + 5 * loss, [x, *parameters], allow_unused=True)
        results.append([out, torch.as_tensor(loss), *grads])
        if isinstance(model, Naive):
            dropped = len(model.dropped)
        else:
            assert model.moe.statistics.dropped.item() == dropped
            assert (dropped > 0) == ("drops" in router)
            assert model.moe.statistics.assignments.sum().item() == 21 * model.moe.router.k
    for expected, found in zip(*results, strict=True):
        close(found, torch.zeros_like(found) if expected is None else expected, 1e-12)


def _same(plain: Naive) -> Net:
    model = Net(copy.deepcopy(plain.moe))
    model.load_state_dict(plain.state_dict())
    return model


def test_second_derivatives_are_those_of_the_loop():
    plain = Naive(_moe("top 2, drops", alone()))
    give_weights(plain)
    seconds = []
    for model in (plain, _same(plain)):
        x = numbers(4, HIDDEN, seed=3).requires_grad_()
        (first,) = torch.autograd.grad((model(x) ** 2).sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad((first**2).sum(), x)[0])
    close(*seconds, 1e-12)


def test_auxiliary_losses_are_taken_once_and_not_made_in_evaluation():
    model = nn.Sequential(_moe("switch", alone()), _moe("switch", alone()))
    x = torch.randn(5, HIDDEN)
    model(x)
    each = [auxiliary_loss(layer.sums) for layer in model]
    assert all(loss > 0 for loss in each)
    torch.testing.assert_close(auxiliary_loss(model), sum(each))
    assert auxiliary_loss(model) == 0.0
    model.eval()
    model(x)
    assert auxiliary_loss(model) == 0.0


def test_no_tokens_at_all_give_gradients_of_zero():
    model = _moe("top 2, drops", alone())
    out = model(torch.randn(0, HIDDEN))
    assert out.shape == (0, HIDDEN)
    loss = auxiliary_loss(model)
    assert loss == 0
    (out.sum() + loss).backward()
    assert all(parameter.grad.abs().sum() == 0 for parameter in model.parameters())


@pytest.mark.slow
def test_weights_start_the_same_whatever_the_layout():
    torch.manual_seed(3)
    whole = Experts(HIDDEN, 5, EXPERTS, context=alone())
    for found in run_world(2, _started).values:
        assert torch.equal(found["up"], whole.up[found["at"] * 2 :][:2])
        assert torch.equal(found["down_bias"], whole.down_bias[found["at"] * 2 :][:2])


def _started() -> dict[str, Any]:
    with launch({"parallel": {"expert": 2}}, context=ParallelContext(), verbose=False) as gpc:
        torch.manual_seed(3)
        experts = Experts(HIDDEN, 5, EXPERTS, context=gpc)
        at = gpc.get_local_rank(ParallelMode.EXPERT)
        return {"at": at, "up": experts.up.detach(), "down_bias": experts.down_bias.detach()}


def test_slips_are_told():
    with pytest.raises(ConfigError, match="k=5: must be from 1 to experts=4"):
        TopKRouter(HIDDEN, 4, 5)
    with pytest.raises(ConfigError, match="capacity=0"):
        SwitchRouter(HIDDEN, 4, capacity=0)
    with pytest.raises(ConfigError, match="the router has 4 experts, but the layer has 8"):
        MoE(HIDDEN, 8, SwitchRouter(HIDDEN, 4))
    with pytest.raises(ConfigError, match="shared is 2; pass a layer from 6 to 6 features"):
        MoE(HIDDEN, 4, shared=2)
    for shape in ((2,), (3,), (2, 1), (4, 1), (3, 1, 1)):
        with pytest.raises(ScheduleError, match=rf"the loss given to moe\(x, loss\) has shape \({shape[0]},"):
            MoE(HIDDEN, 4)(torch.randn(2, HIDDEN), torch.zeros(shape))


def test_losses_are_handed_on_from_layer_to_layer():
    moe, x = _moe("switch", alone()), torch.randn(5, HIDDEN)
    assert MoE(HIDDEN, 4).experts.inner == 4 * HIDDEN
    assert no_losses(x).tolist() == [[0.0]] * 3
    moe(x)
    own = auxiliary_loss(moe)
    torch.testing.assert_close(moe(x, torch.tensor(2.0))[1], 2 + own)
    out, handed = moe(x, no_losses(x))
    torch.testing.assert_close(auxiliary_loss(moe(out, handed)[1]), own + auxiliary_loss(moe(out, no_losses(x))[1]))
    assert moe.eval()(x, handed)[1] is handed
    assert moe(x, torch.tensor(2.0))[1] == 2


def _refused() -> tuple[str, str]:
    with (
        launch({"parallel": {"expert": 2}}, context=ParallelContext(), verbose=False) as gpc,
        pytest.raises(LayoutError) as uneven,
    ):
        Experts(HIDDEN, 8, 3, context=gpc)
    config = {"parallel": {"pipeline": 2}, "schedule": {"type": "GPipe", "num_microbatches": 2}}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        moe = _moe("switch", gpc)
        with pytest.raises(ScheduleError) as lost:
            moe(torch.randn(3, HIDDEN))
        _, loss = moe(torch.randn(3, HIDDEN), torch.zeros(()))
        assert loss.item() > 0
    return str(uneven.value), str(lost.value)


@pytest.mark.slow
def test_experts_that_do_not_fit_and_losses_that_a_pipeline_would_lose_are_refused():
    uneven, lost = run_world(2, _refused).values[0]
    assert "3 experts cannot be sharded evenly over the 2 ranks" in uneven
    assert "y, loss = moe(x, loss)" in lost


# -- many ranks -------------------------------------------------------------------------------------------


def _parts(gpc: ParallelContext) -> tuple[int, int]:
    """(how many ranks have tokens of their own, this one's place among them)"""
    data, at = gpc.data_parallel_size, gpc.get_local_rank(ParallelMode.DATA)
    if not gpc.is_initialized(ParallelMode.SEQUENCE):
        return data, at
    size = gpc.get_world_size(ParallelMode.SEQUENCE)
    return data * size, at * size + gpc.get_local_rank(ParallelMode.SEQUENCE)


def _trained(
    parallel: dict[str, Any], router: str, rows: tuple[int, ...], empty: int = 0, **settings: Any
) -> dict[str, Any]:
    """Three steps, ranks with other numbers of tokens each; the first `empty` experts are never chosen."""
    with launch({"parallel": parallel, "clip_grad_norm": 1.0}, context=ParallelContext(), verbose=False) as gpc:
        parts, mine = _parts(gpc)
        model, plain = Net(_moe(router, gpc, **settings)), Naive(_moe(router, alone(), **settings))
        for each in (model, plain):
            each.moe.router.steps[:empty] = -1000

        def run(engine: Any, step: int) -> None:
            x, y = batch(mine, step, rows[mine])
            squares = (engine(x) - y) ** 2
            # (sum, count): the auxiliary loss is a mean, so it counts once for every element.
            engine.backward((squares.sum() + auxiliary_loss(model) * squares.numel(), squares.numel()))
            outputs.append(model.moe.statistics.dropped)

        def loss_of(plain: Naive, step: int) -> Tensor:
            batches = [batch(part, step, rows[part]) for part in range(parts)]
            x, y = (torch.cat(column) for column in zip(*batches, strict=True))
            loss = F.mse_loss(plain(x), y) + plain.loss
            dropped.append(len(plain.dropped))
            return loss

        outputs: list[Tensor] = []
        dropped: list[int] = []
        engine = train(gpc, model, plain, run, loss_of, after=balance_experts)
        assert torch.equal(model.moe.router.steps, plain.moe.router.steps)
        num_rows = {row.parameter: row for row in engine.ledger().rows}
        return {
            "mine": [value.item() for value in outputs],
            "plain": dropped,
            "handler": num_rows["moe.experts.up"].done_by if "moe.experts.up" in num_rows else None,
            "shape": tuple(model.moe.experts.up.shape),
        }


TENSOR = {"tensor": {"size": 2, "mode": "1d"}}
ACROSS = {**TENSOR, "expert": {"size": 2, "over": "data*tensor"}}
"""An expert group across tensor ranks, which shares the tokens among them."""


def _all_trained(cases: list[tuple[dict[str, Any], str, tuple[int, ...], int, dict[str, Any]]]) -> list[dict[str, Any]]:
    found = []
    for parallel, router, rows, empty, settings in cases:
        try:
            found.append(_trained(parallel, router, rows, empty, **settings))
        except Exception as error:
            raise AssertionError(f"{router} on {parallel}, {settings}: {error}") from error
    return found


@pytest.mark.slow
def test_experts_on_two_ranks_equal_one_process():
    """Experts, router, drops by the order of the joined batch, auxiliary losses of the joined batch, bias."""
    routed = [({"expert": 2}, router, (5, 3), 0, {"shared": True}) for router in ROUTERS]
    # Expert 0, or both experts of rank 0, never get a token; rank 1 has none to send.
    idle = [({"expert": 2}, "sigmoid, bias", (4, 0), empty, {}) for empty in (1, 2)]
    inside = [
        (TENSOR, "top 2", (4,), 0, {"inner": 7}),
        (TENSOR, "top 2", (4,), 0, {"gated": True, "bias": False, "shared": True}),
    ]
    across = [(ACROSS, "top 2, drops", (4,), 0, {})]
    found = list(zip(*run_world(2, _all_trained, [*routed, *idle, *inside, *across], timeout=110).values, strict=True))
    for (_, router, *_), ranks in zip(routed, found, strict=False):
        assert ranks[0]["shape"] == (4 if router == "groups" else 2, HIDDEN, 8)
        assert ranks[0]["handler"] == "MoeGradientHandler"
        for step, dropped in enumerate(ranks[0]["plain"]):
            assert sum(rank["mine"][step] for rank in ranks) == dropped
            assert (dropped > 0) == ("drops" in router)
    assert [ranks[0]["shape"] for ranks in found[-3:]] == [(EXPERTS, HIDDEN, 4)] * 2 + [(2, HIDDEN, 8)]


@pytest.mark.slow
def test_experts_inside_four_data_ranks_equal_one_process():
    """With expert 2 the twins' gradients are summed over 2 ranks and divided by all that sent tokens."""
    cases: list[tuple[dict[str, Any], str, tuple[int, ...], int, dict[str, Any]]] = [
        ({"expert": 2}, "top 2", (2, 5, 1, 4), 0, {}),
        ({"expert": 4}, "top 2, drops", (3, 2, 4, 1), 0, {}),
        ({"expert": 4}, "switch", (1, 2, 3, 1), 0, {}),
        ({"expert": 2}, "switch, drops", (3, 2, 4, 1), 0, {}),
        ({"expert": 4}, "sigmoid, bias", (3, 2, 4, 1), 0, {}),
    ]
    found = run_world(4, _all_trained, cases, timeout=110).values[0]
    assert [one["shape"][0] for one in found] == [EXPERTS // case[0]["expert"] for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("router", [pytest.param("top 2", marks=pytest.mark.long), "top 2, drops"])
@pytest.mark.parametrize(
    ("parallel", "rows", "shape"),
    [
        ({**TENSOR, "expert": 2}, (3, 2, 4, 1), (2, HIDDEN, 4)),
        ({"tensor": {"size": 4, "mode": "1d"}, "expert": {"size": 2, "over": "data*tensor"}}, (3, 2), (2, HIDDEN, 8)),
        ({"sequence": 2, "expert": 2, **TENSOR}, (3, 1, 2, 4), (2, HIDDEN, 4)),
    ],
    ids=str,
)
def test_expert_by_tensor_by_data_on_eight_ranks(parallel, rows, shape, router):
    assert run_world(8, _trained, parallel, router, rows, timeout=100).values[0]["shape"] == shape


def _waits() -> tuple[list[str], list[int]]:
    with launch({"parallel": {"expert": 2}}, context=ParallelContext(), verbose=False) as gpc:
        moes = nn.Sequential(_moe("top 2, drops", gpc), _moe("top 2, drops", gpc))
        with recorded() as calls:
            out = moes(torch.randn(4, HIDDEN, requires_grad=True))
            (out.sum() + auxiliary_loss(moes)).backward()
        model, reductions = MoEGPT(8, 4, 8, 2, 3, 4, every=1, context=gpc), []
        for training in (True, False):
            with recorded() as of_model:
                model.train(training)(torch.zeros(2, 4, dtype=torch.long))
            reductions.append(sum(call.op == "all_reduce" for call in of_model))
        return [f"{call.op} {call.mode.name}" for call in calls], reductions


class Ops(TorchDispatchMode):
    """Writes down the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@by_router
def test_no_operator_of_routing_and_dispatch_waits_for_the_device(router, monkeypatch):
    """Only the sizes of the all-to-all do, in Traffic, which one process has not."""
    monkeypatch.setattr("colonnade.nn.moe.moe_layer.Traffic", None)
    moe = _moe(router, alone())
    with Ops() as seen:
        (moe(torch.randn(9, HIDDEN, requires_grad=True)).sum() + auxiliary_loss(moe)).backward()
        balance_experts(moe)
    assert "topk" in seen.names
    waits = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique2", "_unique2", "repeat_interleave"}
    assert not waits & seen.names


@pytest.mark.slow
def test_what_is_sent():
    """Counts for the capacity, one exchange of sizes, rows there and back; sums for the losses, once; and backward."""
    forward = [*["all_gather DATA", *["all_to_all EXPERT"] * 3] * 2, "all_reduce DATA"]
    backward = ["all_reduce DATA", *["all_to_all EXPERT"] * 4]
    for calls, of_model in run_world(2, _waits).values:
        assert of_model == [1, 0]  # of a model of three such layers: in training, and in evaluation
        assert calls[: len(forward)] == forward
        assert sorted(calls[len(forward) :]) == backward


def _over_the_rank() -> tuple[float, float]:
    with launch({"parallel": {"expert": 2}}, context=ParallelContext(), verbose=False) as gpc:
        settings = {"k": 2, "over": "rank", "capacity": 0.6, "context": gpc}
        x, _ = batch(gpc.get_global_rank(), 0)
        routers = [
            TopKRouter(HIDDEN, EXPERTS, **settings),
            TopKRouter(HIDDEN, EXPERTS, **{**settings, "context": None}),
        ]
        routings, losses = [], []
        for router in routers:
            give_weights(router.double())
            with recorded() as calls:
                routings.append(router(x.flatten(0, 1)))
                losses.append(auxiliary_loss(router.sums(routings[-1]), context=gpc).item())
            assert calls == []
        assert torch.equal(routings[0].limits, routings[1].limits)
        assert losses[0] == losses[1]
        routers[0].over = "batch"
        return losses[0], auxiliary_loss(routers[0].sums(routings[0]), context=gpc).item()


@pytest.mark.slow
def test_a_mean_of_ranks_losses_is_not_the_loss_of_the_joined_batch():
    """over="rank" needs no communication and is each rank's own loss; over="batch" is the same on all, and another."""
    (own, joined), (other, same) = run_world(2, _over_the_rank).values
    assert joined == same
    assert abs((own + other) / 2 - joined) > 1e-4 * joined
