"""What all sides of a run on several machines agree on, for the [run] table of a federation file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparsona.core import spec
from sparsona.core.errors import SparsonaError
from sparsona.core.losses import make_losses
from sparsona.core.metrics import make_metrics
from sparsona.core.targets import LOSSES, USUAL_METRICS, given_name
from sparsona.data.names import clean_names
from sparsona.deploy.jobs import is_reported
from sparsona.engine.availability import write_out
from sparsona.experiment.build import BY_CLIENT, make_config
from sparsona.methods import card, factory
from sparsona.models import MODELS, outline, read_spec
from sparsona.runs.declaration import Option, options_of
from sparsona.runs.options import AGREED, OPTIONS, SIMULATED, RunConfig
from sparsona.runs.stopping import MEASURES, check_computed, watched

PREDICTS = tuple(LOSSES)


def agree(
    method: str,
    options: Mapping[str, Any],
    *,
    model: str,
    classes: int | None = None,
    input_shape: Sequence[int] | None = None,
    predicts: str | None = None,
    class_names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Check the options of a run on several machines, and write out what all sides must agree on.

    Options that are not given are written out as well, so that sides whose versions have other defaults agree; so is a
    trace from a file. Not among them is what each side decides for itself: its data, where it runs, and the limits at
    which a server is stopped. Of an option that is not given, only `evaluate` is not what it is in a simulation:
    "participants", unless patience compares the same clients after each round.

    Args:
        method: a row of `sparsona methods`, with options after a colon if need be.
        options: of the run and of the method, by name; `client_epochs` and `client_lr_scale` also by names of clients.
        model: a row of `sparsona models`.
        classes: the number of classes, of tokens in the vocabulary, or of labels or numbers that are predicted; 1 for
            "binary", a yes or no by one logit; None: as many as there are `class_names`.
        input_shape: the shape of an example; None: what the papers gave the network.
        predicts: one of `PREDICTS`; None: tokens for a network that takes them, classes for others.
        class_names: what classes or labels 0, 1, ... are called, at every client; None: clients must only agree with
            each other.

    Returns:
        Plain values: `make_config` takes `method`, and everything else that is an option.

    Example:
        >>> run = agree("fedspa:density=0.2", {"rounds": 5}, model="cnn28", classes=10)
        >>> run["rounds"], run["batch_size"], run["input"], run["options"]["density"]
        (5, 16, [1, 28, 28], 0.2)
    """
    if classes is None:
        if class_names is None:
            raise SparsonaError(
                "the number of classes is not given",
                expected="classes, or the names of them all",
                hint="--classes 3, or --class-names sit,stand,walk",
            )
        classes = 1 if predicts == "binary" else len(class_names)
    given = {key.replace("-", "_"): value for key, value in options.items()}
    check_not_simulated(given)
    for name in given:
        if name in MEASURES:
            raise SparsonaError(
                f"'{name}' in a federation file",
                expected="a server that is stopped with Ctrl-C, and goes on with `sparsona resume`",
                hint="patience ends a run for good, by its validation data",
            )
        if name in OPTIONS and name not in (*AGREED, "model", "preset"):
            raise SparsonaError(
                f"'{name}' in a federation file",
                expected="what all sides must agree on: not data, places, or what one side has",
                hint="capacities are given by `sparsona federation admit --capacity`, the rest by each side itself",
            )
    drawn = outline(model, tuple(input_shape or MODELS[read_spec(model)[0].name].input_shape), classes)
    # As many clients as will be admitted: as with a natural partition, their number is not known yet.
    # On a network, a message to everybody after every round would be the most of the traffic.
    usual = "participants" if given.get("patience") is None else "everyone"
    by_client = {key: dict(given[key]) for key in BY_CLIENT if isinstance(given.get(key), Mapping)}
    in_turn = {key: dict(enumerate(found.values())) for key, found in by_client.items()}  # to be checked
    options = {key: value for key, value in options.items() if key.replace("-", "_") not in by_client}
    config = make_config(method, {"evaluate": usual, **options, **in_turn, "model": model, "partition": "natural"})
    run = config.model_dump(mode="json")
    values = {key: run[key] for key in AGREED}
    for key, found in by_client.items():  # by names of clients that are still to be admitted, too
        values[key] = dict(zip(map(str, found), run[key].values(), strict=True))
    if values["lr_schedule"] != "decay":
        del values["lr_decay"]  # belongs to that schedule
    if config.availability is not None:
        values["availability"] = write_out(config.availability)
    row = card(config.method)
    if row.peers:
        check_among_peers(config, row.title)
    own = options_of(factory(row)[1])
    _check_files({**OPTIONS, **own}, {**values, **config.options})
    if read_spec(model)[1].get("weights"):
        raise _names_a_file("model", model)
    predicted = predicts or ("tokens" if drawn.takes_tokens else "classes")
    if predicted not in PREDICTS:
        raise SparsonaError(f"a model that predicts '{predicted}'", expected=f"one of {', '.join(PREDICTS)}")
    _check_task(config, predicted)
    task = {"model": model, "classes": classes, "input": list(drawn.input_shape), "predicts": predicted}
    if class_names is not None:
        task["class_names"] = _names(class_names, predicted, classes)
    return {"method": row.name, **task, **values, "options": config.options}


