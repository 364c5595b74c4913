"""What came of a run: the summary that is printed and stored."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsona.analysis.outcomes import (
    arrays,
    classes,
    errors,
    evaluated,
    guard,
    is_regression,
    mean_at,
    novel,
    pipeline,
)
from sparsona.analysis.statistics import accuracy_summary, mean_of_last
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.points import GUARDED, NOVEL, PERSONAL, POINTS, RECEIVED, TUNED, on
from sparsona.runs.store import RunFolder

# How a client's test data was chosen, where it is not simply a part of its own.
TESTED_ON = {
    "shares": "drawn from the published test set in the client's own label shares, so that clients share some of it, "
    "and ",
    "natural": "published for it, and ",
}
# The headline's model in words: by how clients are connected for what they receive, by its name after tuning.
WHICH = {
    RECEIVED: "the personal model each client would deploy: what the server holds for it after the round, "
    "with what the client keeps itself, before any more local training",
    TUNED: "each client's own copy of the last model after final tuning on its own training data",
    "peers": "the personal model each client would use next: its own, mixed with what its neighbours sent last, "
    "before any more local training",
    "alone": "each client's own model, trained on its data alone",
}


def summarize(folder: RunFolder, seconds: float) -> dict[str, Any]:
    """The summary of a run as its records stand."""
    about = folder.about
    point, completed, correct, count = headline(folder)
    accuracy: dict[str, Any] = accuracy_summary(correct, count)
    # A point that is evaluated once, after the end, has no last ten rounds.
    accuracy["last10"] = mean_of_last(curve(folder, point)) if point == RECEIVED else None
    error = None
    if is_regression(folder):
        error = {**(errors(folder, completed, point) or {}), "last10": accuracy["last10"]}
        accuracy = dict.fromkeys(accuracy)
    up, down, paper_up, paper_down, train, search = folder.select(
        "SELECT SUM(bytes_up), SUM(bytes_down), SUM(paper_up), SUM(paper_down), SUM(train_flops), SUM(search_flops) "
        "FROM rounds"
    )[0]
    summary: dict[str, Any] = {
        "run": str(folder.path),
        "method": about["method"],
        "protocol": protocol(folder),
        "accuracy": accuracy,
        "bytes": {
            "up": up,
            "down": down,
            "total": down if about.get("peers") else up + down,  # what one peer sends, another is sent
            **_busiest(folder),
            "paper_up": paper_up,
            "paper_down": paper_down,
            "paper_total": paper_down if about.get("peers") else paper_up + paper_down,
            "upload_share": _upload_share(folder),
        },
        "flops": {"train": train, "mask_search": search},
        "rounds": completed,
        "seconds": round(seconds, 3),
    }
    if error is not None:
        summary["error"] = error
    summary["pipeline"] = pipeline(folder, completed)
    if (by_class := classes(folder, completed, point)) is not None:
        summary["classes"] = by_class
    if evaluated(folder, completed, NOVEL):
        summary["novel"] = novel(folder, completed, point)
    if evaluated(folder, completed, GUARDED):
        summary["guard"] = guard(folder, completed)
    for other in _other_points():
        if (mean := mean_at(folder, completed, other)) is not None:
            summary.setdefault("other_points", {})[other] = mean
    return summary


def _other_points() -> list[str]:
    """Points beside the headline and what a guard decides by: models on test data first, then on training data."""
    own = [name for name, found in POINTS.items() if not found.is_derived and name not in (RECEIVED, TUNED, PERSONAL)]
    return [*own, *(on(name, "train") for name in (RECEIVED, TUNED, *own))]


def _busiest(folder: RunFolder) -> dict[str, int]:
    """Bytes through the busiest node in the whole run, and the most that went in and out of one in one round."""
    if not folder.about.get("peers"):  # the server, through which everything passes
        most = "SELECT SUM(bytes_up + bytes_down), MAX(bytes_up), MAX(bytes_down) FROM rounds"
        total, inward, outward = folder.select(most)[0]
    else:
        by_client = "SELECT SUM(bytes_up + bytes_down) AS through FROM turns GROUP BY client"
        total = folder.select(f"SELECT MAX(through) FROM ({by_client})")[0][0]
        inward, outward = folder.select("SELECT MAX(bytes_down), MAX(bytes_up) FROM turns")[0]
    return {"busiest_node": total, "busiest_round_in": inward, "busiest_round_out": outward}


def _upload_share(folder: RunFolder) -> float | None:
    """The share of the model's entries in a client's upload, mean over the turns in which one was sent; None: in none.

    What pFedGate calls q. Counted as the papers count, four bytes an entry and masks free. Peers have none: each asks
    for its own.
    """
    if folder.about.get("peers"):
        return None
    sent = folder.select("SELECT AVG(paper_up) FROM turns WHERE paper_up > 0")[0][0]
    return None if sent is None else sent / (4 * folder.about["num_parameters"])


def has_results(folder: RunFolder) -> bool:
    """Whether any round was evaluated yet."""
    return bool(folder.select("SELECT 1 FROM evaluations LIMIT 1"))


def headline(folder: RunFolder) -> tuple[str, int, np.ndarray, np.ndarray]:
    """Point, completed rounds, and per client the number of right predictions and of test examples."""
    point = folder.about["point"]
    if not has_results(folder):
        raise SparsonaError(
            f"'{folder.path}' has no results yet", expected="at least one evaluated round", mend="resume the run first"
        )
    found = folder.select("SELECT MAX(completed) FROM evaluations")[0][0]
    if not evaluated(folder, found, point):  # stopped before the final tuning: what there is, named as what it is
        point = RECEIVED
    return at(folder, point)


def at(folder: RunFolder, point: str) -> tuple[str, int, np.ndarray, np.ndarray]:
    """The same for any point, as it was last looked at."""
    if point not in (known := points(folder)):
        raise unknown_name("point", point, known)
    found = folder.select("SELECT MAX(completed) FROM evaluations WHERE point = ?", (point,))[0][0]
    rows = evaluated(folder, found, point)
    # One entry per client, in order: those not evaluated here (novel, or not drawn) have no test examples.
    correct, count = np.zeros((2, len(folder.about["sizes"])), dtype=int)
    clients = [row[0] for row in rows]
    correct[clients], count[clients] = arrays(rows)
    return point, int(found), correct, count


def losses(folder: RunFolder, point: str | None = None) -> np.ndarray:
    """Each client's mean loss at this point, or the headline's, as it was last looked at; NaN: not tested there."""
    point, completed, _, count = headline(folder) if point is None else at(folder, point)
    found = np.full(len(count), np.nan)
    query = "SELECT client, loss FROM evaluations WHERE completed = ? AND point = ?"
    for client, loss in folder.select(query, (completed, point)):
        found[client] = loss
    return found


def points(folder: RunFolder) -> list[str]:
    """Every point at which somebody was evaluated."""
    return [row[0] for row in folder.select("SELECT DISTINCT point FROM evaluations ORDER BY point")]


def protocol(folder: RunFolder) -> str:
    """In words: which model, on whose test data, weighted how, at which round."""
    config, about = folder.config, folder.about
    point, completed, _, count = headline(folder)
    kind = "alone" if about["alone"] else "peers" if about.get("peers") else point
    which = WHICH[kind if point == RECEIVED else point]
    tested = count[count > 0]
    chosen = TESTED_ON.get(about["tested_on"].partition(":")[0], "")
    unit = "tokens" if about["label_counts"] is None and not is_regression(folder) else "examples"
    text = (
        f"{which[0].upper()}{which[1:]}; on that client's own test data ({tested.min()} to {tested.max()} "
        f"{unit}, {chosen}never used in any decision); mean over {len(tested)} clients, each counting the same; "
        f"after round {completed} of {config['rounds']}, the last and not the best."
    )
    if about.get("transductive"):
        text += (
            " TRANSDUCTIVE: a prediction also depends on the other test examples of its batch, as in the authors' "
            "code; not comparable with results that do not say so."
        )
    took_part = len(count) - config["novel"]
    if len(tested) < took_part:
        text += f" They were drawn once, the same for every evaluation, from the {took_part:,} that took part."
    if config["novel"]:
        text += f" {config['novel']} novel clients took no part and are not among them."
    if about["ignores_capacity"]:
        text += " Capacities are not kept: this method's models are larger than some clients can hold."
    if about["has_batch_statistics"] and not config["stateless"]:
        text += " Buffers such as BatchNorm statistics stay on the client"
        moved = "steps" if about.get("peers") else "NOT dropped"  # a peer out of reach trains on
        trained = {row[0] for row in folder.select(f"SELECT DISTINCT client FROM turns WHERE {moved}")}
        untrained = len(set(np.flatnonzero(count).tolist()) - trained)
        text += (
            f"; {untrained} of the clients never trained and are scored with the initial ones." if untrained else "."
        )
    if evaluated(folder, completed, GUARDED):
        found = guard(folder, completed)
        reached = found["error" if is_regression(folder) else "accuracy"]["guarded"]
        shown = f"squared error {reached:.4g}" if is_regression(folder) else f"accuracy {reached:.1%}"
        text += (
            f" With guard, {found['kept_shared']} of {found['clients']} clients keep the shared model by their "
            f"validation data: mean {shown}; {found['hurt']['guarded']} clients "
            f"are worse off than with the shared model, instead of {found['hurt']['personal']}."
        )
    if lacking := about["left_out"]:
        text += " People left out: " + ", ".join(f"{num:,} with {lack}" for lack, num in lacking.items()) + "."
    if known := about.get("warm_start"):
        text += f" Training began with the model of '{known['run']}' ({known['method']}, {known['rounds']} rounds)."
        if not known["same_data"]:
            text += " That run had other clients, and may have been trained on what is tested here."
    if about["augments"]:
        text += " Training images are cropped and mirrored at random, test images are not."
    if config["stateless"]:
        text += " Clients are stateless: they keep nothing between rounds"
        initial = about["has_batch_statistics"] and point == RECEIVED
        text += ", and buffers such as BatchNorm statistics are the initial ones." if initial else "."
    return text


def curve(folder: RunFolder, point: str) -> list[tuple[int, float]]:
    """Mean accuracy (of a regression: squared error) over clients against completed rounds."""
    figure = "loss" if is_regression(folder) else "CAST(correct AS REAL) / count"
    return folder.select(
        f"SELECT completed, AVG({figure}) FROM evaluations WHERE point = ? GROUP BY completed ORDER BY completed",
        (point,),
    )
