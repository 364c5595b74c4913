"""Why clients were not heard or were left out of a round, in the words of the records. Free of torch."""

from __future__ import annotations

from sparsona.core.points import FEWEST

REFUSALS = 3  # in a row, after which a client is not asked again
LOST = "no answer within {seconds:g} s"
DIED = "its process died {times} times: {cause}"
OVERDUE = "its turn took longer than {seconds:g} s"
FOREIGN = "an answer that is not its own: "
REFUSED = "refused: "
UNABLE = "it says that it cannot: "  # after REFUSED: for a reason of the client's own, and it is asked again
BARRED = f"not asked: its last {REFUSALS} answers were refused"
ABSENT = "not asked: it has not been there yet"
STARTED_ANEW = "its state was lost: it started anew"
WITHHELD = f"few: fewer than {FEWEST} examples, of which a client does not tell the result"
DIVERGED = "training diverged: "
LEFT_OUT = "it left out "  # what a peer received, and why
ALONE = "it trained on alone: with what it received, "
TOO_FEW = "updates that a round needs"

DIVERGENCE = "diverged"
# How they are reported, in this order.
_KINDS = {
    "no answer": "no answer",
    "its process died": "its process died",
    "its turn took longer": "its turn took too long",
    FOREIGN: "an answer that is not its own",
    REFUSED: "refused",
    BARRED: "barred after refusals",
    ABSENT: "not there yet",
    DIVERGED: DIVERGENCE,
}


def kind_of(reason: str) -> str | None:
    """In short why a client was not heard; None if it was, and something else is noted.

    Args:
        reason: as it is recorded.

    Returns:
        Such as "no answer".

    Example:
        >>> kind_of("no answer within 60 s"), kind_of("refused: its loss is NaN"), kind_of(STARTED_ANEW)
        ('no answer', 'refused', None)
    """
    for start, kind in _KINDS.items():
        if reason.startswith(start):
            return kind
    is_note = any(part in reason for part in (STARTED_ANEW, ALONE, WITHHELD, LEFT_OUT)) or reason.endswith(TOO_FEW)
    return None if is_note else "other reasons"
