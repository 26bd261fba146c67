"""Settings of all tests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says more about the machine of the day than about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", help="where tests/engines/test_device.py runs, such as cuda:0; it is skipped without")
    parser.addoption("--device-model", help="a real draft model that it tests too: a path, or a name on the hub")
