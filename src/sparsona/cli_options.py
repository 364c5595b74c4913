"""Options that several commands have, and how they become options of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from sparsona.core.errors import SparsonaError

# Words of the commands themselves, which a config file or --set must not overrule.
OWN_WORDS = frozenset(
    {
        "method",
        "methods",
        "names",
        "out",
        "seeds",
        "federation",
        "observers",
        "log",
        "config",
        "json",
        "options",
        "profile",
    }
)

SHARING_OPTIONS = [
    click.option("--data-dir", help="Folder where the data's files are looked for first, before the cache."),
    click.option("--clients", type=int, help="Number of clients.  [20, or everybody: --partition natural]"),
    click.option(
        "--partition", help="How they share the data, a row of `sparsona data`; text is by speaker.  [dirichlet:0.3]"
    ),
    click.option("--partition-seed", type=int, help="Fix the partition and the splits whatever --seed is."),
    click.option(
        "--test", help="What is tested on: split | split-train | shares:N | natural, or what suits the data.  [auto]"
    ),
]

OPTIONS = [
    click.option("--data", help="Data set, a row of `sparsona data`.  [digits]"),
    *SHARING_OPTIONS,
    click.option("--model", help="Network, a row of `sparsona models`.  [the data set's default]"),
    click.option("--preset", help="paper | authors: a paper's method as its text, or its authors' code, has it."),
    click.option("--rounds", type=int, help="Number of rounds.  [30]"),
    click.option("--per-round", type=int, help="Clients sampled per round.  [half of them; all peers]"),
    click.option("--graph", help="Who hears from whom, among peers: ring | full | random:N | ...  [random:10]"),
    click.option("--epochs", type=int, help="Local epochs per round.  [5]"),
    click.option("--batch-size", type=int, help="Examples in a training batch.  [16]"),
    click.option("--lr", type=float, help="Learning rate in the first round; pfedgate: 0.05.  [0.1]"),
    click.option("--lr-decay", type=float, help="Factor on the learning rate after each round.  [0.998]"),
    click.option(
        "--lr-schedule", help="decay | constant | halving:N | linear:W | steps:A,B: see docs/experiments.md.  [decay]"
    ),
    click.option("--warm-start", metavar="RUN", help="Begin with the global model of this finished run."),
    click.option(
        "--guard/--no-guard",
        default=None,
        help="Let each client keep its own or the shared model, by its validation data.",
    ),
    click.option(
        "--weight-decay", type=float, help="L2 pull of the weights towards zero; fedalt and fedsim: 0.  [0.0005]"
    ),
    click.option("--density", type=float, help="Share of the parameters a sparse method keeps, in (0, 1].  [0.5]"),
    click.option(
        "--personal", help="What stays with a client, of fedalt and fedsim: input,norm,NAME-PATTERN...  [output]"
    ),
    click.option("--seed", type=int, help="Varies everything: partition, weights, sampling, batches, masks.  [0]"),
    click.option("--device", help="auto | cpu | cuda; auto is a GPU if there is one.  [auto]"),
    click.option("--precision", help="fp32 | tf32 | bf16, on a GPU; weights stay in fp32.  [fp32]"),
    click.option("--executor", help="auto | serial | workers | stacked | graphed.  [auto]"),
    click.option("--out", type=click.Path(path_type=Path), help="Folder to make.  [a new one in ./runs]"),
    click.option("--config", type=click.Path(path_type=Path), help="TOML file of options; the command line wins."),
    click.option(
        "--set", "pairs", multiple=True, metavar="KEY=VALUE", help="Any other option; see `sparsona methods METHOD`."
    ),
    click.option("--json", "as_json", is_flag=True, help="Print only the summary, as JSON, on stdout."),
]


PROFILE = click.option(
    "--profile",
    is_flag=True,
    help="Measure where the time goes, phase by phase: a table, and profile.json in the run's folder. A GPU is waited "
    "for wherever a phase ends, which slows the run; its results stay the same.",
)


LOG = click.option(
    "--log",
    "logs",
    multiple=True,
    metavar="FILE.jsonl",
    help="Also write what happens, a line of JSON for each round and evaluation: docs/observers.md.",
)


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a run."""
    return _with(OPTIONS, command)


def with_sharing_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say how data is shared out."""
    return _with(SHARING_OPTIONS, command)


def _with(options: list[Any], command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command


def check_names(methods: Iterable[str], options: Mapping[str, Any]) -> None:
    """Refuse misspelt names before torch is imported, which takes seconds."""
    from sparsona.core.errors import unknown_name
    from sparsona.data import SOURCES
    from sparsona.methods import card
    from sparsona.models import read_spec

    for method in methods:
        card(method.partition(":")[0])
    data, model = options.get("data"), options.get("model")
    if isinstance(data, str) and data not in SOURCES and data.partition(":")[0] not in ("arrays", "folder"):
        raise unknown_name("data set", data, [*SOURCES, "arrays:PATH.npz", "folder:PATH"])
    if isinstance(model, str):
        read_spec(model)


def gather(config: Path | None, pairs: tuple[str, ...], flags: dict[str, Any]) -> dict[str, Any]:
    """Options from the file, then from the flags given, then from --set."""
    from sparsona.runs.config import parse_pairs, read_toml

    given = {key: value for key, value in flags.items() if value is not None}
    found = {**(read_toml(config) if config else {}), **given, **parse_pairs(pairs)}
    if misplaced := sorted(OWN_WORDS & set(found)):
        raise SparsonaError(
            f"'{misplaced[0]}' is no option of a run",
            expected="options, in a config file and in --set",
            mend="methods, --out, --seeds and --profile are said on the command line itself",
        )
    return found
