"""What an experiment costs, before it is run: bytes, FLOPs, memory. Free of torch.

Every round is taken to cost what the first one does, and every client to have the same number of examples.
docs/accounting.md says what is counted, and how the papers' printed figures come out of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import cycle
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from sparsona import data, methods, models
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.layout import Layout
from sparsona.core.outline import Outline
from sparsona.core.round import Client, Round
from sparsona.core.seeds import Seeds
from sparsona.core.transform import transform_cost
from sparsona.core.update import Cost, PartSize
from sparsona.costs.own import OwnSource, read_own
from sparsona.costs.report import CostReport, Flops, Memory, Number, Traffic
from sparsona.costs.rules import COST_RULES, RuleCard
from sparsona.data import catalog
from sparsona.engine.graphs import Graph, Links, links, read_graph
from sparsona.engine.graphs import check as check_graph
from sparsona.engine.pace import check_clients, value_of
from sparsona.runs.declaration import Option, as_tuple, option, options_of
from sparsona.runs.options import NUM_CLIENTS, OPTIONS, RunConfig
from sparsona.runs.request import choose, fit_clients, parse_method
from sparsona.runs.validation import check, merge_errors
from sparsona.sparsity.search import mask_counts
from sparsona.transforms import read_transforms
from sparsona.wire.format import message_size, paper_size, payload_size

SCREENING_BATCH = 128
QUIRKS = {
    "phantom-screening": (
        f"a dense gradient batch of {SCREENING_BATCH} is charged wherever a client holds a mask: also for masks that "
        "stay as drawn or regrow at random, and whatever the client's batch"
    ),
    "zero-biases": (
        "the biases of norms, which start at zero, count half: the mean of the first round's messages down, "
        "where they are zero, and up, where they are not"
    ),
    "emnist-400-rounds": "FedSpa's EMNIST figures are of 400 rounds, its others of 1,000",
}


def _parse_shape(value: Any) -> Any:
    """'3x32x32', as it is written on a command line; one number is the length of a sequence."""
    if not isinstance(value, str | int):
        return value
    parts = str(value).lower().split("x")
    if not all(part.isdecimal() for part in parts):
        raise PydanticCustomError("shape", "a shape like 3x32x32, or a length")
    return tuple(int(part) for part in parts)


_own = partial(option, cost=True)


class CostOptions(BaseModel):
    """What a cost needs and a run does not: a run reads it from its data."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    classes: int | None = _own(
        None, "number of classes", group="data", none="the data's, or the model's usual ones", flag=True, ge=1
    )
    input_shape: Annotated[tuple[Annotated[int, Field(ge=1)], ...] | None, BeforeValidator(_parse_shape)] = _own(
        None, "shape of an example", group="data", none="the data's, or the model's usual one", flag="--input CxHxW"
    )
    tokens: bool | None = _own(
        None, "whether a module of your own takes tokens", group="data", none="as the data has it"
    )
    samples: int | None = _own(
        None,
        "training examples of a client",
        group="sharing",
        none="the published training examples by clients; without data 500",
        flag=True,
        ge=1,
    )
    counting: Literal["encoded", "paper"] = _own(
        "encoded",
        "bytes as encoded, or as the papers count: which of them the JSON leads with",
        group="plan",
        flag=True,
    )
    quirks: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = _own(
        (), f"deviations that printed figures include: {' | '.join(QUIRKS)}", group="plan", flag="--quirk NAME ..."
    )


# Where a cost is not that of the run with the same options: the defaults are those of the papers' tables, and there is
# no data set unless one is named. With the user's own data they are those of a run.
PAPERS = {"rounds": 1000, "clients": 100, "per_round": 10, "batch_size": 128}


def cost_options() -> dict[str, Option]:
    """Every option of a cost besides the method's own: those of a run, with the papers' defaults, and its own."""
    changes: dict[str, dict[str, Any]] = {"data": {"default": None, "none": "none: the model says what it takes"}}
    changes["per_round"] = {"default": PAPERS["per_round"], "text": "clients sampled per round; all peers"}
    of_run = {name: replace(one, default=PAPERS.get(name, one.default)) for name, one in OPTIONS.items()}
    return {name: replace(one, **changes.get(name, {})) for name, one in of_run.items()} | options_of(CostOptions)


