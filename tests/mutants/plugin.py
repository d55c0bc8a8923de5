"""A plugin for pytest: runs the tests in the order of a plan, and writes down each as it begins and as it ends.

Of a file, the first case of every test comes first, then the second of each: what comes after the budget is like what
was before it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--plan", help="a JSON file: `order` (pairs of tier and file), `skip` (tests), `limits`, `budget` (seconds)"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Planned(Path(config.getoption("--plan"))))


class _Planned:
    def __init__(self, path: Path) -> None:
        self.plan: dict[str, Any] = json.loads(path.read_text())
        self.events = path.with_suffix(".events").open("w")
        self.tiers: dict[str, str] = {}
        self.begun: dict[object, float] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        ranks = {(tier, file): rank for rank, (tier, file) in enumerate(self.plan["order"])}
        skip = set(self.plan["skip"])
        ranked, cases = [], Counter[str]()
        for item in items:
            tier = "slow" if item.get_closest_marker("slow") else "fast"
            file = item.nodeid.partition("::")[0]
            self.tiers[item.nodeid] = tier
            if (tier, file) in ranks and item.nodeid not in skip:
                test = item.nodeid.partition("[")[0]
                ranked.append(((ranks[tier, file], cases[test]), item))
                cases[test] += 1
                if file in self.plan["limits"] and not item.get_closest_marker("timeout"):
                    item.add_marker(pytest.mark.timeout(self.plan["limits"][file]))
        items[:] = [item for _, item in sorted(ranked, key=lambda pair: pair[0])]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Pass over what comes after the budget, of which one file gets a half at most."""
        now, budget = time.monotonic(), self.plan["budget"]
        file = self.tiers[item.nodeid], item.path
        is_over = now - self.begun.setdefault(None, now) > budget or now - self.begun.setdefault(file, now) > budget / 2
        if is_over:
            # The test before left open what it shares with this one. If nobody ended that, the next file would begin with an error,
            # which would count as noticed.
            item.session._setupstate.teardown_exact(nextitem)
        return is_over or None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(test=report.nodeid, failed=True, seconds=0)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.when == "call":
            self._write(test=report.nodeid, failed=report.failed, seconds=report.duration)

    def _write(self, test: str, **rest: object) -> None:
        # At once: a test that hangs takes the process with it.
        print(json.dumps({"test": test, "tier": self.tiers.get(test, "fast"), **rest}), file=self.events, flush=True)
