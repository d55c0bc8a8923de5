"""The numbers of a step, collected by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from colonnade.trainer.records import _LOSS, _LR, RecordBook


class Clock:
    restarts = 0

    def restart(self) -> None:
        self.restarts += 1

    def end_step(self) -> None: ...


def engine(*rates: float, norm: Any = None, divisor: Any = None) -> Any:
    groups = [{"lr": rate} for rate in rates]
    return SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=groups), grad_norm=norm, clip_divisor=divisor, last_skip_flag=None
    )


def test_a_record_has_the_loss_of_all_passes_and_the_rate_of_the_first_group():
    clock: Any = Clock()
    book = RecordBook(clock)
    assert clock.restarts == 1
    assert book.draft() is None
    book.add_pass(torch.tensor(6.0), 2.0, 4)
    book.add_pass(torch.tensor(3.0), 1.0, 3)
    book.add_pass(None, 9.0, 2)
    book.add({"mine": 5, "other": torch.tensor(7.0)})
    book.end_step(8, 2, engine(0.5, 0.25, norm=torch.tensor(3.0)))
    book.add({"late": 1.0})
    assert book._samples == 9
    assert book._values["mine"] == 5.0
    assert book._values[_LR] == 0.5
    assert book._values["late"] == 1.0
    assert book._tensors["other"].item() == 7.0
    assert book._tensors[_LOSS].item() == 9.0
    assert book._weight == 3.0
    assert book._place is not None
    assert book._place[:2] == (8, 2)
    assert book.draft() is not None
    assert book.draft() is None
    assert (book._samples, book._weight, book._tensors, book._values) == (0, 0.0, {}, {})
    book.end_step(9, 2, engine())
    assert _LR not in book._values
