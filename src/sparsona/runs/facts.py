"""Facts of a run: what is known of its data, model and method when it starts (about.json).

Options are in config.json; facts are derived from options and data. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

import numpy as np

from sparsona.core.errors import SparsonaError
from sparsona.core.packing import Packing
from sparsona.core.spec import shorten
from sparsona.data.names import clean_name, clean_names

FORMAT = 2  # of a run folder that this version writes and resumes
DTYPES = ("float32", "uint8", "int32")  # of stored inputs
READABLE = (1, 2)  # of those that it reads: format 1 lacks nothing that a report needs
MEANS = {"clients": "mean", "examples": "weighted"}  # in a summary, the accuracy that is the result, by headline_weight


@dataclass(frozen=True)
class WarmStartFacts:
    """Where the weights come from that a run began with.

    `weights` and `federation` are digests; of the `of` parameters, `taken` come from that run; `same_data`: it was
    trained on the same clients. `data` is what its data set is called; "" in runs of older versions. `client_digest` is
    as in RunFacts.
    """

    run: str
    method: str
    rounds: int
    weights: str
    federation: str
    taken: int = 0
    of: int = 0
    same_data: bool = True
    data: str = ""
    client_digest: str = ""


@dataclass(frozen=True)
class Extension:
    """Rounds that were added to a run with `resume --rounds`.

    Args:
        rounds: how many rounds it had before.
        total: how many it has with them.
        changed: the options that follow a run's progress, and so run differently than in a run of `total` rounds.
    """

    rounds: int
    total: int
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExampleFacts:
    """What a run's examples look like, so that its models can be used without them.

    `shape` and `dtype` are those of a stored input; `num_outputs` is the number of classes, of tokens or of outputs.
    The others are those of the federation's View that matter to a test example, the name of the data, and where in a
    stored row several inputs are, as Packing has it.
    """

    shape: tuple[int, ...]
    dtype: str
    num_outputs: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    crop: int | None = None
    test_resize: bool = False
    name: str = ""
    packing: Packing | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ExampleFacts:
        """What `asdict` wrote."""
        known: dict[str, Any] = {one.name: values[one.name] for one in fields(cls) if one.name in values}
        lists: dict[str, Any] = {key: tuple(value) for key, value in known.items() if isinstance(value, list)}
        if known.get("packing") is not None:
            lists["packing"] = Packing.from_json(known["packing"]["fields"])
        found = cls(**known | lists)
        sides = (*found.shape, found.num_outputs, *(() if found.crop is None else (found.crop,)))
        numbers = (*found.mean, *found.std)
        if (
            found.dtype not in DTYPES
            or not all(type(side) is int and side > 0 for side in sides)
            or not all(type(number) in (int, float) for number in numbers)
        ):
            raise ValueError(f"examples of {found}")
        return found


@dataclass(frozen=True, eq=False, kw_only=True)
class RunFacts:
    """What is known about a run besides its options. Digests identify data and models.

    `point` is the headline's evaluation point, `headline_weight` how clients count in its mean: by `clients`, all the
    same, or by their test `examples`. `alone`: clients send nothing; `peers`: they send to each other. `leaves_model`:
    the run ends with a shared model in a file; False also in runs of older versions. `partial_global`: the server's
    model is no client's whole model. `graph` and `latency` are digests of files, if there are any. `tested_on` says how
    test data was chosen, `left_out` how many owners were left out, by reason. `sizes` has a row of training, validation
    and test examples for each client; `label_counts` counts its training labels, and is None where labels are tokens or
    numbers, and where clients on other machines do not tell them; there, FEW is a count from 1 to 4, and sizes are 0
    for a client that never came. `needs_validation`: training decides by validation data. `has_one_size`: clients have
    models of one size, though some have little capacity. `preset` has the options that a preset set, and what of it the
    run has otherwise, in words. `num_personal` is how many parameters of a client's model are its own, and no other
    client's; None: the method does not say. `targets` are classes, binary (by one logit), labels, tokens or numbers; ""
    in runs of older versions, as `loss` is, which have no `examples` either. `class_weights` are as they were counted,
    `metrics` the names of those evaluated. `num_frozen` parameters of the model are frozen, and not among its
    `num_parameters`. `data` is what the data set is called; `client_names` and `class_names` are empty where there are
    none. `differing`: in which versions and parts of machines the sides of a run on several machines differ, and what
    is in use. `availability` is a digest of a trace. `config` has a digest of each option in config.json, and is empty
    in runs of older versions; `extensions` are the rounds that were added later. `functions` has digests of the code of
    functions from Python, by option and name. `attackers` are the clients that attack, where some do. `in_the_clear`:
    in a run with differential privacy, the parts of messages that noise does not cover. `federation` is a digest of all
    examples in their order, or of what clients on several machines report; `client_digest` is one of what each client
    holds, and "" of data sets of the catalog, on several machines and in runs of older versions: see `same_data`.
    `client_owners`: of clients without names, the numbers of the owners that they are in the user's data; empty in runs
    of older versions. `drawn_by` is the partition that made clients up; "" where clients have their own examples, on
    several machines, and in runs of older versions.
    """

    method: str
    title: str
    point: str
    federation: str
    layout: str
    start: str
    num_parameters: int
    sizes: np.ndarray
    label_counts: np.ndarray | None
    alone: bool
    has_batch_statistics: bool
    ignores_capacity: bool
    tested_on: str
    left_out: Mapping[str, int]
    augments: bool
    peers: bool = False
    leaves_model: bool = False
    partial_global: bool = False
    graph: str | None = None
    latency: str | None = None
    transductive: bool = False
    novel: tuple[int, ...] = ()
    is_regression: bool = False
    needs_validation: bool = False
    has_one_size: bool = False
    preset: str = ""
    num_personal: int | None = None
    warm_start: WarmStartFacts | None = None
    targets: str = ""
    availability: str | None = None
    config: Mapping[str, str] = field(default_factory=dict)
    extensions: tuple[Extension, ...] = ()
    loss: str = ""
    class_weights: tuple[float, ...] | None = None
    metrics: tuple[str, ...] = ()
    examples: ExampleFacts | None = None
    num_frozen: int = 0
    data: str = ""
    client_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    differing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    functions: Mapping[str, str] = field(default_factory=dict)
    attackers: tuple[int, ...] = ()
    in_the_clear: tuple[str, ...] = ()
    client_digest: str = ""
    client_owners: tuple[int, ...] = ()
    drawn_by: str = ""
    headline_weight: str = "clients"
    format: int = field(default=FORMAT)

    @property
    def weight(self) -> str:
        """How clients count in the mean that is the result; in a regression all the same."""
        return "clients" if self.is_regression else self.headline_weight

    @property
    def predicts_tokens(self) -> bool:
        """Whether the next token is predicted at each position; older runs have no label counts then."""
        return self.targets == "tokens" if self.targets else self.label_counts is None and not self.is_regression

    def _check(self) -> None:
        """Raise ValueError for values that no run has: about.json may be of anybody."""
        for facts in (self, *self.extensions, *(() if self.warm_start is None else (self.warm_start,))):
            for one in fields(facts):
                kinds, value = _KINDS.get(str(one.type)), getattr(facts, one.name)
                if kinds and (type(value) not in kinds or (type(value) is int and not 0 <= value < 1 << 62)):
                    raise ValueError(f"{one.name} is {shorten(repr(value))}")
        num, counts = len(self.sizes), self.label_counts
        if self.sizes.shape != (num, 3) or (counts is not None and len(counts) != num):
            raise ValueError("its sizes and label counts are not those of the same clients")
        if counts is not None and self.examples is not None and self.examples.num_outputs > counts.shape[1]:
            raise ValueError(f"label counts of {counts.shape[1]} classes, and {self.examples.num_outputs} outputs")
        if len(self.client_owners) not in (0, num):
            raise ValueError(f"{len(self.client_owners)} owners for {num} clients")
        if not all(type(one) is int and 0 <= one < num for one in (*self.novel, *self.attackers)):
            raise ValueError("it names clients that are none")
        texts = (*self.metrics, *self.config.values(), *(text for values in self.differing.values() for text in values))
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a number where a text belongs")
        if not all(type(count) is int for count in dict(self.left_out).values()):
            raise ValueError("its numbers of owners that were left out are none")
        if self.headline_weight not in MEANS:
            raise ValueError(f"headline_weight is {shorten(repr(self.headline_weight))}")

    def as_json(self) -> dict[str, Any]:
        """Plain values, the format first."""
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        plain["sizes"] = self.sizes.tolist()
        plain["label_counts"] = None if self.label_counts is None else self.label_counts.tolist()
        plain["client_names"] = list(self.client_names)
        plain["differing"] = {name: list(values) for name, values in self.differing.items()}
        plain["left_out"], plain["novel"] = dict(self.left_out), list(self.novel)
        plain["attackers"], plain["client_owners"] = list(self.attackers), list(self.client_owners)
        plain["metrics"] = list(self.metrics)
        plain["class_weights"] = None if self.class_weights is None else list(self.class_weights)
        plain["class_names"] = list(self.class_names)
        plain["warm_start"] = None if self.warm_start is None else asdict(self.warm_start)
        plain["functions"] = dict(self.functions)
        plain["config"], plain["extensions"] = dict(self.config), [asdict(one) for one in self.extensions]
        plain["examples"] = None if self.examples is None else asdict(self.examples)
        return {"format": plain.pop("format"), **plain}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str) -> RunFacts:
        """The facts that `as_json` wrote, in this version or in one that `READABLE` names; `where` is for errors."""
        if values.get("format") not in READABLE:
            raise SparsonaError(
                f"'{where}' was written in format {values.get('format')}",
                expected=f"format {FORMAT}",
                hint="use the version of sparsona named in its environment.json",
            )
        needed = [one.name for one in fields(cls) if one.default is MISSING and one.default_factory is MISSING]
        missing = [name for name in needed if name not in values]
        known = {one.name: values[one.name] for one in fields(cls) if one.name in values}
        try:
            if missing:
                raise ValueError(f"it lacks {', '.join(missing)}")
            known["sizes"] = _freeze(known["sizes"])
            known["label_counts"] = None if known["label_counts"] is None else _freeze(known["label_counts"])
            known["differing"] = {name: tuple(values) for name, values in known.get("differing", {}).items()}
            known["novel"], known["metrics"] = (tuple(known.get(name, ())) for name in ("novel", "metrics"))
            known["client_owners"] = tuple(map(int, known.get("client_owners", ())))
            known["attackers"] = tuple(map(int, known.get("attackers", ())))
            known["in_the_clear"] = tuple(map(str, known.get("in_the_clear", ())))
            if known.get("class_weights") is not None:
                known["class_weights"] = tuple(map(float, known["class_weights"]))
            for name, what, count in (
                ("client_names", "clients", len(known["sizes"])),
                ("class_names", "classes", None if known["label_counts"] is None else known["label_counts"].shape[1]),
            ):
                known[name] = clean_names(known[name], what, count) if known.get(name) else ()
            known["data"], known["drawn_by"] = (clean_name(known.get(name, "")) for name in ("data", "drawn_by"))
            if known.get("warm_start") is not None:
                known["warm_start"] = WarmStartFacts(**known["warm_start"])
            extensions = (Extension(**{**one, "changed": tuple(one["changed"])}) for one in known.get("extensions", ()))
            known["extensions"] = tuple(extensions)
            if not isinstance(known.get("config", {}), dict):
                raise ValueError("its digests of options are none")
            known["functions"] = {str(key): str(value) for key, value in dict(known.get("functions", {})).items()}
            if known.get("examples") is not None:
                known["examples"] = ExampleFacts.from_json(known["examples"])
            found = cls(**known)
            found._check()
            return found
        except (TypeError, ValueError, AttributeError, KeyError, IndexError, OverflowError, SparsonaError) as error:
            raise SparsonaError(
                f"'{where}' is damaged: its facts cannot be read ({error})",
                expected="about.json as sparsona wrote it",
                hint="restore it from a copy, or start the run again in another folder",
            ) from None


def same_data(one: RunFacts | WarmStartFacts, other: RunFacts | WarmStartFacts) -> bool:
    """Whether each client of two runs holds the same examples in the same order, wherever they are among all.

    Runs of older versions, and of data sets of the catalog, have a digest of all examples in their order alone.
    """
    return one.federation == other.federation or bool(one.client_digest and one.client_digest == other.client_digest)


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "str": (str,),
    "bool": (bool,),
    "int | None": (int, type(None)),
    "str | None": (str, type(None)),
}


def _freeze(values: Any) -> np.ndarray:
    """A table of whole numbers that nobody writes to."""
    found = np.array(values)
    if found.ndim != 2 or found.dtype != np.int64:
        raise ValueError(f"a table of {found.dtype} in {found.ndim} dimensions")
    found.flags.writeable = False
    return found
