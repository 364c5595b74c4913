"""Which of two models a client keeps: by what they did on its validation data. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Seen:
    """What a model did on some examples."""

    correct: int | None
    count: int
    loss: float


def keeps_shared(personal: Seen, shared: Seen) -> bool:
    """Whether the shared model serves better: in accuracy, then in loss; if in neither, the personal one is kept."""
    own, other = ((seen.correct or 0) / max(seen.count, 1) for seen in (personal, shared))
    return other > own or (other == own and shared.loss < personal.loss)
