"""Runs on one's own data: names in everything that is shown, clients that only train, a network by shape."""

import json
import shutil

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from older_runs import unseal
from safetensors import safe_open
from torch import nn

import sparsona as sp
from sparsona.analysis.partition import Partition
from sparsona.cli.app import cli as main
from sparsona.core.errors import SparsonaError
from sparsona.deploy.jobs import reported_points
from sparsona.report import plots
from sparsona.report.pictures import draw

RNG = np.random.default_rng(1)
X, Y = RNG.normal(size=(12, 6)).astype(np.float32), np.arange(12) % 2
SCRIPT, MARKUP, ESCAPE = "<script>alert(1)</script>", "[red]$x$[/] [/b] :smile: %{y}", "\x1b[31mred\u202e\n"
NAMES = (SCRIPT, MARKUP, "\\x1b[31mred\\u202e\\n", "plain & simple")
COMMON = {"rounds": 2, "epochs": 1, "batch_size": 4, "seed": 0}


def hostile():
    y = np.array(["<b>up</b>", "[/down]"])[Y]
    clients = {SCRIPT: (X, y), MARKUP: (X + 1, y), ESCAPE: (X - 1, y), "plain & simple": {"train": (X, y)}}
    return sp.Federation.from_clients(clients, name="wards")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("named")
    common = {**COMMON, "points": ["global"]}
    return (
        sp.train("local", hostile(), out=folder / "local", **COMMON),
        sp.train("fedavg", hostile(), out=folder / "fedavg", **common),
    )


def test_names_are_facts_of_the_run(runs):
    for run in (*runs, sp.load(runs[0].path)):
        assert run.client_names == NAMES
        assert run.class_names == ("<b>up</b>", "[/down]")
        assert list(run.accuracies_by_name()) == list(NAMES[:3])
        assert list(run.accuracies_by_name().values()) == run.accuracies()[:3].tolist()
    assert runs[0].view.data == "wards"
    assert isinstance(runs[0].personal_model(ESCAPE), nn.Module)
    with pytest.raises(SparsonaError, match="unknown client 'plain'"):
        runs[0].personal_model("plain")


def test_new_data_has_labels_as_the_run_had_them(runs, tmp_path, monkeypatch):
    run = sp.load(runs[1].path)
    names, numbers = np.array(["<b>up</b>", "[/down]"])[Y], Y
    found = run.evaluate([None, SCRIPT], X, names)
    assert found.class_names == run.class_names
    assert found.rows() == run.evaluate([None, 0], X, numbers).rows()
    assert [(row["client"], row["name"]) for row in found.rows()] == [("shared", ""), (0, SCRIPT)]
    for y, words in ((["<b>up</b>"] * 11 + ["up"], "unknown label .*'up'"), ([(1, "a")] * 12, "labels of type")):
        with pytest.raises(SparsonaError, match=words) as caught:
            run.evaluate(None, X, np.array(y, dtype=object) if words.startswith("un") else _objects(y))
        assert "unique" not in str(caught.value.hint)
    np.savez(tmp_path / "new.npz", x=X, y=names)
    text = CliRunner().invoke(main, ["evaluate", str(run.path), "--global", "--data", str(tmp_path / "new.npz")]).output
    assert "[/down]" in text


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors"))


