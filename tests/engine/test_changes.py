"""What changes after `initialize`: frozen and thawed parameters, new groups, weights that were put elsewhere.

Everything equals one process that does the same, from the next step on, or is an error that names the parameter.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.errors import GradientError
from tests.engine.twins import twins
from tests.gradients.scenarios import numbers
from tests.ranks import on_ranks

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}
CONFIGS: list[dict[str, Any]] = [{}, {"clip_grad_norm": 0.1}, {"flat_step": False, "clip_grad_norm": 0.1}]
ZERO: list[dict[str, Any]] = [{"zero": 1, "clip_grad_norm": 0.1}, {"zero": 2}]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(numbers(4, 5, seed=10 * step + rank)).square().mean()


def _both(
    change: Callable[[nn.Module, Any, int], None],
    make: Callable[[Any], Any],
    config: dict[str, Any],
    begin: Callable[[nn.Module], Any] = lambda model: model.parameters(),
    steps: int = 5,
    build: Callable[[], nn.Module] = net,
    loss_of: Callable[[nn.Module, int, int], Tensor] = loss_of,
) -> None:
    """Train on the ranks and in one process; `change(model, optimizer, step)` is done to both before each step."""
    with twins(config, build, lambda model: make(begin(model))) as both:
        for step in range(steps):
            change(both.model, both.engine.optimizer, step)
            change(both.plain, both.reference, step)
            both.model.zero_grad()  # also what the optimizer does not have
            both.train(loss_of, step)
            both.follow(loss_of, step)
            both.compare()


def _freeze_first(model: nn.Module) -> Any:
    model[2].requires_grad_(False)
    return model.parameters()


@pytest.mark.parametrize("first", [0, 1, 2])
@on_ranks(2)
def test_a_layer_that_is_thawed_is_summed_measured_and_stepped_on_at_once(first: int):
    def change(model: nn.Module, optimizer: Any, step: int) -> None:
        model[2].requires_grad_(first <= step < 4)

    for name in ("AdamW", "SGD", "Adagrad"):
        for config in CONFIGS:
            _both(change, OPTIMIZERS[name], config, _freeze_first)


def _new_group(model: nn.Module, optimizer: Any, step: int) -> None:
    if step == 2:
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})


def _takes_new_groups(make: Any) -> bool:
    """Whether an optimizer of torch can step parameters of a group that was added later: Adagrad of torch 2.11 cannot."""
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = make([first])
    optimizer.add_param_group({"params": [second]})
    second.grad = torch.ones(2)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


@on_ranks(2)
def test_parameters_of_the_model_that_come_to_the_optimizer_later():
    for name, make in OPTIMIZERS.items():
        if not _takes_new_groups(make):
            continue
        for config in CONFIGS:
            if name == "Adagrad" and config.get("flat_step") is False:
                continue  # the same as without
            _both(_new_group, make, config, lambda model: [*model[0].parameters(), *model[4].parameters()])


@on_ranks(2)
def test_parameters_that_the_model_did_not_have_are_refused_by_name():
    for config, users_own in itertools.product([*CONFIGS, *ZERO], (False, True)):
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            model = net()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            engine = initialize(model, optimizer, context=gpc)[0]
            engine.zero_grad()
            engine.backward(loss_of(model, 0, 0))
            engine.step()
            model.append(nn.Linear(3, 3).double())
            (optimizer if users_own else engine.optimizer).add_param_group({"params": list(model[5].parameters())})
            engine.zero_grad()
            engine.backward(loss_of(model, 0, 0))
            named = (
                r"had \[6\] parameters and now have \[6, 2\]\. .*\[C070\]$"
                if "zero" in config
                else r"5\.weight of shape \(3, 3\) was added to optimizer group 1"
            )
            with pytest.raises(GradientError, match=named):
                engine.step()
            engine.close()


def _other_memory(model: nn.Module, optimizer: Any, step: int) -> None:
    with torch.no_grad():
        if step == 1:
            model[0].weight.data = model[0].weight.data * 0.5
        if step == 2:  # as an average of weights is swapped in and kept
            for parameter in model.parameters():
                parameter.data = parameter.data.clone() + 0.01
        if step == 3:
            model[2].bias.data.copy_(model[2].bias.data + 1.0)
            model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})
        if step == 4:
            model.to(torch.float64)
            model.to("cpu")


@on_ranks(2)
def test_weights_that_were_put_elsewhere_or_written_by_hand():
    for name in ("AdamW", "Adagrad"):
        for config in [*CONFIGS, *ZERO]:
            _both(_other_memory, OPTIMIZERS[name], config, steps=6)


def _images() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 2)).double()


def _loss_of_images(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(numbers(2, 3, 5, 5, seed=10 * step + rank)).square().mean()


def _other_format(model: nn.Module, optimizer: Any, step: int) -> None:
    """What `Module.to` and the like put elsewhere are gradients too: those of the step before are still there."""
    if step == 1:
        model.to(memory_format=torch.channels_last)
    if step == 3:
        model.float()
        model.double()
    if step == 4:
        model[0].weight.data = model[0].weight.data.contiguous() * 0.5


@on_ranks(2)
def test_weights_that_got_another_memory_format_or_went_to_another_dtype_and_back():
    for config in [*CONFIGS, {"sync": {"shared_memory": False}}, *ZERO]:
        for give_back in (True, False) if config.get("zero") == 1 else (True,):
            if not give_back:
                config = {**config, "zero": {"stage": 1, "reduce_scatter": False}}
            _both(_other_format, OPTIMIZERS["AdamW"], config, steps=6, build=_images, loss_of=_loss_of_images)


@on_ranks(2)
def test_what_is_written_to_half_precision_parameters_is_not_lost_under_zero():
    """Under ZeRO a half-precision parameter has a master copy, which takes up what is written to the parameter."""
    for stage in (1, 2):
        with launch({"zero": stage}, context=ParallelContext(), verbose=False) as gpc:
            model = net().bfloat16()
            engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.0), context=gpc)[0]
            model[0].weight.data.copy_(torch.full((6, 5), 0.25))
            model[2].weight.data = torch.full((6, 6), 0.5, dtype=torch.bfloat16)
            engine.zero_grad()
            engine.backward(engine(torch.ones(2, 5, dtype=torch.bfloat16)).float().square().mean())
            engine.step()
            engine.optimizer.wait()
            assert bool((model[0].weight == 0.25).all())
            assert bool((model[2].weight == 0.5).all())
            engine.close()


@on_ranks(2)
def test_parameters_that_were_replaced_are_refused_by_name():
    for config in [*CONFIGS, *ZERO]:
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            model = net()
            engine = initialize(model, lambda p: torch.optim.AdamW(p, lr=0.1), context=gpc)[0]
            with pytest.raises(GradientError, match=r"'0\.weight' was replaced by another parameter after initialize"):
                model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
            engine.close()
            model = net()
            engine = initialize(model, lambda p: torch.optim.AdamW(p, lr=0.1), context=gpc)[0]
            model[2].bias = nn.Parameter(torch.zeros(6, dtype=torch.float64))
            engine.zero_grad()
            engine.backward(loss_of(model, 0, 0))
            with pytest.raises(GradientError, match=r"'2\.bias' was replaced by another parameter"):
                engine.step()
            engine.close()


@on_ranks(2)
def test_a_model_that_was_converted_is_refused_by_name():
    for config in [*CONFIGS, *ZERO]:
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            model = net()
            engine = initialize(model, lambda p: torch.optim.AdamW(p, lr=0.1), context=gpc)[0]
            model[2].float()
            engine.zero_grad()
            out = model[0](torch.ones(2, 5).double()).square().mean()
            told = r"'2\.(weight|bias)' was torch\.float64 on cpu at initialize\(\) and is torch\.float32"
            with pytest.raises(GradientError, match=told):
                engine.backward(out)
            engine.close()


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(7, 4, sparse=True)
        self.out = nn.Linear(4, 2)
        self.double()

    def forward(self, step: int, rank: int) -> Tensor:
        """In steps 1 and 2 nobody uses the embedding."""
        return self.out(numbers(3, 4, seed=step) if step in (1, 2) else self.words(torch.tensor([step, rank, 6])))


@on_ranks(2)
def test_a_parameter_with_sparse_gradients_that_a_step_does_not_use():
    for config in [{}, {"flat_step": False}]:
        _both(
            lambda model, optimizer, step: None,
            lambda p: torch.optim.SGD(p, lr=0.05),
            config,
            build=_Words,
            loss_of=lambda model, rank, step: model(step, rank).square().mean(),
        )