@dataclass(frozen=True)
class Experiment:
    """What is charged: the options of a run and of the cost itself, and the graph if clients send to each other."""

    run: RunConfig
    options: CostOptions
    graph: Graph | None
    data: str | None  # None: not given
    requests: int | None = None  # peers that each peer requests messages from, where the method chooses them

    @property
    def rounds(self) -> int:
        return 400 if "emnist-400-rounds" in self.options.quirks else self.run.rounds

    @property
    def clients(self) -> int:
        assert self.run.clients is not None  # PAPERS has a default
        return self.run.clients

    @property
    def sampled(self) -> int:
        """Clients that train in a round."""
        return self.run.sampled if self.graph is None else self.clients

    @cached_property
    def links(self) -> Links:
        if self.requests is not None:
            return Links(self.requests)
        return Links(0) if self.graph is None else links(self.graph, self.clients)

    @property
    def neighbours(self) -> Number:
        """Links of a peer, the mean over peers."""
        if self.links.each is not None:
            return self.links.each
        return _divide(sum(map(len, self.links.received)), self.clients)

    @property
    def period(self) -> int:
        """The clients after which capacities and epochs repeat, at most all of them."""
        epochs = self.run.client_epochs
        if isinstance(epochs, dict):
            return self.clients
        return min(self.clients, math.lcm(len(self.run.capacities), len(epochs) or 1))

    @property
    def kinds(self) -> list[int]:
        """Clients of each kind: those at the same place of a period."""
        whole, rest = divmod(self.clients, self.period)
        return [whole + (index < rest) for index in range(self.period)]

    def client(self, index: int, samples: int) -> Client:
        """The client at this place, with its capacity and its own epochs."""
        run = self.run
        epochs = value_of(run.client_epochs, index, None)
        capacity = run.capacities[index % len(run.capacities)]
        return Client(index, samples, capacity, num_clients=self.clients, epochs=epochs)


def cost(method: str | methods.MethodCard | Callable[..., Any], *, model: Any = None, **options: Any) -> CostReport:
    """What a method would cost, without training.

    Args:
        method: a row of `sparsona methods`, or one with a rule for its costs only; options of its own may follow its
            name after a colon. Or a MethodCard or a factory, as `train` takes them.
        model: the name of a network, or an nn.Module (which needs `input_shape` and `classes`); left out, it is the
            default of `data`.
        options: those of a run (`rounds`, `graph`, `preset`, ...), whose defaults are those of the papers' tables, and
            of a run for data of your own; the method's own (`epochs`, `density`, ...); and `CostOptions` (`samples`,
            `counting`, ...).

    Returns:
        Bytes, FLOPs and memory; `to_json` has every figure.

    Example:
        >>> cost("dispfl", model="lenet5", graph="ring").neighbours
        2
    """
    row: methods.MethodCard | RuleCard
    if isinstance(method, str):
        name, own = parse_method(method)
        row, kind = row_of(name)
    else:
        row, own = methods.as_card(method), {}
        name, kind = row.name, methods.factory(row)[1]
    given = {key.replace("-", "_"): value for key, value in {**options, **own}.items()}
    cost_values = {key: given.pop(key) for key in CostOptions.model_fields if key in given}
    errors = [
        SparsonaError(f"'{key}' in a cost", expected="what a cost can count", hint=reason)
        for key in given
        if key in OPTIONS and isinstance(reason := OPTIONS[key].cost, str)
    ]
    published = methods.published(row, given)
    chosen = choose(row, kind, published, given)
    known = {*OPTIONS, *kind.model_fields, *CostOptions.model_fields}
    unknown = [methods.unknown_option([row.name], option, known) for option in chosen.unknown]
    usual = {key: value for key, value in PAPERS.items() if key != "per_round" or not row.peers}
    if "data" in chosen.run and catalog.parse_spec(str(chosen.run["data"]))[1]:
        usual = {"clients": NUM_CLIENTS}  # no paper has the user's own data: a cost is that of a run
    own_options, of_cost = check(CostOptions, cost_values, "a cost")
    run, of_run = check(RunConfig, {**usual, **chosen.run, "method": name}, "a cost")
    run = run and fit_clients(run, chosen.published, published)
    config, of_method = check(kind, chosen.method, name)
    if errors := [*unknown, *chosen.errors, *errors, *of_cost, *of_run, *of_method]:
        raise merge_errors(errors)
    return _report(row, run, own_options, config, model, chosen.run.keys() - chosen.published, chosen.published)