def test_files_are_called_by_names_made_safe(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    say("export", runs[1].path, "--client", "plain & simple")
    assert files_in(tmp_path) == ["fedavg-client-plain_simple.safetensors"]
    said = say("export", runs[1].path, "--client", "all", "--out", "models")
    assert files_in(tmp_path / "models") == [
        "client-plain_simple.safetensors",
        "client-red_x_b_smile_y.safetensors",
        "client-script_alert_1_script.safetensors",
        "client-x1b_31mred_u202e_n.safetensors",
    ]
    assert "plain & simple" in said


def say(*words):
    return CliRunner().invoke(main, [str(word) for word in words], catch_exceptions=False).output


def test_files_of_any_names_stay_in_their_folder(tmp_path, monkeypatch):
    """Paths, a NUL, what is too long for a file system, and names that are one name on some file systems."""
    given = ["../../x", "x", "/etc/passwd", "a\0b", "z" * 200, "é" * 200, "..", "Ward", "ward", "ward-7", "  ", "x-0"]
    clients = dict.fromkeys(given, (X, Y))
    path = sp.train("local", sp.Federation.from_clients(clients), out=tmp_path / "run", **COMMON).path
    monkeypatch.chdir(tmp_path)
    say("export", path, "--client", "all", "--out", "deep/models")
    made = files_in(tmp_path / "deep" / "models")
    assert len({name.casefold() for name in made}) == len(made) == len(given)
    assert made == [name for name in made if "/" not in name and "\\" not in name and len(name.encode()) < 160]
    assert {path.name for path in tmp_path.iterdir()} == {"run", "deep"}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["models"]
    numbers = {}
    for name in made:
        with safe_open(tmp_path / "deep" / "models" / name, "pt") as file:
            numbers[name.removesuffix(".safetensors")] = int(file.metadata()["client"])
    assert numbers["client-etc_passwd"] == 2
    assert (numbers["client-Ward-7-"], numbers["client-ward-8"], numbers["client-ward-7"]) == (7, 8, 9)
    assert numbers["client-x-0-"] == 0  # another client is called x-0
    say("export", path, "--client", "../../x")  # the same name for one as for all
    assert (tmp_path / "run-client-x-0-.safetensors").exists()
    say("export", path, "--client", "3")
    assert (tmp_path / "run-client-a_x00b.safetensors").exists()


def _objects(values):
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def test_texts_are_no_labels_where_classes_have_no_names(tmp_path):
    run = sp.train("local", sp.Federation.from_clients([(X, Y)] * 2), out=tmp_path / "run", **COMMON)
    with pytest.raises(SparsonaError, match="labels of type") as caught:
        run.evaluate(0, X, ["cat", "dog"] * 6)
    assert "no names" in caught.value.expected
    assert "unique" not in caught.value.hint


def test_two_classes_by_one_logit_have_names(tmp_path):
    data = sp.Federation.from_clients([(X, np.array(["no", "yes"])[Y])] * 2, task="binary")
    run = sp.load(sp.train("local", data, out=tmp_path / "run", **COMMON).path)
    assert run.evaluate(0, X, np.array(["no", "yes"])[Y]).rows() == run.evaluate(0, X, Y).rows()
    assert run.class_names == ("no", "yes")


def test_errors_name_clients(tmp_path):
    clients = {"north": (X, Y), "south": (X, Y)}
    federation = sp.Federation.from_clients(clients, validation_rate=0)
    for executor in ("serial", "stacked"):
        with pytest.raises(SparsonaError, match=r"diverged, .*: client north's"):
            sp.train("local", federation, out=tmp_path / executor, lr=1e30, clip_norm=None, executor=executor, **COMMON)
    with pytest.raises(SparsonaError, match=r"client north is the first"):
        sp.train("fedavg", federation, guard=True, **COMMON)


def test_options_by_the_names_of_clients(tmp_path):
    federation = sp.Federation.from_clients(dict.fromkeys(("north", "south", "7"), (X, Y)))
    named = {"client_epochs": {"south": 3, "7": 2}, "client_lr_scale": {"north": 0.5}, "speeds": {"0": 2.0, 1: 3.0}}
    run = sp.train("fedavg", federation, out=tmp_path / "run", **COMMON | {"rounds": 1}, **named)
    assert run.config["client_epochs"] == {"1": 3, "2": 2}
    assert run.config["client_lr_scale"] == {"0": 0.5}
    assert run.config["speeds"] == {"0": 2.0, "1": 3.0}
    with pytest.raises(SparsonaError, match="unknown client 'west'"):
        sp.train("fedavg", federation, client_epochs={"west": 3}, **COMMON)
    with pytest.raises(SparsonaError, match="client_epochs of client south twice"):
        sp.train("fedavg", federation, client_epochs={1: 3, "south": 3}, **COMMON)
    with pytest.raises(SparsonaError, match=r"speeds of client 'north'(.|\n)*by number"):
        sp.train("fedavg", clients=4, speeds={"north": 3}, **COMMON)


def test_a_network_was_chosen_by_shape_and_written_down(runs, tmp_path):
    assert json.loads((runs[0].path / "config.json").read_text())["model"] == "mlp:hidden=32"
    cut = sp.train("local", hostile(), out=tmp_path / "cut", max_seconds=1e-9, **COMMON)
    assert cut.summary["rounds"] == 1
    resumed = sp.resume(tmp_path / "cut", hostile())  # the name is enough: no model is passed
    assert resumed.accuracies()[:3].tolist() == runs[0].accuracies()[:3].tolist()
    own = sp.train("local", hostile(), nn.Linear(6, 2), out=tmp_path / "own", **COMMON)
    assert own.config["model"] == "given"


def test_facts_written_by_others_are_cleaned(runs, tmp_path):
    """A folder may come from somebody else: names in it are no safer than those of data."""
    copy = shutil.copytree(runs[0].path, tmp_path / "copy")
    unseal(copy)
    about = json.loads((copy / "about.json").read_text())
    about["client_names"] = ["a", "b", "c\x1b[2J", "d"]
    (copy / "about.json").write_text(json.dumps(about))
    assert sp.load(copy).client_names == ("a", "b", "c\\x1b[2J", "d")
    for names in (["a"], ["a", "a", "b", "c"], "abcd"):
        (copy / "about.json").write_text(json.dumps(about | {"client_names": names}))
        with pytest.raises(SparsonaError, match="is damaged: its facts cannot be read"):
            sp.load(copy)
    del about["client_names"], about["class_names"], about["data"]  # as older versions wrote it
    (copy / "about.json").write_text(json.dumps(about))
    assert sp.load(copy).client_names is None


def test_who_is_not_tested_is_told(runs):
    for run in runs:
        assert np.isnan(run.accuracies()[3])
        assert "mean over 3 clients" in run.protocol
        assert "clients: 1 client has no test data and is not in the mean." in run.protocol


def test_a_page_shows_names_as_text(runs, tmp_path):
    page = sp.Comparison(tmp_path, list(runs)).report().read_text()
    assert "<script>alert" not in page
    assert "<b>up</b>" not in page
    assert "\x1b" not in page
    for shown in ("&lt;script&gt;alert", "plain &amp; simple", "wards"):
        assert shown in page
    data = page[page.index("Who holds what") :]
    assert "client plain &amp; simple: 11 train, 1 validation" in data


def test_figures_escape_names(runs):
    """Plotly reads HTML in every text."""
    views = [run.view for run in runs]
    notes = plots.client_accuracies(views).data[0].customdata
    assert [note.partition(":")[0] for note in notes[:1]] == ["<b>client &lt;script&gt;alert(1)&lt;/script&gt;"]
    assert "&lt;b&gt;up&lt;/b&gt;: 5" in notes[0]
    bars = plots.client_differences(views, 1).data[0].customdata
    assert any(note.startswith("<b>client [red]$x$[/]") for note in bars)
    confusion = plots.confusion(views, 0)
    assert list(confusion.layout.xaxis.ticktext) == ["&lt;b&gt;up&lt;/b&gt;", "[/down]"]
    assert confusion.data[0].customdata[0][1] == "true &lt;b&gt;up&lt;/b&gt;, predicted [/down]"


def test_pictures_take_any_name(runs):
    view = runs[0].view
    sizes = dict(zip(("train", "validation", "test"), view.sizes.T, strict=True))
    svg = draw(Partition("t", sizes, view.label_counts, view.client_names, view.class_names)).svg()
    assert "[red]$x$[/] [/b] :s…" in svg  # neither markup nor mathematics
    assert "client \\x1b[31mred" in svg
    assert "<script>" not in svg
    draw(Partition("t", sizes, None, view.client_names)).svg()


@pytest.mark.parametrize("arguments", [["fedavg"], ["fedavg", "--against", "local"]])
def test_the_terminal_shows_names_as_text(runs, arguments):
    folder = runs[0].path.parent
    arguments = [str(folder / one) if not one.startswith("-") else one for one in arguments]
    found = CliRunner().invoke(main, ["clients", *arguments], catch_exceptions=False)
    assert found.exit_code == 0
    for name in NAMES[:3]:
        assert name in found.output
    assert NAMES[3] not in found.output
    assert "\x1b" not in found.output
    as_json = json.loads(CliRunner().invoke(main, ["clients", *arguments, "--json"]).output)
    assert as_json["changes"][0]["names"] == list(NAMES[:3])


# A client that only trains, in everything that evaluates.


def some(num_untested=1):
    """Five clients, of whom the last ones are not tested."""
    clients = [(X + k, Y) for k in range(5 - num_untested)] + [{"train": (X - k, Y)} for k in range(num_untested)]
    return sp.Federation.from_clients(clients)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedavg", {"executor": "stacked", "train_accuracy": True}),
        ("fedavg", {"guard": True, "points": ["global", "received/validation"], "tune_epochs": 1}),
        ("fedavg", {"evaluate": "participants", "per_round": 3, "eval_every": 1}),
        ("fedavg", {"eval_clients": 2}),
        ("dispfl", {"points": ["consensus", "trained"]}),
        ("fedspa", {"novel": 2, "tune_epochs": 1, "record_traits": True}),
    ],
)
def test_a_client_that_only_trains(method, options, tmp_path):
    federation = some(2)
    run = sp.train(method, federation, out=tmp_path / "run", **COMMON, **options)
    rows = [row.client for row in run._folder.records.evaluations(2, run.points[0])]
    assert rows
    for point in run.points:
        counts = run.counts(point)[1]
        assert not counts[3:].any()
    assert "2 clients have no test data" in run.protocol
    if "per_round" not in options and "novel" not in options:
        assert run._folder.records.trained_clients() & {3, 4}
    assert run.personal_model(4) is not None
    if options.get("executor") == "stacked":
        serial = sp.train(method, some(2), out=tmp_path / "serial", **COMMON, executor="serial")
        np.testing.assert_array_equal(run.accuracies(), serial.accuracies())
    if options.get("guard"):
        assert run.summary["guard"]["clients"] == 3
        assert isinstance(run.personal_model(4, guarded=True), nn.Module)


