"""Clients of one run mean the same by class 0: their class names are compared before anything is trained."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from federations import free_address, make
from safetensors import safe_open

import sparsona as sp
from sparsona.cli.app import cli
from sparsona.core.errors import SparsonaError
from sparsona.deploy.exchange import in_memory
from sparsona.deploy.federation_file import FederationFile
from sparsona.deploy.greeting import OtherNamesError
from sparsona.deploy.journal import Journal
from sparsona.experiment import client_side, server_side
from sparsona.experiment.client_data import own_data
from sparsona.experiment.client_side import make_agent
from sparsona.experiment.guests import read_guests
from sparsona.experiment.network import Network
from sparsona.experiment.peers import make_peer
from sparsona.experiment.server_side import play_network
from sparsona.experiment.terms import Terms

NAMES = tuple(f"digit {number}" for number in range(10))
OTHER = NAMES[::-1]
NUM = 3


def command(*words):
    done = CliRunner().invoke(cli, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def agents(made, folder, names):
    """A client for each entry of `names`, with these class names; None: without any."""
    found = []
    for index, own in enumerate(names):
        data = replace(made.own_data(index), class_names=own)
        found.append(make_agent(made.terms, index, data, folder / f"v{index}", made.key(index), made.roster))
    return found


def greeted(made, found, **more):
    heard = []
    network = made.network(in_memory({one.client: one.handle for one in found}), report=heard.append, **more)
    network.greet(range(NUM))
    return network, heard


def test_another_order_is_refused_on_both_sides(tmp_path):
    made = make(tmp_path / "fed", num_clients=NUM)
    found = agents(made, tmp_path, [NAMES, OTHER, NAMES])
    network, heard = greeted(made, found)
    assert sorted(network.guests) == [0, 2]
    (refused,) = (text for text in heard if "cannot take part" in text)
    assert "site-1 cannot take part: it calls class 0 'digit 9', and site-0 'digit 0'" in refused
    assert ", ".join(NAMES) in refused
    assert ", ".join(OTHER) in refused
    assert "--class-names" in refused
    # The client learns it as well, and ends.
    assert found[1].finished.is_set()
    assert isinstance(found[1].refusal, OtherNamesError)
    assert "calls class 0 'digit 9', and the federation 'digit 0'" in found[1].refusal.what
    assert ", ".join(NAMES) in found[1].refusal.expected
    assert not found[0].finished.is_set()
    network.greet([1])
    assert sum("cannot take part" in text for text in heard) == 1


def test_clients_without_names_take_part_and_the_log_says_so(tmp_path):
    made = make(tmp_path / "fed", num_clients=NUM)
    network, heard = greeted(made, agents(made, tmp_path, [None, NAMES, None]))
    assert sorted(network.guests) == [0, 1, 2]
    (note,) = (text for text in heard if "without class names" in text)
    assert note.startswith("site-0, site-2 without class names: class 0 there is taken for 'digit 0', as site-1 calls")
    network, heard = greeted(made, agents(made, tmp_path / "plain", [None] * NUM))
    assert len(network.guests) == NUM
    assert not any("class names" in text for text in heard)


def test_a_server_that_is_started_again_knows_the_names(tmp_path):
    made = make(tmp_path / "fed", num_clients=NUM, rounds=1)
    found = agents(made, tmp_path, [NAMES, OTHER, NAMES])
    network, _ = greeted(made, [found[0], found[2]])
    run = play_network(network, tmp_path / "run")
    assert read_guests(run.path)[0][1].class_names == NAMES
    assert run.class_names == run.view.class_names == NAMES  # for the report, and what is exported
    sp.load(run.path).export(None, tmp_path / "shared.safetensors")
    with safe_open(tmp_path / "shared.safetensors", "pt") as file:
        assert json.loads(file.metadata()["class_names"]) == list(NAMES)
    assert "digit 9" in (tmp_path / "shared.safetensors.md").read_text()
    heard = []
    signer, verifier = network.connection.signer, network.connection.verifier
    again = Network(made.terms, in_memory({1: found[1].handle}), signer, verifier, report=heard.append)
    again.gather_guests(run.path, 1, 1.0, lambda there, of: None)
    assert again.guests == {}
    assert any("site-1 cannot take part: it calls class 0" in text for text in heard)


def test_a_run_is_called_by_names_that_come_late(tmp_path):
    made = make(tmp_path / "fed", num_clients=NUM, rounds=2, per_round=3)
    found = agents(made, tmp_path, [None, None, NAMES])
    late = [False]
    handles = {one.client: one.handle for one in found}
    handles[2] = lambda data: found[2].handle(data) if late[0] else None
    network = made.network(in_memory(handles))
    network.greet(range(NUM))
    assert sorted(network.guests) == [0, 1]
    late[0] = True
    assert play_network(network, tmp_path / "run").class_names == NAMES


@pytest.mark.parametrize("wrong", [["", *NAMES[1:]], ["x" * 201, *NAMES[1:]], [NAMES[1], *NAMES[1:]], list(NAMES[1:])])
def test_names_that_no_run_could_have_are_refused(tmp_path, monkeypatch, wrong):
    """They would be written into the run's facts, which could then not be read."""
    made = make(tmp_path / "fed", num_clients=NUM)
    found = agents(made, tmp_path, [None, None, NAMES])
    monkeypatch.setattr(found[2], "greeting", replace(found[2].greeting, class_names=tuple(wrong)))
    network, heard = greeted(made, found)
    assert sorted(network.guests) == [0, 1]
    assert sum("site-2 cannot take part" in text for text in heard) == 1


