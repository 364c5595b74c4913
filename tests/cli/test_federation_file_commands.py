"""`sparsona keys` and `sparsona federation`: from nothing to a file that everybody has."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sparsona.deploy.federation_file import FederationFile, key_path
from sparsona.deploy.identity import KeyFile, check_certificate, describe_certificate
from sparsona.runs.options import AGREED, OPTIONS
from sparsona.runs.stopping import MEASURES

NEW = ["federation", "new", "fed.toml", "--method", "fedspa", "--model", "cnn28", "--classes", "10"]


def listing(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def test_from_keys_to_a_roster(say, tmp_path):
    said = say("keys", "new", "hospital-3", "--out", tmp_path)
    assert said.code == 0, said.err
    own = KeyFile.read(tmp_path / "hospital-3.key")
    assert own.public in said.out
    for name in ("hospital-3.key", "hospital-3.pub"):
        shown = say("keys", "show", name)
        assert own.public in shown.out
        assert ("hospital-3" in shown.out) == name.endswith(".pub")
        assert "PRIVATE" not in shown.out

    said = say(
        *NEW, "--rounds", "100", "--density", "0.2", "--set", "tune_epochs=3", "--address", "fl.example.org:7447"
    )
    assert said.code == 0, said.err
    for secret in ("fed.authority.key", "fed.server.key"):
        assert secret in said.out
        assert stat.S_IMODE((tmp_path / secret).stat().st_mode) == 0o600
        assert "PRIVATE" in (tmp_path / secret).read_text()
    made = FederationFile.read("fed.toml")
    assert (made.run["rounds"], made.run["tune_epochs"], made.run["options"]["density"]) == (100, 3, 0.2)
    assert made.server.key == KeyFile.read(key_path("fed.toml", "server")).public
    assert made.server.addresses == ("fl.example.org:7447",)
    found = check_certificate(made.server.certificate, made.authority, made.server.key, "the server")
    assert found.hosts == ("localhost", "127.0.0.1", "fl.example.org")

    said = say("federation", "admit", "fed.toml", "hospital-3.pub", "--capacity", "0.2")
    assert said.code == 0, said.err
    grown = FederationFile.read("fed.toml")
    assert grown.digest in said.out
    assert grown.digest != made.digest
    assert (grown.clients[0].name, grown.clients[0].key, grown.clients[0].capacity) == ("hospital-3", own.public, 0.2)
    assert describe_certificate(grown.clients[0].certificate).hosts == ()

    said = say("federation", "show", "fed.toml")
    for word in (grown.digest, "fedspa", "cnn28", "hospital-3", own.public, "density", "0.2", "until 20"):
        assert word in said.out
    assert "half of the clients" in said.out  # per_round, which nobody chose
    shown = json.loads(say("federation", "show", "fed.toml", "--json").out)
    assert (shown["digest"], shown["run"]["method"], len(shown["roster"])) == (grown.digest, "fedspa", 2)

    said = say("federation", "renew", "fed.toml", "--days", "5")
    assert said.code == 0, said.err
    renewed = FederationFile.read("fed.toml")
    assert renewed.digest == grown.digest
    assert renewed.clients[0].certificate != grown.clients[0].certificate
    assert b"PRIVATE" not in Path("fed.toml").read_bytes()


def test_everything_that_is_agreed_on_is_written_out(say):
    assert say(*NEW).code == 0
    run = tomllib.loads(Path("fed.toml").read_text())["run"]
    assert set(run) == {"method", "model", "classes", "input", "predicts", "options", *AGREED}
    assert (run["batch_size"], run["seed"], run["per_round"], run["input"]) == (16, 0, "none", [1, 28, 28])
    theirs = {"data", "reading", "sharing"}
    assert not [name for name in run if name in OPTIONS and OPTIONS[name].group in theirs]
    assert not run.keys() & MEASURES.keys()
    assert not {"device", "executor", "capacities", "warm_start", "preset"} & set(run)


def test_an_input_that_was_not_given_is_said(say, tmp_path):
    mlp = [*NEW[:6], "mlp", "--class-names", "no,yes"]
    assert (
        "input:      64, usual for mlp; for examples of another shape, make the file anew with --input" in say(*mlp).out
    )
    assert FederationFile.read("fed.toml").run["classes"] == 2
    for one in tmp_path.iterdir():
        one.unlink()
    assert "input:" not in say(*mlp, "--input", "561").out
    assert FederationFile.read("fed.toml").run["input"] == [561]
    assert say(*NEW[:2], "one.toml", *mlp[3:], "--predicts", "binary").code == 0
    assert FederationFile.read("one.toml").run["classes"] == 1


def test_peers_have_no_server_and_all_listen(say, tmp_path):
    said = say("federation", "new", "fed.toml", "--method", "dispfl", "--model", "cnn28", "--classes", "10")
    assert said.code == 0, said.err
    assert listing(tmp_path) == ["fed.authority.key", "fed.toml"]
    assert FederationFile.read("fed.toml").server is None
    for name, options in (("a", ["--address", "seed.example.org:7447"]), ("b", [])):
        say("keys", "new", name)
        assert say("federation", "admit", "fed.toml", f"{name}.pub", *options).code == 0
    seed, other = FederationFile.read("fed.toml").clients
    assert seed.addresses == ("seed.example.org:7447",)
    assert describe_certificate(seed.certificate).hosts == ("localhost", "127.0.0.1", "seed.example.org")
    assert describe_certificate(other.certificate).hosts == ("localhost", "127.0.0.1")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--set", "denisty=0.2"], ["unknown option of fedspa 'denisty'", "did you mean 'density'?"]),
        (["--method", "fedsap"], ["unknown method 'fedsap'", "did you mean 'fedspa'?"]),
        (["--model", "cnn82"], ["unknown model 'cnn82'", "did you mean 'cnn28'?"]),
        (["--model", "transformer", "--input", "1x28x28"], ["takes sequences of tokens"]),
        (["--rounds", "0"], ["rounds = 0 without a model"]),
        (["--density", "2"], ["density = 2.0"]),
        (["--classes", "0"], ["classes"]),
        (["--input", "1x2x2"], ["cannot take 2x2 images"]),
        (["--input", "1xax2"], ["an input of '1xax2'", "3x32x32"]),
        (["--predicts", "weather"], ["predicts 'weather'", "classes, tokens"]),
        (["--set", "clients=5"], ["'clients' in a federation file", "each side itself"]),
        (["--set", "device=cpu"], ["'device' in a federation file"]),
        (["--set", "capacities=[0.5]"], ["'capacities' in a federation file", "federation admit --capacity"]),
        (["--set", "warm_start=runs/x"], ["'warm_start' in a federation file"]),
        (["--set", "max_steps=9"], ["'max_steps' in a federation file"]),
        (["--set", "model=mlp"], ["a model twice"]),
        (["--method", "dispfl", "--graph", "file:mine.txt"], ["names a file, which other machines do not have"]),
        (["--method", "pfedgate", "--set", "budget=latency:x.json"], ["names a file"]),
        (["--model", "resnet18:weights=x.pth"], ["names a file"]),
        (["--method", "dispfl", "--address", "a:1"], ["which has no server"]),
        (["--address", "nowhere"], ["the address 'nowhere'", "host:port"]),
        (["--name", "a b"], ["the name 'a b'"]),
        (["--days", "0"], ["0 days"]),
    ],
)
def test_mistakes_leave_nothing_behind(args, words, say, tmp_path):
    said = say(*NEW, *args)
    assert said.code != 0
    assert listing(tmp_path) == []
    for word in words:
        assert word in said.err


def test_files_are_not_overwritten(say, tmp_path):
    assert say(*NEW).code == 0
    before = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    assert "'fed.toml' exists already" in say(*NEW).err
    Path("fed.toml").unlink()
    assert "exists already" in say(*NEW).err
    assert listing(tmp_path) == ["fed.authority.key", "fed.server.key"]
    Path("fed.authority.key").unlink()
    assert "fed.server.key' exists already" in say(*NEW).err
    assert listing(tmp_path) == ["fed.server.key"]
    assert Path("fed.server.key").read_bytes() == before["fed.server.key"]


def test_admission_needs_the_right_authority(say, tmp_path):
    assert say(*NEW).code == 0
    assert say("keys", "new", "a").code == 0
    before = Path("fed.toml").read_bytes()
    assert "has no certificate request" in say("federation", "admit", "fed.toml", "a.key").err
    assert "capacity 2.0" in say("federation", "admit", "fed.toml", "a.pub", "--capacity", "2").err
    Path("fed.authority.key").write_bytes(Path("a.key").read_bytes())
    assert "is not the key of this federation's authority" in say("federation", "admit", "fed.toml", "a.pub").err
    Path("fed.authority.key").unlink()
    assert "cannot be read" in say("federation", "admit", "fed.toml", "a.pub").err
    assert Path("fed.toml").read_bytes() == before


def test_the_same_client_is_not_admitted_twice(say):
    assert say(*NEW).code == 0
    assert say("keys", "new", "a").code == 0
    assert say("federation", "admit", "fed.toml", "a.pub").code == 0
    assert "has a name twice: a" in say("federation", "admit", "fed.toml", "a.pub").err
    assert len(FederationFile.read("fed.toml").clients) == 1


def test_help_and_keys_import_no_torch(tmp_path):
    code = (
        "import sys; from sparsona.cli.app import cli\n"
        "for args in (['federation', 'new', '--help'], ['keys', 'new', 'a'], ['federation', 'show', 'none.toml']):\n"
        "    try: cli.main(args, standalone_mode=False)\n"
        "    except Exception as error: assert 'no federation file' in str(error), error\n"
        "assert 'torch' not in sys.modules\n"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    for flag in ("--rounds", "--density", "--classes", "--address", "--set"):
        assert flag in said.stdout
    for flag in ("--data ", "--clients", "--device", "--executor", "--warm-start"):
        assert flag not in said.stdout
