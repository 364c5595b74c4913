"""The options of a run, each declared once. Free of torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    model_validator,
)

from sparsona.core import points as eval_points
from sparsona.core import spec
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.targets import ALL_LOSSES, ALL_METRICS, USUAL_METRICS, given_name
from sparsona.data.split_plan import MOST_SEED, SplitPlan
from sparsona.engine.availability import KINDS as AVAILABILITY
from sparsona.engine.availability import check_availability
from sparsona.engine.divergence import FEWEST as FEWEST_NORMS
from sparsona.engine.graphs import GRAPHS, USUAL_DEGREE
from sparsona.engine.pace import LOGNORMAL, read_sigma
from sparsona.engine.sampling import SAMPLERS, check_sampler
from sparsona.executors import EXECUTORS
from sparsona.learning.schedule import SCHEDULES, lr_schedule
from sparsona.robust import ATTACKS, LABEL_FLIP, LITTLE, MEANS, PLAIN, read_attack, read_mean
from sparsona.runs.declaration import Option, as_int, as_tuple, option, options_of
from sparsona.runs.stopping import Stopping
from sparsona.transforms import TRANSFORMS, read_transforms, split_transforms
from sparsona.transforms.privacy import CENTRAL, LOCAL, read_privacy

MOST_CLIENTS = MOST_ROUNDS = 10_000_000
# What runs did whose configurations lack these options: they go on as they began.
BEFORE = {"on_divergence": "stop", "divergence_factor": None}
NUM_CLIENTS = 20  # if neither the user nor the partition says how many
KNOW_THEIR_CLIENTS = ("natural", "file")  # partitions

_SPLIT = SplitPlan()
_data = partial(option, group="data", condition=True)
_reading = partial(option, group="reading", condition=True)
_sharing = partial(option, group="sharing", condition=True)
_plan = partial(option, group="plan")
_evaluation = partial(option, group="evaluation")
_place = partial(option, group="place")
_SAY_INPUT, _SAY_SAMPLES = "give --input and --classes instead", "give --samples instead"


def _any_of(forms: Iterable[str]) -> str:
    return " | ".join(forms)


def check_points(names: tuple[str, ...]) -> tuple[str, ...]:
    """Check the names of evaluation points."""
    for name in names:
        try:
            eval_points.check_option(name)
        except SparsonaError as error:
            raise ValueError(str(error)) from error
    return names


def check_transforms(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Check the names and options of transforms."""
    try:
        read_transforms(texts)
    except SparsonaError as error:
        raise ValueError(str(error)) from error
    return texts


def check_mean(text: str) -> str:
    """Check the name and values of a mean."""
    try:
        read_mean(text)
    except SparsonaError as error:
        raise ValueError(str(error)) from error
    return text


def check_attack(text: str | None) -> str | None:
    """Check the name, share and options of an attack."""
    try:
        if text is not None:
            read_attack(text)
    except SparsonaError as error:
        raise ValueError(str(error)) from error
    return text


def check_privacy(text: str | None) -> str | None:
    """Check who adds how much noise."""
    try:
        if text is not None:
            read_privacy(text)
    except SparsonaError as error:
        raise ValueError(str(error)) from error
    return text


def _as_values(value: Any) -> Any:
    """Values of clients: one number is for all; keys of a dict may be texts, as JSON has them."""
    return (value,) if isinstance(value, int | float) else value


def _check_sampler(name: str) -> str:
    try:
        return check_sampler(name)
    except SparsonaError as error:
        raise ValueError(str(error)) from error


_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]
_ClientIndex = Annotated[int, Field(ge=0)]


def check_loss(name: str | None) -> str | None:
    """Check the name of a loss."""
    if name is not None and name not in ALL_LOSSES and given_name(name) is None:
        raise ValueError(name) from unknown_name("loss", name, ALL_LOSSES)
    return name