def options_for(method: str) -> set[str]:
    """Names of the options that `cost` takes for this method."""
    return {*cost_options(), *row_of(parse_method(method)[0])[1].model_fields}


def row_of(name: str) -> tuple[methods.MethodCard | RuleCard, Any]:
    """A row and the class of its options."""
    if (row := methods.find(name)) is not None:
        return row, methods.factory(row)[1]
    if name in COST_RULES:
        return COST_RULES[name], COST_RULES[name].config
    error = unknown_name("method", name, [*methods.names(), *COST_RULES])
    expected = f"one of {', '.join(methods.names())}; costs only: {', '.join(COST_RULES)}"
    raise SparsonaError(error.what, expected=expected, hint=error.hint)


def _check_experiment(run: RunConfig, options: CostOptions, peers: bool, given: Set[str]) -> Experiment:
    """The experiment, checked; `given` are the names of the options that were given."""
    assert run.clients is not None
    errors = [unknown_name("quirk", quirk, QUIRKS) for quirk in options.quirks if quirk not in QUIRKS]
    if peers and run.per_round not in (None, run.clients):
        what, expected = f"per_round = {run.per_round} among peers", "all clients: each trains in every round"
        errors.append(SparsonaError(what, expected=expected, hint="leave --per-round out, or set --clients"))
    else:
        errors += run.conflicts()
    if run.graph is not None and not peers:
        what, expected = "'graph' for a method with a server", "a method whose clients send to each other"
        errors.append(SparsonaError(what, expected=expected, hint="leave --graph out"))
    if run.tune_from != "neighbours" and not peers:
        what, expected = "'tune_from' for a method with a server", "a method whose clients send to each other"
        errors.append(SparsonaError(what, expected=expected, hint="leave tune_from out"))
    if "emnist-400-rounds" in options.quirks and "rounds" in given and run.rounds != 400:
        what, expected = f"--rounds {run.rounds} with the quirk of 400 rounds", "one of the two"
        errors.append(SparsonaError(what, expected=expected, hint="leave --rounds out"))
    if errors:
        raise merge_errors(errors)
    graph = None
    if peers:
        graph = read_graph(run.graph, run.clients)
        check_graph(graph, range(run.clients))
    return Experiment(run, options, graph, run.data if "data" in given else None)


