"""The federation file, fed.toml: what all sides of a run must agree on, and who they are.

Everybody has the same file. Its digest is the run's identity: it covers the options and the roster. It does not cover
addresses and certificates, which may change while a run goes on.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.files import replace_file
from sparsona.core.reading import parse_toml
from sparsona.deploy import identity
from sparsona.deploy.addresses import split_address
from sparsona.deploy.identity import Authority, Request

FORMAT = 1
_MOST_BYTES = 1 << 24
_MAX_INT = 2**63
_BARE = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Server:
    """The server of a federation.

    Args:
        key: its public key.
        certificate: PEM.
        addresses: where clients dial, as "host:port".
    """

    key: str
    certificate: str
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Member:
    """A client of a federation.

    Args:
        index: its index in the run.
        name: of its own choice.
        key: its public key.
        capacity: the density that it can hold.
        certificate: PEM.
        addresses: of a peer that others can dial.
    """

    index: int
    name: str
    key: str
    capacity: float
    certificate: str
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class FederationFile:
    """What all sides of a run agree on.

    Args:
        name: of the federation.
        run: the options of the run: values as TOML has them, and None, in tables if need be. What they mean is not
            checked here.
        authority: the certificate (PEM) of who signs the others.
        server: None: peers, among whom there is none.
        clients: in the order of their indices, which have no gaps.
        path: where it was read from, for messages.
    """

    name: str
    run: Mapping[str, Any]
    authority: str
    server: Server | None = None
    clients: tuple[Member, ...] = ()
    path: str = field(default="fed.toml", compare=False)

    @staticmethod
    def read(path: str | Path) -> FederationFile:
        """Read and check a file.

        Args:
            path: the file.

        Returns:
            What it says.

        Raises:
            SparsonaError: names the file and the key that is wrong.
        """
        return _parse(str(path), _read_toml(path))

    def write(self, path: str | Path) -> None:
        """Write it: a reader sees the old content or the new one."""
        text = "".join(self._lines())
        _parse(str(path), tomllib.loads(text))  # what is written can be read
        try:
            with replace_file(Path(path), is_durable=True) as file:
                file.write(text.encode())
        except OSError as error:
            raise SparsonaError(
                f"'{path}' cannot be written: {error.strerror}", expected="a folder to write into"
            ) from None

    @property
    def digest(self) -> str:
        """The run's identity: 32 hexadecimal digits."""
        content = {
            "format": FORMAT,
            "name": self.name,
            "run": self.run,
            "server": None if self.server is None else self.server.key,
            "clients": [[one.index, one.name, one.key, one.capacity] for one in self.clients],
        }
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def capacities(self) -> tuple[float, ...]:
        """What each client can hold."""
        return tuple(one.capacity for one in self.clients)

    def keys(self) -> dict[int, str]:
        """The public key of everybody, by index, the server's under `SERVER`: for `identity.Roster`."""
        from sparsona.core.update import SERVER  # imports torch, which listing a file does not need

        server = {} if self.server is None else {SERVER: self.server.key}
        return server | {one.index: one.key for one in self.clients}

    def client(self, key: str) -> Member:
        """The client with this public key."""
        for one in self.clients:
            if one.key == key:
                return one
        raise SparsonaError(
            f"no client in '{self.path}' has the key {key}",
            expected="a key that was admitted",
            hint=f"`sparsona federation admit {self.path} NAME.pub` where the authority's key is",
        )

    def admit(
        self,
        request: Request,
        authority: Authority,
        *,
        capacity: float = 1.0,
        addresses: Sequence[str] = (),
        hosts: Sequence[str] = (),
        days: int = identity.DAYS,
    ) -> FederationFile:
        """The federation with one more client, under the next index: another run, with another digest.

        Args:
            request: who asks.
            authority: signs the client's certificate.
            capacity: the density that it can hold, above 0 and at most 1.
            addresses: where others can dial it, as peers do.
            hosts: further names under which it can be dialled: see `identity.certify`.
            days: how long its certificate is valid.

        Returns:
            The federation to write.
        """
        hosts = (*hosts, *(split_address(one)[0] for one in addresses))
        certificate = identity.certify(request, authority, hosts=hosts, days=days)
        index = len(self.clients)
        one = Member(index, request.name, request.key, float(capacity), certificate, tuple(addresses))
        return _check_roster(replace(self, clients=(*self.clients, one)))

    def renew(self, authority: Authority, days: int = identity.DAYS) -> FederationFile:
        """The same federation, and the same run, with certificates that are valid from now on.

        Args:
            authority: signs them; its own is replaced as well.
            days: how long those of server and clients are valid.

        Returns:
            The federation to write.
        """
        authority = identity.renew_authority(authority)

        def again(name: str, key: str, certificate: str) -> str:
            hosts = identity.describe_certificate(certificate).hosts
            return identity.certify(Request(name, key), authority, hosts=hosts, days=days)

        server = self.server and replace(
            self.server, certificate=again("server", self.server.key, self.server.certificate)
        )
        clients = tuple(replace(one, certificate=again(one.name, one.key, one.certificate)) for one in self.clients)
        return replace(self, authority=authority.certificate, server=server, clients=clients)

    def _lines(self) -> Iterator[str]:
        yield "# What all sides of a run agree on: everybody has the same file. See `sparsona federation show`.\n"
        yield from _write({"format": FORMAT, "name": self.name})
        yield from _write(self.run, "run")
        if self.server is not None:
            yield "\n[server]\n"
            yield from _write(_row(self.server))
        yield "\n[authority]\n"
        yield from _write({"certificate": self.authority})
        for one in self.clients:
            yield "\n[[client]]\n"
            yield from _write(_row(one))


