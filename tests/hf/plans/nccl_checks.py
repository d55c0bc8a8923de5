"""Over NCCL: models under plans, their styles one by one, with data parallelism and ZeRO; and what is said of wrong ones."""

from __future__ import annotations

from collections.abc import Iterator

from tests.device.check import Check
from tests.hf.plans import test_check, test_experts, test_parallelize
from tests.ranks import body_of


def checks() -> Iterator[Check]:
    names = [name for name in test_parallelize.cases() if name != "sequence split"]
    yield Check("plans", "styles", 2, test_parallelize._all_styles, (names,))
    yield Check("plans", "with data and ZeRO", 4, body_of(test_parallelize.test_with_data_parallelism_and_zero), ())
    yield Check("plans", "wrong ones", 2, body_of(test_check.test_every_wrong_plan_is_named_by_every_rank), ())
    yield Check(
        "plans",
        "experts over tensor, over expert ranks",
        2,
        body_of(test_experts.test_over_tensor_ranks_and_over_expert_ranks),
        (),
    )
    yield Check("plans", "experts over both", 4, body_of(test_experts.test_over_tensor_and_expert_ranks_at_once), ())
