"""The list of what can run code (docs/threat-model.md) is the source's, and each entry has its test."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from sparsona.core.errors import SparsonaError

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "sparsona"
SECTION = "## What can run code"

# Calls by their whole name, by the name's beginning, and by its end.
WHOLE = {
    *(
        "eval",
        "exec",
        "compile",
        "__import__",
        "ProcessPoolExecutor",
        "_Pool",
        "entry_points",
        "point.load",
        "_Unpickler",
    ),
    *(
        "np.load",
        "np.memmap.load",
        "numpy.load",
        "torch.load",
        "os.system",
        "os.popen",
        "os.startfile",
        "fork",
        "os.fork",
    ),
}
BEGINS = (
    "os.exec",
    "os.spawn",
    "os.posix_spawn",
    "subprocess.",
    "runpy.",
    "marshal.",
    "shelve.",
    "dill.",
    "joblib.",
    "yaml.",
)
ENDS = (
    *(
        "import_module",
        "pickle.load",
        "pickle.loads",
        "cloudpickle.load",
        "cloudpickle.loads",
        "CDLL",
        "PyDLL",
        "dlopen",
    ),
    *("read_array", "spec_from_file_location", "exec_module", "load_module", "export.load", "jit.load", "hub.load"),
    *("cpp_extension.load", "load_inline", "create_subprocess_exec", "create_subprocess_shell", "Process", "Unpickler"),
)


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


def can_run(name: str) -> bool:
    parts = name.split(".")
    ends = {".".join(parts[at:]) for at in range(len(parts))}
    return name in WHOLE or name.startswith(BEGINS) or not ends.isdisjoint(ENDS)


LAST = "|".join(
    sorted({re.escape(name.rpartition(".")[2]) for name in (*WHOLE, *ENDS, "import_extra", "_extra", "_import")})
)
SUSPECT = re.compile(rf"\b(?:{LAST})\(|\b(?:{'|'.join(map(re.escape, BEGINS))})")  # parsing every file takes seconds


@cache
def source() -> dict[Path, list[ast.Call]]:
    """Every call, by file."""
    found = ((path, path.read_text()) for path in SOURCE.rglob("*.py"))
    return {
        path: [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        for path, text in found
        if SUSPECT.search(text)
    }


def calls(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.Call]]:
    for node in nodes:
        if isinstance(node, ast.Call) and can_run(name := dotted(node.func)):
            yield name, node


def in_source() -> set[tuple[str, str]]:
    return {(path.relative_to(SOURCE).as_posix(), name) for path, nodes in source().items() for name, _ in calls(nodes)}


def rows() -> list[list[str]]:
    section = (ROOT / "docs" / "threat-model.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    found = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:3] == "| `"
    ]
    assert found
    return found


def ticked(cell: str) -> list[str]:
    return re.findall("`([^`]+)`", cell)


def test_the_list_is_the_source():
    listed = {(ticked(file)[0], call) for file, called, *_ in rows() for call in ticked(called)}
    assert listed == in_source()


def test_every_guard_is_there():
    for *_, guard in rows():
        path, _, name = ticked(guard)[0].partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), guard


@pytest.mark.parametrize(
    "text",
    [
        *("eval(x)", "exec(x)", "pickle.loads(x)", "import cloudpickle\ncloudpickle.loads(x)", "torch.load(x)"),
        *("os.execv(x)", "subprocess.run(x)", "torch.jit.load(x)", "pickle.Unpickler(x)", "importlib.import_module(x)"),
    ],
)
def test_a_new_call_would_be_seen(text):
    assert list(calls(ast.walk(ast.parse(text))))
    assert not list(calls(ast.walk(ast.parse("x.load(y); made(x).eval(); re.compile(y)"))))


def test_modules_that_would_hide_a_call_are_not_imported_from():
    """`from pickle import loads` would make a call that has another name."""
    hiding = "pickle|cloudpickle|subprocess|runpy|marshal|shelve|ctypes|os|builtins"
    found = re.compile(rf"^\s*(?:from (?:{hiding}) import |import .*\b(?:{hiding}) as )", re.MULTILINE)
    assert not [path for path in SOURCE.rglob("*.py") if found.search(path.read_text())]
    assert found.search("import sys\nfrom pickle import loads")
    assert found.search("import pickle as p")


def test_arrays_are_read_without_pickles():
    found = 0
    for path, nodes in source().items():
        for name, call in calls(nodes):
            if name in ("np.load", "np.lib.format.read_array"):
                given = {one.arg: one.value for one in call.keywords}
                assert isinstance(given["allow_pickle"], ast.Constant), path
                assert given["allow_pickle"].value is False, path
                found += 1
            if name == "torch.load":
                (safe,) = (one.value for one in call.keywords if one.arg == "weights_only")
                assert safe.value is True, path
                found += 1
    assert found > 5


def test_modules_are_named_by_tables(tmp_path, monkeypatch):
    """Names in a configuration choose rows of tables; packages of extras are named in the source."""
    from sparsona.data.read import read
    from sparsona.models import builder
    from sparsona.runs.observers import make_observer
    from sparsona.transforms import read_transforms

    (tmp_path / "planted.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    attempts = (
        lambda: builder("planted", (1, 8, 8), 10),
        lambda: builder("planted:planted", (1, 8, 8), 10),
        lambda: make_observer("planted:place"),
        lambda: read_transforms(("planted",)),
        lambda: read_transforms(("..planted:x",)),
        lambda: read("planted"),
    )
    for attempt in attempts:
        with pytest.raises(SparsonaError):
            attempt()
    assert "planted" not in sys.modules
    for path, nodes in source().items():
        for node in nodes:
            if isinstance(node, ast.Call) and dotted(node.func) in ("import_extra", "_extra", "_import"):
                assert isinstance(node.args[0], ast.Constant), (path, node.lineno)
