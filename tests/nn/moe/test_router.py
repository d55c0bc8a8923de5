"""Routers in one process: who is chosen, what is counted, and what evaluation leaves alone."""

from __future__ import annotations

import pytest
import torch

from colonnade.errors import ConfigError
from colonnade.nn.moe import TopKRouter, auxiliary_loss, balance_experts
from colonnade.nn.moe.router import joined

HIDDEN, EXPERTS, TOKENS = 6, 4, 40


def tokens(count: int = TOKENS) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def router(**options: object) -> TopKRouter:
    torch.manual_seed(0)
    return TopKRouter(HIDDEN, EXPERTS, **options).double()


def test_evaluation_does_not_move_the_bias_and_training_does():
    made = router(bias_rate=0.1)
    made.eval()
    made(tokens())
    balance_experts(made)
    assert made.load.sum() == made.steps.abs().sum() == 0
    made.train()
    counts = made(tokens()).counts.sum(0)
    assert torch.equal(made.load, counts)
    balance_experts(made)
    # More than a fair share loses, less gains; and counting begins anew.
    assert torch.equal(made.steps, (counts.sum() - counts * EXPERTS).sign())
    assert made.load.sum() == 0
    assert torch.equal(made.bias, made.steps.double() * 0.1)


def test_the_bias_chooses_and_does_not_weigh():
    made = router(bias_rate=1.0, k=1, normalize=False)
    made.steps[2] = 5
    routing = made(tokens())
    assert torch.equal(routing.experts, torch.full((1, TOKENS), 2))
    torch.testing.assert_close(routing.weights[0], (tokens() @ made.weight.T).softmax(-1)[:, 2])


def test_noise_is_of_training_alone_and_as_large_as_it_says():
    made = router(noise=0.25)
    plain = tokens() @ made.weight.T
    made.eval()
    assert torch.equal(made(tokens()).logits, plain)
    made.train()
    noisy = [made(tokens()).logits for _ in range(2)]
    assert not torch.equal(*noisy)
    with torch.no_grad():
        made.weight.copy_(torch.eye(EXPERTS, HIDDEN))  # now a logit is an input
    factors = torch.cat([(made(tokens()).logits / tokens()[:, :EXPERTS]).flatten() for _ in range(5)])
    assert 0.75 <= factors.min() < 0.8
    assert 1.2 < factors.max() <= 1.25
    assert torch.equal(router()(tokens()).logits, router().eval()(tokens()).logits)


def test_the_auxiliary_losses_are_those_of_the_formula_and_only_in_training():
    made = router(k=2, balance_loss=0.3, z_loss=0.2)
    routing, logits = made(tokens()), tokens() @ made.weight.T
    share = routing.counts.sum(0) / (2 * TOKENS)
    balance = EXPERTS * (share * logits.softmax(-1).mean(0)).sum()
    expected = 0.3 * balance + 0.2 * logits.logsumexp(-1).square().mean()
    sums = made.sums(routing)
    assert sums.shape == (3, 1 + EXPERTS + 1)
    torch.testing.assert_close(auxiliary_loss(sums), expected)
    made.over = "rank"
    own = made.sums(routing)
    assert own.shape == (3, 1)
    torch.testing.assert_close(auxiliary_loss(own), expected)
    assert joined([own, sums]).shape == sums.shape
    torch.testing.assert_close(auxiliary_loss(joined([own, sums])), 2 * expected)
    torch.testing.assert_close(auxiliary_loss(joined([own, own, sums, sums])), 4 * expected)
    one = router(k=1, balance_loss=0.3, z_loss=0.2)
    logits = (tokens(1) @ one.weight.T)[0]
    expected = 0.3 * EXPERTS * logits.softmax(-1).max() + 0.2 * logits.logsumexp(-1).square()
    torch.testing.assert_close(auxiliary_loss(one.sums(one(tokens(1)))), expected)
    assert made.eval().sums(routing) is None
    assert router(balance_loss=0.0).sums(routing) is None
    assert router(balance_loss=0.0, z_loss=0.1).sums(routing) is not None


@pytest.mark.parametrize(
    "options",
    [
        {"k": 0},
        {"k": 5},
        {"score": "x"},
        {"over": "x"},
        {"capacity": 0.0},
        {"noise": 1.0},
        {"noise": -0.1},
        {"groups": 3},
        {"groups": 0},
        {"top_groups": 3, "groups": 2},
        {"top_groups": 0},
        {"top_groups": 1, "groups": 2, "k": 3},
    ],
    ids=str,
)
def test_options_that_make_no_router(options):
    with pytest.raises(ConfigError, match=f"router: {next(iter(options))}="):
        router(**options)
    router(k=EXPERTS, capacity=0.1, noise=0.0)
    router(k=1, groups=EXPERTS, top_groups=EXPERTS)
    router(k=2, groups=2, top_groups=1)


def test_choices_are_made_in_float32_also_where_autocast_has_less():
    torch.manual_seed(0)
    made, x = TopKRouter(HIDDEN, EXPERTS), tokens().float()
    exact = x @ made.weight.T
    assert torch.equal(made(x).logits, exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(made(x).logits, exact)
    assert made(x.bfloat16()).logits.dtype is torch.float32


def test_a_router_starts_with_weights_that_give_logits_of_size_one():
    torch.manual_seed(0)
    weight = TopKRouter(256, 64).weight
    assert abs(weight.std().item() - 1 / 16) < 0.002
    assert abs(weight.mean().item()) < 0.002


def test_the_bias_is_saved_and_the_counts_of_a_step_are_not():
    assert [*router(bias_rate=0.1).state_dict()] == ["weight", "steps"]
    made = router()
    made(tokens())
    assert made.load.sum() == 0  # nobody balances by them
