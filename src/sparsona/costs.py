"""What an experiment costs, before it is run: bytes, FLOPs, memory. Free of torch.

Every round is taken to cost what the first one does, and every client to have the same number of examples.
docs/accounting.md says what is counted, and how the papers' printed figures come out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from sparsona import data, methods, models
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.layout import Layout
from sparsona.core.outline import Outline
from sparsona.core.round import Client, Round
from sparsona.core.seeds import Seeds
from sparsona.core.update import Cost, PartSize
from sparsona.cost_report import CostReport, Flops, Memory, Number, Traffic
from sparsona.cost_rules import COST_RULES, RuleCard
from sparsona.runs import config as configs
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
    "emnist-400-rounds": "FedSpa's EMNIST figures rest on 400 rounds, its others on 1,000",
}


def _parsed_shape(value: Any) -> Any:
    """'3x32x32', as it is written on a command line; one number is the length of a sequence."""
    if not isinstance(value, str | int):
        return value
    parts = str(value).lower().split("x")
    if not all(part.isdecimal() for part in parts):
        raise PydanticCustomError("shape", "a shape like 3x32x32, or a length")
    return tuple(int(part) for part in parts)


class CostConfig(BaseModel):
    """What decides the cost of an experiment besides the method's own options."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: str | None = Field(None, description="a row of `sparsona data`: its input, classes, examples and model")
    classes: int | None = Field(
        None, ge=1, description="number of classes; none: the data's, or the model's usual ones"
    )
    input_shape: Annotated[tuple[Annotated[int, Field(ge=1)], ...] | None, BeforeValidator(_parsed_shape)] = Field(
        None, description="shape of an example; none: the data's, or the model's usual one"
    )
    tokens: bool | None = Field(None, description="whether a module of your own takes tokens; none: as the data has it")
    rounds: int = Field(1000, ge=1, description="number of rounds")
    clients: int = Field(100, ge=1, description="number of clients")
    per_round: int | None = Field(None, ge=1, description="clients sampled per round; none: 10, and all where peers")
    samples: int | None = Field(None, ge=1, description="training examples of a client; none: the data's share, or 500")
    batch_size: int = Field(128, ge=1, description="examples in a training batch")
    capacities: Annotated[
        tuple[Annotated[float, Field(gt=0, le=1)], ...], BeforeValidator(configs.listed), Field(min_length=1)
    ] = Field((1.0,), description="density each client can hold, repeated over clients")
    tune_epochs: int = Field(0, ge=0, description="epochs of final tuning for every client; 0: none")
    topology: Literal["random", "ring", "full"] = Field("random", description="who is whose neighbour, among peers")
    neighbours: int = Field(10, ge=1, description="neighbours of a peer in a random topology")
    counting: Literal["encoded", "paper"] = Field("encoded", description="bytes as encoded, or as the papers count")
    quirks: Annotated[tuple[str, ...], BeforeValidator(configs.listed)] = Field(
        (), description="departures that printed figures rest on"
    )

    def conflicts(self, peers: bool) -> list[SparsonaError]:
        """What single fields cannot see."""
        found = [unknown_name("quirk", quirk, QUIRKS) for quirk in self.quirks if quirk not in QUIRKS]
        given = self.model_fields_set
        if peers and self.per_round not in (None, self.clients):
            what, expected = f"per_round = {self.per_round} among peers", "all clients: each trains in every round"
            found.append(SparsonaError(what, expected=expected, mend="leave --per-round out, or set --clients"))
        elif self.sampled(peers) > self.clients:
            what, expected = f"{self.per_round or 10} clients per round of {self.clients}", f"at most {self.clients}"
            found.append(SparsonaError(what, expected=expected, mend="lower --per-round or raise --clients"))
        for key in ("topology", "neighbours"):
            if key in given and not peers:
                what, expected = f"'{key}' for a method with a server", "a method whose clients send to each other"
                found.append(SparsonaError(what, expected=expected, mend=f"leave '{key}' out"))
        if "neighbours" in given and self.topology != "random":
            what, expected = f"'neighbours' in a {self.topology} graph", "topology=random, the only one with a choice"
            found.append(SparsonaError(what, expected=expected, mend="leave 'neighbours' or 'topology' out"))
        if peers and self.links >= self.clients:
            what, expected = f"{self.links} neighbours among {self.clients} clients", f"at most {self.clients - 1}"
            found.append(SparsonaError(what, expected=expected, mend="lower neighbours or raise --clients"))
        if "emnist-400-rounds" in self.quirks and "rounds" in given and self.rounds != 400:
            what, expected = f"--rounds {self.rounds} with the quirk of 400 rounds", "one of the two"
            found.append(SparsonaError(what, expected=expected, mend="leave --rounds out"))
        return found

    @property
    def links(self) -> int:
        """Neighbours of each peer; fewer than usual where there are fewer peers, as in a run."""
        others = self.clients - 1
        number = self.neighbours if "neighbours" in self.model_fields_set else min(self.neighbours, max(others, 1))
        return {"random": number, "ring": min(2, max(others, 1)), "full": others}[self.topology]

    @property
    def all_rounds(self) -> int:
        return 400 if "emnist-400-rounds" in self.quirks else self.rounds

    @property
    def shares(self) -> list[int]:
        """Clients of each capacity, of which those past the number of clients have none."""
        whole, rest = divmod(self.clients, len(self.capacities))
        counts = [whole + (index < rest) for index in range(len(self.capacities))]
        return [count for count in counts if count]

    def sampled(self, peers: bool) -> int:
        """Clients that train in a round."""
        return self.clients if peers else self.per_round or 10