def _report(
    row: methods.MethodCard | RuleCard,
    run: RunConfig,
    options: CostOptions,
    config: Any,
    model: Any,
    given: Set[str],
    published: Set[str],
) -> CostReport:
    source = _source(run, "data" in given)
    if isinstance(source, OwnSource) and source.num_owners and not {"clients", "partition"} & given:
        # As in a run, every owner is a client.
        most = None if run.per_round is None else min(run.per_round, source.num_owners)
        run = run.model_copy(update={"clients": source.num_owners, "per_round": most})
    samples, samples_from = _samples(source, run, options, published)
    label, outline = _outline(model if model is not None else run.model, source, options)
    whole = outline.layout
    if run.subnetwork is not None:
        methods.check_subnetwork(row.name, _price(row, outline, config)[0], whole)
        outline = copy(outline)
        object.__setattr__(outline, "layout", whole.keep(mask_counts(whole, run.subnetwork, "erk")))
    price, peers = _price(row, outline, config)
    experiment = _check_experiment(run, options, peers, given)
    layout = outline.layout
    round_ = Round(0, experiment.rounds, 1.0, run.batch_size, Seeds(0), drop_last=run.drop_last)
    check_clients("client_epochs", run.client_epochs, experiment.clients)
    clients, chain = [experiment.client(index, samples) for index in range(experiment.period)], run.transform
    kinds, tuned = (
        [transform_cost(price(layout, client, round_), read_transforms(chain)) for client in some]
        for some in (clients, [client.in_tuning for client in clients])
    )
    if (requests := kinds[0].requests) is not None:
        if run.graph is not None:
            what, expected = f"'graph' for {row.name}", "no graph: its clients choose whose models they receive"
            raise SparsonaError(what, expected=expected, hint="leave --graph out")
        experiment = replace(experiment, requests=requests)
    infer = [layout.forward_flops() if cost.infer_flops is None else cost.infer_flops for cost in kinds]
    flops = Flops(
        _mean(_sum([cost.train_flops for cost in kinds], experiment), experiment),
        _mean(_sum([_search_flops(cost, layout, options.quirks) for cost in kinds], experiment), experiment),
        run.tune_epochs
        * _sum([_tune_flops(*cost, layout, samples) for cost in zip(tuned, infer, strict=True)], experiment),
        _sum([cost.tune_search_flops for cost in tuned], experiment) if run.tune_epochs else 0,
    )
    as_papers = partial(_paper_size, quirks=options.quirks, uniform=getattr(config, "allocation", "erk") == "uniform")
    return CostReport(
        method=row.name,
        title=row.title,
        model=label,
        num_parameters=layout.size,
        input_shape=tuple(outline.input_shape),
        classes=outline.num_classes,
        costs_only=isinstance(row, RuleCard),
        exact=all(cost.exact and not cost.compact for cost in kinds) and not outline.uncounted and not peers,
        notes=tuple(_notes(row, outline, kinds, run, whole.size, peers)),
        peers=peers,
        experiment=experiment,
        options=config.model_dump(mode="json"),
        samples=samples,
        samples_from=samples_from,
        flops=flops,
        inference_flops=max(infer),
        memory=max((_memory(cost, layout) for cost in kinds), key=lambda memory: max(vars(memory).values())),
        encoded=_traffic(kinds, experiment, message_size, one_direction=False),
        paper=_traffic(kinds, experiment, as_papers, one_direction=True),
    )


def _source(run: RunConfig, is_given: bool) -> data.SourceCard | OwnSource | None:
    if not is_given:
        return None
    name, path = catalog.parse_spec(run.data)
    return read_own(run) if path else catalog.get(name)


def _samples(
    source: data.SourceCard | OwnSource | None, run: RunConfig, options: CostOptions, published: Set[str]
) -> tuple[int, str]:
    """How many examples a client trains on, and where that number comes from if it was not given.

    What is used and held back is that of a preset, if it says so, and of the user's own data that of a run.
    """
    if source is None or options.samples is not None:
        return options.samples or 500, ""
    if source.is_natural:
        raise SparsonaError(
            f"no number of examples for a client of {source.name}",
            expected="samples: its clients are people, with different numbers of examples",
            hint="give a number, for example --samples 200",
        )
    assert run.clients is not None
    is_own = isinstance(source, OwnSource)
    splits_all = (run.test == "split" and "test" in published) or (is_own and not source.num_train)
    published_by = "" if is_own else "published "
    total, what = (source.num_train, "training ") if source.num_train else (source.num_examples, "")
    if splits_all:
        total, what = source.num_examples, ""
    used = run.data_rate if "data_rate" in published else 1.0
    held = {
        "validation": run.validation_rate if is_own or "validation_rate" in published else 0.0,
        "testing": run.test_rate if splits_all else 0.0,
    }
    rates = " and ".join(f"{rate:.0%} for {purpose}" for purpose, rate in held.items() if rate)
    of = f"{f'{used:.0%} of ' if used < 1 else ''}{total:,} {published_by}{what}examples / {run.clients:,} clients"
    of += f", held out: {rates}" if rates else ", none held out for validation or testing"
    dealt = math.floor(total * used) // run.clients
    return max(1, dealt - sum(round(dealt * rate) for rate in held.values())), of


