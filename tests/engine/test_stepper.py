"""The step of an engine by its parts: also what only a GPU does, with parts that are made up."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine import stepper
from colonnade.engine.build import initialize
from colonnade.engine.stepper import Stepper
from colonnade.errors import ConfigError
from colonnade.gradients.synchroniser import StepOutcome
from colonnade.optim.clip import Decision
from colonnade.optim.norm import Norms

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def bare(**parts: Any) -> Any:
    """A stepper of these parts alone."""
    made = Stepper.__new__(Stepper)
    vars(made).update(parts)
    return made


@pytest.mark.parametrize(
    ("device", "world_size", "drops", "waits", "alike", "expected"),
    [
        (CUDA, 2, True, False, True, True),
        (CPU, 2, True, False, True, False),
        (CUDA, 1, True, False, True, False),
        (CUDA, 2, False, False, True, False),
        (CUDA, 2, True, True, True, False),
        (CUDA, 2, True, False, False, False),  # another rank cannot
    ],
)
def test_flags_are_piggybacked_where_all_ranks_can(monkeypatch, device, world_size, drops, waits, alike, expected):
    monkeypatch.setattr(stepper, "PiggybackedFlags", lambda device: "flags")
    monkeypatch.setattr(stepper, "is_same_everywhere", lambda number, device: alike)
    given: list[Any] = []
    synchroniser: Any = SimpleNamespace(host_waits=waits, agree_by=given.append)
    context = SimpleNamespace(device=device, world_size=world_size)
    made = bare(_context=context, _step=SimpleNamespace(skips_on_device=drops))
    found = made._piggybacked_flags(synchroniser)
    assert (found, given) == (("flags", ["flags"]) if expected else (None, []))


def decision(found_inf: float = 0.0) -> Decision:
    norms = Norms(2.0, torch.tensor([9.0, 16.0]), torch.zeros(2))
    return Decision(
        norms=norms,
        norm=torch.tensor(5.0),
        divisor=torch.tensor([1.0, 2.0]),
        found_inf=torch.tensor(found_inf),
        nonfinite=torch.tensor(0.0),
    )


@pytest.mark.parametrize(
    ("unsent", "whole", "graph", "world_size", "how", "sent"),
    [
        (False, False, False, 2, "by a bucket", 0),
        (True, False, False, 2, "with the norm", 2),
        (True, True, False, 2, "alone", 0),  # nothing of the norm is sent
        (False, False, True, 1, "by a bucket", None),
        (False, True, True, 2, "by a bucket", None),
        (False, False, True, 2, "by a bucket", 0),
        (True, True, True, 2, "alone", None),
    ],
)
@pytest.mark.parametrize("clips", [True, False])
def test_flags_are_sent_once_and_drop_the_step(monkeypatch, unsent, whole, graph, world_size, how, sent, clips):
    seen: list[Any] = []

    def reduce_norms(vector: Any, p: float, group: Any = None, *, piggybacked: int = 0, whole: bool = False) -> Any:
        seen.append(piggybacked)
        return vector[: len(vector) - piggybacked]

    monkeypatch.setattr(stepper, "reduce_norms", reduce_norms)
    monkeypatch.setattr(stepper.dist, "all_reduce", lambda numbers, group: seen.append("alone"))
    policy = SimpleNamespace(slots=2, decide=lambda norms: seen.append(norms.tolist()) or decision())
    stepped: list[Any] = []
    made = bare(
        _step=SimpleNamespace(
            meter=lambda *_: SimpleNamespace(measure=lambda: torch.tensor([1.0, 2.0])), measures_full_gradient=whole
        ),
        optimizer=SimpleNamespace(step_divided=lambda divisor, drop: stepped.append((divisor, drop.item()))),
        _norm_type=2.0,
        _context=SimpleNamespace(
            device=CPU,
            world_size=world_size,
            get_group=lambda mode: mode,
            waits=SimpleNamespace(during=lambda *_: nullcontext()),
        ),
        _flags=SimpleNamespace(take=lambda numbers: torch.tensor(float(numbers.sum() == 30.0))),
        _capture=object() if graph else None,
        _repeated=lambda *_: decision(),
        policy=policy if clips else None,
        scaler=None,
        skips=stepper.SkipReport(),
    )
    flags = torch.tensor([10.0, 20.0]) if unsent else None
    made.step(StepOutcome(drop_flag=None if unsent else torch.tensor(0.5), unsent_flags=flags))
    ((divisor, drop),) = stepped
    assert drop == (1.0 if unsent else 0.5)
    if not clips:
        assert (divisor, seen) == (None, ["alone"] if unsent else [])
        return
    assert seen == [*([sent, [1.0, 2.0]] if sent is not None else []), *["alone"] * (how == "alone")]
    assert divisor.tolist() == [1.0, 2.0]


def test_a_graph_leaves_copies(monkeypatch):
    wholes: list[bool] = []
    monkeypatch.setattr(stepper, "reduce_norms", lambda vector, p, *, whole: wholes.append(whole) or vector)
    known = decision()
    policy: Any = SimpleNamespace(
        decide=lambda norms: known if norms == "measured" else norms, method=SimpleNamespace(state={"a": 1, "b": 2})
    )
    meter: Any = SimpleNamespace(measure=lambda: "measured")
    given: list[Any] = []
    capture: Any = SimpleNamespace(run=lambda keys, before, decide: given.append(keys) or decide())
    found = bare(scaler=None, _norm_type=2.0)._repeated(capture, policy, meter)
    assert wholes == [True]
    assert given == [(meter, 1, 2)]
    for name in ("norm", "divisor", "found_inf", "nonfinite"):
        assert torch.equal(getattr(found, name), getattr(known, name))
        assert getattr(found, name) is not getattr(known, name)
    assert torch.equal(found.norms.sums, known.norms.sums)
    assert found.norms.sums is not known.norms.sums
    scaler = SimpleNamespace(unscaled=lambda norms: known if norms == "measured" else None)
    assert bare(scaler=scaler, _norm_type=2.0)._repeated(capture, policy_of(known), meter).norm == known.norm


def policy_of(known: Decision) -> Any:
    """One that takes unscaled norms alone."""
    return SimpleNamespace(decide=lambda norms: {id(known): known}[id(norms)], method=SimpleNamespace(state={}))


def test_a_graph_step_cannot_raise_on_the_host():
    config = {"graph_step": True, "clip_grad_norm": {"max_norm": 1.0, "nonfinite": "raise"}}
    with (
        launch(config, context=ParallelContext(), verbose=False) as gpc,
        pytest.raises(ConfigError, match=r"^graph_step=True is not available with .* use nonfinite='skip'"),
    ):
        initialize(nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)


@pytest.mark.parametrize(
    ("dropped", "bad", "rank", "said"),
    [
        (0, "w", 0, None),
        (1, "", 0, "step skipped: its gradient norm is 5 (7 skipped so far)"),
        (1, "", 1, None),
        (2, "w", 0, "step skipped: first in w on rank 0; its gradient norm is 5"),
        (1, "w", 1, "step skipped: first in w on rank 1; its gradient norm is 5"),
    ],
)
@pytest.mark.parametrize("wait", [False, True])
def test_dropped_steps_are_said_by_rank_0_and_by_whom_it_concerns(monkeypatch, dropped, bad, rank, said, wait):
    told: list[str] = []
    monkeypatch.setattr(stepper, "get_dist_logger", lambda: SimpleNamespace(warning=told.append))
    skips = SimpleNamespace(total=7, read=lambda: dropped * wait, poll=lambda: dropped * (not wait))
    bare(
        skips=skips,
        _step=SimpleNamespace(first_nonfinite=lambda: bad),
        _context=SimpleNamespace(get_global_rank=lambda: rank),
        last=decision(),
    ).report_skips(wait=wait)
    assert len(told) == (said is not None)
    assert not told or told[0].startswith(said)


def test_a_dropped_step_is_said_when_the_next_one_begins(caplog):
    with launch({"clip_grad_norm": 1.0}, context=ParallelContext(), verbose=False) as gpc:
        model = nn.Linear(1, 1)
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), context=gpc)[0]
        logging.getLogger("colonnade").propagate = True
        for bad in (True, False):
            engine.zero_grad()
            engine.backward(engine(torch.full((1, 1), float("inf") if bad else 1.0)).sum())
            engine.step()
        engine.zero_grad()
        assert caplog.text.count("step skipped") == 1
        assert all(parameter.grad is None for parameter in model.parameters())
        engine.close()
