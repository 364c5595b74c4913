"""The recipes of pFedGate and of FedSim and FedAlt.

Printed figures against a second transcription of the papers, by column where the recipes go by row; what the papers say
about their own figures; and that every row can be run.
"""

from __future__ import annotations

import pytest

from sparsona.costs.rules import COST_RULES
from sparsona.experiment.build import make_config
from sparsona.methods import card, published
from sparsona.reproduce.recipe import Printed, Recipe, load, names
from sparsona.reproduce.runner import reproduce

MINE = [name for name in names() if name.startswith(("pfedgate/", "fedalt/"))]
FIGURES = {"pfedgate": range(3, 8), "fedalt": range(3, 11)}
TABLES = {"pfedgate": range(1, 8), "fedalt": range(2, 13)}


def options_of(recipe: Recipe, name: str) -> dict[str, object]:
    options = dict(recipe.options)
    for setting in sorted(recipe.settings, key=len):
        if name.startswith(f"{setting}/"):
            options |= recipe.settings[setting]
    return options | recipe.rows[name].options


def text(printed: Printed, digits: int = 2) -> str:
    """As in the transcriptions below: 25.20(1) is 25.20 with a spread of 0.01."""
    spread = "" if printed.spread is None else f"({round(printed.spread * 100)})"
    return f"{printed.value:.{digits}f}{spread}"


def printed(recipe: Recipe, row: str, *columns: str) -> str:
    return " ".join(text(recipe.rows[row].printed[column]) for column in columns)


def lines(block: str) -> list[str]:
    return [" ".join(line.split()) for line in block.strip().splitlines()]


def test_every_table_and_figure_has_a_recipe() -> None:
    for paper, numbers in TABLES.items():
        assert {f"{paper}/table{number}" for number in numbers} <= set(MINE)
    for paper, numbers in FIGURES.items():
        found = [load(f"{paper}/figure{number}") for number in numbers]
        assert all(recipe.kind == "figure" and recipe.picture for recipe in found)
    assert "pfedgate/appendix-e" in MINE


@pytest.mark.parametrize("name", MINE)
def test_rows_refer_to_rows_and_columns_that_are_there(name: str) -> None:
    recipe = load(name)
    for row in recipe.rows.values():
        assert {row.against, row.warm_start} <= {None, *recipe.rows}
        assert set(row.printed) <= set(recipe.columns)
        assert not (row.stand_in and row.printed)
    used = {str(options_of(recipe, row)["data"]) for row in recipe.rows}
    assert set(recipe.absent) <= used
    for key, row in recipe.rows.items():
        assert not (row.stand_in and options_of(recipe, key)["data"] in recipe.absent)
    for key, figures in recipe.averages.items():
        assert set(figures) <= set(recipe.columns)
        assert sum(row.partition("/")[2] == key for row in recipe.rows) > 1


@pytest.mark.parametrize("name", MINE)
def test_every_row_is_a_valid_run(name: str) -> None:
    recipe = load(name)
    for key, row in recipe.rows.items():
        if row.method in COST_RULES:
            continue  # costs alone are known of it
        options = options_of(recipe, key)
        if row.warm_start and not options.get("rounds", 1):
            options["rounds"] = 1  # none are trained, and what to start from is not there yet
        config = make_config(row.method, options)
        assert config.preset in ("paper", "authors", name.partition("/")[0])
        if config.preset in ("paper", "authors"):
            assert config.method in ("pfedgate", "fedalt", "fedsim")


def test_rows_of_both_presets_have_what_is_printed_once() -> None:
    twins = 0
    for recipe in map(load, MINE):
        figures = {key: row.printed for key, row in recipe.rows.items()} | recipe.averages
        for key in figures:
            if key.endswith("-authors"):
                assert figures[key] == figures[key.removesuffix("-authors")]
                twins += 1
    assert twins > 50


