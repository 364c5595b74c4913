"""How clients used the blocks of a gated model: densities, uploads, and the gates over the rounds (pFedGate, figure 7).

Read from what the method measured of turns (`Method.measure`) in the rounds that were evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.runs.folder import RunFolder
from sparsona.runs.records import unpack_numbers

BY_BLOCK = ("scores", "gates", "chosen")  # measures that have a number for each block
VECTORS = (*BY_BLOCK, "newly_used")
MOST_ROWS = 12  # of the table
Figure = Literal["density_used", "upload_share", "upload_share_formula"]


@dataclass(frozen=True, eq=False)
class GateTurn:
    """What one client's turn used.

    Args:
        completed: the number of rounds with this one.
        client: the number of the client.
        density_used: the share of the model's entries that an example was trained with, in the mean (s').
        upload_share: the share of the entries that any batch used, which are those that an update may change (q).
        upload_share_formula: 1 - prod_j (1 - p_j) over the batches, where p_j is the share that batch j used.
        newly_used: of the first batches, the share that each used of what none before it had: with these as p_j the
            formula is an identity. NaN: the turn had fewer batches (records of earlier runs have 0).
        scores: the mean score G of each block.
        gates: the mean gate M' = M I* of each block.
        chosen: the share of the batches that used each block.
    """

    completed: int
    client: int
    density_used: float
    upload_share: float
    upload_share_formula: float
    newly_used: np.ndarray
    scores: np.ndarray
    gates: np.ndarray
    chosen: np.ndarray


@dataclass(frozen=True, eq=False)
class Gates:
    """The recorded turns of a run, in the order of rounds and clients."""

    title: str
    turns: tuple[GateTurn, ...]

    @cached_property
    def rounds(self) -> list[int]:
        """The rounds that were recorded, as numbers of completed rounds."""
        return sorted({turn.completed for turn in self.turns})

    def mean(self, name: Figure) -> float:
        """The mean of a figure over all recorded turns."""
        return float(np.mean([getattr(turn, name) for turn in self.turns]))

    @cached_property
    def newly_used(self) -> list[float]:
        """Of what no batch before it had used, the share that batch 1, 2, ... used: means over turns that had it."""
        shares = np.array([turn.newly_used for turn in self.turns])
        return [float(taken.mean()) for share in shares.T if len(taken := share[~np.isnan(share)])]

    def histogram(
        self, of: Literal["gates", "scores", "chosen"] = "gates", bins: int = 20
    ) -> tuple[list[int], np.ndarray, np.ndarray]:
        """How the blocks of all clients are distributed, round by round.

        Args:
            of: which figure of a block.
            bins: how many equal parts the range from 0 to 1 has; it is wider where figures are.

        Returns:
            The rounds, the edges of the bins, and the counts [rounds, bins].
        """
        values = {completed: self._all(of, completed) for completed in self.rounds}
        low, high = min(v.min() for v in values.values()), max(v.max() for v in values.values())
        edges = np.linspace(min(0.0, low), max(1.0, high), bins + 1)
        return self.rounds, edges, np.stack([np.histogram(v, edges)[0] for v in values.values()])

    def _all(self, of: str, completed: int) -> np.ndarray:
        return np.concatenate([getattr(turn, of) for turn in self.turns if turn.completed == completed])

    def rows(self) -> list[dict[str, str]]:
        """Some of the rounds, from the first to the last: means over the clients that trained."""
        places = np.unique(np.linspace(0, len(self.rounds) - 1, min(MOST_ROWS, len(self.rounds))).round().astype(int))
        found = []
        for completed in (self.rounds[place] for place in places):
            turns = [turn for turn in self.turns if turn.completed == completed]
            gates = self._all("gates", completed)
            figures = {
                "density used": np.mean([turn.density_used for turn in turns]),
                "upload share": np.mean([turn.upload_share for turn in turns]),
                "by formula": np.mean([turn.upload_share_formula for turn in turns]),
                "mean gate": gates.mean(),
                "gates at 0": np.mean(gates <= 0),
            }
            row = {"round": f"{completed:,}", "clients": f"{len(turns):,}"}
            found.append({**row, **{name: f"{figure:.3f}" for name, figure in figures.items()}})
        return found

    def sentences(self) -> list[str]:
        """What the figures are."""
        names: tuple[Figure, ...] = ("density_used", "upload_share", "upload_share_formula")
        used, measured, formula = (self.mean(name) for name in names)
        shares = ", ".join(f"{share:.3f}" for share in self.newly_used)
        text = f"Over {len(self.turns):,} turns: density used s' {used:.3f}, upload share q {measured:.3f}; "
        return [
            f"{text}by the formula of appendix E, with batches that choose independently, {formula:.3f}.",
            f"Of what no batch before it had used, batch 1, 2, ... used {shares}.",
            "A gate is M' of one block of one client, the mean over a turn's examples.",
        ]

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        figures = ("completed", "client", "density_used", "upload_share", "upload_share_formula")
        return {
            "title": self.title,
            "turns": [
                {name: getattr(turn, name) for name in figures}
                | {name: getattr(turn, name).tolist() for name in BY_BLOCK}
                | {"newly_used": [None if np.isnan(p) else p for p in turn.newly_used.tolist()]}
                for turn in self.turns
            ],
        }


def recorded_gates(run: RunFolder) -> Gates | None:
    """What a run recorded of its clients' gates; None where its method has none, or nothing was evaluated yet."""
    found: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    most = run.records.bounds.numbers
    for row in run.records.measures():
        found.setdefault((row.round, row.client), {})[row.name] = unpack_numbers(row.numbers, "<f4", most)
    turns = [_turn(*key, measures) for key, measures in found.items() if set(VECTORS) <= set(measures)]
    if not turns:
        return None
    facts, config = run.facts, run.config
    parts = [facts.title, config["data"].partition(":")[0], config["partition"], f"seed {config['seed']}"]
    return Gates(", ".join(map(str, parts)), tuple(turns))


def gates_of(run: RunFolder) -> Gates:
    """The same; SparsonaError where nothing was recorded."""
    found = recorded_gates(run)
    if found is None:
        raise SparsonaError(
            f"'{run.path}' has no gates on record",
            expected="a run of a method whose clients have gates, such as pfedgate, with an evaluated round",
        )
    return found


def mean_measures(run: RunFolder) -> dict[str, float]:
    """The mean over turns of each measure that is one number."""
    found: dict[str, list[float]] = {}
    for row in run.records.measures():
        numbers: Sequence[float] = unpack_numbers(row.numbers, "<f4", run.records.bounds.numbers).tolist()
        if len(numbers) == 1:
            found.setdefault(row.name, []).append(numbers[0])
    return {name: float(np.mean(values)) for name, values in found.items()}


def _turn(round_: int, client: int, measures: dict[str, np.ndarray]) -> GateTurn:
    used, measured, formula = (
        float(measures[name][0]) for name in ("density_used", "upload_share", "upload_share_formula")
    )
    return GateTurn(round_ + 1, client, used, measured, formula, **{name: measures[name] for name in VECTORS})
