"""Generated bad input for every command: each ends with an exit code of 0, 1 or 2 and a message that helps.

Commands, flags and options are read from the command line itself and from the tables of options, so that new ones are
among them. Some are tried with every run of the suite, 2,000 with `pytest -m slow`, which also plays a round of some.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import unicodedata
from dataclasses import fields
from pathlib import Path

import click
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sparsona as sp
from sparsona.cli import app
from sparsona.core.errors import SparsonaError
from sparsona.methods import METHODS, factory
from sparsona.robust import ATTACKS, MEANS, read_attack, read_mean
from sparsona.runs.options import OPTIONS
from sparsona.transforms.privacy import KINDS, Privacy, read_privacy

NUMBERS = ["-1", "0", "1", "2", "2.0", "1.5", "-0", "1e400", "nan", "inf", "-inf", "1" * 30, "9" * 5000, "1" + "0" * 11]
NUMBERS += [
    "1" + "0" * 23,
    "0x10",
    "1_000",
    "٣",
    "true",
    "none",
    "1e-320",
    "1e308",
    "9223372036854775807",
    "3,4",
    "1:2",
]
TEXTS = ["", " ", "x", "\x1b[2J", "a\x9b31m", "\u202egnp.exe", "[bold]x[/d]", "exp[x=1]", "ü" * 300, ":::", "=", "a=b"]
TEXTS += ["[" * 900, "{" * 50, "'", '"', "\\", "\ud83d\ude00", "\udcff", "a,b,c", "~nobody/x", "a" * 5000, "\t", "none"]
TEXTS += [
    "file:",
    "random:0",
    "dirichlet:1e400",
    "shards:" + "9" * 40,
    "topk:2",
    "diurnal:0:0",
    "a:b=c",
    "cosine:1:2:3",
]
TEXTS += ["[1, 2]", "[true]", "[[1], [2]]", "[]", "{a = 1}", "2020-01-01", "lognormal:x", "markov:2:2", "-", "--", "@"]
NAMES = [
    "missing",
    "folder",
    "binary",
    "empty",
    "deep.json",
    "numbers.json",
    "bad.toml",
    "deep.toml",
    "keys.toml",
    "run",
]
NAMES += [
    "run/config.json",
    "broken",
    "objects.npz",
    "latin.csv",
    "/dev/null",
    "/dev/full/x",
    "folder/new.svg",
    "new.png",
]
NAMES += ["a" * 300, "list.json", "runs", "fed.toml", "pipe", "odd\udcffname", "/proc/self/mem"]
PREFIXES = ["", "file:", "arrays:", "folder:", "latency:", "natural:", "jsonl:"]
FILES = {
    "binary": bytes(range(256)) * 8,
    "empty": b"",
    "deep.json": b"[" * 100_000,
    "numbers.json": b'{"0.weight": 1e308, "1.weight": ' + b"9" * 400 + b', "edges": [[0, ' + b"1" * 4999 + b"]]}",
    "list.json": b'[[0, 1], [1, "x"], [2]]',
    "bad.toml": b"rounds = true\nclients = '5'\nseed = 1.5\nlr = [1]\nguard = 1\n[options]\nepochs = 1.5\n",
    "deep.toml": b"x = " + b"[" * 900 + b"]" * 900 + b"\nseed = " + b"9" * 5000,
    "keys.toml": b"a" + b".a" * 50_000 + b" = 1\n",
    "fed.toml": b"format = 1\nname = '\\u001b[2J'\nclients = 3\n",
    "latin.csv": "0,é\n".encode("latin-1"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of files that are wrong in some way, and of one run that is as it should be."""
    folder = tmp_path_factory.mktemp("place")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    for name in ("folder", "broken", "runs"):
        (folder / name).mkdir()
    (folder / "broken" / "config.json").write_bytes(FILES["deep.json"])
    (folder / "broken" / "comparison.json").write_text('[{"folder": 3, "config": []}]')
    np.savez(folder / "objects.npz", x=np.array([{}, []], dtype=object), y=np.arange(2))
    os.mkfifo(folder / "pipe")
    before = Path.cwd()
    os.chdir(folder)
    sp.train("fedavg", out="run", clients=3, rounds=1, epochs=1, data_rate=0.05, min_size=2, executor="serial")
    yield folder
    os.chdir(before)


def commands(group=app.cli, name=()):
    for key, one in group.commands.items():
        if isinstance(one, click.Group):
            yield from commands(one, (*name, key))
            if one.invoke_without_command:
                yield (*name, key), one
        else:
            yield (*name, key), one