# pFedGate, table 1, by data set.
GATE_1_ROWS = [
    *("local", "fedavg", "fedavg-ft", "pfedme", "lg-fedavg", "ditto", "fedem", "fedrep", "fedmask", "heterofl"),
    *("s=1/pfedgate", "s=0.5/pfedgate", "s=0.3/pfedgate"),
]
GATE_1_ACCURACY = {
    "emnist": "71.91 82.54 83.19 83.29 83.25 82.75 83.41 82.42 81.95 85.64 87.11 87.28 87.09",
    "femnist": "71.12 76.51 78.43 75.29 75.13 79.29 80.12 79.17 78.69 77.22 87.32 86.31 86.75",
    "cifar10": "61.91 68.33 69.91 70.29 69.54 73.14 72.43 72.77 72.43 70.97 75.18 74.07 73.65",
    "cifar100": "26.95 35.21 37.15 36.14 36.72 37.32 38.28 36.68 36.21 37.01 42.01 40.07 39.53",
    "average": "57.97 65.65 67.17 66.25 66.16 68.13 68.56 67.76 67.32 67.71 72.91 71.93 71.76",
}
GATE_1_DECILE = {
    "emnist": "64.28 75.07 76.83 76.48 76.14 78.12 76.59 77.71 77.26 77.76 81.43 81.15 82.52",
    "femnist": "57.93 60.82 64.22 57.63 57.62 63.24 64.81 62.89 62.18 59.13 77.14 75.68 76.47",
    "cifar10": "53.71 60.22 61.55 62.13 61.86 62.59 62.88 63.44 62.88 63.64 66.67 64.21 64.39",
    "cifar100": "21.13 29.82 30.91 30.13 30.51 30.11 31.04 30.51 30.13 31.27 35.03 32.38 31.63",
    "average": "49.26 56.48 58.38 56.59 56.53 58.52 58.83 58.64 58.11 57.95 65.07 63.36 63.75",
}


def test_pfedgate_table_1() -> None:
    recipe = load("pfedgate/table1")
    for column, table in (("accuracy", GATE_1_ACCURACY), ("decile", GATE_1_DECILE)):
        for data, figures in table.items():
            for row, figure in zip(GATE_1_ROWS, figures.split(), strict=True):
                if data == "average":
                    assert text(recipe.averages[row][column]) == figure
                    continue
                assert text(recipe.rows[f"{data}/{row}"].printed[column]) == figure, (data, row)
    used = {key: figures["used"].value for key, figures in recipe.averages.items() if "used" in figures}
    printed = {"s=0.5/pfedgate": 0.43, "s=0.3/pfedgate": 0.25}
    assert used == {f"{key}{end}": value for key, value in printed.items() for end in ("", "-authors")}
    assert not any("used" in row.printed for row in recipe.rows.values())  # printed once for each method


def test_pfedgate_table_1_averages_are_means() -> None:
    recipe = load("pfedgate/table1")
    for row in GATE_1_ROWS:
        for column in ("accuracy", "decile"):
            figures = [recipe.rows[f"{data}/{row}"].printed[column].value for data in list(GATE_1_ACCURACY)[:4]]
            assert recipe.averages[row][column].value == pytest.approx(sum(figures) / 4, abs=0.00501)


# By column: FedAvg, FedEM, pFedGate with s = 1, 0.5, 0.3.
FIVE = ("fedavg", "fedem", "s=1/pfedgate", "s=0.5/pfedgate", "s=0.3/pfedgate")
GATE_5 = {
    ("femnist", "accuracy"): "76.39 79.21 87.79 86.64 85.69",
    ("femnist", "novel"): "74.93 78.26 87.18 86.19 85.12",
    ("femnist", "gap"): "1.46 0.95 0.61 0.45 0.57",
    ("cifar10", "accuracy"): "67.78 71.92 73.97 74.12 73.64",
    ("cifar10", "novel"): "66.15 70.75 73.18 73.19 72.78",
    ("cifar10", "gap"): "1.63 1.17 0.79 0.93 0.86",
}
GATE_6 = {
    ("femnist", "accuracy"): "77.45 78.54 87.86 86.72 85.78",
    ("femnist", "decile"): "57.98 63.37 77.43 75.12 74.89",
    ("cifar10", "accuracy"): "66.31 71.12 74.29 74.25 73.91",
    ("cifar10", "decile"): "57.96 60.76 64.11 64.36 64.38",
    ("average", "drop"): "3.56 1.45 0.82 0.79 0.36",
    ("average", "decile_drop"): "2.55 1.78 1.13 0.21 0.80",
}