def test_names_in_the_federation_file(tmp_path, monkeypatch):
    """They are those of every client, also of one that is the first to come; texts are numbered by them."""
    monkeypatch.chdir(tmp_path)
    words = "federation new fed.toml --method fedavg --model digits-cnn --classes 3 --input 1x8x8 --class-names"
    with pytest.raises(SparsonaError, match="2 names for 3 classes"):
        command(*words.split(), "sit,walk")
    with pytest.raises(SparsonaError, match="the number of classes is not given"):
        command(*words.replace(" --classes 3", "").removesuffix(" --class-names").split())
    command(
        *words.replace(" --classes 3", "").split(), "sit,none, walk"
    )  # TOML has no None: 'none' stands for it elsewhere
    command("keys", "new", "anna")
    command("federation", "admit", "fed.toml", "anna.pub")
    assert "sit, none, walk" in command("federation", "show", "fed.toml")
    terms = Terms.read("fed.toml")
    assert (terms.class_names, terms.kind.num_classes) == (("sit", "none", "walk"), 3)
    x = np.zeros((30, 1, 8, 8), dtype=np.float32)
    np.savez("texts.npz", x=x, y=np.array(["walk", "sit"] * 15))
    data = own_data(terms, 0, "arrays:texts.npz")
    assert sorted(set(data.y.tolist())) == [0, 2]
    assert data.class_names == terms.class_names
    np.savez("turned.npz", x=x, y=np.arange(30) % 3, class_names=["walk", "none", "sit"])
    with pytest.raises(OtherNamesError, match=r"calls class 0 'walk', and 'fed\.toml' 'sit'"):
        own_data(terms, 0, "arrays:turned.npz")
    np.savez("plain.npz", x=x, y=np.arange(30) % 3)
    assert own_data(terms, 0, "arrays:plain.npz").class_names is None
    np.savez("strange.npz", x=x, y=np.array(["walk", "run"] * 15))
    with pytest.raises(SparsonaError, match=r"unknown label in 'strange\.npz'"):
        own_data(terms, 0, "arrays:strange.npz")
    with pytest.raises(SparsonaError, match="class names for a model that predicts numbers"):
        command(*words.replace("fed.toml", "other.toml").split(), "a,b,c", "--predicts", "numbers")


def test_texts_without_class_names_are_told_apart_from_too_few_names(tmp_path):
    made = make(tmp_path / "fed", num_clients=1, per_round=1)
    x = np.zeros((40, 1, 8, 8), dtype=np.float32)
    np.savez(tmp_path / "texts.npz", x=x, y=np.array(NAMES * 4))
    with pytest.raises(SparsonaError, match="the labels are texts, and the file has no class_names") as told:
        own_data(made.terms, 0, f"arrays:{tmp_path / 'texts.npz'}")
    assert "class_names=[...]" in told.value.hint
    np.savez(tmp_path / "few.npz", x=x, y=np.array(NAMES[:5] * 8), class_names=NAMES[:5])
    with pytest.raises(SparsonaError, match="labels with 5 names, for a run of 10 classes"):
        own_data(made.terms, 0, f"arrays:{tmp_path / 'few.npz'}")


