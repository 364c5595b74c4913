"""What a run is asked to do: checked before anything starts, every mistake reported at once. Free of torch."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparsona.core.errors import SparsonaError, unknown_name

POINT = Literal["received", "trained", "tuned", "global"]


class RunConfig(BaseModel):
    """Everything that decides a run's result, and where it runs. Options of the method itself are in `options`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str = Field(description="a row of `sparsona methods`")
    data: str = Field("digits", description="a row of `sparsona data`")
    clients: int = Field(20, ge=1, description="number of clients")
    partition: str = Field("dirichlet:0.3", description="how the data is shared out among the clients")
    partition_seed: int | None = Field(None, ge=0, description="fixes the partition whatever the seed")
    validation_rate: float = Field(0.1, ge=0, lt=1, description="share of a client's data held for decisions")
    test_rate: float = Field(0.25, gt=0, lt=1, description="share of a client's data held for the final word")
    min_size: int = Field(10, ge=2, description="fewest examples a client may be dealt")
    model: str | None = Field(None, description="a row of `sparsona models`; none: the data set's default")
    rounds: int = Field(50, ge=1, description="number of rounds")
    per_round: int | None = Field(None, ge=1, description="clients sampled per round; none: half of them")
    batch_size: int = Field(32, ge=1, description="examples in a training batch")
    lr_decay: float = Field(0.998, gt=0, le=1, description="factor on the learning rate after each round")
    seed: int = Field(0, ge=0, description="varies everything: partition, weights, sampling, batches, masks")
    executor: str = Field("auto", description="serial, workers or auto")
    eval_every: int = Field(1, ge=1, description="rounds between evaluations (the last ten are always evaluated)")
    points: tuple[POINT, ...] = Field((), description="which models to evaluate besides the headline's")
    tune_epochs: int = Field(0, ge=0, description="epochs of final tuning for every client; 0: none")
    tune_lr_scale: float = Field(1.0, gt=0, description="learning rate of tuning, as a share of the first round's")
    drop_rate: float = Field(0.0, ge=0, lt=1, description="probability that an update is lost on its way")
    everyone_trains: bool = Field(False, description="all clients train each round; only the sampled are aggregated")
    stateless: bool = Field(False, description="clients forget everything between rounds")
    novel: int = Field(0, ge=0, description="clients held out of training and met only at the end")
    capacities: tuple[float, ...] = Field((1.0,), description="density each client can hold, repeated over clients")
    max_seconds: float | None = Field(None, gt=0, description="stop after the round in which this time is reached")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the method")

    @property
    def sampled(self) -> int:
        """Clients per round, the default worked out."""
        return self.per_round or max(1, (self.clients - self.novel) // 2)

    @property
    def headline(self) -> str:
        """The evaluation point whose accuracy is the result."""
        return "tuned" if self.tune_epochs else "received"

    @property
    def all_points(self) -> tuple[str, ...]:
        """Every point to evaluate; `received` always, since learning curves need it."""
        return ("received", *(point for point in dict.fromkeys(self.points) if point not in ("received", "tuned")))

    def check_together(self) -> None:
        """What single fields cannot see."""
        taking_part = self.clients - self.novel
        if taking_part < 1:
            raise SparsonaError(
                f"{self.novel} novel clients of {self.clients}", expected="at least one client that takes part"
            )
        if self.sampled > taking_part:
            raise SparsonaError(
                f"cannot sample {self.sampled} clients per round: only {taking_part} take part",
                expected=f"per_round from 1 to {taking_part}",
                mend="lower --per-round or raise --clients",
            )
        if "tuned" in self.points and not self.tune_epochs:
            raise SparsonaError("point 'tuned' without tuning", mend="set --set tune_epochs=5, or use fedavg-ft")
        if not all(0 < capacity <= 1 for capacity in self.capacities):
            raise SparsonaError(f"capacities {self.capacities}", expected="densities above 0 and at most 1")


def validated(kind: type[BaseModel], values: Mapping[str, Any], where: str) -> Any:
    """`kind` from plain values; unknown and bad keys become one error that lists them all."""
    try:
        return kind(**values)
    except ValidationError as error:
        known = list(kind.model_fields)
        lines = []
        for item in error.errors():
            key = ".".join(str(place) for place in item["loc"]) or "?"
            if item["type"] == "extra_forbidden":
                hint = unknown_name("option", key, known).mend
                lines.append(f"unknown option '{key}' of {where}" + (f": {hint}" if hint else ""))
            else:
                field = kind.model_fields.get(str(item["loc"][0])) if item["loc"] else None
                about = f" ({field.description})" if field is not None and field.description else ""
                lines.append(f"{key} = {item['input']!r}{about}: {item['msg'].lower()}")
        raise SparsonaError(
            "; ".join(lines), expected=f"options of {where}: " + ", ".join(known), mend="correct the named option"
        ) from None


def split_options(
    values: Mapping[str, Any], method_keys: set[str], where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sort flat key=value pairs into those of the run and those of the method."""
    run_keys = set(RunConfig.model_fields) - {"options", "method"}
    of_run, of_method = {}, {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in run_keys:
            of_run[name] = value
        elif name in method_keys:
            of_method[name] = value
        else:
            raise unknown_name(f"option of {where}", name, run_keys | method_keys)
    return of_run, of_method


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


def read_toml(path: str | Path) -> dict[str, Any]:
    """Options from a file: top-level keys, and optionally a table [options] for the method's own."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SparsonaError(f"there is no config file '{path}'", mend="check the path given to --config") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SparsonaError(f"config file '{path}' cannot be read: {error}", expected="a TOML file") from None
    options = values.pop("options", {})
    if not isinstance(options, dict):
        raise SparsonaError(f"'options' in '{path}' is not a table", expected="[options] and key = value lines")
    return {**values, **options}


def dump(config: RunConfig) -> str:
    """The config as JSON, to be stored with the run."""
    return json.dumps(config.model_dump(mode="json"), indent=2) + "\n"
