"""Flags that several commands share, made from the tables of options, and how they become options of a run.

The tables are read only when a command runs or prints its help: `sparsona --help` needs none of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsona.core.errors import SparsonaError, nearest

if TYPE_CHECKING:
    from sparsona.runs.declaration import Option

CONFIG = click.Option(
    ["--config"],
    type=click.Path(path_type=Path),
    help="TOML file of options; options on the command line take precedence.",
)
SET = click.Option(
    ["--set", "pairs"], multiple=True, metavar="KEY=VALUE", help="Any other option; see `sparsona methods METHOD`."
)
PROFILE = click.option(
    "--profile",
    is_flag=True,
    help="Measure where the time goes, phase by phase: a table, and profile.json in the run's folder. A GPU is waited "
    "for wherever a phase ends, which slows the run; its results stay the same.",
)


class LogOption(click.Option):
    """Its help lists the observers that have a name; their table is read when help is asked for."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        from sparsona.runs.observers import OBSERVERS

        kinds = "; ".join(f"{name}: {row.text}" for name, row in OBSERVERS.items())
        self.help = f"Also write a log, see docs/observers.md ({kinds})."
        return super().get_help_record(ctx)


LOG = click.option("--log", "logs", cls=LogOption, multiple=True, metavar="[NAME:]PLACE")
OUT = click.option("--out", type=click.Path(path_type=Path), help="Folder to make.  [a new one in ./runs]")
JSON = click.option("--json", "as_json", is_flag=True, help="Print only the summary, as JSON, on stdout.")


class Jobs(click.ParamType):
    """A number of runs at a time, or "auto"."""

    name = "jobs"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        text = str(value).strip().lower()
        if text == "auto":
            return text
        try:
            return int(text)
        except ValueError:
            self.fail(f"'{value}' is neither a whole number nor auto", param, ctx)


JOBS = click.option(
    "--jobs",
    type=Jobs(),
    default=1,
    show_default=True,
    help="Runs at a time, each in a process of its own; auto: one more for as long as all together get a tenth faster.",
)

MATCH = click.option(
    "--match",
    metavar="rounds|steps|flops|bytes",
    default="rounds",
    show_default=True,
    help="What is equal for all methods. The first method runs --rounds; the others get the number of rounds that "
    "comes nearest to what it spends.",
)


def with_table(make: Callable[[], list[click.Option]]) -> type[click.Command]:
    """A class of commands that also have the options that `make` returns, and CONFIG and SET."""

    class Tabled(click.Command):
        made: list[click.Parameter] | None = None

        def get_params(self, ctx: click.Context) -> list[click.Parameter]:
            if self.made is None:
                arguments = [one for one in self.params if isinstance(one, click.Argument)]
                rest = [one for one in self.params if one not in arguments]
                self.made = [*arguments, *make(), CONFIG, SET, *rest]
            help_option = self.get_help_option(ctx)
            return self.made if help_option is None else [*self.made, help_option]

        def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
            try:
                return super().parse_args(ctx, args)
            except click.NoSuchOption as error:
                flags = {flag for one in self.get_params(ctx) for flag in one.opts if flag.startswith("--")}
                if error.option_name == "--seeds" and "--seed" in flags:  # which is more like it than any other
                    text = "No such option '--seeds'. `sparsona compare` has it; here it is '--seed', of one run."
                elif (meant := _meant(error.option_name, flags)) is None:
                    raise
                else:
                    text = f"No such option '{error.option_name}'. Did you mean {meant}?"
                raise click.NoSuchOption(error.option_name, text, ctx=ctx) from None

    return Tabled


def _meant(name: str, flags: set[str]) -> str | None:
    """The flag that was probably meant, or the option to be given with --set: click knows flags of its own alone."""
    from sparsona.methods import option_owners
    from sparsona.runs.options import OPTIONS

    owners, by_key = option_owners(), {flag.removeprefix("--").replace("-", "_"): flag for flag in flags}
    near = nearest(name.removeprefix("--").replace("-", "_"), sorted({*by_key, *OPTIONS, *owners}))
    if near is None or near in by_key:
        return None if near is None else f"'{by_key[near]}'"
    return f"'--set {near}=VALUE'" + ("" if near in OPTIONS else f", an option of {', '.join(owners[near])}")


def run_flags() -> list[click.Option]:
    """The flags of a run: those of every run, and those of methods."""
    from sparsona.runs.options import OPTIONS

    return [*flags_of(OPTIONS), *method_flags()]


def data_flags() -> list[click.Option]:
    """The flags that say how a data set is shared out, which is named by an argument."""
    from sparsona.runs.options import OF_DATA, OPTIONS

    return flags_of({name: OPTIONS[name] for name in (*OF_DATA, "seed") if name != "data"})


