"""What personalization does to each client: accuracy of its personal model over that of a shared one, or in a
regression what the run is judged by.

The analysis of FedSim and FedAlt's paper (section 4.2, appendix C.2): a mean can rise while some clients are hurt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsona.analysis.format import UNKNOWN, signed
from sparsona.analysis.measure import ACCURACY, Measure, client_scores, measure_of
from sparsona.analysis.statistics import accuracy_summary, spearman
from sparsona.analysis.summary import at, headline, points, untrained, untrained_note
from sparsona.core.errors import SparsonaError
from sparsona.core.points import CONSENSUS, GLOBAL, GUARDED, NOVEL, NOVEL_TUNED, RECEIVED, START, TUNED, on
from sparsona.core.points import point as evaluation_point
from sparsona.runs.facts import same_data
from sparsona.runs.folder import RunFolder

# Shared models that a run may have evaluated besides the personal ones. The first that is found is the one to compare
# with: what personal models started from (a warm start), or else the model that all share.
SHARED = (START, GLOBAL, CONSENSUS)
QUANTILES = {"worst": 0, "10%": 10, "median": 50, "90%": 90, "best": 100}


@dataclass(frozen=True, eq=False)
class Change:
    """The accuracies (0 to 1) of two models for each client, or what a regression is judged by, on the data that `name`
    says.

    `samples` is each client's number of training examples; `labels` are the clients' names, if they have any. `models`
    is what the two are called in a table of clients.
    """

    name: str
    clients: np.ndarray
    before: np.ndarray
    after: np.ndarray
    samples: np.ndarray
    labels: tuple[str, ...] = ()
    models: tuple[str, str] = ("before", "after")
    measure: Measure = ACCURACY

    def who(self, place: int) -> str:
        """The client at this place by name, or by number."""
        return self.labels[place] if self.labels else str(self.clients[place])

    @property
    def gains(self) -> np.ndarray:
        """What each client gains, in percentage points of accuracy or in what a regression is judged by."""
        return self.measure.gain(self.before, self.after)

    @property
    def num_hurt(self) -> int:
        """Clients that the change is for the worse for."""
        return int((self.gains < -1e-9).sum())

    @property
    def num_helped(self) -> int:
        return int((self.gains > 1e-9).sum())

    def as_dict(self) -> dict[str, Any]:
        """The figures of the table, unrounded, and the clients behind them."""
        quantiles = np.percentile(self.gains, list(QUANTILES.values())).tolist()
        return {
            "on": self.name,
            "num_clients": len(self.clients),
            "judged_by": self.measure.name,
            "hurt": self.num_hurt,
            "helped": self.num_helped,
            "mean": float(self.gains.mean()),
            **dict(zip(QUANTILES, quantiles, strict=True)),
            "correlation": spearman(self.gains, self.samples),
            "clients": self.clients.tolist(),
            **({"names": list(self.labels)} if self.labels else {}),
            "before": self.before.tolist(),
            "after": self.after.tolist(),
            "samples": self.samples.tolist(),
        }

    def row(self) -> dict[str, str]:
        """The line of a table."""
        found = self.as_dict()
        figures = {name: self.measure.show_gain(found[name]) for name in ("mean", *QUANTILES)}
        share = f"{self.num_hurt} ({100 * self.num_hurt / len(self.clients):.0f}%)"
        correlation = UNKNOWN if found["correlation"] is None else signed(found["correlation"], 2)
        counts = {"clients": str(len(self.clients)), "hurt": share, "helped": str(self.num_helped)}
        return {"on": self.name, **counts, **figures, "with samples": correlation}

    def client_rows(self) -> list[dict[str, str]]:
        """A line for each client, from the largest loss to the largest gain."""
        return [
            {
                "client": self.who(place),
                "train": f"{self.samples[place]:,}",
                self.models[0]: self.measure.brief(self.before[place]),
                self.models[1]: self.measure.brief(self.after[place]),
                "change": self.measure.show_gain(self.gains[place]),
            }
            for place in np.argsort(self.gains, kind="stable").tolist()
        ]


@dataclass(frozen=True)
class Gap:
    """Clients that took no part beside those that did: mean accuracies from 0 to 1, or what a regression is judged by.

    `novel_trained` is that of the novel clients in a run in which they took part.
    """

    taking_part: float
    novel: float
    novel_trained: float | None = None
    measure: Measure = ACCURACY

    def sentences(self) -> list[str]:
        met, novel = self._show(self.taking_part), self._show(self.novel)
        gap = f"Generalization gap: {self._lost(self.taking_part)}"
        found = [f"{gap} ({met} of those that took part, {novel} of the novel ones)."]
        if self.novel_trained is not None:
            trained, lost = self._show(self.novel_trained), self._lost(self.novel_trained)
            found.append(f"Had the novel clients taken part: {trained}, a difference of {lost}.")
        return found

    def _show(self, mean: float) -> str:
        return f"{self.measure.show(mean)}{self.measure.unit}"

    def _lost(self, other: float) -> str:
        return f"{self.measure.show_gain(self.measure.gain(self.novel, other))} {self.measure.gain_unit}"


@dataclass(frozen=True, eq=False)
class ClientEffects:
    """What one model does to the clients over another: on test and training data, with a guard, to novel clients."""

    title: str
    changes: tuple[Change, ...]
    gap: Gap | None = None
    notes: tuple[str, ...] = ()

    @property
    def measure(self) -> Measure:
        """What clients are judged by."""
        return self.changes[0].measure if self.changes else ACCURACY

    def rows(self) -> list[dict[str, str]]:
        """A line per kind of data, ready to print; gains are percentage points of accuracy, or in what a regression is
        judged by."""
        return [change.row() for change in self.changes]

    def sentences(self) -> list[str]:
        """What the table does not show."""
        return [*(self.gap.sentences() if self.gap else []), *self.notes]

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        gap = None
        if self.gap is not None:
            gap = {"taking_part": self.gap.taking_part, "novel": self.gap.novel, "had_they": self.gap.novel_trained}
            gap["gap"] = self.gap.taking_part - self.gap.novel
        changes = [change.as_dict() for change in self.changes]
        return {"title": self.title, "changes": changes, "novel": gap, "notes": list(self.notes)}


def client_effects(run: RunFolder, against: RunFolder | str | None = None) -> ClientEffects:
    """What the headline's model does to each client, over another run's or over another point of this run.

    Args:
        run: any run; clients of a regression are compared by what it is judged by.
        against: a run on the same clients, or the name of a point of `run`. None: the shared model that the run
            evaluated ("start", "global" or "consensus"), or what was there before tuning.

    Returns:
        A change for each kind of data that both were evaluated on.
    """
    point = headline(run)[0]
    if isinstance(against, RunFolder):
        return _over_run(run, point, against)
    shared = _shared_point(run, point, against)
    rounds = [run.records.last_evaluated(name) for name in (point, shared)]
    if rounds[0] != rounds[1]:
        raise SparsonaError(
            f"'{run.path}' was evaluated at {point} after round {rounds[0]}, and at {shared} after round {rounds[1]}",
            expected="figures of the same round",
            hint="`sparsona resume` the run to its end, where both are evaluated",
        )
    changes = _changes(run, point, run, shared)
    return ClientEffects(f"{run.facts.title}: {point} over {shared}", tuple(changes), _gap(run, point))


def has_effects(run: RunFolder) -> bool:
    """Whether a run evaluated a shared model beside that of its headline."""
    point, completed = headline(run)[:2]
    known = [shared for shared in _candidates(run, point) if shared in points(run) and shared != point]
    return bool(known) and run.records.last_evaluated(known[0]) == completed


def _over_run(run: RunFolder, point: str, other: RunFolder) -> ClientEffects:
    if not same_data(run.facts, other.facts):
        raise SparsonaError(
            f"the clients of '{run.path}' and '{other.path}' hold different data",
            expected="two runs on the same data, partition, split and seed of both",
            hint="run the other method with the same options, or both with `sparsona compare`",
        )
    measures = [measure_of(folder) for folder in (run, other)]
    if measures[0].name != measures[1].name:  # one client's change has no weight
        raise SparsonaError(
            f"'{run.path}' is judged by {measures[0].title}, and '{other.path}' by {measures[1].title}",
            expected="two runs that are judged by the same figure",
            hint="give both the same metrics: the first that has a good end counts",
        )
    shared = headline(other)[0]
    changes = _changes(run, point, other, shared)
    novel = _novel_change(run, other, shared)
    novel_trained = None if novel is None else _mean(other, shared, measures[0], novel.clients.tolist())
    gap = _gap(run, point, novel_trained)
    if not changes and novel is None:
        raise SparsonaError(
            f"no client was tested in both '{run.path}' and '{other.path}'",
            expected="the same clients tested",
            hint="leave eval_clients out of both",
        )
    notes = _drop_note(run, point, other, shared)
    for folder, name in ((run, point), (other, shared)):
        if never := untrained(folder, at(folder, name)[3]):
            notes.append(f"'{folder.path.name}': {untrained_note(never)}.")
    for key in ("rounds", "model", "seed"):
        a, b = run.config.get(key), other.config.get(key)
        if a != b:
            notes.append(f"Not the same {key}: {a} and {b}.")
    names = [folder.facts.title for folder in (run, other)]
    if names[0] == names[1]:
        names = [f"{name}, {folder.path.name}" for name, folder in zip(names, (run, other), strict=True)]
    title = f"{names[0]} ({point}) over {names[1]} ({shared})"
    return ClientEffects(title, (*changes, *([novel] if novel else [])), gap, tuple(notes))


def _drop_note(run: RunFolder, point: str, other: RunFolder, shared: str) -> list[str]:
    """The figures that pFedGate's table 6 compares, where both runs tested the same clients on classes."""
    if run.facts.is_regression:
        return []
    found = [at(folder, name)[2:] for folder, name in ((run, point), (other, shared))]
    if not np.array_equal(found[0][1], found[1][1]):
        return []
    own, base = (accuracy_summary(*one) for one in found)
    texts = [
        f"{what}: {100 * own[key]:.2f}% against {100 * base[key]:.2f}%, {signed(100 * (own[key] - base[key]))}"
        for key, what in (("weighted", "Weighted by test examples"), ("bottom_decile", "bottom decile"))
    ]
    return [f"{'; '.join(texts)} percentage points."]


