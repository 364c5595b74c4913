"""Every method over a real link with mutual TLS: the bits and bytes of the simulator."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from federations import free_address
from method_lines import anywhere, further_rows_are_slow

from sparsona import methods
from sparsona.core.update import SERVER
from sparsona.deploy import identity
from sparsona.deploy.zenoh_link import Tls, ZenohLink
from sparsona.testing import Case
from sparsona.testing.exchange import RUN, frames_give_the_same_bits

pytestmark = pytest.mark.long

NUM = 4
COMMON = {"clients": NUM, "per_round": 2, "epochs": 1, "novel": 1}
OWN = {
    "fedavg-ft": {"guard": True, "drop_rate": 0.3},
    "fedspa": {"points": ["trained", "global"], "drop_rate": 0.3, "everyone_trains": True, "tune_epochs": 1},
    "dispfl": {"points": ["consensus"], "drop_rate": 0.3, "tune_epochs": 1},
    "pfedgate": {"capacities": [0.3, 1.0], "points": ["global"]},
    "ditto": {"sampler": "loss"},
    "fedavg": {"sampler": "size", "availability": "diurnal:3:0.7"},
}


class Star:
    """A server and NUM clients with a link each. What the clients do with frames is changed from test to test."""

    def __init__(self, folder) -> None:
        address = free_address()
        authority = identity.new_authority("test", folder / "authority.key")

        def tls(name: str, *hosts: str) -> Tls:
            key = identity.write_new_key(folder / f"{name}.key")
            made = identity.certify(identity.Request(name, key.public), authority, hosts=hosts)
            return Tls(authority.certificate, made, key.pem)

        self.handles = {}
        one_at_a_time = threading.Lock()  # torch has one generator for a process, and clients share this one here
        own = tls("server", *identity.LOCAL_HOSTS)
        self.links = [ZenohLink(SERVER, run=RUN, listen=(address,), tls=own)]
        for client in range(NUM):
            link = ZenohLink(client, run=RUN, connect=(address,), tls=tls(f"client-{client}"))

            def handle(frame, client=client):
                with one_at_a_time:
                    return self.handles[client](frame)

            link.serve(handle)
            self.links.append(link)

    def reach(self, handles):
        self.handles.clear()
        self.handles.update(handles)
        return self.links[0].exchange


@pytest.fixture(scope="module")
def star(tmp_path_factory) -> Iterator[Star]:
    found = Star(tmp_path_factory.mktemp("keys"))
    yield found
    for link in reversed(found.links):
        link.close()


# Further rows of a file are more of the same.


@pytest.mark.parametrize("name", further_rows_are_slow(sorted(methods.METHODS)))
def test_a_link_gives_the_simulators_bits(name, star):
    options = {**COMMON, **anywhere(name), **OWN.get(name, {})}
    if methods.METHODS[name].peers:
        options["per_round"] = None
    frames_give_the_same_bits(Case(methods.card(name), options), star.reach)
