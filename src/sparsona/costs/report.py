"""What an experiment costs, as a value: figures per client, round and run, and the JSON made of them. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsona.analysis.format import human_bytes
from sparsona.core.printable import printable
from sparsona.core.rows import html_table, text_table

if TYPE_CHECKING:
    from sparsona.costs import Experiment

Number = int | float


def show_bytes(value: Number) -> str:
    """One digit more than elsewhere: as many as the papers print."""
    return human_bytes(value, digits=4)


@dataclass(frozen=True)
class Traffic:
    """Bytes in one way of counting. Between peers each message is both sent and received: `round` counts it once."""

    up: Number  # of one client in one round, the mean over clients
    down: Number
    round_up: Number  # of all clients in one round
    round_down: Number
    round: Number
    tuning: Number  # received by all clients for final tuning
    busiest: Number  # through the busiest node in one round; the papers count one direction of it
    busiest_in: Number
    busiest_out: Number
    tuning_up: Number = 0  # of these, what clients sent: between peers all of it

    def to_json(self, rounds: int) -> dict[str, dict[str, Any]]:
        """Decimal megabytes, and gigabytes for the whole run."""
        total = {
            "comm_gb": (self.round * rounds + self.tuning) / 1e9,
            "up_gb": (self.round_up * rounds + self.tuning_up) / 1e9,
            "down_gb": (self.round_down * rounds + self.tuning) / 1e9,
        }
        per_round = {"comm_mb": self.round / 1e6, "up_mb": self.round_up / 1e6, "down_mb": self.round_down / 1e6}
        per_client = {"up_mb": self.up / 1e6, "down_mb": self.down / 1e6}
        busiest = {"comm_mb": self.busiest / 1e6, "in_mb": self.busiest_in / 1e6, "out_mb": self.busiest_out / 1e6}
        return {"total": total, "per_round": per_round, "per_client_round": per_client, "busiest_node": busiest}


@dataclass(frozen=True)
class Flops:
    """FLOPs of one client in one round, the mean over clients, and of all clients' final tuning."""

    train: Number
    search: Number
    tuning: Number
    tuning_search: Number = 0

    def to_json(self, turns: int, with_tuning: bool = False) -> dict[str, Number]:
        """The FLOPs of this number of turns."""
        train, search = self.train * turns, self.search * turns
        if with_tuning:
            train, search = train + self.tuning, search + self.tuning_search
        return {"flops": train + search, "train_flops": train, "search_flops": search}


@dataclass(frozen=True)
class Memory:
    """Bytes on the client that holds most: parameters, gradients and masks, but no activations and no messages."""

    kept: int  # between rounds
    at_hand: int  # kept and received; between peers, kept and what is made of all that is received
    training: int  # kept, at work, gradients and copies
    search: int  # the same with a dense gradient to grow masks by; 0 if the search reads no gradient


