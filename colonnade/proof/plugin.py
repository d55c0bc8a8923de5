"""The pytest fixture `colonnade_verify`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


@pytest.fixture
def colonnade_verify() -> Callable[..., Any]:
    """A function of a script: `colonnade_verify("train.py", nproc=4)` fails the test unless it equals one process.

    Further arguments: `arguments` of the script, `steps`, `dtype` ("fp64" or "own"), `dropout` (False: nothing is
    dropped), `is_module`, `timeout` in seconds. Returns the report; with check=False also of a run that differs.
    """

    def verify(
        script: Any, arguments: Sequence[str] = (), *, check: bool = True, dropout: bool = True, **options: Any
    ) -> Any:
        # Imported here: pytest loads this file in every run.
        from colonnade.proof.scripts import Script, verify_script

        off: dict[str, str] | None = {} if dropout else None
        report = verify_script(Script(str(script), tuple(map(str, arguments)), off=off, **options))
        if check and not report.ok:
            pytest.fail(str(report), pytrace=False)
        return report

    return verify
