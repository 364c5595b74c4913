"""The table of methods: who may import what of whom."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from sparsona import methods
from sparsona.core.errors import SparsonaError
from sparsona.methods import METHODS, factory
from sparsona.runs.declaration import options_of

FOLDER = Path(methods.__file__).parent
MODULES = sorted({row.module for row in METHODS.values()})
# A method may be made of another: of its factory and the classes of its options.
PUBLIC = {module: {module} | {row.config for row in METHODS.values() if row.module == module} for module in MODULES}

OWN = {"fedspa": "fedspa", "fedspa-rsm": "fedspa", "dispfl": "dispfl", "pfedgate": "pfedgate"}


def test_a_paper_has_a_preset_of_its_own_methods():
    """So that one preset is for a whole column of its table."""
    for name, paper in {**OWN, "fedalt": "fedalt", "fedsim": "fedalt"}.items():
        own = METHODS[name].presets["paper"]
        if name == "pfedgate":  # by the code, as its baselines, at the rates of the text
            own = replace(METHODS[name].presets["authors"], by_density=own.by_density)
        assert METHODS[name].presets[paper] == own


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.stem)
def test_a_method_takes_of_another_its_factory_and_config_alone(path):
    own = path.relative_to(FOLDER).with_suffix("").parts[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not [name.name for name in node.names if name.name.startswith("sparsona.methods.")], path
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            found = (node.module or "").removeprefix("sparsona.methods.").split(".")[0]
            if (node.module or "").startswith("sparsona.methods.") and found in MODULES and found != own:
                assert {name.name for name in node.names} <= PUBLIC[found], f"{path.name} imports internals of {found}"


def test_no_option_has_the_value_none_as_a_word():
    """On the command line and in files 'none' is None."""
    for name in METHODS:
        for key, one in options_of(factory(name)[1]).items():
            assert "none" not in (one.choices or ()), f"{name}: {key}"


def test_names_with_commas_between_them_are_told_apart():
    with pytest.raises(SparsonaError, match="separate them by spaces"):
        methods.card("fedavg,fedspa")
    with pytest.raises(SparsonaError, match="unknown method"):
        methods.card("fedavg,nothing")