def method_flags(classes: Mapping[str, Any] | None = None) -> list[click.Option]:
    """The flags of methods' own options: the default that most have, and which methods have another.

    `classes` maps rows to the classes of their options; None: all methods that can be run.
    """
    from sparsona.methods import METHODS, factory
    from sparsona.runs.declaration import options_of

    rows: dict[str, tuple[Mapping[str, Any], Any]] = {
        name: (row.options, factory(name)[1]) for name, row in METHODS.items()
    }
    rows |= {name: ({}, kind) for name, kind in (classes or {}).items()}
    options: dict[str, Option] = {}
    defaults: dict[str, dict[str, str]] = {}
    for name, (preset, kind) in rows.items():
        for key, one in options_of(kind).items():
            defaults.setdefault(key, {})[name] = format_default(preset.get(key, one.default))
            if one.flag:
                options.setdefault(key, one)
    found = []
    for key, one in options.items():
        usual = Counter(defaults[key].values()).most_common(1)[0][0]
        others: dict[str, list[str]] = {}
        for name, value in defaults[key].items():
            if value != usual:
                others.setdefault(value, []).append(name)
        exceptions = "".join(f"; {', '.join(names)}: {value}" for value, names in others.items())
        found.append(flag(one, f"{one.text}{exceptions}", usual))
    return found


def flags_of(options: Mapping[str, Option]) -> list[click.Option]:
    """The flags of those options that have one."""
    return [flag(one) for one in options.values() if one.flag]


def flag(one: Option, text: str = "", default: str = "", hidden: bool = False) -> click.Option:
    """An option of a table as a flag; its default is printed and not set, so that a config file may set it."""
    text, default = text or one.text, default or (one.none if one.default is None else format_default(one.default))
    written = one.flag if isinstance(one.flag, str) else f"--{one.name.replace('_', '-')}"
    name, metavar, repeats = (*written.split(), None, None)[:3]
    if one.choices:
        metavar = "|".join(map(str, one.choices))
    help_text = f"{text[0].upper()}{text[1:]}." + (f"  [{default}]" if default and one.type is not bool else "")
    if one.type is bool:
        return click.Option([f"{name}/--no-{str(name)[2:]}", one.name], default=None, help=help_text, hidden=hidden)
    several = repeats is not None
    return click.Option(
        [str(name), one.name], type=one.type, metavar=metavar, help=help_text, hidden=hidden, multiple=several
    )


def format_default(value: Any) -> str:
    """A default as it is written on the command line."""
    if value is None:
        return "none"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def check_names(methods: Iterable[str], options: Mapping[str, Any]) -> None:
    """Refuse misspelt names before torch is imported, which takes seconds."""
    from sparsona.core import spec
    from sparsona.data.catalog import parse_spec
    from sparsona.methods import card
    from sparsona.models import read_spec

    for method in methods:
        card(spec.parse("method", method).name)
    data, model = options.get("data"), options.get("model")
    if isinstance(data, str):
        parse_spec(data)
    if isinstance(model, str):
        read_spec(model)


def gather(
    config: Path | None, pairs: tuple[str, ...], flags: dict[str, Any], method: str | None = None
) -> dict[str, Any]:
    """Options from the file (and from its table of `method`), then from the flags given, then from --set."""
    options, tables = gather_each(config, pairs, flags)
    return {**options, **({} if method is None else table_for(method, tables))}


def table_for(method: str, tables: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The file's options for a method; with options after a colon, those of its row that these leave open."""
    from sparsona.runs.request import parse_method

    if method in tables:
        return tables[method]
    name, own = parse_method(method)
    table = tables.get(name, {})
    kept = {key: value for key, value in table.items() if key not in own and key != "tuned_with"}
    return kept if own else table


def gather_each(
    config: Path | None, pairs: tuple[str, ...], flags: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The same, and the file's options for single methods; what the command line gives wins over both."""
    from sparsona.core.spec import parse_pairs
    from sparsona.methods import card
    from sparsona.runs.request import OptionFile, parse_method, read_option_file

    typed = {key: value for key, value in flags.items() if value not in (None, ())} | parse_pairs(pairs)
    found = read_option_file(config) if config else OptionFile({}, {})
    tables = {}
    for name, table in found.methods.items():
        card(parse_method(name)[0])  # a misspelt table would be ignored otherwise
        kept = {key: value for key, value in table.items() if key not in typed}
        if len(kept) < len(table):
            kept.pop("tuned_with", None)  # what is typed was not chosen by trials
        tables[name] = kept
    return {**found.options, **typed}, tables


def check_reserved(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse options named like a parameter of the function they are passed to, and `method`."""
    import inspect

    from sparsona.runs.options import OPTIONS

    own = {"method", *inspect.signature(function).parameters} - set(OPTIONS)
    if misplaced := sorted(own & set(options)):
        raise SparsonaError(
            f"'{misplaced[0]}' is no option of a run",
            expected="options, in a config file and in --set",
            hint="methods, --out, --seeds, --match and --profile are given on the command line itself",
        )


def in_shell(message: str) -> str:
    """A message whose hints are Python's, with options as they are written on a command line.

    Args:
        message: the text of an error.

    Returns:
        The same with --set in place of a keyword argument.

    Example:
        >>> in_shell('hint: task="multilabel" for labels')
        'hint: --set task=multilabel for labels'
    """
    message = re.sub(r'\btask="(\w+)"', r"--set task=\1", message)
    return re.sub(r"\bclass_weights=\{'(.+?)': ([\d.]+)\}", r"--set 'class_weights=\1=\2'", message)
