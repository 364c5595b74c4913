"""Tests of traced steps."""

from __future__ import annotations

import pytest
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.fixture(autouse=True)
def _one_mode():
    """A mode that all values of a trace share: else each has its own, and writes down the stack that asked for it."""
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        yield