@dataclass(frozen=True)
class CostReport:
    """What an experiment costs. `to_json` has every figure."""

    method: str
    title: str
    model: str
    num_parameters: int
    input_shape: tuple[int, ...]
    classes: int
    costs_only: bool  # there is a rule for its costs, but it cannot be run yet
    exact: bool  # False: `notes` say what is not
    notes: tuple[str, ...]
    peers: bool
    experiment: Experiment
    options: dict[str, Any]
    samples: int
    samples_from: str  # "" if it was given
    flops: Flops
    inference_flops: int  # of one example
    memory: Memory
    encoded: Traffic
    paper: Traffic

    @property
    def rounds(self) -> int:
        return self.experiment.rounds

    @property
    def per_round(self) -> int:
        return self.experiment.sampled

    @property
    def traffic(self) -> Traffic:
        """Bytes in the counting that was chosen."""
        return self.paper if self.experiment.options.counting == "paper" else self.encoded

    @property
    def neighbours(self) -> Number:
        """Peers that each peer sends to, the mean over peers; 0 where there is a server."""
        return self.experiment.neighbours

    @property
    def graph(self) -> str:
        """The graph that clients send along."""
        if self.experiment.graph is None:
            return "star"
        return self.experiment.run.graph or f"random:{self.neighbours}"

    @property
    def busiest(self) -> str:
        """The busiest node. In a random graph a peer receives from a fixed number of peers, but sends to any number."""
        if not self.peers:
            return "server"
        graph = self.experiment.graph
        assert graph is not None
        return "any peer, on average" if graph.kind == "random" and not graph.bounded else "any peer"

    @property
    def head(self) -> str:
        """What is charged for: method, model and density."""
        density = f", density {self.options['density']:g}" if "density" in self.options else ""
        only = " (costs only: it cannot be run yet)" if self.costs_only else ""
        return f"{self.title}{only}, {self.model} of {self.num_parameters:,} parameters{density}"

    @property
    def scope(self) -> str:
        """What is charged, in words."""
        experiment = self.experiment
        epochs = (
            f"{value} {key.replace('_', ' ')}"
            for key, value in self.options.items()
            if value and key.endswith("epochs")
        )
        return (
            f"{self.rounds:,} rounds, {self.per_round} of {experiment.clients} clients in each, {self.samples:,} "
            f"examples a client{f' ({self.samples_from})' if self.samples_from else ''}, "
            f"batches of {experiment.run.batch_size}, {', '.join(epochs)}"
        )

    def row(self) -> dict[str, str]:
        """Totals of all rounds and clients, and memory while a client trains, ready to print."""
        flops, rounds = self.flops, self.rounds
        return {
            "bytes as encoded": show_bytes(self.encoded.round * rounds + self.encoded.tuning),
            "as papers count": show_bytes(self.paper.round * rounds + self.paper.tuning),
            "busiest node, a round": show_bytes(self.encoded.busiest),
            "FLOPs": f"{(flops.train + flops.search) * self.per_round * rounds + flops.tuning:.4g}",
            "inference FLOPs": f"{self.inference_flops:.4g}",
            "memory": show_bytes(self.memory.training),
        }

    def __repr__(self) -> str:
        return (
            f"CostReport({printable(self.head, kept='')})\n{printable(self.scope, kept='')}\n{text_table([self.row()])}"
        )

    def _repr_html_(self) -> str:
        return html_table([{"method": self.title} | self.row()], f"{self.head}: {self.scope}")

    def to_json(self) -> dict[str, Any]:
        """Plain values, unrounded; decimal megabytes and gigabytes."""
        chosen = self.traffic.to_json(self.rounds)
        turns = self.per_round
        return {
            "method": self.method,
            "model": self.model,
            "counting": self.experiment.options.counting,
            "quirks": list(self.experiment.options.quirks),
            "num_parameters": self.num_parameters,
            "rounds": self.rounds,
            "clients": self.experiment.clients,
            "clients_per_round": self.per_round,
            "graph": self.graph,
            "neighbours": self.neighbours,
            "data": self.experiment.data,
            "input_shape": list(self.input_shape),
            "classes": self.classes,
            "samples": self.samples,
            "samples_from": self.samples_from,
            "batch_size": self.experiment.run.batch_size,
            "options": self.options,
            "costs_only": self.costs_only,
            "exact": self.exact,
            "notes": list(self.notes),
            "total": {**chosen["total"], **self.flops.to_json(turns * self.rounds, with_tuning=True)},
            "per_round": {**chosen["per_round"], **self.flops.to_json(turns)},
            "per_client_round": {**chosen["per_client_round"], **self.flops.to_json(1)},
            "busiest_node": {
                "who": self.busiest,
                "directions": 1 if self.experiment.options.counting == "paper" else 2,
                **chosen["busiest_node"],
            },
            "memory": {f"{key}_mb": value / 1e6 for key, value in vars(self.memory).items()},
            "inference_flops": self.inference_flops,
            "encoded": self.encoded.to_json(self.rounds),
            "paper": self.paper.to_json(self.rounds),
        }
