"""Keys and certificates: who can sign, who is certified, and what a link accepts."""

from __future__ import annotations

import base64
import contextlib
import json
import stat
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from federations import free_address
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparsona.core.errors import SparsonaError
from sparsona.core.update import SERVER
from sparsona.deploy import identity
from sparsona.deploy.frames import Frame, seal, unseal
from sparsona.deploy.identity import Authority, KeyFile, Request, Roster, certify, new_authority, new_key, read_request


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return new_authority("fed", tmp_path / "fed.authority.key")


def party(folder: Path, name: str) -> tuple[KeyFile, Request]:
    key, request = new_key(name, folder)
    return KeyFile.read(key), read_request(request)


def test_a_key_is_secret_and_never_overwritten(tmp_path: Path) -> None:
    key, request = new_key("hospital-3", tmp_path)
    assert (key.name, request.name) == ("hospital-3.key", "hospital-3.pub")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    before = key.read_bytes(), request.read_bytes()
    assert b"PRIVATE" not in before[1]
    with pytest.raises(SparsonaError, match="exists already"):
        new_key("hospital-3", tmp_path)
    request.unlink()
    with pytest.raises(SparsonaError, match="exists already"):
        new_key("hospital-3", tmp_path)
    assert key.read_bytes() == before[0]
    assert not request.exists()
    (tmp_path / "other.pub").write_text("mine")
    with pytest.raises(SparsonaError, match=r"other\.pub' exists already"):
        new_key("other", tmp_path)
    assert not (tmp_path / "other.key").exists()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SparsonaError, match="cannot be written: No such file"):
        new_key("hospital-3", tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a b", "-x", ".x", "é", "x" * 64, "a\n"])
def test_names_are_plain(name: str, tmp_path: Path) -> None:
    with pytest.raises(SparsonaError, match="the name"):
        new_key(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_frames_are_accepted_from_the_roster_alone(tmp_path: Path) -> None:
    (server, _), (own, _), (other, _) = (party(tmp_path, name) for name in ("server", "own", "other"))
    roster = Roster({SERVER: server.public, 0: own.public})
    frame = Frame("ab", "answer", 0, SERVER, 4, "j1", {}, (b"weights",))
    assert unseal(seal(frame, own), roster, run="ab", receiver=SERVER) == frame
    for signer in (server, other):
        with pytest.raises(SparsonaError, match="in the name of client 0 is not signed by it"):
            unseal(seal(frame, signer), roster, run="ab", receiver=SERVER)
    with pytest.raises(SparsonaError, match="a frame from client 1"):
        unseal(seal(replace(frame, sender=1), other), roster, run="ab", receiver=SERVER)
    for signature in (b"", bytes(64), bytes(63), bytes(1000)):
        with pytest.raises(SparsonaError, match="is not signed by it"):
            roster.verify(0, b"data", signature)
    assert Roster({0: own.public}).verify(0, b"data", own.sign(b"data")) is None


@pytest.mark.slow
def test_ten_thousand_forged_frames_of_each_kind_are_refused(tmp_path: Path) -> None:
    (own, _), (other, _) = (party(tmp_path, name) for name in ("own", "other"))
    roster = Roster({0: own.public, 1: other.public})
    for number in range(10_000):
        frame = Frame("ab", "answer", 0, SERVER, number, "j1", {}, (b"%d" % number,))
        with pytest.raises(SparsonaError, match="is not signed by it"):  # another client's key
            unseal(seal(frame, other), roster, run="ab", receiver=SERVER)
        with pytest.raises(SparsonaError, match="belongs to run"):
            unseal(seal(replace(frame, run=f"ab{number}"), own), roster, run="ab", receiver=SERVER)
        with pytest.raises(SparsonaError, match="is for client"):
            unseal(seal(replace(frame, receiver=number), own), roster, run="ab", receiver=SERVER)


def test_a_request_must_be_signed_by_its_key(tmp_path: Path) -> None:
    own, request = party(tmp_path, "own")
    other, _ = party(tmp_path, "other")
    assert request == Request("own", own.public)
    text = (tmp_path / "own.pub").read_text()
    for wrong, words in (
        (text.replace("name: own", "name: other"), "first lines"),
        (text.replace(own.public, other.public), "first lines"),
        ("", "no certificate request"),
        ((tmp_path / "own.key").read_text(), "no certificate request"),
    ):
        (tmp_path / "wrong.pub").write_text(wrong)
        with pytest.raises(SparsonaError, match=words):
            read_request(tmp_path / "wrong.pub")
    # Somebody else's public key in a request that its owner did not sign.
    lines = text.splitlines()
    der = base64.b64decode("".join(lines[3:-1]))
    forged = der.replace(bytes.fromhex(own.public[8:]), bytes.fromhex(other.public[8:]))
    assert forged != der
    pem = "\n".join([lines[2], base64.b64encode(forged).decode(), lines[-1]])
    (tmp_path / "wrong.pub").write_text(f"name: own\nkey:  {other.public}\n{pem}\n")
    with pytest.raises(SparsonaError, match="no certificate request"):
        read_request(tmp_path / "wrong.pub")


MUTATIONS = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@example(changes=[(151, 1)], inside=True)  # another version of the format
@given(changes=MUTATIONS, inside=st.booleans())
def test_changed_requests_raise_our_error_or_say_the_same(
    changes: list[tuple[int, int]], inside: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("request")
    _, request = party(folder, "own")
    text = (folder / "own.pub").read_bytes()
    lines = text.split(b"\n")
    data = bytearray(base64.b64decode(b"".join(lines[3:-2])) if inside else text)
    for place, value in changes:
        data[place % len(data)] = value
    if inside:
        data = bytearray(b"\n".join([*lines[:3], base64.b64encode(data), lines[-2], b""]))
    (folder / "own.pub").write_bytes(data)
    with contextlib.suppress(SparsonaError):
        assert read_request(folder / "own.pub") == request


@pytest.mark.parametrize("text", ["", "x", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_a_file_without_a_key(text: str, tmp_path: Path) -> None:
    (tmp_path / "own.key").write_text(text)
    with pytest.raises(SparsonaError, match="has no private key"):
        KeyFile.read(tmp_path / "own.key")
    with pytest.raises(SparsonaError, match="cannot be read: No such file"):
        KeyFile.read(tmp_path / "none.key")
    (tmp_path / "large.key").write_bytes(bytes(1 << 17))
    with pytest.raises(SparsonaError, match="too large"):
        KeyFile.read(tmp_path / "large.key")


def test_keys_of_other_kinds_are_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    key = ec.generate_private_key(ec.SECP256R1())
    for secret in (NoEncryption(), BestAvailableEncryption(b"password")):
        (tmp_path / "own.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, secret))
        with pytest.raises(SparsonaError, match="has no private key"):
            KeyFile.read(tmp_path / "own.key")


def test_a_certificate_says_whose_it_is_and_how_long(tmp_path: Path, authority: Authority) -> None:
    own, request = party(tmp_path, "own")
    dials = certify(request, authority, days=10)
    listens = certify(request, authority, hosts=("fl.example.org", "10.0.0.7", "::1"))
    found = identity.check_certificate(dials, authority.certificate, own.public, "own")
    assert (found.name, found.key, found.hosts) == ("own", own.public, ())
    assert timedelta(days=9) < found.until - datetime.now(UTC) < timedelta(days=10)
    hosts = identity.describe_certificate(listens).hosts
    assert hosts == ("localhost", "127.0.0.1", "fl.example.org", "10.0.0.7", "::1")
    for host in ("", "a b", "*.example.org", "-x", "x" * 300, "a..b"):
        with pytest.raises(SparsonaError, match="the host"):
            certify(request, authority, hosts=(host,))
    for days in (0, -1, 10**6):
        with pytest.raises(SparsonaError, match="days"):
            certify(request, authority, days=days)


def test_a_certificate_of_another_authority_or_key_is_refused(tmp_path: Path, authority: Authority) -> None:
    own, request = party(tmp_path, "own")
    other = new_authority("fed", tmp_path / "other.key")
    with pytest.raises(SparsonaError, match="was not signed by"):
        identity.check_certificate(certify(request, other), authority.certificate, own.public, "own")
    with pytest.raises(SparsonaError, match="is for another key"):
        identity.check_certificate(certify(request, authority), authority.certificate, other.key.public, "own")
    with pytest.raises(SparsonaError, match="is not the key of this federation's authority"):
        Authority.read(tmp_path / "other.key", authority.certificate)
    assert Authority.read(tmp_path / "fed.authority.key", authority.certificate).key.public == authority.key.public
    with pytest.raises(SparsonaError, match="cannot be read"):
        identity.describe_certificate("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")


def test_an_expired_certificate_says_so(tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    own, request = party(tmp_path, "own")
    certificate = certify(request, authority, days=10)
    found = identity.describe_certificate(certificate)
    found.check_time("own", found.until)
    with pytest.raises(SparsonaError, match=r"the certificate of own expired on (.|\n)*federation renew"):
        found.check_time("own", found.until + timedelta(seconds=1))
    with pytest.raises(SparsonaError, match=r"is valid from (.|\n)*clock"):
        found.check_time("own", found.since - timedelta(seconds=1))

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(days=11)

    monkeypatch.setattr(identity, "datetime", Later)
    with pytest.raises(SparsonaError, match="expired"):
        identity.check_certificate(certificate, authority.certificate, own.public, "own")
    assert identity.check_certificate(certify(request, authority), authority.certificate, own.public, "own")


def test_nothing_outlives_its_authority(tmp_path: Path) -> None:
    short = new_authority("fed", tmp_path / "short.key", days=5)
    _, request = party(tmp_path, "own")
    until = identity.describe_certificate(short.certificate).until
    assert identity.describe_certificate(certify(request, short, days=50)).until == until
    longer = identity.renew_authority(short, days=500)
    own = certify(request, short)
    assert identity.check_certificate(own, longer.certificate, request.key, "own").until == until  # still valid
    assert identity.describe_certificate(certify(request, longer, days=50)).until > until


def test_without_the_extra_the_error_names_it() -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from sparsona.deploy import identity, federation_file\n"
        "from sparsona.core.errors import SparsonaError\n"
        "for call in (lambda: identity.new_key('a', '.'), lambda: identity.KeyFile.read('a'),\n"
        "             lambda: identity.Roster({}), lambda: identity.describe_certificate('')):\n"
        "    try: call()\n"
        "    except SparsonaError as error: assert 'sparsona[peers]' in str(error)\n"
        "    else: raise AssertionError\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def open_link(authority: str, key: KeyFile, certificate: str, names: bool = True, **endpoints: str) -> Any:
    """A zenoh session with mutual TLS that listens on, or connects to, an endpoint."""
    import zenoh

    secrets = {"root_ca_certificate": authority}
    for side in ("listen", "connect"):
        secrets |= {f"{side}_private_key": key.pem, f"{side}_certificate": certificate}
    values: dict[str, Any] = {
        f"transport/link/tls/{name}_base64": base64.b64encode(text.encode()).decode() for name, text in secrets.items()
    }
    values |= {"transport/link/tls/enable_mtls": True, "transport/link/tls/verify_name_on_connect": names}
    values |= {
        "mode": "peer",
        "scouting/multicast/enabled": False,
        "connect/timeout_ms": 700,
        "connect/exit_on_failure": True,
    }
    values |= {f"{side}/endpoints": [endpoints[side]] if side in endpoints else [] for side in ("listen", "connect")}
    config = zenoh.Config()
    for name, value in values.items():
        config.insert_json5(name, json.dumps(value))
    return zenoh.open(config)


@pytest.mark.long
def test_a_link_is_opened_by_this_authoritys_certificates_alone(tmp_path: Path, authority: Authority) -> None:
    import zenoh

    ours = authority.certificate
    server, request = party(tmp_path, "server")
    client, asks = party(tmp_path, "client")
    other = new_authority("fed", tmp_path / "other.key")
    listens, dials = certify(request, authority, hosts=("localhost",)), certify(asks, authority)
    address = free_address()
    port = address.partition(":")[2]
    endpoint = f"tls/{address}"

    def ask(trusted: str, certificate: str, host: str = "127.0.0.1", names: bool = True) -> list[bytes]:
        with open_link(trusted, client, certificate, names, connect=f"tls/{host}:{port}") as session:
            return [reply.ok.payload.to_bytes() for reply in session.get("frame", timeout=5)]

    with open_link(ours, server, listens, listen=endpoint) as session:
        queryable = session.declare_queryable("frame", lambda query: query.reply("frame", b"answer"))
        assert ask(ours, dials) == [b"answer"]
        assert ask(ours, dials, "localhost") == [b"answer"]
        with pytest.raises(zenoh.ZError):  # the server refuses the client
            ask(ours, certify(asks, other))
        with pytest.raises(zenoh.ZError):  # the client refuses the server
            ask(other.certificate, dials)
        queryable.undeclare()
    with open_link(ours, client, dials, listen=endpoint), pytest.raises(zenoh.ZError):
        ask(ours, dials, names=False)  # a certificate to dial with is none to listen with, under whatever name
