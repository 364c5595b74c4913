"""The federation file: round trips, what its digest covers, and every mistake by file and key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparsona.core.errors import SparsonaError
from sparsona.core.update import SERVER
from sparsona.deploy import identity
from sparsona.deploy.addresses import split_address
from sparsona.deploy.federation_file import FederationFile, Server, key_path
from sparsona.deploy.frames import Frame, seal, unseal

RUN: dict[str, Any] = {
    "method": "fedspa",
    "rounds": 100,
    "per_round": None,
    "lr_decay": 0.998,
    "guard": False,
    "input": [1, 28, 28],
    "transform": [],
    "options": {"density": 0.5, "initial_masks": "same", "clip_norm": None, "personal": ["norm", "output"]},
}


def make(folder: Path, names: tuple[str, ...] = ("hospital-1", "hospital-2")) -> FederationFile:
    """A federation with a server and clients, in fed.toml, all keys beside it."""
    path = folder / "fed.toml"
    authority = identity.new_authority("fed", key_path(path, "authority"))
    key = identity.write_new_key(key_path(path, "server"))
    certificate = identity.certify(identity.Request("server", key.public), authority, hosts=("fl.example.org",))
    server = Server(key.public, certificate, ("fl.example.org:7447",))
    found = FederationFile("fed", RUN, authority.certificate, server, path=str(path))
    for number, name in enumerate(names):
        request = identity.read_request(identity.new_key(name, folder)[1])
        found = found.admit(request, authority, capacity=1 / (number + 1))
    found.write(path)
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> FederationFile:
    return make(tmp_path_factory.mktemp("federation"))


def test_what_is_written_is_read(made: FederationFile) -> None:
    found = FederationFile.read(made.path)
    assert found == made
    assert found.digest == made.digest
    assert found.run == RUN
    assert [(one.index, one.name, one.capacity) for one in found.clients] == [
        (0, "hospital-1", 1.0),
        (1, "hospital-2", 0.5),
    ]
    assert found.capacities == (1.0, 0.5)
    before = Path(made.path).read_bytes()
    found.write(made.path)
    assert Path(made.path).read_bytes() == before


def test_keys_of_the_roster_check_frames(made: FederationFile) -> None:
    folder = Path(made.path).parent
    roster = identity.Roster(made.keys())
    own = identity.KeyFile.read(folder / "hospital-2.key")
    assert made.client(own.public).index == 1
    assert made.server is not None
    server = identity.KeyFile.read(key_path(made.path, "server"))
    assert made.keys() == {SERVER: server.public, 0: made.clients[0].key, 1: own.public}
    frame = Frame(made.digest, "answer", 1, SERVER, 0, "j", {}, (b"x",))
    assert unseal(seal(frame, own), roster, run=made.digest, receiver=SERVER) == frame
    with pytest.raises(SparsonaError, match="in the name of the server"):
        roster.verify(SERVER, b"", own.sign(b""))
    with pytest.raises(SparsonaError, match=r"no client in (.|\n)*federation admit"):
        made.client(server.public)


def test_certificates_are_those_of_the_roster(made: FederationFile) -> None:
    assert made.server is not None
    found = identity.check_certificate(made.server.certificate, made.authority, made.server.key, "the server")
    assert found.hosts == ("localhost", "127.0.0.1", "fl.example.org")
    for one in made.clients:
        assert identity.check_certificate(one.certificate, made.authority, one.key, one.name).hosts == ()


def test_the_digest_is_that_of_options_and_roster(made: FederationFile) -> None:
    assert made.server is not None
    assert len(made.digest) == 32
    first = made.clients[0]
    others = [
        replace(made, name="other"),
        replace(made, run={**RUN, "rounds": 101}),
        replace(made, run={**RUN, "options": {**RUN["options"], "density": 0.2}}),
        replace(made, run={**RUN, "guard": None}),
        replace(made, server=replace(made.server, key="ed25519:" + "0" * 64)),
        replace(made, server=None),
        replace(made, clients=made.clients[:1]),
        replace(made, clients=(replace(first, capacity=0.9), made.clients[1])),
        replace(made, clients=(replace(first, name="x"), made.clients[1])),
        replace(made, clients=(replace(first, key="ed25519:" + "0" * 64), made.clients[1])),
    ]
    assert len({made.digest, *(one.digest for one in others)}) == 1 + len(others)
    moved = replace(made.server, addresses=("elsewhere:1",))
    authority = identity.Authority.read(key_path(made.path, "authority"), made.authority)
    renewed = made.renew(authority, days=10)
    assert made.digest == replace(made, server=moved).digest == renewed.digest
    assert replace(made, run=dict(sorted(RUN.items()))).digest == made.digest


def test_renewed_certificates_serve_as_the_old_ones_did(made: FederationFile) -> None:
    authority = identity.Authority.read(key_path(made.path, "authority"), made.authority)
    renewed = made.renew(authority, days=10)
    assert made.server is not None
    assert renewed.server is not None
    for old, new in zip((made.server, *made.clients), (renewed.server, *renewed.clients), strict=True):
        before, after = (identity.describe_certificate(one.certificate) for one in (old, new))
        assert (before.name, before.key, before.hosts) == (after.name, after.key, after.hosts)
        assert after.until < before.until
        identity.check_certificate(new.certificate, renewed.authority, new.key, "it")


def test_nobody_is_admitted_twice(made: FederationFile) -> None:
    authority = identity.Authority.read(key_path(made.path, "authority"), made.authority)
    first, second = made.clients
    with pytest.raises(SparsonaError, match="has a name twice: hospital-1"):
        made.admit(identity.Request(first.name, "ed25519:" + "1" * 64), authority)
    with pytest.raises(SparsonaError, match="has a key twice: hospital-2 and third"):
        made.admit(identity.Request("third", second.key), authority)
    assert made.server is not None
    with pytest.raises(SparsonaError, match="has a key twice: the server and third"):
        made.admit(identity.Request("third", made.server.key), authority)
    for capacity in (0, -1, 1.5, float("nan")):
        with pytest.raises(SparsonaError, match="capacity"):
            made.admit(identity.Request("third", "ed25519:" + "1" * 64), authority, capacity=capacity)
    grown = made.admit(identity.Request("third", "ed25519:" + "1" * 64), authority, addresses=("a.example.org:1",))
    assert grown.clients[2].index == 2
    assert "a.example.org" in identity.describe_certificate(grown.clients[2].certificate).hosts


VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda text: text != "none")
    | st.sampled_from(
        [None, "-----BEGIN \x1f\n", "-----BEGIN X\n\n", "a\nb", 'a\n"""', "a\\\n", "\x7f\n", "\r\n", "\U0001f600"]
    ),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)
