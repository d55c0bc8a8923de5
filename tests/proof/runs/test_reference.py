"""One process is plain torch: clipped as torch clips, counted losses divided once, the run's own optimizer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from colonnade.context.parallel_context import ParallelContext
from colonnade.core import global_context
from colonnade.proof.reference import (
    Limit,
    OneProcess,
    Pass,
    canonical_names,
    load,
    moved_by_an_ulp,
    norm_of,
    same_optimizer,
    world_of_one,
)


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def _batch(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (rows,), generator=draw)
    labels[:: seed + 2] = -100
    return torch.randn(rows, 4, generator=draw, dtype=torch.float64), labels


def _one(limit: Limit | None = None) -> OneProcess:
    return OneProcess(
        _model(1),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        limit,
    )


def _start() -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in _model().named_parameters()}


def test_two_steps_are_those_of_plain_torch_on_the_joined_batch_also_in_passes():
    steps = [[Pass([_batch(3, 0)], 0.5), Pass([_batch(5, 1)], 0.5)], [Pass([_batch(8, 2)])]]
    found = list(_one(Limit(0.3)).run(_start(), steps))

    plain = _model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step, truth in zip(steps, found, strict=True):
        x, y = (torch.cat(column) for column in zip(*(one.batches[0] for one in step), strict=True))
        optimizer.zero_grad()
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        torch.testing.assert_close(truth.loss, loss.item(), rtol=1e-12, atol=0)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(truth.total[name], parameter.grad, rtol=1e-11, atol=1e-15)
            parts = torch.stack([one[name] for one in truth.passes]).sum(0)
            torch.testing.assert_close(parts, truth.total[name], rtol=1e-11, atol=1e-15)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        torch.testing.assert_close(truth.norm, norm.item(), rtol=1e-12, atol=0)
        optimizer.step()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(truth.clipped[name], parameter.grad, rtol=1e-11, atol=1e-15)
            torch.testing.assert_close(truth.weights[name], parameter.detach(), rtol=1e-12, atol=1e-15)


def test_groups_with_limits_of_their_own_are_clipped_apart():
    limit = Limit(
        0.3, own={"2.bias": ("head", 0.01)}, uncounted=frozenset({"2.weight"}), unclipped=frozenset({"0.bias"})
    )
    (truth,) = _one(limit).run(_start(), [[Pass([_batch(8, 2)])]])
    assert abs(float(truth.clipped["2.bias"].norm()) - 0.01) < 1e-5
    assert torch.equal(truth.clipped["0.bias"], truth.total["0.bias"])
    counted = torch.cat([value.flatten() for name, value in truth.total.items() if name != "2.weight"])
    torch.testing.assert_close(truth.norm, counted.norm().item(), rtol=1e-12, atol=0)


def test_shares_are_taken_at_the_weights_of_the_step_and_change_no_buffer():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    one = OneProcess(
        model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), lambda m: torch.optim.SGD(m.parameters(), lr=0.1)
    )
    start = {name: value.detach().clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    halves = [_batch(4, 5), _batch(4, 6)]
    whole = (torch.cat([x for x, _ in halves]), torch.cat([y for _, y in halves]))
    (truth,) = one.run(start, [[Pass([whole])]], [[[Pass([half])] for half in halves]])
    assert len(truth.by_data_rank) == 2
    assert int(truth.buffers["0.num_batches_tracked"]) == 1


def test_one_ulp_is_one_ulp_and_of_the_coarser_dtype():
    draw = torch.Generator().manual_seed(0)
    values = torch.rand(1000, dtype=torch.float32) + 1
    apart = ((moved_by_an_ulp(values, draw) - values) / values).abs()
    assert 0 < float(apart.max()) <= 2 * torch.finfo(torch.float32).eps
    coarse = ((moved_by_an_ulp(values, draw, torch.bfloat16) - values) / values).abs()
    torch.testing.assert_close(coarse, torch.full_like(coarse, torch.finfo(torch.bfloat16).eps), rtol=1e-3, atol=0)
    assert moved_by_an_ulp(values, None) is values


def test_the_optimizer_has_the_class_the_options_and_the_groups_of_the_run():
    model = _model()
    named = dict(model.named_parameters())
    like = torch.optim.AdamW(
        [{"params": [named["0.weight"]], "lr": 0.5}, {"params": [named["2.bias"]]}], betas=(0.5, 0.6)
    )
    groups = [
        ({k: v for k, v in group.items() if k != "params"}, names)
        for group, names in zip(like.param_groups, (["0.weight"], ["2.bias"]), strict=True)
    ]
    made = same_optimizer(like, groups, _model())
    assert isinstance(made, torch.optim.AdamW)
    assert [group["lr"] for group in made.param_groups] == [0.5, 1e-3]
    assert made.param_groups[1]["betas"] == (0.5, 0.6)


def test_the_norm_of_millions_of_numbers_is_exact_in_fp32_too():
    values = torch.full((5_000_000,), 0.1)
    assert abs(norm_of([values, values], 2.0) / (0.1 * 10_000_000**0.5) - 1) < 1e-7


class _Needy(torch.optim.SGD):
    def __init__(self, params, needed):
        super().__init__(params, lr=0.3)
        self.needed = needed


def test_an_optimizer_that_cannot_be_built_anew_is_copied():
    model = _model()
    like = _Needy(model.parameters(), needed=object())
    other = _model(3)
    made = same_optimizer(like, [({"lr": 0.3, **like.defaults}, [name for name, _ in other.named_parameters()])], other)
    assert made.needed is like.needed
    assert made.param_groups[0]["params"][0] is next(other.parameters())


def test_inside_a_world_of_one_the_context_has_no_ranks_and_afterwards_it_is_as_before():
    context = ParallelContext()
    context.world_size = 8
    before = dict(vars(context))
    with world_of_one(context):
        assert context.world_size == 1
        assert global_context.world_size == 1
    assert vars(context) == before


def test_tied_weights_are_known_by_their_first_name_and_loaded_by_it():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    assert canonical_names(model)["b.weight"] == "a.weight"
    load(model, {"a.weight": torch.ones(2, 2)}, in_place=True)
    assert torch.equal(model["b"].weight, torch.ones(2, 2))