def _outline(model: Any, source: data.SourceCard | OwnSource | None, options: CostOptions) -> tuple[str, Any]:
    """The model's name and outline."""
    usual: Any = source
    if model is None or isinstance(model, str):
        if not model and source is None:
            raise SparsonaError("no model", expected="--model or --data", hint="for example --model vgg11")
        if model is None and usual.default_model is None:
            raise SparsonaError(
                f"no network fits examples of shape {usual.input_shape} of '{usual.name}'",
                expected="a row of `sparsona models`, or from Python a torch.nn.Module",
                hint="name it: --model NAME",
            )
        model = model or usual.default_model
        usual = usual or models.read_spec(model)[0]
    elif not callable(model):
        expected = "the name of a network, a torch.nn.Module, or a function that builds one"
        raise SparsonaError(f"a model of type {type(model).__name__}", expected=expected)
    elif source is None and (options.input_shape is None or options.classes is None):
        raise SparsonaError(
            "a module without its input", expected="input_shape and classes", hint="for example input_shape=(3, 32, 32)"
        )
    shape, classes = options.input_shape or usual.input_shape, options.classes or usual.num_classes
    if isinstance(model, str):
        return model, models.outline(model, shape, classes)
    from sparsona.core.task import Task  # only here: a user's module needs torch

    tokens = source is not None and source.has_tokens if options.tokens is None else options.tokens
    return type(model).__name__, Task(model, shape, classes, tokens=tokens)


def _notes(
    card: methods.MethodCard | RuleCard, outline: Outline, kinds: list[Cost], run: RunConfig, size: int, peers: bool
) -> Iterator[str]:
    """Notes on these figures in particular; `size` is that of the whole model."""
    if isinstance(card, RuleCard) and card.note:
        yield card.note
    elif not all(cost.exact for cost in kinds):
        yield "training decides what is used and sent: these are upper bounds"
    if any(cost.compact for cost in kinds):
        yield "messages are compacted, and their content decides how short they become: bytes are upper bounds"
    if peers:
        yield "in the first round of a run no peer has a message yet: total bytes, which count it, are upper bounds"
    if frozen := outline.layout.frozen.size:
        yield f"{frozen:,} parameters more are frozen: held, and neither trained nor sent"
    if outline.uncounted:
        yield f"FLOPs of layers that are neither linear nor convolutions are missing: {', '.join(outline.uncounted)}"
    for cost, capacity in zip(kinds, cycle(run.capacities), strict=False):
        held = [part.num_values for part in (*cost.kept, *(cost.down or ())) if not part.is_mask]
        if max(held, default=0) > capacity * size:
            yield "capacities are not kept: this method's models are larger than some clients can hold"
            return


def _price(
    card: methods.MethodCard | RuleCard, outline: Outline, config: Any
) -> tuple[Callable[[Layout, Client, Round], Cost], bool]:
    """The function that returns the cost of a turn, and whether clients send to each other."""
    if isinstance(card, RuleCard):
        rule = card.rule
        return (lambda layout, client, round_: rule(layout, client, round_, config)), card.peers
    method = methods.make(outline, row=card, config=config)
    return method.cost, card.peers


def _traffic(
    kinds: list[Cost],
    experiment: Experiment,
    size: Callable[[tuple[PartSize, ...]], int],
    one_direction: bool,
) -> Traffic:
    sizes = [size(cost.up) if cost.up else 0 for cost in kinds]
    sent = _sum(sizes, experiment)
    if experiment.graph is not None:
        return _traffic_of_peers(sizes, sent, experiment, one_direction)
    received = _sum([size(cost.down) if cost.down else 0 for cost in kinds], experiment)
    up, down, turns = _mean(sent, experiment), _mean(received, experiment), experiment.sampled
    return Traffic(
        up,
        down,
        round_up=turns * up,
        round_down=turns * down,
        round=turns * (up + down),
        tuning=received if experiment.run.tune_epochs else 0,
        busiest=turns * (max(up, down) if one_direction else up + down),
        busiest_in=turns * up,
        busiest_out=turns * down,
    )