def _changes(run: RunFolder, point: str, other: RunFolder, shared: str) -> list[Change]:
    wanted = [
        ("test", point, shared),
        ("test, guarded", GUARDED, shared),
        ("train", on(point, "train"), on(shared, "train")),
    ]
    found = (_change(name, run, after, other, before) for name, after, before in wanted)
    return [change for change in found if change is not None]


def _change(name: str, run: RunFolder, after: str, other: RunFolder, before: str) -> Change | None:
    """None where no client was evaluated at both."""
    measure = measure_of(run)
    tables = _scores(other, before, measure), _scores(run, after, measure)
    clients = sorted(tables[0].keys() & tables[1].keys())
    if not clients:
        return None
    samples = run.facts.sizes[clients, 0]
    old, new = (np.array([table[client] for client in clients]) for table in tables)
    models = (before, after) if other is run else _names_of_runs(other, run)
    return Change(
        name, np.array(clients), old, new, samples, names_at(run.facts.client_names, clients), models, measure
    )


def _names_of_runs(other: RunFolder, run: RunFolder) -> tuple[str, str]:
    """What two runs are called as columns: by their methods, or what else tells them apart."""
    for names in (
        (other.facts.title, run.facts.title),
        (other.path.name, run.path.name),
        (str(other.path), str(run.path)),
    ):
        if names[0] != names[1] and not {"client", "train", "change"} & {*names}:  # the other columns
            return names
    return "other run", "this run"


