"""Over NCCL: models under plans, their styles one by one, with data parallelism and ZeRO; and what is said of wrong ones."""

from __future__ import annotations

from collections.abc import Iterator

from tests.device.check import Check
from tests.hf.plans import test_check, test_experts, test_parallelize


def checks() -> Iterator[Check]:
    names = [name for name in test_parallelize.cases() if name != "sequence split"]
    yield Check("plans", "styles", 2, test_parallelize._all_styles, (names,))
    yield Check("plans", "with data and ZeRO", 4, test_parallelize._combined, ())
    yield Check("plans", "wrong ones", 2, test_check._wrong, ())
    yield Check("plans", "experts over tensor, over expert ranks", 2, test_experts._over_two, ())
    yield Check("plans", "experts over both", 4, test_experts._over_four, ())
