"""Results for other programs: numbers, Markdown, LaTeX, CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable

import pytest

from sparsona.analysis.numbers import numbers, to_csv, to_latex, to_markdown, to_text
from sparsona.analysis.view import RunView
from sparsona.core.errors import SparsonaError

MakeComparison = Callable[..., list[RunView]]


def test_numbers_by_method_client_and_round(make_comparison: MakeComparison) -> None:
    views = make_comparison(seeds=2)
    by_method = numbers(views)
    assert [line["method"] for line in by_method][:2] == ["Local", "FedAvg"]
    first = [view.summary["accuracy"]["mean"] for view in views[:2]]
    assert by_method[0]["accuracy_mean"] == pytest.approx(sum(first) / 2)
    assert by_method[0]["accuracy_mean_spread"] > 0
    clients = numbers(views, "client")
    assert len(clients) == 5 * 2 * 20
    assert clients[3]["accuracy"] == views[0].correct[3] / views[0].count[3]
    rounds = numbers(views, "round")
    assert {line["round"] for line in rounds} == set(range(1, 51))
    assert rounds[0]["accuracy"] == views[0].curves["received"][0][1]
    assert "name" not in clients[0]
    named = dataclasses.replace(views[0], client_names=tuple(f"ward {number}" for number in range(20)))
    assert [line["name"] for line in numbers([named], "client")][:2] == ["ward 0", "ward 1"]
    with pytest.raises(SparsonaError, match="unknown kind of line 'clients'"):
        numbers(views, "clients")


def test_csv_has_every_number(make_comparison: MakeComparison) -> None:
    views = make_comparison(seeds=1)
    lines = list(csv.DictReader(io.StringIO(to_csv(views, "client"))))
    assert [float(line["accuracy"]) for line in lines] == [line["accuracy"] for line in numbers(views, "client")]


def test_markdown_and_latex(make_comparison: MakeComparison) -> None:
    views = [
        dataclasses.replace(view, title="Fed|Avg_2% & more<img src=x>") if view.title == "FedAvg" else view
        for view in make_comparison(seeds=2)
    ]
    lines = to_markdown(views).splitlines()
    assert lines[0].startswith("| method | accuracy | bottom decile |")
    assert lines[3].startswith("| Fed\\|Avg\\_2% & more&lt;img src=x&gt; | ")
    assert sum("**" in line for line in lines) >= 1
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    said, needs, text = to_latex(views, caption="100% of 5", label="tab:x").split("\n", 2)
    assert said.startswith("% digits, dirichlet:0.3; ")
    assert text.startswith("\\begin{table}")
    assert r"Fed|Avg\_2\% \& more\textless{}img src=x\textgreater{} & " in text
    assert r"\caption{100\% of 5}" in text
    assert r"\label{tab:x}" in text
    assert needs == r"% This table needs \usepackage{booktabs}."
    *_, alone = to_latex(views, label="tab:a_b").split("\n", 2)
    assert alone.startswith("\\begin{table}\n\\centering\n\\label{tab:a_b}\n\\begin{tabular}")
    for label in ("x}\\input{secret", "50%", "a,b"):
        with pytest.raises(SparsonaError, match="the label"):
            to_latex(views, label=label)
    body = text[text.index(r"\midrule") : text.index(r"\bottomrule")].splitlines()[1:]
    assert all(line.count(" & ") == 6 and line.endswith(r"\\") and "±" not in line for line in body)
    assert "%" not in text.replace(r"\%", "")  # one would comment out the rest of its line
    assert to_markdown(views, every=True).count("|") > to_markdown(views).count("|")


def test_a_small_table_for_a_prompt(make_comparison: MakeComparison) -> None:
    views = [
        dataclasses.replace(view, config={**view.config, "options": {"density": 0.5}})
        if "FedSpa" in view.title
        else view
        for view in make_comparison(seeds=1)
    ]
    lines = to_text(views).splitlines()
    assert lines[0].split() == ["method", "accuracy", "bottom", "decile", "density", "bytes", "sent"]
    assert len(lines) == 6
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) < 80
    place = lines[0].index("density") + len("density")
    density = {line.split("  ")[0]: line[:place].split()[-1] for line in lines[1:]}
    assert {value for name, value in density.items() if "FedSpa" in name} == {"0.5"}
    assert density["FedAvg"] == "–"  # it has no such option
    assert to_text(views, most=2).splitlines()[-1] == "... and 3 more"
