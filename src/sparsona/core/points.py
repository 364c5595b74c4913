"""Evaluation points: whose model is evaluated, on which data, and when. Free of torch.

This table is the only place that defines points. A point is written NAME for a model on a client's test data and
NAME/train or NAME/validation for the same model on other data of that client.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from sparsona.core.errors import SparsonaError, unknown_name

Data = Literal["test", "train", "validation"]


@dataclass(frozen=True)
class Point:
    """One evaluation point.

    Args:
        name: how it is written.
        model: a client's own, the shared one, or the one that training started from.
        when: after a round, at the end of each client's turn, or once after the last round.
        text: what is evaluated, for lists.
        of: which clients are evaluated.
        is_option: it can be requested with `points=`.
        is_derived: computed from the results of other points, without evaluating a model.
        data: the data that the model is evaluated on.
    """

    name: str
    model: Literal["own", "shared", "start"]
    when: Literal["round", "turn", "end"]
    text: str
    of: Literal["participants", "novel"] = "participants"
    is_option: bool = False
    is_derived: bool = False
    data: Data = "test"

    @property
    def base(self) -> str:
        """The name without the data."""
        return self.name.partition("/")[0]


RECEIVED, TRAINED, TUNED = "received", "trained", "tuned"
GLOBAL, CONSENSUS, START = "global", "consensus", "start"
NOVEL, NOVEL_TUNED = "novel", "novel_tuned"
PERSONAL, SHARED, GUARDED = "personal", "shared", "guarded"

POINTS = {
    point.name: point
    for point in (
        Point(RECEIVED, "own", "round", "the personal model a client would use next", is_option=True),
        Point(TRAINED, "own", "turn", "a client's model at the end of its local training", is_option=True),
        Point(TUNED, "own", "end", "a client's model after final tuning", is_option=True),
        Point(GLOBAL, "shared", "round", "the server's model", is_option=True),
        Point(CONSENSUS, "shared", "round", "the mean of all peers' models", is_option=True),
        Point(START, "start", "end", "the model that training started from"),
        Point(NOVEL, "own", "end", "the model that a novel client receives", of="novel"),
        Point(NOVEL_TUNED, "own", "end", "a novel client's model after tuning", of="novel"),
        # What a guard compares: the client's own model and the shared one, both on validation data.
        Point(PERSONAL, "own", "end", "the client's own model, as the guard compares it"),
        Point(SHARED, "shared", "end", "the shared model, as the guard compares it", is_derived=True),
        Point(GUARDED, "own", "end", "the model that each client keeps under guard", is_derived=True),
    )
}

# A client on another machine does not tell counts below this, which speak of single examples: FEW stands for them.
FEWEST, FEW = 5, -1
OPTIONS = tuple(name for name, found in POINTS.items() if found.is_option)


def point(name: str) -> Point:
    """The point of this name, which may have the data after a slash.

    Args:
        name: such as "received" or "received/validation".

    Returns:
        The row of the table, with this `name` and `data`.

    Example:
        >>> point("received/validation").data
        'validation'
    """
    base, slash, data = name.partition("/")
    if base not in POINTS:
        raise unknown_name("point", name, POINTS)
    if not slash:
        return POINTS[base]
    if data not in get_args(Data) or data == "test":
        raise SparsonaError(
            f"point '{name}'",
            expected=f"'{base}' (on test data), '{base}/train' or '{base}/validation'",
            hint="name the data after the slash",
        )
    return replace(POINTS[base], name=name, data=data)  # type: ignore[arg-type]


def on(name: str, data: Data) -> str:
    """The name of the point that evaluates the same model on other data.

    Args:
        name: any point.
        data: the data to evaluate on.

    Returns:
        The name of the other point.

    Example:
        >>> on("received", "validation")
        'received/validation'
    """
    base = name.partition("/")[0]
    return base if data == "test" else f"{base}/{data}"


def check_option(name: str) -> str:
    """Check that a point can be requested with `points=`.

    Args:
        name: what the user wrote.

    Returns:
        The same name.

    Example:
        >>> check_option("global/train")
        'global/train'
    """
    if name.partition("/")[0] not in POINTS:
        raise unknown_name("point", name, OPTIONS)
    if not point(name).is_option:
        raise SparsonaError(
            f"point '{name}' is evaluated automatically where it applies",
            expected=f"one of {', '.join(OPTIONS)}, or one of them with /train or /validation",
            hint="leave it out of points",
        )
    return name


def check_headline(name: str) -> str:
    """Check that this point may be the result: a model on test data, in or after each round.

    Args:
        name: the headline of a card, or of a run.

    Returns:
        The same name.

    Example:
        >>> check_headline("consensus")
        'consensus'
    """
    found = point(check_option(name))
    if found.data != "test" or found.when == "end":
        allowed = [option for option in OPTIONS if POINTS[option].when != "end"]
        raise SparsonaError(
            f"'{name}' as the headline",
            expected=f"a model on test data in or after each round: {', '.join(allowed)}",
            hint="leave headline out, or name one of these",
        )
    return name


def headline(tune_epochs: int) -> str:
    """The point whose accuracy is the result, unless the method's card names another.

    Args:
        tune_epochs: epochs of final tuning.

    Returns:
        The name of the point.

    Example:
        >>> headline(tune_epochs=0)
        'received'
    """
    return TUNED if tune_epochs else RECEIVED


def select(names: Iterable[str], when: Literal["round", "turn", "end"]) -> tuple[str, ...]:
    """The points among these that are evaluated at this time.

    Args:
        names: some points.
        when: after a round, at the end of a turn, or after the last round.

    Returns:
        Their names, in the same order.

    Example:
        >>> select(["received", "trained", "global"], "round")
        ('received', 'global')
    """
    return tuple(name for name in names if point(name).when == when)


def is_own(name: str) -> bool:
    """Whether a point evaluates a client's own model on its test data.

    Args:
        name: any point.

    Returns:
        True or False.

    Example:
        >>> is_own("trained"), is_own("trained/validation")
        (True, False)
    """
    found = point(name)
    return found.model == "own" and found.data == "test"
