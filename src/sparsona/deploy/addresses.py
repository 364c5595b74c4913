"""Addresses of machines: "host:port"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sparsona.core.errors import SparsonaError

_ADDRESS = re.compile(r"(?:(?P<scheme>[a-z]+)/)?(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]*):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class Address:
    """An address, taken apart.

    Args:
        scheme: "tcp" or "tls" where it says so, or "".
        host: a name, an IPv4 address, or an IPv6 address in brackets; "": none is given.
        port: from 1 to 65535.
    """

    scheme: str
    host: str
    port: int


def parse_address(text: str) -> Address:
    """Take an address apart.

    Args:
        text: "host:port", ":port" or "[IPv6]:port"; "tcp/" or "tls/" may stand before it.

    Returns:
        Its parts.

    Example:
        >>> parse_address("tls/[::1]:7447")
        Address(scheme='tls', host='[::1]', port=7447)
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        hint = "an IPv6 address stands in brackets" if text.count(":") > 1 else "a port is a number from 1 to 65535"
        raise SparsonaError(f"the address {text[:80]!r}", expected="host:port, :port or [IPv6]:port", hint=hint)
    return Address(match["scheme"] or "", match["host"], int(match["port"]))


def split_address(text: str) -> tuple[str, int]:
    """Host and port of an address that others can dial.

    Args:
        text: "host:port". The host may be a name, an IPv4 address, or an IPv6 address in brackets.

    Returns:
        Both, the host without brackets.

    Example:
        >>> split_address("fl.example.org:7447")
        ('fl.example.org', 7447)
    """
    found = parse_address(text)
    if found.scheme or not found.host or "%" in found.host:
        raise SparsonaError(f"the address {text[:80]!r}", expected="host:port", hint="for example fl.example.org:7447")
    return found.host.strip("[]"), found.port