def cost(method: str, *, model: Any = None, **options: Any) -> CostReport:
    """What `method` would cost, without training: a row of `sparsona methods`, or one with a rule for its costs only.

    `model` names a network, or is an nn.Module (which needs `input_shape` and `classes`); left out, it is the default
    of `data`. `options` are those of `CostConfig` (rounds, per_round, clients, samples, counting, quirks, ...) and the
    method's own (epochs, density, ...); some of them may follow the method's name after a colon.
    """
    name, own = configs.parse_method(method)
    card, kind = _card(name)
    given = {key.replace("-", "_"): value for key, value in {**options, **own}.items()}
    known = CostConfig.model_fields.keys() | kind.model_fields.keys()
    mistakes = [unknown_name(f"option of {name}", key, known) for key in given if key not in known]
    asked_values = {**card.engine, **{key: value for key, value in given.items() if key in CostConfig.model_fields}}
    own_values = {**card.options, **{key: value for key, value in given.items() if key in kind.model_fields}}
    mistakes += configs.mistakes(CostConfig, asked_values, "a cost") + configs.mistakes(kind, own_values, name)
    if mistakes:
        raise configs.all_of(mistakes)
    return _report(card, CostConfig(**asked_values), kind(**own_values), model)


def options_of(method: str) -> set[str]:
    """Names of the options that `cost` takes for this method."""
    return {"model", *CostConfig.model_fields, *_card(configs.parse_method(method)[0])[1].model_fields}


def _card(name: str) -> tuple[methods.MethodCard | RuleCard, Any]:
    """A row and the class of its options."""
    if name in methods.METHODS:
        return methods.card(name), methods.factory(name)[1]
    if name in COST_RULES:
        return COST_RULES[name], COST_RULES[name].config
    error = unknown_name("method", name, [*methods.METHODS, *COST_RULES])
    expected = f"one of {', '.join(methods.METHODS)}; costs only: {', '.join(COST_RULES)}"
    raise SparsonaError(error.what, expected=expected, mend=error.mend)


