"""The summary of a run, which is printed and stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsona.analysis.conditions import conditions, conditions_sentence, early_stop
from sparsona.analysis.format import between, plural
from sparsona.analysis.gates import mean_measures
from sparsona.analysis.heard import (
    divergence_sentence,
    divergences,
    evaluation_bytes,
    heard,
    heard_sentence,
    machines_sentence,
    untested_sentence,
)
from sparsona.analysis.measure import BY_EXAMPLES, LOSS, measure_curve, measure_of, summarize_metrics
from sparsona.analysis.outcomes import (
    ERRORS,
    arrays,
    capacities,
    classes,
    errors,
    guard,
    mean_at,
    novel,
    pipeline,
)
from sparsona.analysis.privacy import spent as spent_privacy
from sparsona.analysis.protocol import Protocol
from sparsona.analysis.statistics import ACCURACIES, accuracy_summary, mean_of_last
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.points import GUARDED, NOVEL, PERSONAL, POINTS, RECEIVED, TUNED, on
from sparsona.core.points import point as point_of
from sparsona.core.spec import shorten
from sparsona.core.targets import LOSSES
from sparsona.core.transform import describe
from sparsona.data.holdout import HELD_OUT
from sparsona.robust import PLAIN, read_attack, read_mean
from sparsona.runs.folder import RunFolder
from sparsona.runs.options import MATCHES
from sparsona.transforms import read_transforms

# How a client's test data was chosen, where it is not simply a part of its own.
TESTED_ON = {
    "shares": "drawn from the published test set in the client's own label shares, so that clients share some of it, "
    "and ",
    "natural": "published for it, and ",
    HELD_OUT: "held out of its training data in place of its test data, to choose options by, and ",
}
# The headline's model in words: by how clients are connected for what they receive, by its name after tuning.
WHICH = {
    RECEIVED: "the personal model each client would deploy: what the server holds for it after the round, "
    "with what the client keeps itself, before any more local training",
    TUNED: "each client's own copy of the last model after final tuning on its own training data",
    "all": "each client's own copy of the mean of all peers' models after final tuning on its own training data",
    "peers": "the personal model each client would use next: its own, mixed with what its neighbours sent last, "
    "before any more local training",
    "alone": "each client's own model, trained on its data alone",
}


def summarize(folder: RunFolder, seconds: float) -> dict[str, Any]:
    """The summary of a run as its records stand."""
    with folder.records.reading():
        return _summarize(folder, seconds)


def _summarize(folder: RunFolder, seconds: float) -> dict[str, Any]:
    facts, totals = folder.facts, folder.records.totals()
    point, completed, correct, count = headline(folder)
    accuracy: dict[str, Any] = accuracy_summary(correct, count) if count.any() else dict.fromkeys(ACCURACIES)
    # A point that is evaluated once, after the end, has no last ten rounds.
    accuracy["last10"] = mean_of_last(curve(folder, point)) if point_of(point).when != "end" else None
    error = None
    if facts.is_regression:
        error = {**(errors(folder, completed, point) or dict.fromkeys(ERRORS)), "last10": accuracy["last10"]}
        accuracy = dict.fromkeys(accuracy)
    up, down = totals.bytes_up or 0, totals.bytes_down or 0
    paper_up, paper_down = totals.paper_up or 0, totals.paper_down or 0
    summary: dict[str, Any] = {
        "run": str(folder.path),
        "method": facts.method,
        "protocol": "",
        "accuracy": accuracy,
        "bytes": {
            "up": up,
            "down": down,
            "total": down if facts.peers else up + down,  # each message between peers is counted once
            **_busiest(folder),
            "paper_up": paper_up,
            "paper_down": paper_down,
            "paper_total": paper_down if facts.peers else paper_up + paper_down,
            "upload_share": _upload_share(folder),
        },
        "evaluation_bytes": evaluation_bytes(folder),
        "flops": {"train": totals.train_flops or 0, "mask_search": totals.search_flops or 0},
        **effort(folder),
        "rounds": completed,
        "seconds": round(seconds, 3),
    }
    for name, value in mean_measures(folder).items():
        summary.setdefault(name, value)  # what the method measured of turns, such as pFedGate's density_used
    blocks = {"heard": heard(folder), "diverged": divergences(folder), "conditions": conditions(folder)}
    private = spent_privacy(folder)
    blocks |= {"privacy": None if private is None else private.brief(), "early_stop": early_stop(folder)}
    blocks["untrained"] = untrained(folder, count)
    for name, block in blocks.items():
        if block is not None:
            summary[name] = block
    summary["protocol"] = _protocol(folder, summary)
    if error is not None:
        summary["error"] = error
    if judged := summarize_metrics(folder, completed, point):
        summary["metrics"] = judged
    summary["pipeline"] = pipeline(folder, completed)
    if (by_class := classes(folder, completed, point)) is not None:
        summary["classes"] = by_class
    if (by_capacity := capacities(folder.config, correct, count)) and error is None:
        summary["capacities"] = [{"capacity": capacity, **found} for capacity, found in by_capacity.items()]
    if folder.records.evaluations(completed, NOVEL):
        summary["novel"] = novel(folder, completed, point)
    if folder.records.evaluations(completed, GUARDED):
        summary["guard"] = guard(folder, completed)
    for other in _other_points(folder):
        if (mean := mean_at(folder, completed, other)) is not None:
            summary.setdefault("other_points", {})[other] = mean
    return summary


def untrained(folder: RunFolder, count: np.ndarray) -> dict[str, int] | None:
    """How many clients trained in no round, of those with test examples (`count`); None: all or none did."""
    trained, tested = _trained_clients(folder), set(np.flatnonzero(count).tolist())
    never = tested - trained
    return {"clients": len(never), "of": len(tested)} if trained and never else None


def untrained_note(found: Mapping[str, int]) -> str:
    """For a sentence, what `untrained` found: "6 of 30 clients trained in no round"."""
    return f"{found['clients']:,} of {plural(found['of'], 'client')} trained in no round"


def _trained_clients(folder: RunFolder) -> set[int]:
    """Clients that trained, in a turn that was not lost; but a peer out of reach trains on."""
    return folder.records.trained_clients() if folder.facts.peers else folder.records.kept_clients()


def effort(folder: RunFolder) -> dict[str, dict[str, int]]:
    """Client turns and local steps: of the rounds, of final tuning, and of both."""
    in_rounds, tuning = folder.records.effort(folder.last_round)
    return {
        name: {"rounds": done, "tuning": tuned, "total": done + tuned}
        for name, done, tuned in (
            ("turns", in_rounds.turns, tuning.turns),
            ("steps", in_rounds.steps, tuning.steps),
        )
    }


def spent(summary: dict[str, Any], by: str) -> int:
    """What a run spent, by its summary: steps, flops or bytes, final tuning included."""
    if by == "flops":
        return (summary["flops"]["train"] or 0) + (summary["flops"]["mask_search"] or 0)
    return summary[by]["total"]


def _other_points(folder: RunFolder) -> list[str]:
    """Points besides the headline and those of a guard: models on test data first, then on other data."""
    own = [name for name, found in POINTS.items() if not found.is_derived and name not in (RECEIVED, TUNED, PERSONAL)]
    asked = [name for name in folder.config["points"] if name not in (RECEIVED, TUNED)]
    return [*dict.fromkeys((*own, *(on(name, "train") for name in (RECEIVED, TUNED, *own)), *asked))]


def _busiest(folder: RunFolder) -> dict[str, int]:
    """Bytes through the busiest node in the whole run, and the most that went in and out of one in one round.

    DisPFL's tables have the larger of the two, four bytes a value and masks free.
    """
    load = folder.records.peer_load() if folder.facts.peers else folder.records.server_load()
    return {
        "busiest_node": load.total,
        "busiest_round_in": load.most_in,
        "busiest_round_out": load.most_out,
        "busiest_round_paper": load.most_paper,
    }


def _upload_share(folder: RunFolder) -> float | None:
    """The share of the model's entries in a client's upload, mean over the turns in which one was sent; None: in none.

    What pFedGate calls q. Counted as the papers count, four bytes an entry and masks free. Peers have none, and with
    transforms, which send entries in fewer bytes, it is not known.
    """
    unknown = folder.facts.peers or folder.config.get("transform")
    sent = None if unknown else folder.records.mean_upload()
    return None if sent is None else sent / (4 * folder.facts.num_parameters)


def has_results(folder: RunFolder) -> bool:
    """Whether any round was evaluated yet, or was to be: the result is then that no client told one."""
    return folder.records.has_evaluations() or bool(folder.records.evaluation_failures())


def headline(folder: RunFolder) -> tuple[str, int, np.ndarray, np.ndarray]:
    """Point, completed rounds, and per client the number of right predictions and of test examples.

    Where clients were asked and none told a result, there are no test examples: `untested_sentence` says why.
    """
    point, found = folder.facts.point, folder.records.last_evaluated()
    if found is None and (missing := folder.records.evaluation_failures()):
        nobody = np.zeros(len(folder.facts.sizes), dtype=int)
        return point, max(row.completed for row in missing), nobody, nobody.copy()
    if found is None:
        raise SparsonaError(
            f"'{folder.path}' has no results yet", expected="at least one evaluated round", hint="resume the run first"
        )
    # Stopped before the final tuning, or in a round after which nothing but received models was evaluated.
    if not folder.records.evaluations(found, point):
        point = RECEIVED
    return at(folder, point)


def at(folder: RunFolder, point: str) -> tuple[str, int, np.ndarray, np.ndarray]:
    """The same for any point, at its last evaluation."""
    if point not in (known := points(folder)):
        raise unknown_name("point", point, known)
    found = folder.records.last_evaluated(point)
    assert found is not None, "a known point was evaluated"
    rows = folder.records.evaluations(found, point)
    # One entry per client, in order: those not evaluated here (novel, or not drawn) have no test examples.
    correct, count = np.zeros((2, len(folder.facts.sizes)), dtype=int)
    clients = [row.client for row in rows]
    correct[clients], count[clients] = arrays(rows)
    return point, found, correct, count


def losses(folder: RunFolder, point: str | None = None) -> np.ndarray:
    """Each client's mean loss at this point, or the headline's, at its last evaluation; NaN: not tested there."""
    point, completed, _, count = headline(folder) if point is None else at(folder, point)
    found = np.full(len(count), np.nan)
    for row in folder.records.evaluations(completed, point):
        found[row.client] = row.loss
    return found


def points(folder: RunFolder) -> list[str]:
    """Every point at which clients were evaluated."""
    return folder.records.points()


def _protocol(folder: RunFolder, summary: dict[str, Any]) -> str:
    """In words: which model, on whose test data, weighted how, at which round, for what price."""
    config, facts, found = folder.config, folder.facts, Protocol()
    point, completed, _, count = headline(folder)
    kind = "alone" if facts.alone else "peers" if facts.peers else point
    kind = kind if point == RECEIVED else "all" if point == TUNED and config.get("tune_from") == "all" else point
    which = WHICH.get(kind, point_of(point).text)
    tested = count[count > 0]
    chosen = TESTED_ON.get(facts.tested_on.partition(":")[0], "")
    unit = "token" if facts.predicts_tokens else "example"
    when = f"after round {completed} of {config['rounds']}" if config["rounds"] else "no rounds were played"
    if len(tested):
        found.say("model", f"{which[0].upper()}{which[1:]}.")
        found.say(
            "test data",
            f"Each client's own test data ({between(int(tested.min()), int(tested.max()), unit)}), "
            f"{chosen}never used in any decision.",
        )
        last = ", the last and not the best" if config["rounds"] else ""
        counting = f" {BY_EXAMPLES}" if facts.weight == "examples" else ", each counting the same"
        found.say("result", f"The mean over {plural(len(tested), 'client')}{counting}, {when}{last}.")
    else:
        found.say(
            "result",
            f"Nothing was evaluated: no client told a result, and no model has an accuracy or an error; {when}.",
        )
    found.say("loss", _loss_sentence(folder))
    if preset := config.get("preset"):
        found.say(
            "options",
            f"Options of the preset '{preset}'" + (f": {facts.preset}." if facts.preset else ", which are defaults."),
        )
    if trials := config.get("tuned_with"):
        found.say("options", f"Options were tuned with {plural(trials, 'trial')} of `sparsona tune`.")
    if matched := config.get("matched"):
        found.say("budget", _match_sentence(matched, summary, config["rounds"]))
    if held := int(facts.sizes[:, 1].sum()):
        share = held / int(facts.sizes[:, :2].sum())
        found.say(
            "validation",
            f"{share:.0%} of the other examples are held back for validation, and trained on by no method"
            + ("; this one's training decides by them." if facts.needs_validation else "."),
        )
    if facts.transductive:
        found.say(
            "warning",
            "TRANSDUCTIVE: a prediction also depends on the other test examples of its batch, as in the authors' code. "
            "Not comparable with results that do not say so.",
        )
    if config.get("evaluate") == "participants":
        found.say(
            "learning curve",
            "Before the end, each point of a learning curve is a mean over the clients that were sampled in that "
            "round, on what they received in it: other clients from point to point.",
        )
    took_part = len(count) - config["novel"]
    _say_clients(found, folder, completed, took_part)
    found.say("machines", machines_sentence(folder))
    found.say("divergence", divergence_sentence(folder))
    _say_sizes(found, folder, point, count)
    if folder.records.evaluations(completed, GUARDED):
        kept = guard(folder, completed)
        reached = kept["error" if facts.is_regression else "accuracy"]["guarded"]
        name = (facts.loss or "squared-error").removeprefix("given:").replace("-", " ")
        shown = f"{name} {reached:.4g}" if facts.is_regression else f"accuracy {reached:.1%}"
        found.say(
            "guard",
            f"With guard, {kept['kept_shared']} of {kept['clients']} clients keep the shared model by their "
            f"validation data: mean {shown}. {kept['hurt']['guarded']} clients are worse off than with the shared "
            f"model, instead of {kept['hurt']['personal']}.",
        )
    if (chain := read_transforms(config.get("transform", ()))) and not facts.alone:
        found.say("messages", describe(chain, facts.peers))
    if (mean := read_mean(config.get("mean", PLAIN))) is not None:
        found.say("aggregation", mean.describe(facts.peers))
    if attack := config.get("attack"):
        found.say("attackers", read_attack(attack).describe(len(facts.attackers), took_part, len(tested)))
    if (private := spent_privacy(folder)) is not None:
        for topic, sentences in private.lines():
            found.say(topic, sentences)
    if known := facts.warm_start:
        text = f"Training began with the model of '{known.run}' ({known.method}, {known.rounds} rounds)"
        new = known.of - known.taken
        text += f", to which {new} tensors drawn from the seed were added." if new else "."
        if not known.same_data:
            text += " That run had other clients, and may have been trained on what is tested here."
        found.say("start", text)
    if facts.augments:
        found.say("augmentation", "Training images are cropped and mirrored at random, test images are not.")
    found.say("conditions", conditions_sentence(folder, summary))
    return found.text


def _say_clients(found: Protocol, folder: RunFolder, completed: int, took_part: int) -> None:
    """Who is in the mean and who is not."""
    config, facts = folder.config, folder.facts
    if facts.drawn_by:
        num = len(facts.sizes)
        were = "was" if num == 1 else "were"
        found.say(
            "clients", f"The {plural(num, 'client')} {were} drawn from all examples by partition {facts.drawn_by}."
        )
    if untested := int(((facts.sizes[:, 2] == 0) & (facts.sizes[:, 0] > 0)).sum()):
        has, is_ = ("has", "is") if untested == 1 else ("have", "are")
        found.say("clients", f"{plural(untested, 'client')} {has} no test data and {is_} not in the mean.")
    found.say("clients", untested_sentence(folder, completed) + heard_sentence(folder))
    if (config.get("eval_clients") or took_part) < took_part:
        found.say(
            "clients",
            f"Those that are tested were drawn once, the same for every evaluation, from the {took_part:,} that took "
            "part.",
        )
    if config["novel"]:
        found.say("clients", f"{plural(config['novel'], 'novel client')} took no part: not in the mean.")
    if lacking := facts.left_out:
        found.say(
            "clients", "Owners left out: " + ", ".join(f"{num:,} with {lack}" for lack, num in lacking.items()) + "."
        )


def _say_sizes(found: Protocol, folder: RunFolder, point: str, count: np.ndarray) -> None:
    """How large clients' models are, and what clients keep of them."""
    config, facts = folder.config, folder.facts
    weakest, density = min(config["capacities"]), config.get("subnetwork")
    if density is not None:
        text = f"All clients have a fixed random sub-network of density {density:g} in place of the whole model"
        found.say("model size", text + (", as much as the weakest can hold." if density == weakest else "."))
    elif weakest < 1 and facts.has_one_size and not facts.ignores_capacity:
        found.say("model size", f"All clients have models that the weakest, of capacity {weakest:g}, can hold.")
    if facts.ignores_capacity:
        found.say("model size", "Capacities are not kept: this method's models are larger than some clients can hold.")
    if facts.has_batch_statistics and not config["stateless"]:
        num_untrained = len(set(np.flatnonzero(count).tolist()) - _trained_clients(folder))
        found.say(
            "client state",
            "Buffers such as BatchNorm statistics stay on the client"
            + (
                f"; {num_untrained} of the clients never trained and are scored with the initial ones."
                if num_untrained
                else "."
            ),
        )
    if config["stateless"]:
        initial = facts.has_batch_statistics and point == RECEIVED
        found.say(
            "client state",
            "Clients are stateless: they keep nothing between rounds"
            + (", and buffers such as BatchNorm statistics are the initial ones." if initial else "."),
        )