def test_class_folders_are_numbered_by_the_federations_names(tmp_path):
    """A client may lack classes: without names its own folders would be numbered from 0."""
    image = pytest.importorskip("PIL.Image")
    for name in ("sit", "walk"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(10):
            image.fromarray(np.full((8, 8), number, dtype=np.uint8)).save(
                tmp_path / "pictures" / name / f"{number}.png"
            )
    made = make(tmp_path / "fed", num_clients=1, per_round=1)
    kind = replace(made.terms.kind, shape=(1, 8, 8), num_classes=3)
    source = f"folder:{tmp_path / 'pictures'}"
    with pytest.raises(SparsonaError, match="has 2 of 3 classes"):
        own_data(replace(made.terms, kind=kind), 0, source)
    named = replace(made.terms, kind=kind, class_names=("lie", "sit", "walk"))
    data = own_data(named, 0, source)
    assert sorted(set(data.y.tolist())) == [1, 2]
    with pytest.raises(SparsonaError, match="unknown class folder"):
        own_data(replace(named, class_names=("lie", "sit", "run")), 0, source)


def test_peers_compare_names(tmp_path):
    made, heard, handles, peers = make(tmp_path / "fed", "dispfl", 2), [[], []], {}, []
    for index, names in enumerate([NAMES, OTHER]):
        data = replace(made.own_data(index), class_names=names)
        peers.append(
            make_peer(
                made.terms,
                index,
                data,
                tmp_path / str(index),
                in_memory(handles),
                made.key(index),
                made.roster,
                report=heard[index].append,
            )
        )
        handles[index] = peers[-1].handle
    with pytest.raises(OtherNamesError, match="site-0 calls class 0 'digit 0', and this peer 'digit 9'") as told:
        peers[1].wait(seconds=5)
    assert ", ".join(NAMES) in told.value.expected
    assert any("site-1 cannot take part: site-1 calls class 0 'digit 9', and this peer" in text for text in heard[0])
    assert peers[0].sizes.keys() == {0}
    opening, _ = Journal(tmp_path / "1").read()
    assert opening.greeting.class_names == OTHER


def test_files_without_names_keep_their_digest(tmp_path):
    made = make(tmp_path / "fed", num_clients=1, per_round=1)
    assert "class_names" not in FederationFile.read(made.path).run
    assert made.terms.class_names == ()


@pytest.mark.long
def test_a_client_with_another_order_ends_with_an_error(tmp_path, monkeypatch):
    """Over a real link, each with a file of its own."""
    made = make(tmp_path / "fed", "fedavg", 2, rounds=1)
    monkeypatch.chdir(tmp_path)
    address, x = free_address(), np.random.default_rng(0).random((40, 1, 8, 8), dtype=np.float32)
    errors, threads = {}, []

    def client(index, names, ready):
        np.savez(f"{index}.npz", x=x, y=np.arange(40) % 10, class_names=names)
        try:
            own = {"key": made.key_path(index), "vault": f"vault/{index}", "connect": [address]}
            client_side.join(made.path, f"arrays:{index}.npz", **own, report=lambda text: ready.set())
        except SparsonaError as error:
            errors[index] = error

    for index, names in enumerate([NAMES, OTHER]):  # one after the other: torch has one generator
        ready = threading.Event()
        threads.append(threading.Thread(target=client, args=(index, names, ready), daemon=True))
        threads[-1].start()
        assert ready.wait(60)
    heard = []
    with pytest.raises(SparsonaError, match="1 of 2 clients came"):
        server_side.serve(made.path, "run", listen=[address], wait=5, report=heard.append)
    threads[1].join(20)
    assert isinstance(errors[1], OtherNamesError)
    assert any("site-1 cannot take part" in text for text in heard)
