"""The pytest fixture `colonnade_verify`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


@pytest.fixture
def colonnade_verify() -> Callable[..., Any]:
    """Return a function that verifies a script: `colonnade_verify("train.py", nproc=4)` fails the test if the run is wrong.

    The function takes the arguments of the script, and `nproc`, `steps`, `dtype` ("fp64" or "own"), `dropout` (False:
    turned off), `is_module` and `timeout` (in seconds). It returns the report. With `check=False`, it also returns the
    report of a wrong run instead of failing.
    """

    def verify(
        script: Any, arguments: Sequence[str] = (), *, check: bool = True, dropout: bool = True, **options: Any
    ) -> Any:
        # Imported here, because pytest loads this file in every run.
        from colonnade.proof.scripts import Script, verify_script

        off: dict[str, str] | None = {} if dropout else None
        report = verify_script(Script(str(script), tuple(map(str, arguments)), off=off, **options))
        if check and not report.ok:
            pytest.fail(str(report), pytrace=False)
        return report

    return verify