def test_a_client_without_tests_trains_as_others_do(tmp_path):
    """The same shared model whether it is tested or not; to choose options, it is tested on training data."""
    clients = [(X[:8] + k, Y[:8], X[8:] + k, Y[8:]) for k in range(3)]
    untested = [*clients[:2], (*clients[2][:2], X[:0], Y[:0])]
    tested, other = (
        sp.train("fedavg", sp.Federation.from_clients(one), out=tmp_path / name, **COMMON)
        for name, one in (("a", clients), ("b", untested))
    )
    for a, b in zip(tested.personal_model(0).parameters(), other.personal_model(0).parameters(), strict=True):
        assert torch.equal(a, b)
    assert other.counts()[1].tolist() == [4, 4, 0]
    assert sp.Federation.from_clients(untested).hold_out(0.3).sizes()[2].tolist()[2] > 0


def test_on_a_machine_of_its_own_it_withholds_what_it_lacks():
    """Even where every count is told: there is nothing to tell."""
    assert reported_points(("received", "received/train"), (12, 0, 0), fewest=0) == (("received/train",), ("received",))


# From the shell.


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("shell") / "har.npz"
    owners = np.repeat(["ana", "bo", "cy"], 14)
    x = RNG.normal(size=(42, 2, 16)).astype(np.float32)
    np.savez(path, x=x, y=np.arange(42) % 3, owner=owners, class_names=["sit", "stand", "walk"])
    return path


