"""A recipe: one table or figure of a paper as rows to run, with the figures that the paper prints. Free of torch.

A recipe is a file recipes/PAPER/NAME.toml, and `PAPER/NAME` is its name. It lists what the paper prints and under which
options, never what came out here.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from sparsona.core.errors import unknown_name
from sparsona.runs.validation import validate

PAPERS = {
    "fedspa": "FedSpa: Huang et al., Achieving Personalized Federated Learning with Sparse Local Models, 2022",
    "dispfl": "DisPFL: Dai et al., Communication-Efficient Personalized FL via Decentralized Sparse Training, 2022",
    "pfedgate": "pFedGate: Chen et al., Efficient Personalized Federated Learning via Sparse Model-Adaptation, 2023",
    "fedalt": "FedSim and FedAlt: Pillutla et al., Federated Learning with Partial Model Personalization, 2022",
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Printed(_Strict):
    """A printed figure: in TOML `88.2`, `[88.2, 0.4]` with its spread, `">1000"` where a target was not reached.

    `"0.8"`, as text, has as many decimals as are written, where its column has another number of them.
    """

    value: float
    spread: float | None = None
    is_bound: bool = False
    digits: int | None = None


def _read_printed(given: Any) -> Any:
    if isinstance(given, str) and given.startswith(">"):
        return {"value": given[1:], "is_bound": True}
    if isinstance(given, str):
        return {"value": given, "digits": len(given.partition(".")[2])}
    if isinstance(given, list) and len(given) == 2:
        return {"value": given[0], "spread": given[1]}
    return {"value": given} if isinstance(given, int | float) else given


class Column(_Strict):
    """What a table prints, or what a picture needs beside it.

    Args:
        measure: how our figure is obtained: a row of `sparsona.reproduce.measures`, with its argument after a colon.
        title: the heading, with the unit.
        digits: decimals that the paper prints, but where a printed figure has its own.
        comparable: False: ours depends on the hardware or the like, so that it is shown and never judged.
    """

    measure: str
    title: str
    digits: int = 1
    comparable: bool = True


class Row(_Strict):
    """One run (for each seed) and what the paper prints about it.

    Args:
        method: as on the command line: `fedspa`, `fedspa:density=0.2`.
        options: of the run, over those of the recipe and of the setting.
        printed: figures by column.
        stand_in: the data of the paper that this row's data stands in for; such a row has no printed figures.
        warm_start: the row whose model this one starts from.
        against: the row that relative columns compare with.
        quirks: of the paper's cost counting, see docs/accounting.md.
        differs: what is known to differ from the paper in this row.
    """

    method: str
    options: dict[str, Any] = Field(default_factory=dict)
    printed: dict[str, Annotated[Printed, BeforeValidator(_read_printed)]] = Field(default_factory=dict)
    stand_in: str | None = None
    warm_start: str | None = None
    against: str | None = None
    quirks: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()


class Recipe(_Strict):
    """One table or figure.

    Args:
        where: its place in the paper, such as "table 1".
        columns: what it prints, in order.
        options: of every run.
        settings: options of the rows whose name begins with this name and a slash.
        rows: by name, such as "cifar10/B/fedspa"; `--rows` selects them with wildcards.
        averages: printed means over the settings, by what follows the setting in the rows' names.
        picture: how a figure is drawn: a row of `sparsona.reproduce.pictures`.
        seeds: seeds that the paper reports over.
        differs: what is known to differ from the paper in every row.
        absent: where data is from that has to be fetched by hand or is often out of reach, and where to put it, by data
            set; rows on data that is not here have cost columns alone.
    """

    title: str
    where: str
    kind: Literal["table", "figure"] = "table"
    columns: dict[str, Column] = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = Field(default_factory=dict)
    rows: dict[str, Row]
    averages: dict[str, dict[str, Annotated[Printed, BeforeValidator(_read_printed)]]] = Field(default_factory=dict)
    picture: str | None = None
    seeds: int = 1
    differs: tuple[str, ...] = ()
    absent: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _refers_to_itself(self) -> Recipe:
        """Rows name rows and columns that are there, and what stands in has nothing in the paper's column."""
        for name, row in self.rows.items():
            for other in (row.warm_start, row.against):
                if other is not None and other not in self.rows:
                    raise ValueError(f"row '{name}' names another row, not '{other}'")
            if unknown := set(row.printed) - set(self.columns):
                raise ValueError(f"row '{name}' prints columns, not '{min(unknown)}'")
            if row.stand_in and row.printed:
                raise ValueError(f"row '{name}' stands in for {row.stand_in}, and nothing is printed of it")
        return self


def names() -> list[str]:
    """The names of all recipes: `PAPER/NAME`."""
    folder = resources.files("sparsona.reproduce") / "recipes"
    return [
        f"{paper}/{found.name.removesuffix('.toml')}"
        for paper in PAPERS
        for found in sorted((folder / paper).iterdir(), key=lambda one: one.name)
        if found.name.endswith(".toml")
    ]


def load(name: str) -> Recipe:
    """The recipe of this name."""
    if name not in (known := names()):
        raise unknown_name("recipe", name, known)
    source = resources.files("sparsona.reproduce") / "recipes" / f"{name}.toml"
    return validate(Recipe, tomllib.loads(source.read_text(encoding="utf-8")), f"recipe {name}")