def _report(card: methods.MethodCard | RuleCard, asked: CostConfig, config: Any, model: Any) -> CostReport:
    source = _source(asked)
    samples, samples_from = _samples(source, asked)
    label, outline = _outline(model, source, asked)
    price, peers = _price(card, outline, config)
    if found := asked.conflicts(peers):
        raise configs.all_of(found)
    layout = outline.layout
    round_ = Round(0, asked.all_rounds, 1.0, asked.batch_size, Seeds(0))
    kinds = [
        price(layout, Client(index, samples, capacity, num_clients=asked.clients), round_)
        for index, capacity in enumerate(asked.capacities[: asked.clients])
    ]
    infer = [layout.forward_flops() if cost.infer_flops is None else cost.infer_flops for cost in kinds]
    flops = Flops(
        _mean(_sum([cost.train_flops for cost in kinds], asked), asked),
        _mean(_sum([_search_flops(cost, layout, asked.quirks) for cost in kinds], asked), asked),
        asked.tune_epochs * _sum([_tune_flops(*cost, samples) for cost in zip(kinds, infer, strict=True)], asked),
    )
    as_papers = partial(_paper_size, quirks=asked.quirks, uniform=getattr(config, "allocation", "erk") == "uniform")
    return CostReport(
        method=card.name,
        title=card.title,
        model=label,
        num_parameters=layout.size,
        input_shape=tuple(outline.input_shape),
        classes=outline.num_classes,
        costs_only=isinstance(card, RuleCard),
        exact=all(cost.exact for cost in kinds) and not outline.uncounted,
        notes=tuple(_notes(card, outline, kinds, asked)),
        peers=peers,
        setting=asked,
        options=config.model_dump(mode="json"),
        samples=samples,
        samples_from=samples_from,
        flops=flops,
        inference_flops=max(infer),
        memory=max((_memory(cost, layout) for cost in kinds), key=lambda memory: max(vars(memory).values())),
        encoded=_traffic(kinds, asked, peers, message_size, one_direction=False),
        paper=_traffic(kinds, asked, peers, as_papers, one_direction=True),
    )


def _source(asked: CostConfig) -> data.SourceCard | None:
    if asked.data is not None and ":" in asked.data:
        raise SparsonaError(
            f"costs of '{asked.data}', which would have to be read",
            expected="a row of `sparsona data`, or no data at all",
            mend="say --input, --classes and --samples instead",
        )
    if asked.data is not None and asked.data not in data.SOURCES:
        raise unknown_name("data set", asked.data, data.SOURCES)
    return None if asked.data is None else data.SOURCES[asked.data]