def _names(given: Sequence[str], predicted: str, classes: int) -> list[str]:
    if predicted not in ("classes", "binary", "labels"):
        raise SparsonaError(
            f"class names for a model that predicts {predicted}", expected="classes or labels", hint="leave them out"
        )
    return list(clean_names(given, "classes", 2 if predicted == "binary" else classes))


def check_not_simulated(options: Iterable[str]) -> None:
    """Raise SparsonaError for an option that a run on several machines cannot have."""
    for name in options:
        if name in SIMULATED:
            why, instead = SIMULATED[name]
            raise SparsonaError(
                f"'{name}' in a federation file: only a simulation has it, because {why}",
                expected="what all sides can do",
                hint=instead,
            )


def check_among_peers(config: RunConfig, title: str) -> None:
    """Raise SparsonaError for what a server would have to decide, in a run on several machines that has none."""
    if config.patience is not None:
        raise SparsonaError(
            f"patience for {title}, a run of peers: there is no server that would hear all their validation results",
            expected="a number of rounds that all peers know",
            hint="choose --rounds in a simulation with patience, or use a method with a server",
        )
    if config.sampler in ("size", "loss") or given_name(config.sampler) is not None:
        raise SparsonaError(
            f"sampler={config.sampler} for {title}, a run of peers: each works out by itself who takes part, and does "
            "not know the others' data or functions",
            expected="a sampler that needs the seed alone: uniform or round-robin",
            hint="--set sampler=round-robin, or leave it out",
        )


def _check_task(config: RunConfig, predicted: str) -> None:
    """Raise SparsonaError for a loss, weights or metrics that other machines do not have, or that do not apply."""
    if of_clients := [key for key in config.functions if not key.startswith("sampler/")]:  # that is the server's
        option, _, name = of_clients[0].partition("/")
        raise SparsonaError(
            f"the function '{name}' as {option} of a run on several machines",
            expected="a name, which every side has",
            hint=f"`sparsona run --help` lists those of {option}",
        )
    weights = config.class_weights
    if isinstance(weights, dict):
        raise SparsonaError(
            "class_weights by name in a run on several machines, whose classes have numbers",
            expected="a number for each class, in order",
            hint="--set class_weights=1,2.5",
        )
    if weights == "balanced":
        raise SparsonaError(
            "class_weights = balanced in a run on several machines, whose label counts no side knows",
            expected="a number for each class",
            hint="--set class_weights=1,2.5",
        )
    make_losses(predicted, config.loss, class_weights=weights, label_smoothing=config.label_smoothing)
    metrics = USUAL_METRICS.get(predicted, ()) if config.metrics is None else config.metrics
    make_metrics(predicted, metrics)
    if config.patience is not None:
        check_computed(config.patience_metric, metrics, predicted == "numbers")
        by = watched(config.patience_metric, predicted == "numbers")
        if not is_reported(by, predicted, shares_labels=True):
            raise SparsonaError(
                f"patience by '{by}' where {predicted} are predicted, in a run on several machines",
                expected="what clients tell the server: their metrics would reveal counts of single labels",
                hint="--set patience_metric=loss, or leave it out: accuracy",
            )


def _check_files(options: Mapping[str, Option], values: Mapping[str, Any]) -> None:
    """Raise SparsonaError for an option that names a file of this machine."""
    for key, value in values.items():
        paths = options[key].paths if key in options else ()
        if isinstance(value, str) and paths and ("" in paths or spec.parse(key, value).name in paths):
            raise _names_a_file(key, value)


def _names_a_file(key: str, value: str) -> SparsonaError:
    return SparsonaError(
        f"{key} = '{value}' names a file, which other machines do not have", expected="a value without files"
    )