def test_rows_of_the_authors_have_the_rates_of_their_readme() -> None:
    """FEMNIST at s = 0.5, all sampled; and a fifth of it at 0.5 and 0.3, for 2,000 rounds with two paths."""
    for table, pattern in (("1", "s=0.5"), ("5", "s=0.5"), ("6", "all/s=0.5"), ("7", "B=5/s=0.5"), ("7", "B=2/s=0.5")):
        recipe = load(f"pfedgate/table{table}")
        config = make_config("pfedgate", options_of(recipe, f"femnist/{pattern}/pfedgate-authors"))
        assert (config.options["lr"], config.options["gate_lr"], config.rounds) == (0.1, 0.1, 400)
        assert not any("no rates for FEMNIST" in one for one in recipe.differs)
    for density in ("0.5", "0.3"):
        row = f"femnist/sampled/s={density}/pfedgate-authors"
        config = make_config("pfedgate", options_of(load("pfedgate/table6"), row))
        assert (config.options["lr"], config.options["gate_lr"]) == (0.1, 0.5)
        assert (config.options["paths"], config.rounds, config.per_round) == (2, 2000, 108)


def test_the_presets_baselines_have_default_rates_and_the_tables_say_so() -> None:
    for name in ("pfedgate/table1", "pfedgate/table7", "pfedgate/figure6"):
        assert any("the preset sets no rate" in one for one in load(name).differs)
    for row in load("pfedgate/table1").rows.values():
        if row.method not in ("pfedgate", *COST_RULES):
            assert "lr" not in published(card(row.method), {"preset": "pfedgate", "data": "cifar10"})


def test_fedmask_masks_as_many_layers_as_appendix_g_says() -> None:
    masked = {"emnist": 1, "femnist": 1, "cifar10": 2, "cifar100": 2, "mnist-dirichlet": 1, "mnist-writers": 1}
    for name in ("pfedgate/table1", "pfedgate/table7"):
        recipe = load(name)
        rows = [row for row in recipe.rows if recipe.rows[row].method == "fedmask"]
        assert rows
        for row in rows:
            config = make_config("fedmask", options_of(recipe, row))
            assert config.options["num_masked_layers"] == masked[row.partition("/")[0]], row


def test_pfedgate_tables_5_and_6() -> None:
    fifth, sixth = load("pfedgate/table5"), load("pfedgate/table6")
    for (data, column), figures in GATE_5.items():
        for row, figure in zip(FIVE, figures.split(), strict=True):
            assert text(fifth.rows[f"{data}/{row}"].printed[column]) == figure
    for (data, column), figures in GATE_6.items():
        for row, figure in zip(FIVE, figures.split(), strict=True):
            found = (
                sixth.averages[f"sampled/{row}"] if data == "average" else sixth.rows[f"{data}/sampled/{row}"].printed
            )
            assert text(found[column]) == figure


def test_pfedgate_gaps_and_drops_follow_from_accuracies() -> None:
    fifth, sixth, first = load("pfedgate/table5"), load("pfedgate/table6"), load("pfedgate/table1")
    for row in fifth.rows.values():
        if row.printed:
            gap = row.printed["accuracy"].value - row.printed["novel"].value
            assert gap == pytest.approx(row.printed["gap"].value, abs=0.001)
    off = set()
    for row in FIVE:
        for column, drop in (("accuracy", "drop"), ("decile", "decile_drop")):
            falls = [
                first.rows[f"{data}/{row}"].printed[column].value
                - sixth.rows[f"{data}/sampled/{row}"].printed[column].value
                for data in ("femnist", "cifar10")
            ]
            if abs(sum(falls) / 2 - sixth.averages[f"sampled/{row}"][drop].value) > 0.00501:
                off.add((row, drop))
                for data in ("femnist", "cifar10"):
                    assert "does not follow" in sixth.rows[f"{data}/sampled/{row}"].differs[0]
    assert off == {(row, "drop") for row in ("fedavg", "s=1/pfedgate", "s=0.5/pfedgate")}


# Table 7: s = 0.5, s = 0.3, and the difference in parentheses, for FedMask and B = 5, 2, 10.
GATE_7 = {
    ("femnist", "accuracy"): "78.69 77.41 -1.28  86.31 86.75 0.44  81.10 80.03 -1.07  85.38 84.67 -0.71",
    ("femnist", "decile"): "62.18 60.69 -1.49  75.68 76.47 0.79  71.28 70.72 -0.56  74.91 75.10 0.19",
    ("cifar10", "accuracy"): "70.54 68.46 -2.08  74.07 73.65 -0.42  70.81 70.65 -0.16  72.94 72.48 -0.46",
    ("cifar10", "decile"): "61.37 59.05 -1.32  64.21 64.39 0.18  61.03 60.66 -0.37  63.59 63.58 -0.11",
}


