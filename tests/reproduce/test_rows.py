"""Which data sets are here: by their files, and for whom."""

from __future__ import annotations

import pytest

from sparsona.data.catalog import SHEET_FILES, SOURCES
from sparsona.reproduce.recipe import Recipe
from sparsona.reproduce.rows import experiment_changes, is_here, row_options, why_absent

CUT = Recipe(
    title="x",
    where="table 9",
    options={"data": "cifar100"},
    rows={"paper": {"method": "fedavg"}, "cut": {"method": "fedavg", "stand_in": "CIFAR-100"}},
    absent={"cifar100": "from Toronto"},
)
WRITERS = {"data": "mnist", "partition": "natural"}
DIGITS = Recipe(
    title="x",
    where="table 9",
    rows={
        "writers": {"method": "fedavg", "options": WRITERS},
        "iid": {"method": "fedavg", "options": {"data": "mnist", "partition": "iid"}},
    },
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSONA_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def put(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()


def here(recipe, row, **changes):
    return is_here(recipe, row, row_options(recipe, row, changes))


@pytest.mark.parametrize("inside", ["", "cifar100"])
def test_a_cut_of_our_own_is_never_in_the_papers_column(tmp_path, cache, inside):
    put(tmp_path / "mine" / inside, *SHEET_FILES)
    assert not here(CUT, "paper", data_dir=str(tmp_path / "mine"))
    assert here(CUT, "cut", data_dir=str(tmp_path / "mine"))
    put(tmp_path / "mine" / inside, "train.bin")  # half of the published files is as good as none
    assert not here(CUT, "paper", data_dir=str(tmp_path / "mine"))
    put(tmp_path / "mine" / inside, "test.bin")
    assert here(CUT, "paper", data_dir=str(tmp_path / "mine"))
    assert not here(CUT, "paper")


def test_files_of_another_set_do_not_count(tmp_path):
    put(tmp_path / "mine", "notes.txt", "data_batch_1.bin")
    assert not here(DIGITS, "iid", data_dir=str(tmp_path / "mine"))


def test_writers_need_the_files_that_name_them(cache):
    put(cache / "mnist", *(f"{name}.gz" for name in SOURCES["mnist"].needed[0]))
    assert here(DIGITS, "iid")
    assert not here(DIGITS, "writers")
    assert why_absent(DIGITS, "writers", WRITERS) == "`sparsona data get mnist`"
    put(cache / "qmnist", "qmnist-train-labels-idx2-int", "qmnist-test-labels-idx2-int.gz")
    assert here(DIGITS, "writers")


def test_what_is_said_of_absent_data():
    assert why_absent(CUT, "paper", {"data": "cifar100"}) == "from Toronto"
    assert "sheet-0000.webp" in why_absent(CUT, "cut", {"data": "cifar100"})


@pytest.mark.parametrize("card", [card for card in SOURCES.values() if card.files], ids=lambda card: card.name)
def test_every_set_says_which_files_it_needs(card):
    assert card.needed
    assert all(card.needed)


def test_another_result_of_the_same_training_is_another_experiment():
    recipe = Recipe(title="t", where="table 1", rows={"a": {"method": "fedavg"}})
    assert experiment_changes(recipe, {"headline": "trained", "eval_every": 5, "device": "cpu"}) == {
        "headline": "trained"
    }
