"""What makes runs in this process short."""

from __future__ import annotations

from federations import one_task  # noqa: F401