def test_pfedgate_table_7() -> None:
    recipe, first = load("pfedgate/table7"), load("pfedgate/table1")
    off = set()
    for (data, column), block in GATE_7.items():
        figures = block.split()
        change = "change" if column == "accuracy" else "decile_change"
        for at, row in enumerate(("s={}/fedmask", "B=5/s={}/pfedgate", "B=2/s={}/pfedgate", "B=10/s={}/pfedgate")):
            half = recipe.rows[f"{data}/{row.format('0.5')}"].printed
            less = recipe.rows[f"{data}/{row.format('0.3')}"].printed
            assert [text(half[column]), text(less[column]), text(less[change])] == figures[3 * at : 3 * at + 3]
            if abs(less[column].value - half[column].value - less[change].value) > 0.001:
                off.add((data, row, column))
        for row in ("fedavg", "fedem"):
            assert recipe.rows[f"{data}/{row}"].printed[column] == first.rows[f"{data}/{row}"].printed[column]
        for s in ("0.5", "0.3"):
            own = recipe.rows[f"{data}/B=5/s={s}/pfedgate"].printed[column]
            assert own == first.rows[f"{data}/s={s}/pfedgate"].printed[column]
    assert off == {("cifar10", "s={}/fedmask", "decile"), ("cifar10", "B=10/s={}/pfedgate", "decile")}


def test_pfedgate_tables_2_3_and_4() -> None:
    second, third, fourth = load("pfedgate/table2"), load("pfedgate/table3"), load("pfedgate/table4")
    rows = ("standard", "no-pre-norm", "no-post-norm", "no-sigmoid", "client-wise")
    by_column = {
        ("emnist", "accuracy"): "87.28 86.25 87.14 83.55 84.83",
        ("emnist", "rounds"): "1.00 1.13 1.10 1.85 0.74",
        ("cifar100", "accuracy"): "39.72 38.32 39.67 31.29 33.52",
        ("cifar100", "rounds"): "1.00 1.24 1.43 1.93 0.86",
    }
    for (data, column), figures in by_column.items():
        assert [printed(second, f"{data}/{row}", column) for row in rows] == figures.split()
    costs = [printed(third, row, "train", "infer", "up", "down", "stored") for row in list(third.rows)[:4]]
    assert costs == lines("""
        2.00 1.00 1.00 1.00 1.00
        2.00 1.00 1.00 1.00 1.00
        6.00 1.00 3.00 3.00 3.00
        1.10 0.55 0.67 1.00 1.05
    """)
    rates = {
        "emnist": "0.10 0.10 0.03",
        "femnist": "0.10 0.10 0.30",
        "cifar10": "0.03 0.03 0.03",
        "cifar100": "0.10 0.03 0.05",
    }
    gates = {
        "emnist": "0.10 0.10 0.50",
        "femnist": "0.10 0.05 0.05",
        "cifar10": "0.05 1.50 1.50",
        "cifar100": "1.50 1.50 0.50",
    }
    for data in rates:
        names_ = [f"{data}/s={s}/pfedgate" for s in ("1", "0.5", "0.3")]
        assert [printed(fourth, row, "model") for row in names_] == rates[data].split()
        assert [printed(fourth, row, "gate") for row in names_] == gates[data].split()
    assert load("pfedgate/figure4").rows["cifar10/s=0.3/pfedgate"].printed["accuracy"].value == 89.21
    assert load("pfedgate/appendix-e").averages["s=0.5/pfedgate"]["q"].value == 0.67


