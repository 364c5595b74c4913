"""What a run is asked to do: checked before anything starts, every mistake reported at once. Free of torch."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from sparsona.core import points as eval_points
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.lr_schedule import lr_schedule


def listed(value: Any) -> Any:
    """One value where a list is meant."""
    return (value,) if isinstance(value, str | float | int) else value


def known_points(names: tuple[str, ...]) -> tuple[str, ...]:
    """Evaluation points that may be asked for."""
    for name in names:
        try:
            eval_points.check_option(name)
        except SparsonaError as error:
            raise ValueError(f"{error.expected}; {error.mend}" if error.mend else error.expected) from None
    return names


def whole(value: float) -> float:
    """A count as it is printed."""
    return int(value) if value == int(value) else value


class RunConfig(BaseModel):
    """Everything that decides a run's result, and where it runs. Options of the method itself are in `options`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str = Field(description="a row of `sparsona methods`")
    preset: str | None = Field(None, description="paper or authors: the method's options as published")
    data: str = Field("digits", description="a row of `sparsona data`")
    data_dir: str | None = Field(None, description="folder where the data's files are looked for first")
    augment: bool | None = Field(None, description="crop and mirror training images; none: as usual for the data")
    resize: int | None = Field(
        None, ge=1, description="side of the square that pictures are made when read (folder, gldv2)"
    )
    crop: int | None = Field(None, ge=1, description="pixels of the square cut from each image (folder, gldv2)")
    sequence_length: int | None = Field(None, ge=2, description="tokens in one example of text; none: 20")
    vocabulary_size: int | None = Field(None, ge=1, description="most frequent words kept; none: 10,000")
    data_rate: float = Field(1.0, gt=0, le=1, description="share of the examples (partition natural: of people) used")
    clients: int | None = Field(
        None, ge=1, description="number of clients; none: 20, or all that the partition knows (natural, file)"
    )
    partition: str = Field("dirichlet:0.3", description="how the data is shared out among the clients")
    partition_seed: int | None = Field(None, ge=0, description="fixes the partition whatever the seed")
    test: str = Field("auto", description="auto, split, split-train, shares:N or natural: see `sparsona data`")
    validation_rate: float = Field(0.1, ge=0, lt=1, description="share of a client's data held for decisions")
    test_rate: float = Field(0.25, gt=0, lt=1, description="share of a client's data held for the final word")
    min_size: int | None = Field(
        None, ge=2, description="fewest examples a client may be dealt; none: 10, or what can be split (natural)"
    )
    min_train: int = Field(0, ge=0, description="fewest examples to train and decide on; people with less are left out")
    min_test: int = Field(0, ge=0, description="fewest test examples; people with less are left out")
    max_examples: int | None = Field(None, ge=2, description="most examples a client keeps of what it is dealt")
    model: str | None = Field(None, description="a row of `sparsona models`; none: the data set's default")
    rounds: int = Field(30, ge=1, description="number of rounds")
    per_round: int | None = Field(None, ge=1, description="clients sampled per round; none: half of them, all peers")
    batch_size: int = Field(16, ge=1, description="examples in a training batch")
    lr_decay: float = Field(0.998, gt=0, le=1, description="factor on the learning rate after each round")
    lr_schedule: str = Field(
        "decay", description="decay (lr_decay), constant, halving:N rounds, linear:WARM-UP share, or steps:SHARE,..."
    )
    warm_start: str | None = Field(
        None, description="a finished run whose global model is everybody's start; none: weights drawn from the seed"
    )
    seed: int = Field(0, ge=0, description="varies everything: partition, weights, sampling, batches, masks")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where models are trained; auto: a GPU if any")
    precision: Literal["fp32", "tf32", "bf16"] = Field(
        "fp32", description="of convolutions and products on a GPU; weights stay in fp32"
    )
    executor: str = Field("auto", description="serial, workers, stacked, graphed or auto")
    eval_every: int = Field(1, ge=1, description="rounds between evaluations (the last ten are always evaluated)")
    eval_clients: int | None = Field(
        None, ge=1, description="clients tested after rounds and final tuning, drawn once; none: all"
    )
    points: Annotated[tuple[str, ...], BeforeValidator(listed), AfterValidator(known_points)] = Field(
        (),
        description="which models to evaluate besides the headline's: "
        f"{', '.join(eval_points.OPTIONS)}; each also on other data, such as received/validation",
    )
    record_traits: bool = Field(
        False, description="at evaluations, write down how far apart clients' masks or gates are, if they have any"
    )
    tune_epochs: int = Field(0, ge=0, description="epochs of final tuning for every client; 0: none")
    tune_lr_scale: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="learning rate of tuning, as a share of the first round's"
    )
    train_accuracy: bool = Field(False, description="look at the last models on clients' training data, too")
    guard: bool = Field(
        False, description="each client keeps its own or the shared model, whichever its validation data favours"
    )
    drop_rate: float = Field(
        0.0, ge=0, lt=1, description="probability that an update is lost on its way; that a peer is out of reach"
    )
    everyone_trains: bool = Field(False, description="all train each round, only the sampled are aggregated")
    stateless: bool = Field(False, description="clients forget everything between rounds")
    novel: Annotated[float, AfterValidator(whole), PlainSerializer(whole, return_type=int | float)] = Field(
        0, ge=0, allow_inf_nan=False, description="clients held out of training and met at the end; below 1: a share"
    )
    novel_epochs: int | None = Field(
        None, ge=0, description="epochs of tuning for the novel clients alone; none: tune_epochs, as for everybody"
    )
    capacities: Annotated[tuple[float, ...], BeforeValidator(listed)] = Field(
        (1.0,), description="density each client can hold, repeated over clients"
    )
    graph: str | None = Field(
        None, description="who hears from whom, among peers: see `sparsona methods dispfl`; none: random:10, or fewer"
    )
    max_seconds: float | None = Field(None, gt=0, description="stop after the round in which this time is reached")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the method")

    @model_validator(mode="before")
    @classmethod
    def _twenty_clients(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("clients") is not None:
            return values
        name = str(values.get("partition")).strip().partition(":")[0]
        return values if name in ("natural", "file") else {**values, "clients": 20}

    @property
    def sampled(self) -> int:
        """Clients per round, the default worked out; `clients` must be known."""
        assert self.clients is not None
        return self.per_round or max(1, (self.clients - self.num_novel) // 2)

    @property
    def num_novel(self) -> int:
        """Novel clients, a share worked out; `clients` must be known."""
        if 0 < self.novel < 1:
            assert self.clients is not None
            return max(1, round(self.novel * self.clients))
        return int(self.novel)

    @property
    def headline(self) -> str:
        """The evaluation point whose accuracy is the result."""
        return eval_points.headline(self.tune_epochs)

    @property
    def all_points(self) -> tuple[str, ...]:
        """Every point to evaluate; `received` always, since learning curves need it."""
        always = (eval_points.RECEIVED, eval_points.TUNED)
        return (eval_points.RECEIVED, *(point for point in dict.fromkeys(self.points) if point not in always))

    def conflicts(self) -> list[SparsonaError]:
        """What single fields cannot see."""
        found = []
        try:
            lr_schedule(self.lr_schedule)
        except SparsonaError as error:
            found.append(error)
        # None: only the data will tell.
        taking_part = None if self.clients is None else self.clients - self.num_novel
        if taking_part is None:
            pass
        elif taking_part < 1:
            found.append(
                SparsonaError(
                    f"{self.num_novel} novel clients of {self.clients}",
                    expected="at least one client that takes part",
                    mend="lower novel or raise --clients",
                )
            )
        elif self.sampled > taking_part:
            found.append(
                SparsonaError(
                    f"cannot sample {self.sampled} clients per round: only {taking_part} take part",
                    expected=f"per_round from 1 to {taking_part}",
                    mend="lower --per-round or raise --clients",
                )
            )
        if taking_part is not None and 1 <= taking_part < (self.eval_clients or 0):
            found.append(
                SparsonaError(
                    f"cannot test {self.eval_clients} clients: only {taking_part} take part",
                    expected=f"eval_clients from 1 to {taking_part}",
                    mend="lower eval_clients, or leave it out: all are tested then",
                )
            )
        if self.novel > 1 and self.novel != int(self.novel):
            found.append(
                SparsonaError(
                    f"{self.novel} novel clients",
                    expected="a whole number, or a share below 1",
                    mend="for example --set novel=4, or novel=0.2",
                )
            )
        if self.novel_epochs and not self.novel:
            found.append(
                SparsonaError(
                    "novel_epochs without novel clients",
                    expected="novel clients to tune",
                    mend="--set novel=0.2 holds a fifth of the clients out",
                )
            )
        if eval_points.select(self.points, "end") and not self.tune_epochs:
            found.append(
                SparsonaError(
                    f"point '{eval_points.TUNED}' without tuning",
                    expected="tune_epochs of 1 or more",
                    mend="--set tune_epochs=5, or use fedavg-ft",
                )
            )
        if not self.capacities or not all(0 < capacity <= 1 for capacity in self.capacities):
            found.append(
                SparsonaError(
                    f"capacities {list(self.capacities)}",
                    expected="one or more densities above 0 and at most 1",
                    mend="for example --set 'capacities=[0.2, 1.0]'",
                )
            )
        return found


def mistakes(kind: type[BaseModel], values: Mapping[str, Any], where: str) -> list[SparsonaError]:
    """Everything that is wrong with these values for `kind`."""
    try:
        kind(**values)
    except ValidationError as error:
        return [_mistake(kind, item, where) for item in error.errors()]
    return []


def _mistake(kind: type[BaseModel], item: Any, where: str) -> SparsonaError:
    key = ".".join(str(place) for place in item["loc"])
    if item["type"] == "extra_forbidden":
        return unknown_name(f"option of {where}", key, kind.model_fields)
    if item["type"] == "missing":
        return SparsonaError(f"{key} is missing from {where}", expected="a config as sparsona writes it")
    if not item["loc"]:  # each is right by itself, but not together: the rule says what is wrong
        rule = item["msg"].removeprefix("Value error, ")
        return SparsonaError(f"options of {where} that do not go together", expected=rule, mend="change one of them")
    field = kind.model_fields.get(str(item["loc"][0]))
    about = f" ({field.description})" if field is not None and field.description else ""
    if item["type"] == "value_error":  # our own words: what would be right
        expected = str(item["ctx"]["error"])
        if not item["loc"]:  # about several options at once, of which the input names only those that were set
            return SparsonaError(f"options of {where} that do not go together", expected=expected)
    else:
        expected = item["msg"].removeprefix("Input should be ").lower()
    return SparsonaError(f"{key} = {item['input']!r}{about}", expected=expected, mend=f"give {key} another value")


def all_of(mistakes: list[SparsonaError]) -> SparsonaError:
    """One error that tells all of them, so that a person mends a config once and not once per mistake."""
    if len(mistakes) == 1:
        return mistakes[0]
    lines = [
        f"{number}. {str(mistake).replace(chr(10), chr(10) + '   ')}" for number, mistake in enumerate(mistakes, 1)
    ]
    return SparsonaError(f"{len(mistakes)} mistakes\n  " + "\n".join(lines).replace("\n", "\n  "))


def validated(kind: type[BaseModel], values: Mapping[str, Any], where: str) -> Any:
    """`kind` from plain values, or one error that lists all that is wrong."""
    if found := mistakes(kind, values, where):
        raise all_of(found)
    return kind(**values)


def split_options(
    values: Mapping[str, Any], method_keys: set[str], where: str
) -> tuple[dict[str, Any], dict[str, Any], list[SparsonaError]]:
    """Sort flat key=value pairs into those of the run, those of the method, and mistakes."""
    run_keys = set(RunConfig.model_fields) - {"options", "method"}
    of_run, of_method, unknown = {}, {}, []
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in run_keys:
            of_run[name] = value
        elif name in method_keys:
            of_method[name] = value
        else:
            error = unknown_name(f"option of {where}", name, run_keys | method_keys)
            unknown.append(
                SparsonaError(error.what, expected=f"what `sparsona methods {where}` lists", mend=error.mend)
            )
    return of_run, of_method, unknown


def parse_value(text: str) -> Any:
    """The value in `key=value` as TOML would read it; anything else is a string, `none` is None."""
    if text.lower() == "none":
        return None
    if text in ("true", "false") or text[:1] in "[0123456789+-.'\"":
        try:
            return tomllib.loads(f"v = {text if text[:1] != '.' else '0' + text}")["v"]
        except tomllib.TOMLDecodeError:
            try:
                return float(text)
            except ValueError:
                return text
    return text


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """'fedspa:density=0.2,search=rsm' is a row and options for it alone."""
    name, _, rest = text.partition(":")
    # Not at commas inside [...], nor at those of a value: personal=norm,output or lr_schedule=steps:0.5,0.75.
    return name, parse_pairs(re.split(r",(?![^\[]*\])(?=[^,]*=)", rest) if rest else [])


def parse_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """key=value texts."""
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise SparsonaError(f"'{pair}' is not an option", expected="key=value", mend="for example density=0.5")
        found[key.strip().replace("-", "_")] = parse_value(value.strip())
    return found


def read_toml(path: str | Path) -> dict[str, Any]:
    """Options from a file: top-level keys, and optionally a table [options] for the method's own."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SparsonaError(
            f"there is no config file '{path}'", expected="a TOML file", mend="check the path given to --config"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SparsonaError(
            f"config file '{path}' cannot be read: {error}",
            expected="a TOML file: lines like rounds = 50",
            mend="correct it at the place named",
        ) from None
    options = values.pop("options", {})
    if not isinstance(options, dict):
        raise SparsonaError(f"'options' in '{path}' is not a table", expected="[options] and key = value lines")
    return {key.replace("-", "_"): value for key, value in {**values, **options}.items()}


def dump(config: RunConfig) -> str:
    """The config as JSON, to be stored with the run."""
    return json.dumps(config.model_dump(mode="json"), indent=2) + "\n"
