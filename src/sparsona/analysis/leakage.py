"""What masks tell about labels: how well someone who knows the classes of some clients guesses those of others.

The attacker fits ridge regression on masks alone, one for each class, on some clients, and is judged on others, never
on those that it was fitted to. Chance is measured by the same attack with the clients' classes exchanged at random.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsona.core.errors import SparsonaError

MOST_FOLDS = 5
REPEATS = 10  # divisions of the clients into folds
SHUFFLES = 20  # exchanges of classes between clients, for chance


@dataclass(frozen=True)
class Presence:
    """How well masks tell which clients have a class.

    Args:
        auc: area under the ROC curve, mean over classes; 0.5: nothing, 1: everything.
        by_class: the same for each class that some clients have and some have not.
        chance: the mean over attacks on exchanged classes.
        spread: their standard deviation.
        clients: how many clients there are.
    """

    auc: float
    by_class: dict[int, float]
    chance: float
    spread: float
    clients: int


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """The share of pairs of a positive and a negative in which the positive has the higher score; ties count half.

    Args:
        scores: a number each.
        positive: whether each is positive; at least one is, and one is not.

    Returns:
        The area under the ROC curve.

    Example:
        >>> auc(np.array([0.1, 0.9, 0.5]), np.array([False, True, False]))
        1.0
    """
    one, other = scores[positive][:, None], scores[~positive][None, :]
    return float((one > other).mean() + 0.5 * (one == other).mean())


def told_classes(counts: np.ndarray) -> np.ndarray:
    """Of each class, whether two clients have it and two have not: fewer leave nobody to judge an attack on.

    Args:
        counts: of each client (rows), how many training examples of each class it has.

    Returns:
        True or False for each class.

    Example:
        >>> told_classes(np.array([[1, 1], [1, 2], [0, 3], [0, 4]])).tolist()
        [True, False]
    """
    present = np.asarray(counts) > 0
    return np.minimum(present.sum(0), (~present).sum(0)) >= 2


def label_presence(distances: np.ndarray, counts: np.ndarray, seed: int = 0) -> Presence:
    """How well masks tell which clients have a class.

    Args:
        distances: between every two clients' masks, the share of entries in which they differ.
        counts: of each client (rows), how many training examples of each class it has.
        seed: of the folds and of the exchanges.

    Returns:
        The attack's success.

    Raises:
        SparsonaError: there is no class that two clients have and two have not.

    Example:
        >>> counts = np.array([[9, 0]] * 4 + [[0, 9]] * 4)
        >>> distances = (counts[:, None, 0] != counts[None, :, 0]) * 0.5
        >>> label_presence(distances, counts).auc
        1.0
    """
    present = np.asarray(counts) > 0
    enough = told_classes(counts)
    if not enough.any():
        raise SparsonaError(
            f"{len(present)} clients, and no class that two of them have and two have not",
            expected="clients with different classes",
            hint="--partition shards:2, or a smaller dirichlet",
        )
    classes = np.flatnonzero(enough)
    kernel = 1.0 - 2.0 * np.asarray(distances, dtype=np.float64)  # of masks written as -1 and 1
    random = np.random.default_rng(seed)
    by_class = {int(one): _attack(kernel, present[:, one], random, REPEATS) for one in classes}
    shuffled = []
    for _ in range(SHUFFLES):
        mixed = present[random.permutation(len(present))]
        shuffled.append(np.mean([_attack(kernel, mixed[:, one], random, 1) for one in classes]))
    found = float(np.mean(list(by_class.values())))
    return Presence(found, by_class, float(np.mean(shuffled)), float(np.std(shuffled, ddof=1)), len(present))


def _attack(kernel: np.ndarray, positive: np.ndarray, random: np.random.Generator, repeats: int) -> float:
    """The mean AUC on clients that were left out of fitting, over folds and divisions into folds."""
    num = min(MOST_FOLDS, int(positive.sum()), int((~positive).sum()))
    found, pairs = 0.0, 0
    for _ in range(repeats):
        fold = np.empty(len(positive), dtype=int)
        for group in (positive, ~positive):  # each fold has some of both
            places = random.permutation(np.flatnonzero(group))
            fold[places] = np.arange(len(places)) % num
        for one in range(num):
            test, train = np.flatnonzero(fold == one), np.flatnonzero(fold != one)
            scores = _ridge(kernel, positive[train].astype(float), train, test)
            weight = int(positive[test].sum()) * int((~positive[test]).sum())
            found += weight * auc(scores, positive[test])
            pairs += weight
    return found / pairs


def _ridge(kernel: np.ndarray, labels: np.ndarray, train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Scores of clients by ridge regression on others, both centred by those that it is fitted to."""
    known, asked = kernel[np.ix_(train, train)], kernel[np.ix_(test, train)]
    mean = known.mean(0)
    centred = known - mean[None, :] - known.mean(1)[:, None] + known.mean()
    asked = asked - asked.mean(1)[:, None] - mean[None, :] + known.mean()
    penalty = np.trace(centred) / len(train)
    if penalty < 1e-12:  # all masks are the same
        return np.zeros(len(test))
    # Rounded, so that masks that are the same have the same score.
    weights = np.linalg.solve(centred + penalty * np.eye(len(train)), labels - labels.mean())
    return np.round(asked @ weights, 12)