def key_path(path: str | Path, of: str) -> Path:
    """Where `sparsona federation new` puts a key: beside the file.

    Args:
        path: the federation file.
        of: "authority" or "server".

    Returns:
        The key's file.

    Example:
        >>> key_path("fed.toml", "server").name
        'fed.server.key'
    """
    return Path(path).with_name(f"{Path(path).stem}.{of}.key")


def _row(one: Server | Member) -> dict[str, Any]:
    """The fields of a table: certificates, which are long, come last."""
    fields = {key: value for key, value in vars(one).items() if key != "certificate"}
    return {**fields, "addresses": list(one.addresses), "certificate": one.certificate}


def _write(values: Mapping[str, Any], table: str = "") -> Iterator[str]:
    """Lines of TOML, which has no None: 'none' is read as that. Tables come last."""
    if table:
        yield f"\n[{table}]\n"
    for key, value in values.items():
        if not isinstance(value, Mapping):
            yield f"{_write_key(key)} = {_write_value(value)}\n"
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _write(value, f"{table}.{_write_key(key)}")


def _write_key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _write_text(key)


def _write_value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    if isinstance(value, str):
        if value.startswith("-----BEGIN ") and re.fullmatch(r"[A-Za-z0-9+/=\n -]*", value):
            return f'"""\n{value}"""'  # as a certificate is read by people
        return _write_text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_write_value, value))}]"
    raise SparsonaError(
        f"{value!r} cannot be written into a federation file", expected="text, finite numbers, truth values and lists"
    )


def _write_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SparsonaError(f"the text {text[:60]!r} is not Unicode", expected="characters") from None
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read_toml(path: str | Path) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise SparsonaError(f"'{path}' is too large", expected=f"at most {_MOST_BYTES:,} bytes")
        return parse_toml(data.decode())
    except FileNotFoundError:
        raise SparsonaError(
            f"there is no federation file '{path}'",
            expected="a file that `sparsona federation new` made",
            hint="check the path",
        ) from None
    except OSError as error:
        raise SparsonaError(f"'{path}' cannot be read: {error.strerror}", expected="a federation file") from None
    except ValueError as error:  # UnicodeDecodeError and TOMLDecodeError are ValueErrors
        raise SparsonaError(
            f"federation file '{path}' cannot be read: {str(error)[:200]}",
            expected="a TOML file that `sparsona federation new` made",
            hint="correct it at the place named",
        ) from None


class _Table:
    """A table of a file that is read; errors name the file and the key."""

    def __init__(self, path: str, place: str, values: Any) -> None:
        self.path, self.place = path, place
        if not isinstance(values, dict):
            raise self.wrong("", values, "a table")
        self.values = values

    def wrong(self, key: str, value: Any, expected: str) -> SparsonaError:
        where = ".".join(part for part in (self.place, key) if part)
        return SparsonaError(f"'{where}' in '{self.path}' is {str(value)[:60]!r}", expected=expected)

    def check_keys(self, known: Sequence[str]) -> None:
        for key in self.values:
            if key not in known:
                where = f" in [{self.place}]" if self.place else ""
                error = unknown_name("key", key[:80], known)
                raise SparsonaError(f"{error.what}{where} of '{self.path}'", expected=error.expected, hint=error.hint)

    def get(self, key: str, kind: type, expected: str, default: Any = None) -> Any:
        value = self.values.get(key, default)
        if value is None:
            where = f"[{self.place}] of " if self.place else ""
            raise SparsonaError(f"{where}'{self.path}' has no '{key}'", expected=f"{key} = {expected}")
        if type(value) is not kind:
            raise self.wrong(key, value, expected)
        return value

    def text(self, key: str) -> str:
        return str(self.get(key, str, "a text"))

    def name(self, key: str) -> str:
        return self._checked(key, identity.check_name)

    def key(self, key: str) -> str:
        return self._checked(key, identity.check_key)

    def certificate(self) -> str:
        text = self.text("certificate")
        if not re.fullmatch(r"-----BEGIN CERTIFICATE-----\n[A-Za-z0-9+/=\n]+-----END CERTIFICATE-----\n?", text):
            raise self.wrong("certificate", text, "a certificate in PEM")
        return text

    def addresses(self) -> tuple[str, ...]:
        found = self.get("addresses", list, "a list of addresses", default=[])
        for one in found:
            if not isinstance(one, str):
                raise self.wrong("addresses", found, "a list of texts like 'fl.example.org:7447'")
            self._within("addresses", split_address, one)
        return tuple(found)

    def _checked(self, key: str, check: Callable[[str], str]) -> str:
        text = self.text(key)
        self._within(key, check, text)
        return text

    def _within(self, key: str, check: Callable[[str], object], text: str) -> None:
        try:
            check(text)
        except SparsonaError as error:
            raise self.wrong(key, text, error.expected) from None


