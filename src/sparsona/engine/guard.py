"""Which of two models a client keeps, by their results on its validation data. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Seen:
    """The result of a model on some examples."""

    correct: int | None
    count: int
    loss: float


def keeps_shared(personal: Seen, shared: Seen) -> bool:
    """Whether the shared model is better, by accuracy and then by loss; in a tie the personal one is kept."""
    own, other = ((seen.correct or 0) / max(seen.count, 1) for seen in (personal, shared))
    return other > own or (other == own and shared.loss < personal.loss)