# FedSim and FedAlt. (1) after a figure is a spread of 0.01.
ALT_3 = {
    "fedavg": "23.82 51.43 93.18",
    "finetune": "25.20(1) 62.85(2) 94.13(1)",
    "ditto": "25.20(1) 62.85(1) 94.13(1)",
    "pfedme": "25.21(1) 62.92(2) 94.13(1)",
    "input/fedalt": "24.44(1) 53.94(7) 93.62(4)",
    "output/fedalt": "25.05(1) 56.64(5) 93.57(5)",
    "adapter/fedalt": "24.82(1) 66.41(6) 94.13(3)",
}
ALT_9 = {
    "ft-part": ["24.96(1) 51.97(2) 93.29(0)", "24.93(1) 53.21(1) 93.37(1)", "24.71(0) 63.86(6) 93.66(0)"],
    "fedalt": ["24.44(1) 53.94(6) 93.62(3)", "25.05(1) 56.64(5) 93.57(4)", "24.82(1) 66.41(5) 94.13(3)"],
    "fedsim": ["24.81(1) 53.64(8) 93.55(5)", "25.02(1) 56.24(4) 93.55(5)", "24.74(1) 66.35(3) 94.07(3)"],
}
ALT_10 = {
    "fedalt": ["-0.06(1) 0.12(2) 0.12(1)", "0.00(1) 0.49(2) 0.09(1)", "0.01(1) 0.14(2) 0.27(2)"],
    "fedsim": ["0.04(2) 0.17(3) 0.12(3)", "0.25(2) 0.57(3) 0.09(3)", "0.40(8) 0.17(1) 0.33(3)"],
}
ALT_11 = {
    "ft-part": ALT_9["ft-part"],
    "fedalt": ["24.84(1) 52.76(6) 93.51(3)", "24.94(1) 53.30(6) 93.53(3)", "24.69(1) 64.10(14) 93.97(4)"],
    "fedsim": ["24.89(1) 52.74(2) 93.48(4)", "24.94(1) 53.30(8) 93.51(4)", "24.71(1) 63.19(4) 93.89(2)"],
}
ALT_12 = {
    "fedalt": ["0.86(3) 0.44(3) 0.11(2)", "1.08(3) 1.47(4) 0.15(2)", "0.84(4) 11.68(20) 0.46(2)"],
    "fedsim": ["1.00(2) 0.42(3) 0.10(4)", "1.10(2) 1.46(5) 0.11(2)", "0.88(2) 10.42(9) 0.42(4)"],
}
DATA, PARTS = ("stackoverflow", "gldv2", "emnist"), ("input", "output", "adapter")


def test_fedalt_tables_3_4_and_9_to_12() -> None:
    third = load("fedalt/table3")
    for row, figures in ALT_3.items():
        assert [printed(third, f"{data}/{row}", "accuracy") for data in DATA] == figures.split()
    for name, table, column in (
        ("table9", ALT_9, "accuracy"),
        ("table10", ALT_10, "change"),
        ("table11", ALT_11, "accuracy"),
        ("table12", ALT_12, "change"),
    ):
        recipe = load(f"fedalt/{name}")
        for method, by_part in table.items():
            for part, figures in zip(PARTS, by_part, strict=True):
                assert [printed(recipe, f"{data}/{part}/{method}", column) for data in DATA] == figures.split()
    fourth, ninth = load("fedalt/table4"), load("fedalt/table9")
    for key, row in ninth.rows.items():
        assert {k: v.value for k, v in row.printed.items()} == {k: v.value for k, v in fourth.rows[key].printed.items()}
        assert all(value.spread is None for value in fourth.rows[key].printed.values())