def _parse(path: str, values: dict[str, Any]) -> FederationFile:
    top = _Table(path, "", values)
    format_ = top.get("format", int, str(FORMAT))
    if format_ != FORMAT:
        raise SparsonaError(
            f"'{path}' has format {format_}", expected=f"format {FORMAT}", hint="use the version that made the file"
        )
    top.check_keys(("format", "name", "run", "server", "authority", "client"))
    authority = _Table(path, "authority", top.get("authority", dict, "a table"))
    authority.check_keys(("certificate",))
    server = None
    if "server" in values:
        table = _Table(path, "server", values["server"])
        table.check_keys(("key", "addresses", "certificate"))
        server = Server(table.key("key"), table.certificate(), table.addresses())
    run = _plain(_Table(path, "run", top.get("run", dict, "a table")), "", values["run"], 8)
    rows = top.get("client", list, "tables [[client]]", default=[])
    clients = [_client(_Table(path, f"client {number}", row)) for number, row in enumerate(rows)]
    clients.sort(key=lambda one: one.index)
    return _check_roster(FederationFile(top.name("name"), run, authority.certificate(), server, tuple(clients), path))


def _client(table: _Table) -> Member:
    table.check_keys(("index", "name", "key", "capacity", "addresses", "certificate"))
    capacity = table.values.get("capacity", 1.0)
    if type(capacity) not in (int, float) or not 0 < capacity <= 1:
        raise table.wrong("capacity", capacity, "a number above 0 and at most 1")
    index = table.get("index", int, "a whole number from 0 on")
    return Member(index, table.name("name"), table.key("key"), float(capacity), table.certificate(), table.addresses())


def _check_roster(file: FederationFile) -> FederationFile:
    """Check that everybody can be told apart."""
    indices = [one.index for one in file.clients]
    if indices != list(range(len(indices))):
        twice = [index for index, number in Counter(indices).items() if number > 1]
        what = f"two clients have index {twice[0]}" if twice else f"the indices of clients are {str(indices)[:60]}"
        raise SparsonaError(f"'{file.path}': {what}", expected=f"0 to {len(indices) - 1}, each once")
    keys = [] if file.server is None else [("the server", file.server.key)]
    keys += [(one.name, one.key) for one in file.clients]
    for what, values in (("name", [one.name for one in file.clients]), ("key", [key for _, key in keys])):
        if twice_ := [value for value, number in Counter(values).items() if number > 1]:
            who = [name for name, key in keys if key == twice_[0]] if what == "key" else twice_
            raise SparsonaError(
                f"'{file.path}' has a {what} twice: {' and '.join(who) if what == 'key' else twice_[0]}",
                expected=f"a {what} of its own for everybody",
                hint="was it admitted already?",
            )
    for one in file.clients:
        if not 0 < one.capacity <= 1:
            raise SparsonaError(
                f"capacity {one.capacity} of {one.name}",
                expected="a number above 0 and at most 1",
                hint="--capacity 0.2",
            )
    return file


def _plain(table: _Table, place: str, value: Any, depth: int) -> Any:
    """Options as read: text, finite numbers, truth values, lists and tables; 'none' is None."""
    if value == "none":
        return None
    if isinstance(value, dict | list) and depth:
        if isinstance(value, list):
            return [_plain(table, place, one, depth - 1) for one in value]
        names = {key: f"{place}.{key}".lstrip(".") for key in value}
        return {key: _plain(table, names[key], one, depth - 1) for key, one in value.items()}
    is_finite = isinstance(value, float) and math.isfinite(value)
    if isinstance(value, str) or is_finite or (isinstance(value, int) and -_MAX_INT <= value < _MAX_INT):
        return value
    raise table.wrong(place, value, "text, finite numbers of 64 bits, truth values, lists and tables")