COMMANDS = dict(commands())
METHOD_OPTIONS = sorted({key for name in METHODS for key in factory(name)[1].model_fields})
KEYS = [*OPTIONS, *METHOD_OPTIONS, "unknown", "", "out", "method", "a.b"]
ANY_TEXT = st.text(st.characters(exclude_characters="\0"), max_size=12)
VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.builds(str.__add__, st.sampled_from(PREFIXES), st.sampled_from(NAMES)),
)
VALUES = st.one_of(VALUES, VALUES, ANY_TEXT, st.integers().map(str), st.floats().map(str))
# Names that are known, with numbers at and beyond the ends of what they may be: most texts above end at the name.
EDGES = ["0", "-0.0", "1e-320", "1e-9", "0.2", "0.5", "0.999999", "1", "2", "3", "1e9", "3.3e38", "-3.3e38", "1e39"]
EDGES += [
    "1e300",
    "-1e308",
    "9223372036854775807",
    "-9223372036854775808",
    "9" * 400,
    "0." + "0" * 400 + "1",
    "nan",
    "2,3",
]
SHARES = st.sampled_from(["0.2", "0.2", "0.5", "1e-300", "0.9", *EDGES])
EDGE = st.sampled_from(EDGES)
LONG = st.builds(
    lambda sign, digit, num: sign + digit * num,
    st.sampled_from(["", "-", "+", "0."]),
    st.sampled_from("019"),
    st.integers(19, 700),
)


INSIDE = st.sampled_from(["1e-320", "1e-9", "0.2", "0.4", "1", "2", "3", "1e9", "-1e9", "3.3e38", "-3.3e38"])


def specs(names, options, numbers=EDGE, shares=SHARES, odd=("x",)) -> st.SearchStrategy[str]:
    """Texts `name:number,option=number` of a table. `options` has those of a name, and how many values it has to and
    may be given."""

    def written(name: str) -> st.SearchStrategy[str]:
        keys, least, most = options(name)
        pairs = st.lists(st.builds("{}={}".format, st.sampled_from([*keys, *keys, *odd]), numbers), max_size=2)
        values = st.lists(shares, min_size=least, max_size=most)
        texts = st.tuples(values, pairs if keys else st.just([]))
        return texts.map(lambda found: f"{name}:{','.join([*found[0], *found[1]])}".rstrip(":"))

    return st.sampled_from(sorted(names)).flatmap(written)


def tables(**how) -> dict[str, st.SearchStrategy[str]]:
    """Texts of each option that is a row of a table with numbers."""
    noise = [one.name for one in fields(Privacy)][1:]
    return {
        "mean": specs(MEANS, lambda name: ((), MEANS[name].needs, MEANS[name].takes), **how),
        "attack": specs(ATTACKS, lambda name: (tuple(ATTACKS[name].options), 1, 1), **how),
        "privacy": specs(KINDS, lambda name: (noise, 0, 0), **how),
    }


SPECS = tables()
PLAYED = tables(numbers=INSIDE, shares=st.sampled_from(["0.2", "0.3", "0.4", "1e-300"]), odd=())
RUN_LIKE = {"RUN", "RUN...", "path", "paths"}


def values_of(parameter: click.Parameter, command: tuple[str, ...]) -> st.SearchStrategy[str]:
    """What a parameter is given: mostly something wrong, at times something right, so that other checks are reached."""
    if parameter.name == "pairs":
        known = [text.map(f"{key}={{}}".format) for key, text in SPECS.items()]
        long = st.builds("{}={}".format, st.sampled_from(KEYS), LONG)
        return st.one_of(st.builds("{}={}".format, st.sampled_from(KEYS), VALUES), st.one_of(known), long)
    if parameter.name in SPECS:
        return st.one_of(SPECS[parameter.name], SPECS[parameter.name], VALUES)
    if isinstance(parameter.type, click.types.IntParamType | click.types.FloatParamType):
        return st.one_of(VALUES, EDGE, LONG)
    if command == ("data", "get"):
        return st.sampled_from(["nothing", *TEXTS])  # nothing is downloaded
    if isinstance(parameter, click.Argument):
        known = ["run"] if (parameter.metavar or "") in RUN_LIKE or parameter.name in RUN_LIKE else []
        known += [*METHODS, "fedspa:density=0.3"][:8] if parameter.name in ("method", "methods") else []
        known += ["digits"] if parameter.name == "name" else []
        right = st.sampled_from(known or ["x"])
        methods = st.builds("{}:{}={}".format, st.sampled_from(["fedspa", "dispfl"]), st.sampled_from(KEYS), VALUES)
        return st.one_of(right, right, right, VALUES, methods)
    if isinstance(parameter.type, click.Choice):
        return st.one_of(st.sampled_from(list(parameter.type.choices)), VALUES)
    return VALUES