def test_what_the_text_says_of_fedalts_tables() -> None:
    third, ninth = load("fedalt/table3"), load("fedalt/table9")

    def at(row: str, recipe: Recipe = third) -> float:
        return recipe.rows[row].printed["accuracy"].value

    for data in DATA:  # table 3 has FedAlt's column of table 4
        assert all(at(f"{data}/{part}/fedalt") == at(f"{data}/{part}/fedalt", ninth) for part in PARTS)
    full = at("stackoverflow/pfedme") - at("stackoverflow/fedavg")
    assert (at("stackoverflow/output/fedalt") - at("stackoverflow/fedavg")) / full == pytest.approx(0.9, abs=0.02)
    assert (at("stackoverflow/adapter/fedalt") - at("stackoverflow/fedavg")) / full == pytest.approx(0.72, abs=0.005)
    assert at("gldv2/adapter/fedalt") - at("gldv2/pfedme") == pytest.approx(3.5, abs=0.05)
    assert at("gldv2/pfedme") - at("gldv2/finetune") == pytest.approx(0.07, abs=0.001)
    assert at("emnist/adapter/fedalt") == at("emnist/finetune")
    alt_over_sim = at("gldv2/input/fedalt", ninth) - at("gldv2/input/fedsim", ninth)
    assert alt_over_sim == pytest.approx(0.3, abs=0.001)
    # The text calls these two FedSim's margins over FT (part.); they are FedAlt's.
    assert at("stackoverflow/output/fedalt", ninth) - at("stackoverflow/output/ft-part", ninth) == pytest.approx(0.12)
    assert at("gldv2/adapter/fedalt", ninth) - at("gldv2/adapter/ft-part", ninth) == pytest.approx(2.55)
    eleventh, twelfth = load("fedalt/table11"), load("fedalt/table12")
    for method, total, tuning in (("fedalt", 12.67, 11.68), ("fedsim", 11.76, 10.42)):
        row = f"gldv2/adapter/{method}"
        assert at(row, eleventh) - at("gldv2/fedavg") == pytest.approx(total, abs=0.001)
        assert twelfth.rows[row].printed["change"].value == tuning
    assert at("gldv2/adapter/fedalt", eleventh) - at("gldv2/adapter/ft-part", eleventh) == pytest.approx(0.24)


def test_fedalt_tables_2_and_5_to_7() -> None:
    second = load("fedalt/table2")
    facts = [[figure.value for figure in second.rows[f"{data}/fedavg"].printed.values()] for data in DATA]
    assert facts == [[10_000, 6, 1000, 4964, 15_520], [2028, 12, 823, 88, 1000], [63, 11, 1114, 298, 418]]
    sizes = {
        "table5": [(0.8, 4.9), (0.8, 4.9), (0.07, 5.7)],
        "table6": [(0.01, 12.2), (1, 11.2), (1.4, 12.2)],
        "table7": [(0.0007, 11.2), (0.03, 11.2), (1.4, 11.2)],
    }
    for name, figures in sizes.items():
        rows = load(f"fedalt/{name}").rows.values()
        assert [(row.printed["personal"].value, row.printed["shared"].value) for row in rows] == figures
    # In millions: 0.8M and 4.9M; 0.01M, 1M, 1.4M; 0.7K, 0.03M, 1.4M are printed.
    text = {"table5": ["0.8", "0.8", "0.07"], "table6": ["0.01", "1", "1.4"], "table7": ["0.0007", "0.03", "1.4"]}
    for name, written in text.items():
        found = reproduce(f"fedalt/{name}", dry_run=True).table()
        assert [line["paper"] for line in found[::2]] == written
        assert all(line["agrees"].startswith("yes") for line in found), name
    hurt = load("fedalt/figure9").rows
    assert hurt["stackoverflow/output/dropout=none"].printed["hurt"].value == 256
    assert hurt["stackoverflow/output/dropout=best"].printed["hurt"].value == 193
    assert hurt["stackoverflow/output/dropout=best-over-none"].printed["gain"].value == 0.18


# Table 8: batch, devices, epochs, and rounds, server's and client's rate of steps (a) and (b), epochs and rate of (c).
ALT_8 = {
    "stackoverflow": [64, 50, 1, (1000, 5e-4, 1), (500, 5e-5, 1e-1), (5, 1e-1)],
    "gldv2": [64, 50, 1, (2500, 2e-4, 1e-2), (600, 2e-5, 1e-3), (5, 1e-3)],
    "emnist": [32, 10, 1, (2000, 1.0, 0.5), (500, 1.0, 1e-2), (5, 1e-2)],
}


def test_fedalt_table_8() -> None:
    recipe = load("fedalt/table8")
    for data, (batch, devices, epochs, step_a, step_b, step_c) in ALT_8.items():
        common = {"batch": batch, "devices": devices, "epochs": epochs} | (
            {"clip": 0.1} if data == "stackoverflow" else {}
        )
        tuning = dict(zip(("tune_epochs", "tune"), step_c, strict=True))
        expected = {
            "fedavg": common | dict(zip(("rounds", "server", "client"), step_a, strict=True)),
            "output/fedalt": common | dict(zip(("rounds", "server", "client"), step_b, strict=True)) | tuning,
            "finetune": {"batch": batch} | tuning,
        }
        for row, figures in expected.items():
            assert {key: one.value for key, one in recipe.rows[f"{data}/{row}"].printed.items()} == figures
