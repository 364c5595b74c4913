"""What a notebook and a prompt show of runs, and the progress of `train`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas
import pytest

import sparsona as sp
from sparsona.core.rows import html_table, text_table
from sparsona.experiment.run import Comparison

OPTIONS = {"clients": 4, "rounds": 2, "data_rate": 0.1, "device": "cpu", "epochs": 1}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return sp.compare(["local", "fedavg"], **OPTIONS, out=tmp_path_factory.mktemp("runs") / "both")


def test_what_a_prompt_prints(both: Comparison) -> None:
    assert repr(both).startswith("Comparison(2 runs, '")
    assert "serves clients best" in repr(both)
    lines = repr(both).splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["method", "Local", "FedAvg"]
    assert lines[5].startswith("note: ")
    assert max(map(len, lines[1:])) < 120
    first, second = repr(both.runs[1]).splitlines()
    assert first.startswith("Run(fedavg, 2 rounds, accuracy ")
    assert second.startswith("  bottom decile ")
    assert " sent, 1 of 4 clients trained in no round" in second
    page = both._repr_html_()
    assert "<script" not in page
    assert page.count("<tr>") == 3
    assert both.runs[0]._repr_html_().count("<tr>") == 2


def test_what_evaluate_cost_and_tune_return_is_shown_without_arrays(both: Comparison, tmp_path: Path) -> None:
    x, y = np.zeros((3, 1, 8, 8), dtype=np.float32), [0, 1, 2]
    new = both.runs[0].evaluate([0, 3], x, y)
    head, titles, first, _ = repr(new).splitlines()
    assert head == "NewResults(2 models)"
    assert titles.split()[:3] == ["client", "examples", "accuracy"]
    assert first.split()[:2] == ["0", "3"]
    assert re.fullmatch(r"NewResult\(client 3, 3 examples, accuracy \d+\.\d%\)", repr(new.results[1]))
    cost = sp.cost("fedspa", model="lenet5")
    assert repr(cost).startswith("CostReport(FedSpa (DST), lenet5 of 439,096 parameters, density 0.5)\n1,000 rounds, ")
    assert len(repr(cost).splitlines()) == 4
    found = sp.tune(["fedavg"], clients=4, rounds=1, data_rate=0.1, trials=1, jobs=1, refit_seeds=0, out=tmp_path / "t")
    assert repr(found).splitlines()[2].split()[:2] == ["fedavg", "lr=0.1"]
    for shown, has in ((new, "<th>accuracy</th>"), (cost, "<td>18.12 GB</td>"), (found, "<td>lr=0.1</td>")):
        assert has in shown._repr_html_()
        assert max(map(len, repr(shown).splitlines())) < 120
    assert "tensor" not in repr(new) + new._repr_html_()


def test_long_tables_say_how_many_more_rows_there_are() -> None:
    rows = [{"name": f"<{i}>\n", "n": i} for i in range(30)]
    assert text_table(rows, most=2) == "name   n\n<0>\\n  0\n<1>\\n  1\n... and 28 more"
    assert html_table(rows, most=2).endswith(
        "<th>&lt;1&gt;\\n</th><td>1</td></tr></tbody></table><p>... and 28 more</p>"
    )


def test_figures_are_plotly_objects(both: Comparison) -> None:
    assert [trace.name for trace in both.plot_curves().data] == ["Local", "FedAvg"]
    assert next(one.name for one in both.plot_tradeoff().data if one.showlegend is not False).startswith("Local")
    assert len(both.plot_clients().data) == 2
    assert len(both.runs[1].plot_curves("bytes").data) == 1
    for metric, hint in (("f1", r"train with metrics=\['f1'\]"), ("acc", "did you mean 'accuracy'"), ("width", None)):
        with pytest.raises(sp.SparsonaError, match=f"curves of '{metric}', which was not recorded") as told:
            both.plot_curves(metric=metric)
        assert re.match(hint or "$", told.value.hint)


def test_tables_in_files(both: Comparison, tmp_path: Path) -> None:
    assert (tmp_path / "a.tex", both.to_latex(tmp_path / "a.tex"))[0].read_text() == both.to_latex()
    assert [line[:1] for line in both.to_markdown().splitlines()].count("|") == 4
    assert both.runs[0].to_csv(per="client").count("\n") == 5
    frame = both.to_frame("client")
    assert isinstance(frame, pandas.DataFrame)
    assert frame["accuracy"].between(0, 1).all()


@pytest.mark.parametrize("per", ["method", "client", "round"])
def test_what_is_not_known_is_nan_in_a_frame(both: Comparison, per: Any) -> None:
    frame = both.to_frame(per)
    assert not frame.map(lambda value: value is None).any(axis=None)
    if per == "method":
        assert frame["accuracy_last10"].dtype == frame["hurt_against_local"].dtype == float
        assert frame["accuracy_last10"].isna().all()  # there were no ten evaluations


class Display:
    """A stand-in for IPython's display: what is shown, and what it is replaced by."""

    def __init__(self) -> None:
        self.shown: list[list[str]] = []

    def __call__(self, what: str, display_id: bool) -> Any:
        lines = [what]
        self.shown.append(lines)
        handle = ModuleType("handle")
        handle.update = lines.append
        return handle


def test_a_bar_in_notebooks_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    display = Display()
    module = ModuleType("IPython.display")
    module.HTML, module.display = str, display
    for name, found in (
        ("ipykernel", ModuleType("ipykernel")),
        ("IPython", ModuleType("IPython")),
        ("IPython.display", module),
    ):
        monkeypatch.setitem(sys.modules, name, found)
    sp.train("local", **OPTIONS, out=tmp_path / "quiet", progress=False)
    assert display.shown == []
    sp.compare(["local", "fedavg"], **OPTIONS, out=tmp_path / "both")
    assert [lines[-1].count("2 of 2 rounds, accuracy") for lines in display.shown] == [1, 1]


def test_no_bar_where_nobody_looks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sp.train("local", **OPTIONS, out=tmp_path / "run")
    assert capsys.readouterr().err == ""
    sp.train("local", **OPTIONS, out=tmp_path / "shown", progress=True)
    assert "local" in capsys.readouterr().err
