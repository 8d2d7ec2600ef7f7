"""Fixtures that choose which kernels the tests of ops run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.interpreter import interpreting, run_by


@pytest.fixture
def interpreter() -> Iterator[None]:
    """Triton's kernels are interpreted."""
    with interpreting():
        yield


@pytest.fixture(params=["torch", "triton"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels that tables choose on a CPU, and Triton's."""
    with run_by(request.param, request):
        yield request.param