def _loss_sentence(folder: RunFolder) -> str:
    """What was minimised, where it is not the usual loss, and what a right prediction of several labels is."""
    facts, config = folder.facts, folder.config
    text = ""
    if facts.targets == "labels":
        text += " An example is predicted right if all its labels are."
    if config.get("loss") and config["loss"] != LOSSES.get(facts.targets, ("",))[0]:
        text += f" The loss is {config['loss'].removeprefix('given:')}."
    if facts.class_weights is not None:
        weights = [f"{weight:.3g}" for weight in facts.class_weights]
        if len(facts.class_names) == len(weights):
            weights = [f"{shorten(name)} {weight}" for name, weight in zip(facts.class_names, weights, strict=True)]
        text += f" Losses are weighted by class ({', '.join(weights[:10])}{', ...' if len(weights) > 10 else ''})."
    if smoothing := config.get("label_smoothing"):
        text += f" Labels are smoothed by {smoothing:g}."
    return text


def _match_sentence(matched: dict[str, Any], summary: dict[str, Any], rounds: int) -> str:
    what = MATCHES[matched["by"]]
    if matched["budget"] is None:
        return f" Not matched by {what}, of which it spends none in its {rounds:,} rounds."
    used = spent(summary, matched["by"]) / matched["budget"]
    text = (
        f" Matched by {what}: the number of its rounds, {rounds:,}, was chosen before training to come nearest to the "
        f"{matched['budget']:,} {what} that {matched['to']} spends in {matched['rounds']:,} rounds; it spent "
        f"{used:.1%} of them, final tuning included. Learning rates follow their schedule over its own rounds."
    )
    return text if matched["exact"] else f"{text} The choice is by an upper bound, since training decides what is used."


def curve(folder: RunFolder, point: str) -> list[tuple[int, float]]:
    """Mean accuracy (of a regression: loss) over clients, weighted as the headline is, against completed rounds."""
    return measure_curve(folder, LOSS if folder.facts.is_regression else measure_of(folder), point)


def weighted_curve(folder: RunFolder, point: str) -> list[tuple[int, float]]:
    """Mean accuracy weighted by clients' test examples against completed rounds."""
    return [(one.completed, one.mean) for one in folder.records.weighted_curve(point)]


def summary_of(folder: RunFolder) -> dict[str, Any]:
    """The summary of a run that has none yet."""
    return summarize(folder, folder.records.totals().seconds or 0.0)
