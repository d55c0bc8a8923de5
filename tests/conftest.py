"""What all tests share: the fork server of `run_world` starts while the tests are still being collected."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from colonnade.testing.start import start_server


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.collectonly:
        start_server()


# The machines of tests are busy: a slow example says nothing about the code.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