def _samples(source: data.SourceCard | None, asked: CostConfig) -> tuple[int, str]:
    """How many examples a client trains on, and where that number comes from if nobody said it."""
    if source is None or asked.samples is not None:
        return asked.samples or 500, ""
    if source.is_natural:
        raise SparsonaError(
            f"no number of examples for a client of {source.name}",
            expected="samples: its clients are people, and each has as many as it has",
            mend="say how many to reckon with, for example --samples 200",
        )
    all_, what = (source.num_train, "published training") if source.num_train else (source.num_examples, "published")
    of = f"{all_:,} {what} examples / {asked.clients:,} clients, none held out for validation or testing"
    return max(1, all_ // asked.clients), of


def _outline(model: Any, source: data.SourceCard | None, asked: CostConfig) -> tuple[str, Any]:
    """The model's name and outline."""
    usual: Any = source
    if model is None or isinstance(model, str):
        if model is None and source is None:
            raise SparsonaError("no model", expected="--model or --data", mend="for example --model vgg11")
        model = model or usual.default_model
        usual = usual or models.read_spec(model)[0]
    elif not callable(model):
        expected = "the name of a network, a torch.nn.Module, or a function that builds one"
        raise SparsonaError(f"a model of type {type(model).__name__}", expected=expected)
    elif source is None and (asked.input_shape is None or asked.classes is None):
        raise SparsonaError(
            "a module without its input", expected="input_shape and classes", mend="for example input_shape=(3, 32, 32)"
        )
    shape, classes = asked.input_shape or usual.input_shape, asked.classes or usual.num_classes
    if isinstance(model, str):
        return model, models.outline(model, shape, classes)
    from sparsona.core.task import Task  # only here: a person's own module needs torch

    tokens = source is not None and source.has_tokens if asked.tokens is None else asked.tokens
    return type(model).__name__, Task(model, shape, classes, tokens=tokens)


def _notes(
    card: methods.MethodCard | RuleCard, outline: Outline, kinds: list[Cost], asked: CostConfig
) -> Iterator[str]:
    """What is to be known of these figures and not of others."""
    if isinstance(card, RuleCard) and card.note:
        yield card.note
    elif not all(cost.exact for cost in kinds):
        yield "training decides what is used and sent: these are upper bounds"
    if outline.uncounted:
        yield f"FLOPs of layers that are neither linear nor convolutions are missing: {', '.join(outline.uncounted)}"
    for cost, capacity in zip(kinds, asked.capacities, strict=False):
        held = [part.num_values for part in (*cost.kept, *(cost.down or ())) if not part.is_mask]
        if max(held, default=0) > capacity * outline.layout.size:
            yield "capacities are not kept: this method's models are larger than some clients can hold"
            return


def _price(
    card: methods.MethodCard | RuleCard, outline: Outline, config: Any
) -> tuple[Callable[[Layout, Client, Round], Cost], bool]:
    """What says the cost of a turn, and whether clients send to each other."""
    if isinstance(card, RuleCard):
        rule = card.rule
        return (lambda layout, client, round_: rule(layout, client, round_, config)), card.peers
    method = methods.factory(card.name)[0](outline, config)
    return method.cost, method.peer is not None


def _traffic(
    kinds: list[Cost],
    asked: CostConfig,
    peers: bool,
    size: Callable[[tuple[PartSize, ...]], int],
    one_direction: bool,
) -> Traffic:
    sizes = [size(cost.up) if cost.up else 0 for cost in kinds]
    sent = _sum(sizes, asked)
    if peers:
        mean, once, most = asked.links * _mean(sent, asked), asked.links * sent, asked.links * max(sizes)
        # Who sends the largest message receives those of others: in a random graph and on a ring, on average.
        others = _divide(asked.links * (sent - max(sizes)), asked.clients - 1)
        busiest = most if one_direction else most + others
        return Traffic(mean, mean, once, once, once, 0, busiest, busiest_in=others, busiest_out=most)
    received = _sum([size(cost.down) if cost.down else 0 for cost in kinds], asked)
    up, down, turns = _mean(sent, asked), _mean(received, asked), asked.sampled(peers)
    return Traffic(
        up,
        down,
        round_up=turns * up,
        round_down=turns * down,
        round=turns * (up + down),
        tuning=received if asked.tune_epochs else 0,
        busiest=turns * (max(up, down) if one_direction else up + down),
        busiest_in=turns * up,
        busiest_out=turns * down,
    )


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
        return SCREENING_BATCH * 3 * layout.forward_flops()
    return cost.search_flops


def _tune_flops(cost: Cost, infer_flops: int, samples: int) -> int:
    """Of one epoch; an example in training is three forward passes unless the method says otherwise."""
    return samples * 3 * infer_flops if cost.tune_flops is None else cost.tune_flops


def _memory(cost: Cost, layout: Layout) -> Memory:
    gradient = PartSize("gradient", layout, layout.size)
    work = (gradient,) if cost.at_work is None else cost.at_work
    held = (*cost.kept, *(cost.down or ()), *(part for part in work if part.name != "gradient"))
    searches = cost.search_flops and any(part.is_mask for part in cost.kept)
    return Memory(
        _bytes(cost.kept),
        _bytes((*cost.kept, *(cost.down or cost.mixing))),
        _bytes((*held, *(part for part in work if part.name == "gradient"))),
        _bytes((*held, gradient)) if searches else 0,
    )


def _bytes(parts: Iterable[PartSize]) -> int:
    """Four bytes a value, a bit an entry of a mask; which entries a sparse model has, its mask says."""
    return sum(payload_size(part)[1] for part in parts)


def _sum(values: list[int], asked: CostConfig) -> int:
    """Over all clients, given the value of each capacity."""
    return sum(value * count for value, count in zip(values, asked.shares, strict=True))


def _mean(total: int, asked: CostConfig) -> Number:
    return _divide(total, asked.clients)


def _divide(total: int, number: int) -> Number:
    """Whole where it can be: FLOPs of a run pass what a float holds exactly."""
    return total // number if total % number == 0 else total / number