def check_metrics(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Check the names of metrics."""
    for name in names or ():
        if name not in ALL_METRICS and given_name(name) is None:
            raise ValueError(name) from unknown_name("metric", name, ALL_METRICS)
    own = [given_name(name) or name for name in names or ()]
    if twice := [name for name in own if own.count(name) > 1]:
        raise ValueError(twice[0]) from SparsonaError(
            f"two metrics called '{twice[0]}'", expected="a name for each", hint="name functions with def"
        )
    return names


def _read_weights(value: Any) -> Any:
    """Numbers as a tuple, also from text: "1,2.5"; by class: "cat=1,dog=2.5"."""
    if isinstance(value, str) and value != "balanced":
        parts = [part.strip() for part in value.split(",")]
        if any("=" in part for part in parts):
            pairs = [part.rpartition("=") for part in parts]
            return {name.strip(): weight for name, _, weight in pairs}
        return tuple(parts)
    return {str(name): weight for name, weight in value.items()} if isinstance(value, Mapping) else value


def check_weights(weights: Any) -> Any:
    """Check weights of classes."""
    found = tuple(weights.values()) if isinstance(weights, dict) else weights
    # A class without a weight of its own has 1.
    if isinstance(found, tuple) and not all(0 <= one < float("inf") for one in found):
        raise ValueError("finite weights of 0 or more, not all of them 0")
    if isinstance(weights, tuple) and not any(weights):
        raise ValueError("finite weights of 0 or more, not all of them 0")
    return weights


def _read_names(value: Any) -> Any:
    """Names as a tuple, also from text: "f1,auc"."""
    return tuple(value.split(",")) if isinstance(value, str) else value


MATCHES: dict[str, str] = {"rounds": "rounds", "steps": "local steps", "flops": "FLOPs", "bytes": "bytes"}


class Matched(BaseModel):
    """What a comparison equalised: `rounds` of this run were chosen to spend what another method spends in its own.

    Args:
        by: a key of `MATCHES`.
        to: the title of the other method.
        rounds: the rounds of that one.
        budget: what it spends in them, under the same seed; None: this method spends none of it, and is not matched.
        exact: False if the budget, or what this run was expected to spend, is an upper bound.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    by: str
    to: str
    rounds: int
    budget: int | None
    exact: bool = True


def _check_device(name: str) -> str:
    """A name, or a list of GPUs that begins with the first: processes share tensors by the number of a device, and
    each of them has a single GPU, whose number is 0."""
    is_list = re.fullmatch(r"cuda:0(,cuda:\d{1,3})+", name)
    if name in ("auto", "cpu", "cuda") or is_list:
        return name
    raise ValueError(
        f"'{name}': use auto, cpu, cuda, or a list that begins with cuda:0, such as cuda:0,cuda:1; "
        "CUDA_VISIBLE_DEVICES=2 makes another GPU the first"
    )


class RunConfig(Stopping):
    """Everything that decides a run's result, and where it runs. Options of the method itself are in `options`."""

    method: str = Field(description="a row of `sparsona methods`")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the method")
    matched: Matched | None = Field(None, description="what a comparison equalised, and to what")

    data: str = _data(
        "digits",
        "data set, a row of `sparsona data`, or the path of your own: mine.npz, or a folder of pictures",
        flag=True,
        cost=True,
        paths=("arrays", "folder"),
    )
    data_dir: str | None = _data(
        None, "folder that is searched first for the data's files", none="the cache alone", flag=True, paths=("",)
    )
    augment: bool | None = _reading(None, "crop and mirror training images", none="as usual for the data")
    resize: int | None = _reading(
        None, "side of the square that pictures are made when read (folder, gldv2)", cost=_SAY_INPUT, ge=1
    )
    crop: int | None = _reading(None, "pixels of the square cut from each image (folder, gldv2)", cost=_SAY_INPUT, ge=1)
    sequence_length: int | None = _reading(None, "tokens in one example of text", none="20", cost=_SAY_INPUT, ge=2)
    task: Literal["auto", "classification", "binary", "multilabel", "regression"] = _reading(
        "auto",
        "what the targets are; binary: 0 or 1, predicted by one logit; multilabel: a column of 0 and 1 for each label; "
        "auto: fractions make a regression",
        cost=_SAY_INPUT,
    )
    vocabulary_size: int | None = _reading(None, "most frequent words kept", none="10,000", cost=_SAY_INPUT, ge=1)

    clients: int | None = _sharing(
        None,
        "number of clients",
        none=f"{NUM_CLIENTS}, or all that the partition knows ({', '.join(KNOW_THEIR_CLIENTS)})",
        flag=True,
        cost=True,
        ge=1,
        le=MOST_CLIENTS,
    )
    partition: str = _sharing(
        _SPLIT.partition,
        "how the data is distributed among the clients, a row of `sparsona data`; text is by speaker",
        flag=True,
        paths=("file",),
    )
    partition_seed: int | None = _sharing(
        None, "fixes the partition and the splits whatever the seed", none="the seed", flag=True, ge=0, le=MOST_SEED
    )
    test: str = _sharing(_SPLIT.test, "what clients are tested on, a choice that `sparsona data` lists", flag=True)
    data_rate: float = _sharing(
        _SPLIT.data_rate, "share of the examples (partition natural: of owners) used", cost=_SAY_SAMPLES, gt=0, le=1
    )
    validation_rate: float = _sharing(
        _SPLIT.validation_rate, "share of a client's data held for validation", cost=_SAY_SAMPLES, ge=0, lt=1
    )
    test_rate: float = _sharing(
        _SPLIT.test_rate, "share of a client's data held for testing", cost=_SAY_SAMPLES, gt=0, lt=1
    )
    holdout_rate: float = _sharing(
        _SPLIT.holdout_rate,
        "share of a client's training data that is held out and tested on, its test data unused: to choose options by",
        cost=_SAY_SAMPLES,
        ge=0,
        lt=1,
    )
    min_size: int | None = _sharing(
        None, "fewest examples a client may be dealt", none="10, or what can be split (natural)", ge=2
    )
    min_train: int = _sharing(
        _SPLIT.min_train, "fewest examples to train and validate on; owners with less are left out", ge=0
    )
    min_test: int = _sharing(_SPLIT.min_test, "fewest test examples; owners with less are left out", ge=0)
    max_examples: int | None = _sharing(
        None, "most examples a client keeps of what it is dealt", none="all", cost=_SAY_SAMPLES, ge=2
    )

    model: str | None = _plan(
        None,
        "network, a row of `sparsona models`",
        none="the data set's default",
        flag=True,
        condition=True,
        cost=True,
    )
    preset: str | None = _plan(
        None,
        "the experiment as published: paper (its text), authors (their code), or fedspa | dispfl | pfedgate | fedalt "
        "(how that paper ran the method)",
        none="options as `sparsona methods` lists them",
        flag=True,
        cost=True,
    )
    rounds: int = _plan(
        30,
        "number of rounds; 0: a stored model (warm_start) is tuned",
        flag=True,
        condition=True,
        cost=True,
        ge=0,
        le=MOST_ROUNDS,
    )
    per_round: int | None = _plan(
        None,
        "clients sampled per round",
        none="half of them, all peers",
        flag=True,
        condition=True,
        cost=True,
        ge=1,
    )
    graph: str | None = _plan(
        None,
        f"who receives from whom, among peers: {_any_of(GRAPHS)}",
        none=f"random:{USUAL_DEGREE}, or fewer",
        flag=True,
        cost=True,
        paths=("file",),
    )
    loss: Annotated[str | None, AfterValidator(check_loss)] = _plan(
        None,
        f"what training minimises: {_any_of(ALL_LOSSES)}; from Python also a function of outputs and targets that "
        "returns a loss for each example",
        none="cross-entropy for classes, bce for one logit and for labels, squared-error for numbers",
    )
    class_weights: Annotated[
        Literal["balanced"] | tuple[float, ...] | dict[str, float] | None,
        BeforeValidator(_read_weights),
        AfterValidator(check_weights),
    ] = _plan(
        None,
        "factor of the loss of each class, of labels where they apply: numbers in the order of classes, or by name "
        "(cat=2,dog=0.5; others 1); balanced: by the counts in all clients' training data",
        none="1 for all",
    )
    label_smoothing: float = _plan(0.0, "share of a label that is spread over all classes", ge=0, lt=1)
    transform: Annotated[tuple[str, ...], BeforeValidator(split_transforms), AfterValidator(check_transforms)] = _plan(
        (),
        f"transforms of messages, in order: {_any_of(card.example for card in TRANSFORMS.values())}",
        flag="--transform NAME ...",
        cost=True,
    )
    mean: Annotated[str, AfterValidator(check_mean)] = _plan(
        PLAIN,
        f"how updates are averaged, see docs/robustness.md: {_any_of(card.example for card in MEANS.values())}",
        flag="--mean NAME",
    )
    privacy: Annotated[str | None, AfterValidator(check_privacy)] = _plan(
        None,
        "differential privacy: changes are clipped to a norm, and noise is added to each (local) or to their "
        "sum (central): local:noise=1.0,clip=0.5 | central:noise=1.0,clip=0.5,delta=1e-5",
        none="no noise, no epsilon",
        flag="--privacy KIND:...",
    )
    batch_size: int = _plan(16, "examples in a training batch", flag=True, cost=True, ge=1)
    drop_last: bool = _plan(
        False, "leave out the last batch of a pass over training data if it is incomplete", cost=True
    )
    lr_decay: float = _plan(0.998, "factor on the learning rate after each round", flag=True, gt=0, le=1)
    lr_schedule: str = _plan(
        "decay",
        f"how the learning rate changes, see docs/experiments.md: {_any_of(row.form for row in SCHEDULES.values())}",
        flag=True,
    )
    warm_start: str | None = _plan(
        None,
        "a finished run whose global model all clients start from",
        none="weights drawn from the seed",
        flag="--warm-start RUN",
    )
    seed: int = _plan(
        0,
        "varies everything: partition, weights, sampling, batches, masks",
        flag=True,
        condition=True,
        ge=0,
        le=MOST_SEED,
    )
    tuned_with: int | None = _plan(
        None,
        "trials that this method's options were chosen by, on data held out of training; `sparsona tune` sets it",
        none="not tuned",
        cost="leave it out: trials are not charged",
        ge=1,
    )
    tune_epochs: int = _plan(0, "epochs of final tuning for every client; 0: none", cost=True, ge=0)
    tune_lr_scale: float = _plan(
        1.0, "learning rate of tuning, as a share of the first round's", gt=0, allow_inf_nan=False
    )
    tune_from: Literal["neighbours", "all"] = _plan(
        "neighbours", "whose models are mixed into the one that is tuned, among peers", cost=True
    )
    guard: bool = _plan(
        False, "each client keeps its own or the shared model, whichever its validation data favours", flag=True
    )
    drop_rate: float = _plan(
        0.0,
        "probability that an update is lost on its way; that a peer is out of reach",
        condition=True,
        cost="leave it out: every message is charged as if it arrived",
        ge=0,
        lt=1,
    )
    attack: Annotated[str | None, AfterValidator(check_attack)] = _plan(
        None,
        "simulated attackers: what this share of the clients sends instead of its update, see docs/robustness.md: "
        f"{_any_of(card.example for card in ATTACKS.values())}",
        none="all are honest",
        flag="--attack NAME:RATE",
        condition=True,
    )
    min_updates: int = _plan(
        0,
        "updates that a round needs: with fewer, neither the server nor any client changes in it",
        condition=True,
        cost="leave it out: every update is charged as if it arrived",
        ge=0,
    )
    on_divergence: Literal["drop", "stop"] = _plan(
        "drop",
        "what happens when a client's training diverges: it is left out of that round, recorded and counted, or the "
        "run ends",
        flag=True,
        condition=True,
        cost="leave it out: every turn is charged as if it went well",
    )
    divergence_factor: float | None = _plan(
        100.0,
        "with on_divergence=drop, an update (among peers: a message) whose norm is more than so many times the median "
        f"of those it came with, of {FEWEST_NORMS} or more, is left out",
        none="whatever its norm",
        condition=True,
        cost="leave it out: every turn is charged as if it went well",
        gt=1,
        allow_inf_nan=False,
    )
    everyone_trains: bool = _plan(
        False,
        "all train each round, only the sampled are aggregated",
        condition=True,
        cost="give the number of clients that train with --per-round",
    )
    stateless: bool = _plan(
        False,
        "clients forget everything between rounds",
        condition=True,
        cost="leave it out: clients are charged as if they remembered",
    )
    novel: Annotated[float, AfterValidator(as_int), PlainSerializer(as_int, return_type=int | float)] = _plan(
        0,
        "clients held out of training and met at the end; below 1: a share",
        condition=True,
        cost="give the number of clients that take part with --clients",
        ge=0,
        allow_inf_nan=False,
    )
    novel_epochs: int | None = _plan(
        None,
        "epochs of tuning for the novel clients alone",
        none="tune_epochs, as for all clients",
        cost="leave it out: novel clients are not charged",
        ge=0,
    )
    capacities: Annotated[tuple[float, ...], BeforeValidator(as_tuple)] = _plan(
        (1.0,), "density each client can hold, repeated over clients", condition=True, cost=True
    )

    client_lr_scale: Annotated[tuple[_Positive, ...] | dict[_ClientIndex, _Positive], BeforeValidator(_as_values)] = (
        _plan(
            (1.0,),
            "factor of each client's learning rates, repeated over clients, or by number (Python: or name): {3 = 0.5}",
            condition=True,
        )
    )
    client_epochs: Annotated[tuple[_Count, ...] | dict[_ClientIndex, _Count], BeforeValidator(_as_values)] = _plan(
        (),
        "each client's own epochs in a round, repeated over clients, or by number (in Python also name): {3 = 1}",
        condition=True,
        cost=True,
    )
    speeds: Annotated[tuple[_Positive, ...] | dict[_ClientIndex, _Positive] | str, BeforeValidator(_as_values)] = _plan(
        (),
        f"relative speed of each client, repeated over clients, by number (Python: or name), or {LOGNORMAL}, drawn",
        condition=True,
        cost="leave it out: every client is charged as if it made the deadline",
    )
    deadline: float | None = _plan(
        None,
        "of a round, in the time that a client of speed 1 with the mean amount of data takes for its turn",
        none="all are waited for",
        condition=True,
        cost="leave it out: every client is charged as if it made the deadline",
        gt=0,
        allow_inf_nan=False,
    )
    late: Literal["drop", "partial"] = _plan(
        "drop",
        "what happens to clients that would miss the deadline: their update is lost, or they take fewer steps",
        condition=True,
        cost="leave it out: every client is charged as if it made the deadline",
    )
    sampler: Annotated[str, AfterValidator(_check_sampler)] = _plan(
        "uniform",
        f"how the clients of a round are chosen: {_any_of(SAMPLERS)}; from Python also a function",
        condition=True,
    )
    availability: str | None = _plan(
        None,
        f"who is available in a round, see docs/experiments.md: {_any_of(row.form for row in AVAILABILITY.values())}",
        none="all are, always",
        condition=True,
        cost="leave it out: every round is charged as if enough clients were available",
        paths=("file",),
    )

    subnetwork: float | None = _plan(
        None,
        "train a fixed random sub-network of this density in place of the whole model",
        none="the whole model",
        cost=True,
        gt=0,
        le=1,
    )

    eval_every: int = _evaluation(
        1, "rounds between evaluations (the last ten are always evaluated)", circumstance=True, ge=1
    )
    evaluate: Literal["everyone", "participants"] = _evaluation(
        "everyone",
        "who is tested before the end; participants: those that train, on the message that they train on, so that "
        "nothing more is sent",
        circumstance=True,
    )
    eval_clients: int | None = _evaluation(
        None, "clients tested after rounds and final tuning, drawn once", none="all", condition=True, ge=1
    )
    headline: str | None = _evaluation(
        None,
        "the evaluation point whose accuracy is the result; trained: with all clients in every round, else received",
        none="the method's own, or received; tuned after final tuning",
        circumstance=True,
    )
    headline_weight: Literal["clients", "examples"] = _evaluation(
        "clients",
        "how clients count in the mean accuracy that is the result: all the same, or by their test examples",
        condition=True,
    )
    points: Annotated[tuple[str, ...], BeforeValidator(as_tuple), AfterValidator(check_points)] = _evaluation(
        (),
        "which models to evaluate besides the headline's: "
        f"{', '.join(eval_points.OPTIONS)}; each also on other data, such as received/validation",
        circumstance=True,
    )
    metrics: Annotated[tuple[str, ...] | None, BeforeValidator(_read_names), AfterValidator(check_metrics)] = (
        _evaluation(
            None,
            f"what else predictions are judged by, at every evaluation: {', '.join(ALL_METRICS)}; from Python also "
            "functions of outputs and targets that return a number",
            none=f"{', '.join(USUAL_METRICS['numbers'])} in a regression, whose headline is the first; otherwise none",
            circumstance=True,
        )
    )
    record_traits: bool = _evaluation(
        False,
        "at evaluations, record how far apart clients' masks or gates are, if they have any",
        circumstance=True,
    )
    train_accuracy: bool = _evaluation(False, "evaluate the last models on clients' training data, too")

    device: Annotated[str, AfterValidator(_check_device)] = _place(
        "auto",
        "where models are trained: auto (a GPU if there is one), cpu, cuda, or several GPUs, such as cuda:0,cuda:1, "
        "each of which takes a share of a round's turns",
        flag=True,
    )
    precision: Literal["fp32", "tf32", "bf16"] = _place(
        "fp32", "number format of convolutions and products on a GPU; weights stay in fp32", flag=True, condition=True
    )
    executor: str = _place("auto", f"how clients are run: {_any_of(EXECUTORS)}", flag=True, circumstance=True)
    turn_seconds: float | None = _place(
        None,
        "seconds after which a client loses its turn, with --executor workers: its process is ended, and the records "
        "say so",
        none="no limit",
        circumstance=True,
        gt=0,
        allow_inf_nan=False,
    )

    # Functions that were passed from Python, by option and name: no part of what is stored, and passed again on resume.
    _functions: dict[str, Callable[..., Any]] = PrivateAttr(default_factory=dict)

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """Functions from Python in place of names, by "loss/NAME" and "metrics/NAME"."""
        return self._functions

    def with_functions(self, functions: Mapping[str, Callable[..., Any]]) -> RunConfig:
        """The same options with these functions."""
        found = self.model_copy()
        found._functions = dict(functions)
        return found

    @model_validator(mode="before")
    @classmethod
    def _usual_clients(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("clients") is not None:
            return values
        name = spec.parse("partition", str(values.get("partition"))).name
        return values if name in KNOW_THEIR_CLIENTS else {**values, "clients": NUM_CLIENTS}

    @property
    def sampled(self) -> int:
        """Clients per round, with its default; `clients` must be known."""
        assert self.clients is not None
        return self.per_round or max(1, (self.clients - self.num_novel) // 2)

    @property
    def num_novel(self) -> int:
        """Novel clients as a number, also if given as a share; `clients` must be known."""
        if 0 < self.novel < 1:
            assert self.clients is not None
            return max(1, round(self.novel * self.clients))
        return int(self.novel)

    @property
    def all_points(self) -> tuple[str, ...]:
        """Every point to evaluate; `received` always, since learning curves need it."""
        always = (eval_points.RECEIVED, eval_points.TUNED)
        return (eval_points.RECEIVED, *(point for point in dict.fromkeys(self.points) if point not in always))

    def _privacy_conflicts(self) -> Iterable[SparsonaError]:
        doubled = [name for text in self.transform if (name := spec.parse("transform", text).name) in ("clip", "noise")]
        if doubled:
            yield SparsonaError(
                f"--transform {doubled[0]} with --privacy, which clips and adds noise itself",
                expected="one of the two",
                hint=f"leave --transform {doubled[0]} out",
            )
        if self.sampler == "loss":
            yield SparsonaError(
                "--privacy with sampler=loss: clients would send their losses without noise, and be chosen by them",
                expected="clients that are drawn whatever they have learned",
                hint="leave sampler out",
            )
        assert self.privacy is not None
        if self.attack is not None and read_privacy(self.privacy).kind == LOCAL:
            name = read_attack(self.attack).name
            if name != LABEL_FLIP:
                how = (
                    "without clip and noise"
                    if name == LITTLE
                    else "with clip and noise, which nobody can force on them"
                )
                yield SparsonaError(
                    f"--attack {name} with --privacy local: attackers would send their lies {how}",
                    expected=f"{LABEL_FLIP}, whose attackers send what they should, or central, which clips at the "
                    "server",
                    hint="leave one of them out",
                )
        if self.min_updates and self.privacy is not None and read_privacy(self.privacy).kind == CENTRAL:
            yield SparsonaError(
                f"--privacy central with min_updates={self.min_updates}: one client would decide if a round has noise",
                expected="rounds that all have an effect: clients that do not come count as no change",
                hint="leave min_updates out",
            )

    def conflicts(self) -> list[SparsonaError]:
        """Errors in combinations of fields."""
        found = []
        for value, read in (
            (self.lr_schedule, lr_schedule),
            (self.availability, check_availability),
            (self.speeds if isinstance(self.speeds, str) else None, read_sigma),
        ):
            try:
                if value is not None:
                    read(value)
            except SparsonaError as error:
                found.append(error)
        if self.late == "partial" and self.deadline is None:
            found.append(
                SparsonaError(
                    "late=partial without a deadline",
                    expected="a deadline that clients may miss",
                    hint="--set deadline=1.5, and --set speeds=lognormal:0.5 for clients of different speeds",
                )
            )
        if self.privacy is not None:
            found.extend(self._privacy_conflicts())
        if self.patience is not None and self.evaluate == "participants":
            found.append(
                SparsonaError(
                    "patience with evaluate=participants: other clients are evaluated in each round",
                    expected="evaluate=everyone: scores of the same clients, which can be compared",
                    hint="leave one of them out",
                )
            )
        # None: known once the data is read.
        taking_part = None if self.clients is None else self.clients - self.num_novel
        if taking_part is None:
            pass
        elif taking_part < 1:
            found.append(
                SparsonaError(
                    f"{self.num_novel} novel clients of {self.clients}",
                    expected="at least one client that takes part",
                    hint="lower novel or raise --clients",
                )
            )
        elif self.sampled > taking_part:
            found.append(
                SparsonaError(
                    f"cannot sample {self.sampled} clients per round: only {taking_part} take part",
                    expected=f"per_round from 1 to {taking_part}",
                    hint="lower --per-round or raise --clients",
                )
            )
        elif self.min_updates > self.sampled:
            found.append(
                SparsonaError(
                    f"rounds that need {self.min_updates} updates, of {self.sampled} clients per round",
                    expected=f"min_updates from 0 to {self.sampled}",
                    hint="lower min_updates or raise --per-round",
                )
            )
        if taking_part is not None and 1 <= taking_part < (self.eval_clients or 0):
            found.append(
                SparsonaError(
                    f"cannot test {self.eval_clients} clients: only {taking_part} take part",
                    expected=f"eval_clients from 1 to {taking_part}",
                    hint="lower eval_clients, or leave it out: all are tested then",
                )
            )
        if self.novel > 1 and self.novel != int(self.novel):
            found.append(
                SparsonaError(
                    f"{self.novel} novel clients",
                    expected="a whole number, or a share below 1",
                    hint="for example --set novel=4, or novel=0.2",
                )
            )
        if self.novel_epochs and not self.novel:
            found.append(
                SparsonaError(
                    "novel_epochs without novel clients",
                    expected="novel clients to tune",
                    hint="--set novel=0.2 holds a fifth of the clients out",
                )
            )
        if eval_points.select(self.points, "end") and not self.tune_epochs:
            found.append(
                SparsonaError(
                    f"point '{eval_points.TUNED}' without tuning",
                    expected="tune_epochs of 1 or more",
                    hint="--set tune_epochs=5, or use fedavg-ft",
                )
            )
        if not self.capacities or not all(0 < capacity <= 1 for capacity in self.capacities):
            found.append(
                SparsonaError(
                    f"capacities {list(self.capacities)}",
                    expected="one or more densities above 0 and at most 1",
                    hint="for example --set 'capacities=[0.2, 1.0]'",
                )
            )
        return found


OPTIONS: dict[str, Option] = {name: found for name, found in options_of(RunConfig).items() if found.group}
CONDITIONS = frozenset(name for name, found in OPTIONS.items() if found.condition)
CIRCUMSTANCES = frozenset(name for name, found in OPTIONS.items() if found.circumstance)


def in_groups(*groups: str) -> tuple[str, ...]:
    """The names of the options of these groups."""
    return tuple(name for name, found in OPTIONS.items() if found.group in groups)


OF_DATA = in_groups("data", "reading", "sharing")  # what a federation made in Python has been through already

# What a simulation alone has, why, and what to use on several machines.
_AS_FAST = ("clients are as fast as they are", "`sparsona server --deadline SECONDS` is for the real time of an answer")
SIMULATED: dict[str, tuple[str, str]] = {
    "speeds": _AS_FAST,
    "deadline": _AS_FAST,
    "late": _AS_FAST,
    "attack": ("nobody can be made to lie", "`sparsona run --attack` simulates it; --mean median guards against it"),
}

# What all sides of a run on several machines agree on, besides method and model. Capacities are in its roster; a preset
# is written out. Limits are a server's own, but for patience: by it a run is finished, and clients keep their models.
AGREED = (
    *(
        name
        for name in (*in_groups("plan", "evaluation"), "precision")
        if name not in ("model", "preset", "warm_start", "capacities", *SIMULATED)
    ),
    "patience",
    "min_delta",
    "patience_metric",
)


def dump(config: RunConfig) -> str:
    """The config as JSON, to be stored with the run."""
    return json.dumps(config.model_dump(mode="json"), indent=2) + "\n"