def _traffic_of_peers(sizes: list[int], sent: int, experiment: Experiment, one_direction: bool) -> Traffic:
    """`sizes` are those of a message by capacity, `sent` their sum over all peers."""
    each = experiment.links.each
    if each is not None:
        once, most = each * sent, each * max(sizes)
        # The peer with the largest message receives those of others: in a random graph and on a ring, on average.
        others = _divide(each * (sent - max(sizes)), experiment.clients - 1)
    else:
        of = [sizes[client % len(sizes)] for client in range(experiment.clients)]
        out = Counter(sender for received in experiment.links.received for sender in received)
        ways = [
            (out[client] * of[client], sum(of[sender] for sender in received))
            for client, received in enumerate(experiment.links.received)
        ]
        once = sum(way[0] for way in ways)
        most, others = max(ways, key=lambda way: way[0] if one_direction else sum(way))
    mean = _mean(once, experiment)
    busiest = most if one_direction else most + others
    tuning = 0
    if experiment.run.tune_epochs:  # peers mix once more: as in a round, or everybody's models
        tuning = (experiment.clients - 1) * sent if experiment.run.tune_from == "all" else once
    return Traffic(mean, mean, once, once, once, tuning, busiest, others, most, tuning_up=tuning)


def _paper_size(parts: tuple[PartSize, ...], quirks: tuple[str, ...], uniform: bool) -> int:
    size = paper_size(parts)
    if "zero-biases" in quirks:
        for part in parts:
            # Only norms have biases that cost no FLOPs. ERK leaves them whole, a uniform mask takes its share of them.
            zeros = sum(s.size for s in part.layout.slots if s.name.endswith("bias") and not s.flops_per_weight)
            size -= 0 if part.is_mask else 2 * zeros * part.num_values // part.layout.size if uniform else 2 * zeros
    return size


def _search_flops(cost: Cost, layout: Layout, quirks: tuple[str, ...]) -> int:
    if "phantom-screening" in quirks and any(part.is_mask for part in cost.kept):
        return SCREENING_BATCH * layout.train_flops()
    return cost.search_flops


def _tune_flops(cost: Cost, infer_flops: int, layout: Layout, samples: int) -> int:
    """Of one epoch; an example in training is three forward passes unless the method says otherwise."""
    return samples * layout.with_backward(infer_flops) if cost.tune_flops is None else cost.tune_flops


def _memory(cost: Cost, layout: Layout) -> Memory:
    gradient = PartSize("gradient", layout, layout.size)
    work = (gradient,) if cost.at_work is None else cost.at_work
    held = (*cost.kept, *(cost.down or ()), *(part for part in work if part.name != "gradient"))
    searches = cost.search_flops and any(part.is_mask for part in cost.kept)
    frozen = 4 * layout.frozen.size
    return Memory(
        frozen + _bytes(cost.kept),
        frozen + _bytes((*cost.kept, *(cost.down or cost.mixing))),
        frozen + _bytes((*held, *(part for part in work if part.name == "gradient"))),
        frozen + _bytes((*held, gradient)) if searches else 0,
    )


def _bytes(parts: Iterable[PartSize]) -> int:
    """Four bytes a value, however few it travels as, and a bit an entry of a mask; which entries a sparse model has,
    its mask says."""
    return sum(payload_size(replace(part, bits=32))[1] for part in parts)


def _sum(values: list[int], experiment: Experiment) -> int:
    """Over all clients, given the value of each kind."""
    return sum(value * count for value, count in zip(values, experiment.kinds, strict=True))


def _mean(total: int, experiment: Experiment) -> Number:
    return _divide(total, experiment.clients)


def _divide(total: int, number: int) -> Number:
    """Whole where it can be: FLOPs of a run pass what a float holds exactly."""
    return total // number if total % number == 0 else total / number
