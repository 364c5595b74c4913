"""The command line. Heavy modules are imported where they are needed, so that `--help` and the lists start fast."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsona.cli.analysis import clients, figure, gates, read_views, similarity, targets
from sparsona.cli.bounds import bounds
from sparsona.cli.cost import cost
from sparsona.cli.data import data
from sparsona.cli.export import evaluate, export
from sparsona.cli.federation import federation, keys
from sparsona.cli.latency import latency
from sparsona.cli.network import join, server, vault
from sparsona.cli.options import (
    JOBS,
    JSON,
    LOG,
    MATCH,
    OUT,
    PROFILE,
    Jobs,
    check_names,
    check_reserved,
    gather,
    gather_each,
    in_shell,
    run_flags,
    table_for,
    with_table,
)
from sparsona.cli.peers import gather as gather_peers
from sparsona.cli.peers import peer
from sparsona.cli.privacy import leakage, privacy
from sparsona.cli.replay import replay
from sparsona.cli.reproduce import reproduce
from sparsona.cli.signals import exit_code, stop_on_signals
from sparsona.cli.streams import printing, usable_streams
from sparsona.cli.table import table
from sparsona.cli.terminal import (
    echo,
    print_profile,
    print_results,
    print_table,
    print_text,
    show_rows,
    terminal_width,
    write_page,
)
from sparsona.cli.tune import tune
from sparsona.cli.verify import verify
from sparsona.cli.watch import watch
from sparsona.core.errors import SparsonaError
from sparsona.core.version import VERSION
from sparsona.runs.progress import progress_bar

if TYPE_CHECKING:
    from sparsona.methods import Preset
    from sparsona.runs.declaration import Option

WIDE = 120  # columns of a terminal that fit every column of `sparsona methods`
DEFAULT_COMPARISON = ("local", "fedavg", "fedavg-ft", "fedspa", "dispfl", "pfedgate", "fedalt")


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="Start with `sparsona compare`: seven methods on handwritten digits. Then `sparsona methods`.",
)
@click.version_option(VERSION)
@click.option("--debug", is_flag=True, help="Show Python's traceback when something fails.")
def cli(debug: bool) -> None:
    """Sparse, personalized federated learning: a small model for each of many clients."""


@cli.command(cls=with_table(run_flags))
@click.argument("method")
@OUT
@JSON
@LOG
@PROFILE
def run(
    method: str,
    out: Path | None,
    config: Path | None,
    pairs: tuple[str, ...],
    as_json: bool,
    logs: tuple[str, ...],
    profile: bool,
    **flags: Any,
) -> None:
    """Train METHOD and show how well it serves every client.

    METHOD is a row of `sparsona methods`, with options of its own after a colon if you like:

    \b
      sparsona run fedspa
      sparsona run fedspa --density 0.2 --rounds 100 --seed 1
      sparsona run fedspa:search=rsm --partition shards:2
      sparsona run fedavg --set tune_epochs=5 --set drop_rate=0.1

    Further options are set with --set, among them task, loss, class_weights, metrics and patience: see
    docs/experiments.md.
    """
    options = gather(config, pairs, flags, method)
    check_names([method], options)
    from sparsona.engine.profiler import START, Clock

    clock = Clock(is_on=profile)
    with clock.measure(f"{START}import"):
        from sparsona.experiment import train as api

    check_reserved(api.train, options)
    with progress_bar(method) as bar:
        result = api.train(method, out=out, observers=[bar, *logs], progress=False, profile=clock, **options)
    show_run(result, as_json)


@cli.command(cls=with_table(run_flags))
@click.argument("methods", nargs=-1)
@click.option("--seeds", type=int, default=1, show_default=True, help="Number of seeds, counted from --seed.")
@MATCH
@JOBS
@OUT
@JSON
@LOG
def compare(
    methods: tuple[str, ...],
    seeds: int,
    match: str,
    jobs: Any,
    out: Path | None,
    config: Path | None,
    pairs: tuple[str, ...],
    as_json: bool,
    logs: tuple[str, ...],
    **flags: Any,
) -> None:
    """Train several METHODS under equal conditions. The result is one table and one report.

    All have the same partition, split, initial weights and sampled clients (peers: all clients, unless --per-round is
    given). Without METHODS: those of the config file, or Local, FedAvg, FedAvg-FT and the systems of the four papers.

    \b
      sparsona compare
      sparsona compare local fedavg fedspa --seeds 3 --partition iid
      sparsona compare fedspa fedspa:density=0.2 fedspa:density=0.8
      sparsona compare fedavg fedalt dispfl --match steps
      sparsona compare --config runs/TUNE/tuned.toml --seeds 3
    """
    options, tables = gather_each(config, pairs, flags)
    names = methods or tuple(tables) or DEFAULT_COMPARISON
    check_names(names, options)
    from sparsona.experiment import compare as api

    check_reserved(api.compare, options)
    with progress_bar(has_seeds=seeds > 1) as bar:
        pairs_of = [(name, own) if (own := table_for(name, tables)) else name for name in names]
        result = api.compare(
            pairs_of, seeds=seeds, match=match, jobs=jobs, out=out, observers=[bar, *logs], progress=False, **options
        )
    show_comparison(result, as_json)


@cli.command()
@click.argument("path", metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="Print only the summary, as JSON, on stdout.")
@click.option(
    "--jobs",
    type=Jobs(),
    help="Of a comparison or a search: runs at a time, each in a process of its own. Of a comparison also auto.",
)
@click.option("--rounds", type=int, help="A new, larger number of rounds, for one run that is finished or stopped.")
@LOG
@PROFILE
def resume(path: str, as_json: bool, jobs: Any, rounds: int | None, logs: tuple[str, ...], profile: bool) -> None:
    """Resume a run, a comparison or a search that was stopped. RUN is a folder, or its name in ./runs.

    The result is the same, bit for bit, as if it had never been stopped. A profiled run stays profiled. --rounds adds
    rounds; a warning says so if the result then differs from that of a run which had them from the start. If the result
    of a finished run is missing or edited, it is written again, with a warning.
    """
    folder = find(path)
    from sparsona.runs.folder import SERVER_FILE, reached

    if rounds is not None and any((folder / name).exists() for name in ("tune.json", "comparison.json", SERVER_FILE)):
        raise SparsonaError(
            "--rounds for a comparison, a search or a run on several machines",
            expected="one run that is simulated",
            hint="make it anew with more --rounds; a comparison's runs are the folders in it",
        )
    if (folder / "tune.json").exists():
        from sparsona.cli.tune import resume_search

        resume_search(folder, as_json, jobs)
        return
    if (folder / SERVER_FILE).exists():
        if logs or profile or jobs:
            raise SparsonaError(
                "--log, --profile or --jobs for a run on several machines",
                expected="none of them",
                hint=f"sparsona resume {path}",
            )
        from sparsona.cli.network import resume_server

        resume_server(folder, as_json)
        return
    is_comparison = (folder / "comparison.json").exists()
    if profile and is_comparison:
        raise SparsonaError("--profile for a comparison", expected="one run", hint="resume its runs one by one")
    from sparsona.engine.profiler import START, Clock
    from sparsona.runs.profile import is_profiled

    clock = Clock(is_on=profile or is_profiled(folder))
    with clock.measure(f"{START}import"):
        from sparsona.experiment import compare as comparisons
        from sparsona.experiment import train as api
    from sparsona.runs.comparison import read_comparison

    runs = [run for run, _ in read_comparison(folder)] if is_comparison else [folder]
    had_finished = rounds is None and all(reached(run).finished for run in runs)
    with progress_bar(has_seeds=is_comparison) as bar:
        if is_comparison:
            comparison = comparisons.resume_comparison(folder, jobs=jobs or 1, observers=[bar, *logs], progress=False)
        else:
            result = api.resume(folder, observers=[bar, *logs], progress=False, profile=clock, rounds=rounds)
    if had_finished and not (is_comparison and comparison.missing):
        echo("it had finished: nothing was left to run", err=True)
    if is_comparison:
        show_comparison(comparison, as_json)
    else:
        show_run(result, as_json)


@cli.command()
@click.argument("paths", nargs=-1, required=True, metavar="RUN...")
@click.option("--out", type=click.Path(path_type=Path), help="The page to write.  [report.html in the first folder]")
def report(paths: tuple[str, ...], out: Path | None) -> None:
    """Write one self-contained HTML page about runs. RUN is a run, a comparison or a reproduction: a folder, or its
    name in ./runs."""
    if len(paths) == 1 and (find(paths[0]) / "reproduction.json").exists():
        from sparsona.reproduce.runner import open_reproduction

        echo(str(open_reproduction(find(paths[0])).report(out)))
        return
    from sparsona.experiment.run import missing_in
    from sparsona.report.page import write_report

    missing = [one for path in paths for one in missing_in(find(path))]
    for one in missing:
        echo(f"missing: {one.sentence}", err=True)
    echo(str(write_report(read_views(paths), out or find(paths[0]) / "report.html", missing=missing)))


@cli.command()
@click.option("--in", "where", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def runs(where: Path, as_json: bool) -> None:
    """List the runs in ./runs: what they are and how far they got."""
    from sparsona.runs.listing import list_runs

    found = list_runs(where)
    if as_json:
        echo(json.dumps(found, indent=2))
    elif not found:
        echo(f"no runs in '{where}' yet: start with `sparsona compare`")
    else:
        columns = ["run", "method", "seed", "rounds", "steps", "accuracy", "state"]
        print_table([{key: str(row[key]) for key in columns} for row in found])


@cli.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def methods(name: str | None, as_json: bool) -> None:
    """List the methods: paper, what a client keeps, what travels. With NAME, also every option it has."""
    from sparsona.methods import COST_ONLY, FAMILIES, card, factory, find, names
    from sparsona.methods import preset as find_preset

    if name is not None:
        from sparsona.runs.declaration import options_of

    if name in COST_ONLY and find(name) is None:
        from sparsona.costs import cost_options, row_of

        rule, own = row_of(name)
        echo(f"{rule.title}\n  paper: {rule.paper}\n  costs only: `sparsona cost {name}`; it cannot be run yet\n")
        preset = {**rule.options, **rule.engine}
        show_options(f"Options of {rule.title}", options_of(own), preset)
        show_options("Options of every cost", cost_options(), preset)
        return
    if name is not None:
        from sparsona.runs.options import OPTIONS

        row = card(name)
        echo(row.title)
        for label, text in (("paper:  ", row.paper), ("kept:   ", row.kept), ("travels:", row.travels)):
            print_text(f"{label} {text}", "  ", " " * 11)
        echo()
        preset = {**row.options, **row.engine}
        show_options(f"Options of {row.title}", options_of(factory(row)[1]), preset)
        show_options("Options of every run", OPTIONS, preset)
        show_presets({name: find_preset(row, name) for name in row.presets})
        if row.peers:
            from sparsona.engine.graphs import GRAPHS

            echo("\nGraphs of peers (--graph)")
            print_table([{"graph": graph, "who receives from whom": what} for graph, what in GRAPHS.items()])
        return
    if as_json:
        keys = ("name", "title", "family", "paper", "kept", "travels")
        echo(json.dumps([{key: getattr(row, key) for key in keys} for row in map(card, names())], indent=2))
        return
    everything = [card(one) for one in names()]  # once: packages are searched for more
    for family, title in {**FAMILIES, "": "of installed packages"}.items():
        if rows := [row for row in everything if row.family == family]:
            echo(f"{family}: {title}" if family else title)
            columns = {"name": "name", "title": "method", "paper": "paper", "kept": "kept", "travels": "travels"}
            if terminal_width() < WIDE:  # five columns of text would be a few letters wide each
                columns = {"name": "name", "kept": "kept", "travels": "travels"}
            print_table([{header: getattr(row, key) for key, header in columns.items()} for row in rows])
    echo("`sparsona methods NAME` lists a method's options; set them with --set KEY=VALUE.")
    echo(f"`sparsona cost` also knows the costs of {', '.join(COST_ONLY)}, which cannot be run.")


@cli.command()
@click.argument("name", required=False)
@click.option("--classes", type=int, help="Number of classes.  [what the papers gave it]")
@click.option("--input", "shape", metavar="CxHxW", help="Shape of an example.  [likewise]")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def models(name: str | None, classes: int | None, shape: str | None, as_json: bool) -> None:
    """List the networks. With NAME: its parameters by role, and every option it has.

    \b
      sparsona models
      sparsona models resnet18 --classes 200 --input 3x64x64
      sparsona models resnet18-emnist:adapters=true
    """
    from sparsona.models import MODELS, describe

    if name is None:
        if classes is not None or shape is not None:
            raise SparsonaError("--classes or --input without a network", expected="the NAME of one", hint="see --help")
        rows = [
            {"name": m.name, "model": m.title, "what": m.summary, "for": m.input, "parameters": m.num_parameters}
            for m in MODELS.values()
        ]
        show_rows(
            rows, as_json, "`sparsona models NAME` says more. From Python, any torch.nn.Module will do: model=net."
        )
        return
    found = describe(name, shape, classes)
    if as_json:
        echo(json.dumps(found, indent=2))
        return
    echo(f"{found['title']}: {found['what']}\n{found['parameters']:,} parameters for {found['for']}\n")
    print_table([{"role": role, **part} for role, part in found["roles"].items()])
    for key, option in found["options"].items():
        echo(f"  {key} = {option['value']}\n      {option['what']}")
    if found["options"]:
        echo(f"\nSet options after the name: --model {name.partition(':')[0]}:{next(iter(found['options']))}=...")


cli.add_command(data)
cli.add_command(cost)
cli.add_command(latency)
cli.add_command(tune)
cli.add_command(export)
cli.add_command(evaluate)
cli.add_command(clients)
cli.add_command(gates)
cli.add_command(similarity)
cli.add_command(reproduce)
cli.add_command(targets)
cli.add_command(figure)
cli.add_command(bounds)
cli.add_command(privacy)
cli.add_command(leakage)
cli.add_command(watch)
cli.add_command(table)
cli.add_command(keys)
cli.add_command(federation)
cli.add_command(replay)
cli.add_command(verify)
for command in (server, join, vault, peer, gather_peers):
    cli.add_command(command)


def show_options(title: str, options: Mapping[str, Option], preset: Mapping[str, Any]) -> None:
    echo(f"{title}, set with --set KEY=VALUE:")
    for key, one in options.items():
        among = f" ({' | '.join(map(str, one.choices))})" if one.choices else ""
        value = preset.get(key, one.default)
        written = list(value) if isinstance(value, tuple) else "none" if value is None else value
        print_text(f"{key} = {written}{among}", "  ", "      ")
        print_text(f"{one.text}{f'; none: {one.none}' if one.none else ''}", "      ", "      ")


def show_presets(presets: Mapping[str, Preset]) -> None:
    """What presets set: whatever the data, and by data set and density. Equal ones are shown once."""

    def show(indent: int, when: str, values: Mapping[str, Any]) -> None:
        text = ", ".join(f"{key}={'none' if value is None else value}" for key, value in values.items())
        print_text(f"{when}: {text or 'as above'}", " " * indent, " " * (indent + 6))

    for name, preset in presets.items():
        same = [other for other, found in presets.items() if found == preset]
        if name != same[0]:
            continue
        show(0, f"--preset {', '.join(same)}", preset.options)
        for source in {**preset.by_data, **preset.by_density}:
            show(2, f"with --data {source}", preset.by_data.get(source, {}))
            for density, values in preset.by_density.get(source, {}).items():
                show(4, f"and --density {density:g}", values)
        for key, why in preset.exceptions.items():
            print_text(f"in a comparison, {key} of its own: {why}", "  ", "      ")


def find(text: str) -> Path:
    """A run by its path, or by its name in ./runs."""
    from sparsona.runs.listing import find_run

    return find_run(text)


def show_run(result: Any, as_json: bool) -> None:
    if as_json:
        echo(json.dumps({**result.summary, "profile": result.profile()} if result.is_profiled else result.summary))
        return
    from sparsona.analysis.protocol import read_protocol

    print_results([result.view])
    echo("\nHow this was measured:")
    _print_lines(read_protocol(result.protocol))
    echo("")
    share = result.summary["bytes"].get("upload_share")  # None: no client sends to a server
    if share is not None and share < 1:
        print_text(f"A client sent {share:.1%} of the model's entries in a turn.\n")
    if result.is_profiled:
        print_profile(result.profile())
    echo(f"run:    {result.path}")
    echo(f"report: {write_page(lambda: result.report(result.path / 'report.html'))}")


def _print_lines(lines: Sequence[tuple[str, str]]) -> None:
    """The lines of a protocol, each after its topic."""
    for topic, sentences in lines:
        print_text(f"{topic}: {sentences}" if topic else sentences, "  ", "      ")


def show_comparison(result: Any, as_json: bool) -> None:
    if as_json:
        echo(
            json.dumps(
                {
                    "runs": [run.summary for run in result.runs],
                    "table": result.figures(),
                    "differences": result.differences(),
                    "notes": result.notes(),
                    "missing": [
                        {"method": one.method, "seed": one.seed, "run": one.folder, "error": one.error}
                        for one in result.missing
                    ],
                }
            )
        )
        _end_with(result)
        return
    from sparsona.analysis.answer import differing
    from sparsona.analysis.groups import group_views
    from sparsona.analysis.protocol import compare_protocols
    from sparsona.analysis.table import difference_unit, differences

    views = result.views()
    print_results(views, result.missing)
    if unequal := differing(views):
        print_text(f"What differs between the methods: {'; '.join(unequal)}.")
    # One seed has no interval, and the table has the differences themselves.
    if len({view.seed for view in views}) > 1 and (compared := differences(views)):
        what = f"Difference to {group_views(views)[0].label}, in {difference_unit(views)}"
        weighted = " (weighted: by test size)" if "weighted" in compared[0] else ""
        echo(f"\n{what}{weighted}, paired by seed (95% interval):")
        print_table(compared)
    echo("\nHow this was measured:")
    groups = group_views(views)
    shared, own = compare_protocols(
        {group.label: {view.seed: view.protocol for view in group.views} for group in groups}
    )
    _print_lines(shared)
    for topic, lines in own:
        for labels, sentences in lines:
            _print_lines([(f"{topic} ({labels})" if topic else labels, sentences)])
    echo(f"\nruns:   {result.path}")
    echo(f"report: {write_page(result.report)}")
    _end_with(result)


def _end_with(result: Any) -> None:
    """An error, after everything else, for a comparison in which runs failed."""
    if result.missing:
        num = len(result.missing)
        raise SparsonaError(
            f"{num} of {num + len(result.runs)} runs failed: {'; '.join(one.sentence for one in result.missing)}",
            expected="a result of every run",
            hint=f"`sparsona resume {result.path}` retries what failed; other options need another comparison",
        )


def main() -> None:
    """Run the command line; an error is printed as one message, not as a traceback."""
    with usable_streams():
        _main()


def _main() -> None:
    debug = "--debug" in sys.argv[1:]
    stop_on_signals()
    try:
        with printing():
            args = [arg for arg in sys.argv[1:] if arg != "--debug"]
            cli.main(args=args, prog_name="sparsona", standalone_mode=False)
    except click.ClickException as error:
        error.show(file=(text := io.StringIO()))
        echo(text.getvalue(), err=True, nl=False)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        if debug:
            raise
        echo("stopped", err=True)
        sys.exit(exit_code())
    except SparsonaError as error:
        if debug:
            raise
        echo(f"error: {in_shell(str(error))}", err=True)
        sys.exit(1)
    except (OSError, MemoryError, UnicodeEncodeError) as error:  # of the machine or a path, which no check foresaw
        if isinstance(error, BrokenPipeError) and error is getattr(sys.stdout, "failure", None):
            sys.exit(141)  # the reader of our output is gone
        if debug:
            raise
        what = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        where = f": '{error.filename}'" if isinstance(error, OSError) and error.filename else ""
        expected = "files that can be read and written, and enough memory"
        echo(f"error: {what}{where}\n  expected: {expected}\n  hint:     --debug shows where it failed", err=True)
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        echo(f"error: {type(error).__name__}: {error}\n  this is a bug: run again with --debug and report it", err=True)
        sys.exit(70)


if __name__ == "__main__":
    main()