TABLES = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    VALUES | st.dictionaries(st.text("ab .\"'=#", max_size=4), VALUES, max_size=2),
    max_size=4,
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(run=TABLES)
def test_any_options_survive_the_file(run: dict[str, Any], made: FederationFile, tmp_path: Path) -> None:
    one = replace(made, run=run)
    one.write(tmp_path / "any.toml")
    assert FederationFile.read(tmp_path / "any.toml") == one
    assert FederationFile.read(tmp_path / "any.toml").digest == one.digest


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**63, "\ud800", b"x", object(), [{"a": 1}]])
def test_what_toml_or_a_digest_cannot_have_is_not_written(value: Any, made: FederationFile, tmp_path: Path) -> None:
    with pytest.raises(SparsonaError):
        replace(made, run={"a": value}).write(tmp_path / "any.toml")
    assert not list(tmp_path.iterdir())


def without(start: str) -> Callable[[str], str]:
    """Remove the first line that starts like this."""

    def change(text: str) -> str:
        lines = text.splitlines(keepends=True)
        lines.remove(next(line for line in lines if line.startswith(start)))
        return "".join(lines)

    return change


def swap(old: str, new: str, count: int = 1) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, count)

    return change


KEY = "ed25519:" + "2" * 64
MISTAKES = {
    "no format": (without("format"), "has no 'format'"),
    "another format": (swap("format = 1", "format = 2"), "has format 2"),
    "a format of another type": (swap("format = 1", "format = true"), "'format' in .* is 'True'"),
    "no name": (without("name"), "has no 'name'"),
    "a bad name": (swap('name = "fed"', 'name = "a b"'), "'name' in .* is 'a b'"),
    "an unknown key": (swap("format = 1", "format = 1\nfromat = 1"), "unknown key 'fromat' of"),
    "an unknown table": (swap("[authority]", "[autority]\n[authority]"), "unknown key 'autority'"),
    "an unknown key of the server": (swap("[server]", "[server]\nport = 1"), r"unknown key 'port' in \[server\]"),
    "an unknown key of a client": (swap("[[client]]", "[[client]]\nkeys = 1"), r"unknown key 'keys' in \[client 0\]"),
    "an unknown key of the authority": (swap("[authority]", "[authority]\nkey = 1"), r"unknown key 'key' in \[auth"),
    "no authority": (swap("[authority]", "[run.x]"), "has no 'authority'"),
    "no run": (lambda text: text[: text.index("[run]")] + text[text.index("[server]") :], "has no 'run'"),
    "a run that is no table": (swap("format = 1", "format = 1\nrun = 3"), "cannot be read"),
    "no key of the server": (without("key"), r"\[server\] of .* has no 'key'"),
    "a short key": (swap('key = "ed25519:', 'key = "ed25519:0'), "'server.key' in .* is 'ed25519:0"),
    "a key of another kind": (swap('key = "ed25519:', 'key = "rsa:'), "'server.key'"),
    "an address without port": (swap("fl.example.org:7447", "fl.example.org"), "'server.addresses' in"),
    "addresses of another type": (swap('["fl.example.org:7447"]', "[7447]"), "'server.addresses' in"),
    "addresses as text": (swap('["fl.example.org:7447"]', '"fl.example.org:7447"'), "'server.addresses' in"),
    "a damaged certificate": (swap("BEGIN CERTIFICATE", "BEGIN CERT"), "'server.certificate' in"),
    "a gap": (swap("index = 1", "index = 2"), r"indices of clients are \[0, 2\]"),
    "an index twice": (swap("index = 1", "index = 0"), "two clients have index 0"),
    "a negative index": (swap("index = 0", "index = -1"), r"indices of clients are \[-1, 1\]"),
    "an index of another type": (swap("index = 1", "index = 1.0"), "'client 1.index' in .* is '1.0'"),
    "no index": (without("index"), r"\[client 0\] of .* has no 'index'"),
    "a name twice": (swap('"hospital-2"', '"hospital-1"'), "has a name twice: hospital-1"),
    "capacity 0": (swap("capacity = 0.5", "capacity = 0"), "'client 1.capacity' in .* is '0'"),
    "capacity nan": (swap("capacity = 0.5", "capacity = nan"), "'client 1.capacity' in .* is 'nan'"),
    "capacity true": (swap("capacity = 0.5", "capacity = true"), "'client 1.capacity' in .* is 'True'"),
    "clients that are no tables": (lambda text: "client = 3\n" + text[: text.index("[[client]]")], "'client' in"),
    "a date": (swap("rounds = 100", "rounds = 2026-01-01"), "'run.rounds' in"),
    "nan": (swap("density = 0.5", "density = nan"), "'run.options.density' in .* is 'nan'"),
    "a huge number": (swap("rounds = 100", "rounds = " + "9" * 30), "'run.rounds' in"),
    "a number too long to read": (swap("rounds = 100", "rounds = " + "9" * 5000), "cannot be read"),
    "too deep": (swap("input = [1, 28, 28]", "input = " + "[" * 20 + "]" * 20), "'run.input' in"),
    "deeper than Python": (swap("input = [1, 28, 28]", "input = " + "[" * 5000 + "]" * 5000), "cannot be read"),
    "no TOML": (lambda text: text + "\n???", "cannot be read"),
    "a key twice in TOML": (swap("rounds = 100", "rounds = 100\nrounds = 100"), "cannot be read"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_by_file_and_key(mistake: str, made: FederationFile, tmp_path: Path) -> None:
    change, words = MISTAKES[mistake]
    path = tmp_path / "wrong.toml"
    path.write_text(change(Path(made.path).read_text()))
    with pytest.raises(SparsonaError, match=words) as caught:
        FederationFile.read(path)
    assert "wrong.toml" in str(caught.value)


def test_a_key_twice(made: FederationFile, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(Path(made.path).read_text().replace(made.clients[1].key, made.clients[0].key))
    with pytest.raises(SparsonaError, match="has a key twice: hospital-1 and hospital-2"):
        FederationFile.read(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SparsonaError, match="there is no federation file"):
        FederationFile.read(tmp_path / "none.toml")
    with pytest.raises(SparsonaError, match="cannot be read"):
        FederationFile.read(tmp_path)
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SparsonaError, match="cannot be read"):
        FederationFile.read(tmp_path / "x.toml")
    (tmp_path / "x.toml").write_bytes(b"#" * (1 << 24) + b"\n")
    with pytest.raises(SparsonaError, match="is too large"):
        FederationFile.read(tmp_path / "x.toml")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10_000), inserted=st.text(max_size=6), removed=st.integers(0, 30))
def test_changed_files_raise_our_error_or_are_read(
    place: int, inserted: str, removed: int, made: FederationFile, tmp_path: Path
) -> None:
    text = Path(made.path).read_text()
    place %= len(text)
    changed = text[:place] + inserted + text[place + removed :]
    (tmp_path / "x.toml").write_bytes(changed.encode("utf-8", "replace"))
    try:
        found = FederationFile.read(tmp_path / "x.toml")
    except SparsonaError:
        return
    assert len(found.digest) == 32


def test_addresses() -> None:
    assert split_address("[::1]:7447") == ("::1", 7447)
    for wrong in ("a", "a:", ":7447", "a:0", "a:65536", "a b:1", "tls/a:1", "::1:5"):
        with pytest.raises(SparsonaError, match="the address"):
            split_address(wrong)
