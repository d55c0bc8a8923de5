"""What all tests share: the fork server of `run_world` starts while the tests are still being collected."""

from __future__ import annotations

import pytest

from colonnade.testing.start import start_server


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.collectonly:
        start_server()
