"""No test reaches beyond this machine."""

from __future__ import annotations

import socket
import urllib.request

import pytest


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "example.org"])
def test_connections_elsewhere_are_refused(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as one:
        for connect in (one.connect, one.connect_ex):
            with pytest.raises(AssertionError, match="tests have no network"):
                connect((host, 80))


def test_names_are_not_looked_up():
    with pytest.raises(AssertionError, match=r"example\.org.*tests have no network"):
        urllib.request.urlopen("http://example.org")


def test_this_machine_is_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(("localhost", server.getsockname()[1])).close()