def names_at(names: Sequence[str], clients: Sequence[int]) -> tuple[str, ...]:
    """The names of these clients, or none where clients have no names."""
    return tuple(names[client] for client in clients) if names else ()


def _novel_change(run: RunFolder, other: RunFolder, shared: str) -> Change | None:
    """Novel clients against the same clients in a run in which they took part."""
    for point in (NOVEL_TUNED, NOVEL):
        if (found := _change(NOVEL, run, point, other, shared)) is not None:
            return found
    return None


def _gap(run: RunFolder, point: str, novel_trained: float | None = None) -> Gap | None:
    measure = measure_of(run)
    met = [name for name in (NOVEL_TUNED, NOVEL) if _scores(run, name, measure)]
    if not met:
        return None
    return Gap(_mean(run, point, measure), _mean(run, met[0], measure), novel_trained, measure)


def _mean(run: RunFolder, point: str, measure: Measure, clients: Sequence[int] | None = None) -> float:
    """Over these clients, or all that were tested there; they count as in the result."""
    scores = _scores(run, point, measure)
    here = list(scores) if clients is None else clients
    weights = at(run, point)[3][here] if measure.weight == "examples" else None
    return float(np.average([scores[client] for client in here], weights=weights))


def _candidates(run: RunFolder, point: str) -> tuple[str, ...]:
    """Points to compare with, in this order; a partial global model only if it is named."""
    shared = tuple(name for name in SHARED if name != GLOBAL or not run.facts.partial_global)
    return (*shared, RECEIVED) if point == TUNED else shared


def _hint_shared(run: RunFolder) -> str:
    """A hint how the run could evaluate a shared model; clients that train alone have none."""
    if run.facts.alone:
        return ""
    if run.facts.partial_global:
        return ", or start from one (--warm-start)"
    return f", or run again with --set 'points=[\"{CONSENSUS if run.facts.peers else GLOBAL}\"]'"


def _shared_point(run: RunFolder, point: str, wanted: str | None) -> str:
    known = {name for name in points(run) if evaluation_point(name).data == "test"}
    for shared in (wanted,) if wanted else _candidates(run, point):
        if shared in known and shared != point:
            return shared
    others = ", ".join(sorted(known - {point})) or "none"
    raise SparsonaError(
        f"'{run.path}' did not evaluate {f'a point {wanted!r}' if wanted else 'a shared model'} beside '{point}'",
        expected=f"a shared model to compare with (other points of this run: {others})",
        hint="give another run with --against RUN" + _hint_shared(run),
    )


def _scores(run: RunFolder, point: str, measure: Measure) -> dict[int, float]:
    """What each client reached where this point was last evaluated, of those that have test data there."""
    last = run.records.last_evaluated(point)
    found = np.zeros(0) if last is None else client_scores(run, measure, last, point)
    return {client: score for client, score in enumerate(found.tolist()) if np.isfinite(score)}