@st.composite
def lines(draw) -> list[str]:
    """A command line: a command, its arguments, and some of its flags."""
    name = draw(st.sampled_from(sorted(COMMANDS)))
    command = COMMANDS[name]
    parameters = command.get_params(click.Context(command))
    found = list(name)
    options = [one for one in parameters if isinstance(one, click.Option) and one.name not in ("help", "opens")]
    chosen = draw(st.lists(st.sampled_from(options), max_size=3, unique_by=id)) if options else []
    for one in dict.fromkeys([*(one for one in options if one.required), *chosen]):
        found.append(draw(st.sampled_from([*one.opts, *one.secondary_opts])))
        if not one.is_flag:
            found.append(draw(values_of(one, name)))
    for one in parameters:
        if isinstance(one, click.Argument):
            found += [draw(values_of(one, name)) for _ in range(1 if one.nargs == 1 else draw(st.integers(0, 2)))]
    if name == ("reproduce",):
        found.append("--dry-run")
    return found


TINY = [
    "--clients",
    "7",
    "--per-round",
    "7",
    "--rounds",
    "1",
    "--executor",
    "serial",
    "--model",
    "mlp",
    "--epochs",
    "1",
]
TINY += ["--set", "data_rate=0.08", "--set", "min_size=3"]
TRAINING = [
    "lr",
    "momentum",
    "weight_decay",
    "lr_decay",
    "density",
    "batch_size",
    "per_round",
    "seed",
    "partition_seed",
    "drop_rate",
]
TRAINING += ["clip_norm", "label_smoothing", "divergence_factor", "min_updates", "novel"]


@st.composite
def played_lines(draw) -> list[str]:
    """A run of one round on a tiny federation, with attackers, a mean, noise, or a number at an edge."""
    found = ["run", draw(st.sampled_from(["fedavg", "fedspa", "fedalt", "dispfl"] * 5 + sorted(METHODS))), *TINY]
    chosen = draw(st.lists(st.sampled_from(sorted(SPECS)), min_size=1, max_size=2, unique=True))
    for name in chosen:
        found += [f"--{name}", draw(PLAYED[name])]
    for name in draw(st.lists(st.sampled_from(TRAINING), max_size=1)):
        found += ["--set", f"{name}={draw(st.one_of(EDGE, LONG))}"]
    return found


def run_line(line: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["sparsona", *line]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            app.main()
        code = 0
    except SystemExit as done:
        code = int(done.code or 0)
    finally:
        sys.argv = argv
    return code, out.getvalue(), err.getvalue()


def hidden_characters(text: str) -> set[str]:
    """What would control a terminal; rich ends lines of its bars with what a terminal takes, which has none here."""
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in "\n\t"}


def check_line(line: list[str]) -> int:
    code, out, err = run_line(line)
    where = (line, code, err[-2000:])
    assert code in (0, 1, 2), where
    assert "Traceback" not in err, where
    assert "this is a bug" not in err, where
    assert not hidden_characters(out + err), where
    if code == 1 and line[0] not in ("replay", "verify"):  # whose findings are their output
        assert "error: " in err, where
        assert "expected: " in err or "hint: " in err, where
    elif code == 2:
        assert "Usage: " in err, where
    return code


def no_training(*_args, **_options):
    raise SparsonaError("accepted", expected="nothing to be trained in this test")


@pytest.fixture
def untrained(place, monkeypatch):
    """Whatever is accepted ends where training, serving or listening would begin."""
    monkeypatch.setattr("sparsona.runs.session.Session.play", no_training)
    monkeypatch.setattr("sparsona.experiment.tune._tune", no_training)
    monkeypatch.setattr("sparsona.experiment.leakage._inversions", no_training)
    monkeypatch.setattr("sparsona.experiment.theory.sample.Sample.__init__", no_training, raising=False)
    monkeypatch.setattr("http.server.ThreadingHTTPServer.serve_forever", no_training)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    for name in ("server_side.serve", "client_side.join", "peers.be_peer"):
        module, _, function = name.partition(".")
        monkeypatch.setattr(f"sparsona.experiment.{module}.{function}", no_training)
    return place


HOW = {"deadline": None, "database": None, "derandomize": True, "print_blob": False}
HOW["suppress_health_check"] = list(HealthCheck)


@given(lines())
@settings(max_examples=60, **HOW)
def test_generated_lines(untrained, line):
    check_line(line)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(lines())
@settings(max_examples=1800, **HOW)
def test_many_generated_lines(untrained, line):
    check_line(line)


@given(played_lines())
@settings(max_examples=4, **HOW)
def test_a_round_of_generated_lines(place, line):
    check_line(line)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(played_lines())
@settings(max_examples=200, **HOW)
def test_a_round_of_many_generated_lines(place, line):
    check_line(line)


@pytest.mark.parametrize(
    ("texts", "read"), [(SPECS["mean"], read_mean), (SPECS["attack"], read_attack), (SPECS["privacy"], read_privacy)]
)
def test_generated_texts_are_read(texts, read) -> None:
    """Many of these texts are right, so that what comes after reading is reached."""
    right = []

    @given(texts)
    @settings(max_examples=100, **HOW)
    def collect(text: str) -> None:
        with contextlib.suppress(SparsonaError):
            right.append(read(text))

    collect()
    assert len(right) > 10
