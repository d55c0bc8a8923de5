"""What is asked of every layout: all orders and dtypes by the function, and steps of an engine."""

from __future__ import annotations

from tests.optim.field_facts import Fact
from tests.optim.field_layouts import CASES
from tests.optim.field_measure import LIMIT, ORDERS, by_engine, by_function, launched


def survey(name: str, p: float = 2.0) -> list[Fact]:
    """The facts of one layout; the engine's norm is of order `p`. The function is asked for every order at once, with p 2."""
    case = CASES[name]
    facts = []
    with launched(case.parallel, clip_grad_norm={"max_norm": LIMIT, "norm_type": p}) as gpc:
        for dtype in case.dtypes if p == 2.0 else ():
            for order in ORDERS:
                facts += by_function(gpc, case.pieces, dtype, order, with_context=case.with_context)
        if case.engine:
            facts += by_engine(gpc, case.pieces, case.kind, p)
    return [Fact(f"{name}: {fact.what}", fact.found, fact.wanted, fact.rtol, fact.at_most) for fact in facts]