def test_a_file_alone_is_data(file, monkeypatch):
    """By its path: owners are clients, the network fits, and the run is called like the file."""
    monkeypatch.chdir(file.parent)
    arguments = ["run", "fedavg", "--data", "har.npz", "--rounds", "1", "--epochs", "1", "--json"]
    found = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert found.exit_code == 0, found.output
    (path,) = (file.parent / "runs").glob("fedavg-har-seed0-*")
    run = sp.load(path)
    assert run.client_names == ("ana", "bo", "cy")
    assert run.class_names == ("sit", "stand", "walk")
    assert (run.config["data"], run.config["partition"]) == (f"arrays:{file}", "natural")
    assert run.config["model"] == "signal-cnn"
    assert run.view.data == "har"
    assert "har, natural" in run.report("page.html").read_text()
    monkeypatch.chdir("/")
    assert isinstance(run.personal_model("bo"), nn.Module)  # wherever it is loaded
    shown = CliRunner().invoke(main, ["data", "show", str(file)], catch_exceptions=False).output
    assert "har, natural" in shown
    assert "cy" in shown
    assert all(name in shown for name in ("sit", "stand", "walk"))


def test_own_data_is_listed():
    shown = CliRunner().invoke(main, ["data"], catch_exceptions=False).output
    assert "arrays:PATH.npz" in shown
    assert "folder:PATH" in shown
    listed = json.loads(CliRunner().invoke(main, ["data", "--json"]).output)
    assert [one["your own"] for one in listed["own"]] == ["arrays:PATH.npz", "folder:PATH"]


def test_partition_of_a_file_may_be_chosen(file):
    arguments = ["data", "show", str(file), "--partition", "iid", "--clients", "2", "--json"]
    found = json.loads(CliRunner().invoke(main, arguments, catch_exceptions=False).output)
    assert (found["clients"], found["client_names"], found["class_names"]) == (2, None, ["sit", "stand", "walk"])


def test_no_network_fits():
    tokens = torch.randint(4, 9, (24, 5))
    federation = sp.Federation.from_clients([(tokens, np.arange(24) % 2)], tokens=True)
    with pytest.raises(SparsonaError, match=r"no network fits examples of shape \(5,\) of tokens, with one class each"):
        sp.train("local", federation, rounds=1)
