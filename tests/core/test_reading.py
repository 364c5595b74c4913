"""Files of others: what is too large, too deep or no text is a ValueError with a reason, whoever reads it."""

from __future__ import annotations

import json
import time

import pytest

from sparsona.core.errors import SparsonaError
from sparsona.core.reading import expand, parse_json, parse_toml, read_text
from sparsona.core.spec import parse_value


@pytest.mark.parametrize("text", ["[" * 900 + "]" * 900, "[" * 100_000, '{"a":' * 40 + "1" + "}" * 40])
def test_depth(text):
    with pytest.raises(ValueError, match="nests deeper than 32 levels"):
        parse_json(text)


@pytest.mark.parametrize("digits", [41, 400, 5000])
def test_numbers(digits):
    for parse, text in ((parse_json, "[{}]"), (parse_json, '{{"a": [1, {}]}}'), (parse_toml, "v = {}")):
        with pytest.raises(ValueError, match="digits"):
            parse(text.format("9" * digits))
    assert parse_json("[1e308, -9223372036854775808]") == [1e308, -(2**63)]


def test_toml():
    for text in ("v = " + "[" * 900 + "]" * 900, "v = " + "[" * 100_000):
        with pytest.raises(ValueError, match=r"nests deeper|expected"):
            parse_toml(text)
    began = time.perf_counter()
    for text in (
        "a" + ".a" * 50_000 + " = 1",
        "[a" + ".a" * 50_000 + "]",
        "x = {a" + ".a" * 50_000 + " = 1}",
        "b." * 40_000 + '"x,"=1',
        '["x]"' + ".b" * 40_000 + "]",
    ):
        with pytest.raises(ValueError, match="line 1 has more than 2,000 dots"):
            parse_toml(text)
    assert time.perf_counter() - began < 5
    assert parse_toml("v = [" + "0.5, " * 500 + "]\n[a.b]\nc.d = 1.5") == {
        "v": [0.5] * 500,
        "a": {"b": {"c": {"d": 1.5}}},
    }


def test_values_on_the_command_line():
    """What is no TOML is a text, and is refused by the option that takes none."""
    for text in ("[" * 900, "9" * 5000, "[" * 40 + "]" * 40):
        assert parse_value(text) in (text, float("inf"))


def test_text(tmp_path):
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="utf-8"):
        read_text(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"x" * 11)
    with pytest.raises(ValueError, match="more than 10 bytes"):
        read_text(tmp_path / "a", 10)
    with pytest.raises(ValueError, match="more than 10 bytes"):
        read_text("/dev/zero", 10)
    with pytest.raises(SparsonaError, match="no such home folder"):
        expand("~nobody-of-this-name/x")


DEEP, LONG = "[" * 100_000, "9" * 400


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("c.toml", "x = " + "[" * 900 + "]" * 900, ["run", "fedavg", "--config", "{}"]),
        ("c.toml", "seed = " + "9" * 5000, ["run", "fedavg", "--config", "{}"]),
        ("c.toml", "a" + ".a" * 50_000 + " = 1", ["run", "fedavg", "--config", "{}"]),
        ("g.json", DEEP, ["run", "dispfl", "--clients", "4", "--graph", "file:{}"]),
        ("g.json", f"[[0, {LONG}]]", ["run", "dispfl", "--clients", "4", "--graph", "file:{}"]),
        ("l.json", DEEP, ["run", "pfedgate", "--clients", "4", "--set", "budget=latency:{}"]),
        ("l.json", "{latencies}1e308", ["run", "pfedgate", "--clients", "4", "--set", "budget=latency:{}"]),
        ("l.json", "{latencies}" + LONG, ["run", "pfedgate", "--clients", "4", "--set", "budget=latency:{}"]),
        ("p.json", DEEP, ["run", "fedavg", "--partition", "file:{}"]),
        ("a.csv", "é", ["run", "fedavg", "--clients", "4", "--set", "availability=file:{}"]),
        ("comparison.json", DEEP, ["resume", "."]),
        ("f.toml", "x = " + "[" * 900 + "]" * 900, ["federation", "show", "{}"]),
    ],
)
def test_bad_files_are_named(say, tmp_path, name, content, line):
    """Each of these was "a bug" or took minutes."""
    if content.startswith("{latencies}"):
        from sparsona.core.task import Task
        from sparsona.models import builder

        names = Task(builder("digits-cnn", (1, 8, 8), 10), (1, 8, 8), 10).layout.names
        content = json.dumps(dict.fromkeys(names, "N")).replace('"N"', content.removeprefix("{latencies}"))
    (tmp_path / name).write_text(content, encoding="latin-1" if name == "a.csv" else "utf-8")
    say(*(word.format(name) for word in line)).refused(name)
