"""Options from a method's text, a file, a preset and keywords, sorted into those of the run and of the method.

Free of torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel

from sparsona.core import spec
from sparsona.core.errors import SparsonaError
from sparsona.core.reading import parse_toml, read_text
from sparsona.data.catalog import own_spec
from sparsona.runs.declaration import Option, options_of, with_absolute_paths
from sparsona.runs.options import OPTIONS, RunConfig


class Row(Protocol):
    """What `choose` reads of a row of `sparsona methods`."""

    @property
    def name(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def engine(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Chosen:
    """Options of a run and of its method, still to be validated, and what is wrong with them.

    `unknown` are names of neither; `published` are the names of those that a preset set and the user did not.
    """

    run: dict[str, Any]
    method: dict[str, Any]
    unknown: list[str]
    errors: list[SparsonaError]
    published: frozenset[str] = frozenset()


def choose(row: Row, kind: type[BaseModel], published: Mapping[str, Any], given: Mapping[str, Any]) -> Chosen:
    """Sort flat options into those of the run and those of the method; the more specific source wins.

    Args:
        row: the method's row, whose options come first.
        kind: the class of the method's options.
        published: what a preset sets; a schedule in `given` replaces the published one.
        given: the user's options, from all sources.

    Returns:
        The options with their paths made absolute, and what is wrong.
    """
    published = dict(published)
    if given.get("lr_schedule", "decay") != "decay":
        published.pop("lr_decay", None)
    elif "lr_decay" in given:
        published.pop("lr_schedule", None)
    own = options_of(kind)
    of_run: dict[str, Any] = {}
    of_method: dict[str, Any] = {}
    unknown, errors = [], []
    for key, value in {**published, **given}.items():
        name = key.replace("-", "_")
        if name in OPTIONS:
            of_run[name] = value
        elif name in own:
            of_method[name] = value
        else:
            unknown.append(name)
    if (schedule := of_run.get("lr_schedule", "decay")) != "decay":
        if "lr_decay" in of_run:
            errors.append(
                SparsonaError(
                    f"lr_decay together with the schedule '{schedule}'",
                    expected="one of them: lr_decay belongs to the schedule 'decay'",
                    hint="leave --lr-decay out, or use --lr-schedule decay",
                )
            )
        of_run["lr_decay"] = 1.0  # recorded as it acts: no decay
    of_run, of_method = as_stored(of_run), with_absolute_paths(own, of_method)
    from_preset = frozenset(published) - {key.replace("-", "_") for key in given}
    return Chosen({**row.engine, **of_run}, {**row.options, **of_method}, unknown, errors, from_preset)


def as_stored(values: Mapping[str, Any], own: Mapping[str, Option] | None = None) -> dict[str, Any]:
    """Options as they are written into a run's folder: files by their absolute paths.

    Args:
        values: options of a run, and perhaps of methods.
        own: the declared options of these methods.

    Returns:
        The same, for another working folder to read.
    """
    found = dict(values)
    if isinstance(found.get("data"), str):
        found["data"] = own_spec(found["data"])
    return with_absolute_paths({**(own or {}), **OPTIONS}, found)


def samples_all(published: Mapping[str, Any]) -> bool:
    """Whether all clients of a published experiment take part in every round."""
    return published.get("per_round") is not None and published["per_round"] == published.get("clients")


def all_owners(published: Mapping[str, Any]) -> bool:
    """Whether the clients of a published experiment are all owners that its data has, of whom all take part."""
    return samples_all(published) and spec.parse("partition", str(published.get("partition"))).name == "natural"


def fit_clients(config: RunConfig, in_force: frozenset[str], published: Mapping[str, Any]) -> RunConfig:
    """The options where the user has another number of clients than a published experiment.

    Args:
        config: the options of a run.
        in_force: the names of those that a preset set and the user did not.
        published: what the preset sets.

    Returns:
        The same, with all clients sampled where the experiment does that or samples more than there are, and all others
        as neighbours in place of too many.
    """
    if config.clients is None or (taking_part := config.clients - config.num_novel) < 1:
        return config
    changed: dict[str, Any] = {}
    if "per_round" in in_force and config.per_round is not None:
        changed["per_round"] = taking_part if samples_all(published) else min(config.per_round, taking_part)
    if "graph" in in_force and config.graph is not None:
        name, *args = config.graph.split(":")
        if args and args[0].isdecimal() and int(args[0]) >= taking_part > 1:
            changed["graph"] = ":".join((name, str(taking_part - 1), *args[1:]))
    return config.model_copy(update=changed)


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """'fedspa:density=0.2,search=rsm' is a row and options for it alone."""
    found = spec.parse("method", text)
    return found.name, spec.named_options(found)


@dataclass(frozen=True)
class OptionFile:
    """Options from a file: for every method, and for single ones by the name they are run under."""

    options: dict[str, Any]
    methods: dict[str, dict[str, Any]]


def read_option_file(path: str | Path) -> OptionFile:
    """Options from a TOML file: top-level keys; a table [options] for the method's own; tables [methods.NAME]."""
    values = _read_toml(path)
    tables = {key: values.pop(key, {}) for key in ("options", "methods")}
    of_methods = tables["methods"].values() if isinstance(tables["methods"], dict) else [None]
    for key, table in (*tables.items(), *(("methods", one) for one in of_methods)):
        if not isinstance(table, dict):
            raise SparsonaError(
                f"'{key}' in '{path}' is not a table",
                expected="[options] or [methods.NAME], and key = value lines below it",
            )
    return OptionFile(
        with_names({**values, **tables["options"]}),
        {name: with_names(table) for name, table in tables["methods"].items()},
    )


def with_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """TOML has no None: as on the command line, 'none' is it."""
    return {key.replace("-", "_"): None if value == "none" else value for key, value in values.items()}


def write_toml(values: Mapping[str, Any]) -> str:
    """Options as TOML, which has no None: 'none' is read as that. Tables, such as `methods`, come last."""
    lines, tables = [], []
    for key, value in values.items():
        if isinstance(value, Mapping):
            tables += [f'\n[{key}."{name}"]\n{write_toml(table)}' for name, table in value.items()]
        else:
            lines.append(f"{key} = {json.dumps('none' if value is None else value)}\n")
    return "".join((*lines, *tables))


def _read_toml(path: str | Path) -> dict[str, Any]:
    try:
        return parse_toml(read_text(path))
    except FileNotFoundError:
        raise SparsonaError(
            f"there is no config file '{path}'", expected="a TOML file", hint="check the path given to --config"
        ) from None
    except (OSError, ValueError) as error:
        raise SparsonaError(
            f"config file '{path}' cannot be read: {error}",
            expected="a TOML file: lines like rounds = 50",
            hint="correct it at the place named",
        ) from None
